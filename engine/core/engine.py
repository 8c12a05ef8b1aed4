"""EngineCore: schedule, execute, update. Runs in the engine process, on a thread, or in the caller's loop."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.api import AddRequest, Stats, StepOut
from engine.core import handover, inspect
from engine.core.constraint import ConstraintFactory
from engine.core.handover import Piece, Taken
from engine.core.plan import BlockAccess, Executor, Geometry, Plan, Result
from engine.core.proposer import Proposer
from engine.core.scheduler import Scheduler
from engine.core.settings import CoreSettings
from engine.errors import ConfigError, EngineDead, InvalidRequest, RequestFailed
from engine.kv import KVManager
from engine.kv.contiguous import ContiguousKV
from engine.kv.costs import Costs
from engine.kv.events import Event
from engine.kv.paged import PagedKV

MEASURED_PREFILL = 32  # tokens that a step must have to tell the prefill rate
SAVE_S = 2.0  # of the time that an engine is given to end
IDLE_S = 0.001  # pause of a step that has nothing to compute


class EngineCore:
    """One model's requests. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        executor: Executor,
        geometry: Geometry,
        settings: CoreSettings,
        eos_token_ids: frozenset[int],
        constraints: ConstraintFactory | None,
        clock: Callable[[], float] = time.time,
        proposer: Proposer | None = None,
    ) -> None:
        """`executor` has been started and gave `geometry`."""
        self.geometry = geometry
        self._executor = executor
        self._clock = clock
        self._overlap = settings.overlap
        self._proposer = proposer
        self.costs = Costs(geometry.bytes_per_block, geometry.block_size)
        self.kv = make_kv(geometry, settings, self.costs)
        self.scheduler = Scheduler(self.kv, self.costs, geometry, settings, eos_token_ids, constraints, proposer, clock)
        self._ledger = self.scheduler.ledger
        self._flights: deque[Plan] = deque()
        self._adapters: set[str] = set()
        self._loading: dict[str, list[AddRequest]] = {}  # adapter on its way -> requests that wait for it
        self._steps = self._step_tokens = 0
        self._step_s = self._schedule_s = self._waited_s = self._sample_s = 0.0
        self._last_step = 0.0

    def add(self, request: AddRequest) -> None:
        """Queue a request. A refusal is a terminal delta a choice in the next `step`."""
        if request.adapter and request.adapter not in self._adapters:
            if request.adapter in self._loading:
                self._loading[request.adapter].append(request)
            else:
                self._ledger.refuse(request, "invalid", f"adapter {request.adapter!r} is not loaded")
            return
        self.scheduler.add(request)

    def abort(self, request_id: str, choice: int = -1) -> None:
        """End a request, or one of its choices. Its blocks are free at once. Idempotent."""
        for waiting in self._loading.values():
            for request in waiting:
                if request.id == request_id and (choice < 0 or request.params.n == 1):
                    waiting.remove(request)
                    self._ledger.abort_unseen(request)
                    return
        self.scheduler.abort(request_id, choice)

    def has_work(self) -> bool:
        """Is any request alive, any step in flight, any delta not yet given out?"""
        return bool(self._ledger.requests or self._flights or self._ledger.deltas)

    def step(self) -> StepOut:
        """Plan a step, start it, take the oldest result.

        When nothing can be computed now (all that is left waits for its grammar) it sleeps for a moment.
        A step that raises ends the requests of that step and no others.
        """
        began = time.perf_counter()
        waited, guessed = self._waited_s, self.scheduler.guess_s
        plan = self.scheduler.schedule()
        refused = self._submit(plan) if plan is not None else None
        # Guesses follow tokens that are known: where there are any, no step is planned ahead.
        overlap = 0 if self.scheduler.guessing else self._overlap
        while self._flights and (len(self._flights) > overlap or plan is None or refused is not None):
            self._collect()
        if plan is not None and refused is not None:
            self._fail(plan, refused)
        waited = self._waited_s - waited
        if plan is not None or waited:
            took = time.perf_counter() - began
            self._step_s += took
            self._schedule_s += took - waited - (self.scheduler.guess_s - guessed)
        elif not self._ledger.deltas:
            time.sleep(IDLE_S)
        return StepOut(tuple(self._ledger.take_deltas()), self.stats())

    # In the next two a failure of the executor, of whatever kind, stays with the requests of its step.

    def _submit(self, plan: Plan) -> Exception | None:
        """Start a step; the error if the executor doesn't take it."""
        try:
            self._executor.submit(plan)
        except EngineDead:
            raise
        except Exception as error:
            return error
        self._flights.append(plan)
        return None

    def _collect(self) -> None:
        """Take the oldest result."""
        began = time.perf_counter()
        plan = self._flights.popleft()
        try:
            result = self._executor.collect()
        except EngineDead:
            raise
        except Exception as error:
            self._fail(plan, error)
            return
        finally:
            self._waited_s += time.perf_counter() - began
        self._finish(plan, result)

    def _finish(self, plan: Plan, result: Result) -> None:
        self.scheduler.update(plan, result)
        tokens = sum(len(row.tokens) for row in plan.rows)
        self._steps += 1
        self._step_tokens += tokens
        self._sample_s += result.sample_s
        self._last_step = self._clock()
        if self._proposer is not None:
            drafts = sum(row.drafts for row in plan.rows)
            self._proposer.saw_step(len(plan.rows), tokens, drafts, result.compute_s + result.sample_s)
        for copied in result.copies:
            self.costs.saw_copy(copied.kind, copied.size_bytes, copied.seconds)
        if tokens >= MEASURED_PREFILL and tokens >= 2 * len(plan.rows):
            self.costs.saw_prefill(tokens, result.compute_s)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """End the requests of a step that failed; one behind it stood on it, so its result is void."""
        while self._flights:
            self._flights.popleft()
            with contextlib.suppress(RequestFailed):
                self._executor.collect()
        self.scheduler.fail(plan.step, f"the step failed: {error}")
        self.kv.check()

    def control(self, command: str, argument: dict[str, str]) -> Any:
        """An operator's command; its answer is JSON-able. Raises InvalidRequest for one that can't be done.

        reset_prefix_cache · load_adapter {name, path} · unload_adapter {name}
        """
        match command:
            case "reset_prefix_cache":
                pass
            case "load_adapter":
                load = self.begin_load(argument)
                problem: Exception | None = None
                try:
                    load()
                except ConfigError as error:
                    problem = error
                return self.end_load(argument, problem)
            case "unload_adapter":
                name = self._free_adapter(command, argument)
                self._adapters.discard(name)
                self._executor.unload_adapter(name)
            case _:
                raise InvalidRequest(f"{command!r} is not a command of this engine")
        return self._forget_prefixes()

    def begin_load(self, argument: dict[str, str]) -> Callable[[], None]:
        """Check what `load_adapter` is given, and return what takes long, for another thread to run beside steps.

        `end_load` follows on this one. Until then requests that name the adapter wait. Raises InvalidRequest.
        """
        name, path = self._free_adapter("load_adapter", argument), argument.get("path", "")
        if not path:
            raise InvalidRequest("load_adapter needs a name and a path")
        self._adapters.discard(name)
        self._loading[name] = []
        return lambda: self._executor.load_adapter(name, path)

    def end_load(self, argument: dict[str, str], problem: Exception | None) -> dict[str, Any]:
        """The adapter is served from now on, unless there was a problem. Raises InvalidRequest for one of its files."""
        name = argument["name"]
        waiting = self._loading.pop(name)
        if problem is None:
            self._adapters.add(name)
            answer = self._forget_prefixes()
        else:
            self._executor.unload_adapter(name)  # what it replaces is no longer known to be whole
        for request in waiting:
            self.add(request)
        if problem is not None:
            raise InvalidRequest(str(problem)) if isinstance(problem, ConfigError) else problem
        return answer

    def _free_adapter(self, command: str, argument: dict[str, str]) -> str:
        """The name of an adapter that no request uses. Raises InvalidRequest."""
        name = argument.get("name", "")
        if not name:
            raise InvalidRequest(f"{command} needs a name{' and a path' if command == 'load_adapter' else ''}")
        if name in self._loading:
            raise InvalidRequest(f"adapter {name!r} is being loaded")
        if any(request.add.adapter == name for request in self._ledger.requests.values()):
            raise InvalidRequest(f"adapter {name!r} is in use; wait until its requests have ended")
        return name

    def _forget_prefixes(self) -> dict[str, Any]:
        """Cached prefixes belong to an adapter's name, so they go when what it names changes."""
        self.kv.reset()
        return {"blocks_free": self.kv.usage().free, "adapters": sorted(self._adapters)}

    def take_kv_events(self) -> Sequence[Event]:
        """What the prefix cache stored and removed since the last call; nothing unless `kv_events` is set."""
        events = self.kv.events if isinstance(self.kv, PagedKV) else None
        return events.take() if events is not None else ()

    def handover_head(self) -> tuple[dict[str, str], int, int, int]:
        """Identity, bytes of a block, blocks and tokens of a piece. Raises InvalidRequest where there are no pieces."""
        kv, _ = self._handover()
        return self.geometry.identity, self.geometry.bytes_per_block, kv.index.blocks_per_node, kv.index.tokens_per_node

    def pieces(self) -> Iterator[Piece]:
        """What the prefix cache holds on the device. Nothing else may be called before its end."""
        return handover.pieces(*self._handover())

    def take_pieces(self, given: Iterable[Piece]) -> Taken:
        """Cache what another engine of equal identity gave."""
        return handover.take(*self._handover(), given)

    def _handover(self) -> tuple[PagedKV, BlockAccess]:
        """The cache and its bytes, with no step in flight and no copy outstanding."""
        if not isinstance(self.kv, PagedKV) or not isinstance(self._executor, BlockAccess):
            raise InvalidRequest("cached prefixes are handed over with --kv-manager paged and a model that generates")
        while self._flights:
            self._collect()
        ops, disk_keys = self.kv.drain()
        if ops:  # of a step that had nothing to compute
            self._executor.submit(Plan(self._steps, (), ops, disk_keys=disk_keys))
            self._executor.collect()
        return self.kv, self._executor

    def save(self) -> None:
        """Write cached prefixes to the disk tier, for SAVE_S at most, so that the next start finds them."""
        while self._flights:
            self._collect()
        until = time.perf_counter() + SAVE_S
        with contextlib.suppress(RequestFailed):  # what can't be written is computed again
            for ops, keys in self.kv.store():
                self._executor.submit(Plan(0, (), ops, disk_keys=keys))
                self._executor.collect()
                if time.perf_counter() > until:
                    break

    def close(self) -> None:
        """Let the executor go, and what guesses. Idempotent."""
        self._executor.close()
        if self._proposer is not None:
            self._proposer.close()

    def inspect(self, what: str, request_id: str = "") -> Any:
        """A JSON-able snapshot: "kv" (every block), "requests" (all, and those that ended lately), "request",

        "live" (what the page shows, compact), "block" (one block, by its number).
        """
        match what:
            case "kv":
                return inspect.memory(self.kv, self.geometry, self._ledger)
            case "live":
                return inspect.live(self.kv, self.geometry, self._ledger, self.stats(), self._clock())
            case "block":
                return inspect.block(self.kv, self.geometry, self._ledger, int(request_id))
            case "requests":
                return inspect.requests(self._ledger, self._clock())
            case _:
                return inspect.request(self._ledger, request_id, self._clock())

    def stats(self) -> Stats:
        """Counters and gauges now."""
        scheduler, counters, usage = self.scheduler, self._ledger.counters, self.kv.usage()
        return Stats(
            step=self._steps,
            time=self._last_step,
            running=scheduler.life.running.requests,
            waiting=scheduler.waiting_requests,
            blocks_total=usage.total,
            blocks_free=usage.free,
            blocks_cached=usage.cached,
            blocks_shared=usage.shared,
            bytes_saved=usage.saved * self.geometry.bytes_per_block,
            host_blocks_total=usage.host_total,
            host_blocks_used=usage.host_used,
            disk_blocks_used=usage.disk_used,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=usage.queried_tokens,
            prefix_hits=usage.hit_tokens,
            prefix_hits_host=usage.hit_tokens_host,
            prefix_hits_disk=usage.hit_tokens_disk,
            preemptions_swap=counters.preemptions_swap,
            preemptions_recompute=counters.preemptions_recompute,
            swap_out_blocks=usage.swapped_out,
            swap_in_blocks=usage.swapped_in,
            cow_copies=usage.copies,
            cost_swap_s=counters.cost_swap_s,
            cost_recompute_s=counters.cost_recompute_s,
            cost_bring_s=counters.cost_bring_s,
            cost_compute_s=counters.cost_compute_s,
            copy_bytes_per_s=dict(self.costs.copy_rates),
            prefill_tokens_per_s=self.costs.prefill_rate,
            spec_proposed=counters.spec_proposed,
            spec_accepted=counters.spec_accepted,
            step_s=self._step_s,
            step_tokens=self._step_tokens,
            schedule_s=self._schedule_s,
            sample_s=self._sample_s,
            guess_s=scheduler.guess_s,
        )


def make_kv(geometry: Geometry, settings: CoreSettings, costs: Costs) -> KVManager:
    """The manager that the settings name."""
    if settings.kv_manager == "paged":
        return PagedKV(
            geometry.num_blocks,
            geometry.block_size,
            costs,
            host_blocks=geometry.host_blocks,
            disk_blocks=geometry.disk_blocks,
            disk_index=geometry.disk_index,
            caching=settings.enable_prefix_caching,
            events=settings.kv_events,
            window=geometry.window,
        )
    slots = min(settings.max_num_seqs, geometry.max_num_seqs)
    pages = geometry.pages_per_slot or -(-geometry.max_model_len // geometry.block_size)
    virtual = settings.kv_manager == "virtual"
    return ContiguousKV(geometry.num_blocks, geometry.block_size, pages, virtual=virtual, slots=slots)
