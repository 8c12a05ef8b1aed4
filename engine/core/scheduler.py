"""Scheduler: which tokens the next step computes, and what its result means for the requests.

There is no prefill phase and no decode phase (Orca's iteration-level scheduling, OSDI 2022; chunked prefill as
in Sarathi-Serve, OSDI 2024): a sequence knows tokens and has KV for some of them; each step computes the next
few. Prefix hits, recomputing after preemption, drafts and resuming after a crash are the same arithmetic.
"""

from __future__ import annotations

import array
import bisect
import heapq
import math
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.api import AddRequest, Delta, FinishReason, TokenLogprobs
from engine.core import admission
from engine.core.beam import BeamSearch
from engine.core.constraint import ConstraintFactory
from engine.core.plan import LAST_SAMPLED, Geometry, Plan, Result, Row, RowResult, Sampled, SlotParams
from engine.core.policy import Fairness, how, running_key, waiting_key
from engine.core.proposer import Proposer
from engine.core.request import Request, Sequence, Status
from engine.core.settings import CoreSettings
from engine.kv import KVManager
from engine.kv.costs import Costs

FINISHED_KEPT = 256  # requests whose timeline stays visible


class Item(NamedTuple):
    """A row of a submitted plan: void when the sequence's epoch has moved on."""

    seq: Sequence
    epoch: int
    start: int
    end: int  # KV of [start, end) comes with the result, the drafts' included
    drafts: tuple[int, ...]


class Counters:
    """Since the start; `EngineCore.stats` shows them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions_swap = 0
        self.preemptions_recompute = 0
        self.cost_swap_s = 0.0
        self.cost_recompute_s = 0.0
        self.spec_proposed = 0
        self.spec_accepted = 0


class Scheduler:
    """Owns every request. `schedule` and `update` alternate; with overlap a plan is made before the last result."""

    def __init__(
        self,
        kv: KVManager,
        costs: Costs,
        geometry: Geometry,
        settings: CoreSettings,
        eos_token_ids: frozenset[int],
        constraints: ConstraintFactory | None,
        proposer: Proposer | None,
        clock: Callable[[], float],
    ) -> None:
        self.kv = kv
        self.costs = costs
        self.counters = Counters()
        self.requests: dict[str, Request] = {}
        self.finished: deque[Request] = deque(maxlen=FINISHED_KEPT)
        self.running: list[Sequence] = []  # in policy order: the last one is the first victim
        self.running_requests = 0
        self._settings = settings
        self._eos = eos_token_ids
        self._constraints = constraints
        self._proposer = proposer
        self._clock = clock
        self._max_len = min(geometry.max_model_len, kv.max_tokens + 1)  # the last token needs no KV
        self._limits = admission.Limits(geometry.max_model_len, kv.max_tokens, geometry.vocab_size)
        self._watermark = math.ceil(settings.watermark * geometry.num_blocks)
        self._slots = list(range(min(settings.max_num_seqs, geometry.max_num_seqs) - 1, -1, -1))
        self._fairness = Fairness()
        self._waiting: list[tuple[tuple[float, ...], int, Sequence]] = []  # a heap; who has ended is skipped
        self._compiling: list[Request] = []
        self._deadlines: list[tuple[float, int, bool, Request]] = []  # a heap of (time, tie, until first token, ...)
        self._picked: dict[Sequence, int] = {}  # tokens that the plan in the making computes of each
        self._flights: dict[int, list[Item]] = {}  # submitted steps
        self.deltas: list[Delta] = []
        self._next_id = 0
        self._step = 0

    # ---------------------------------------------------------------- coming and going

    def add(self, add: AddRequest) -> None:
        """Accept a request, or refuse it with a terminal delta for each of its choices."""
        now = self._clock()
        refusal = self._refusal(add)
        if refusal is not None:
            kind, message = refusal
            for choice in range(add.params.n):
                self.deltas.append(Delta(add.id, choice, (), finish=FinishReason.ERROR, error=message, error_kind=kind))
            return
        request = Request(add, max_len=self._max_len, eos=self._eos, now=now)
        self.requests[add.id] = request
        request.open.update(range(add.params.n))
        request.note(now, "queued", prompt_tokens=request.prompt_len, resumed=bool(add.resume))
        for at, until_first in ((add.deadline, False), (add.ttft_deadline, True)):
            if at is not None:
                heapq.heappush(self._deadlines, (at, self._new_id(), until_first, request))
        if add.params.beam_width:
            request.beam = BeamSearch(add.params, request.prompt_len, request.end, request.stops)
        for choice in range(1 if request.beam else add.params.n):
            resumed = add.resume[choice] if choice < len(add.resume) and not request.beam else ()
            if resumed:
                request.told.add(choice)
            request.sequences.append(Sequence(self._new_id(), request, choice, [*add.prompt, *resumed]))
        if add.params.grammar is not None:
            assert self._constraints is not None, "refused without a factory"
            request.grammar = self._constraints(add.params.grammar)
            self._compiling.append(request)
        else:
            self._begin(request)

    def _refusal(self, add: AddRequest) -> tuple[str, str] | None:
        if add.id in self.requests:
            return "invalid", f"request id {add.id!r} is in use"
        if add.params.grammar is not None and self._constraints is None:
            return "invalid", "this engine has no grammar support"
        problem = self._limits.problem(add)
        if problem:
            return "invalid", problem
        limit = self._settings.max_waiting
        if limit and not add.resume and self.waiting_requests >= limit + len(self._slots):
            return "overloaded", f"{self.waiting_requests} requests are waiting; the limit is {limit}"
        return None

    @property
    def waiting_requests(self) -> int:
        return len(self.requests) - self.running_requests

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _begin(self, request: Request) -> None:
        """Queue the first choice; the others fork from it once it has the prompt's KV."""
        for seq in list(request.sequences):
            if request.grammar is not None:
                seq.constraint = request.grammar.fork()
                if not all(seq.constraint.advance(token) for token in seq.output):
                    self._end(seq, FinishReason.ERROR, error="the tokens so far don't match the grammar", kind="failed")
                    continue
            self._end_if_done(seq)
        for seq in request.sequences[1:]:
            seq.to(Status.FOLLOWING)
        if request.sequences:
            self._queue(request.sequences[0])

    def _end_if_done(self, seq: Sequence) -> None:
        """A choice that was resumed after its last token, or that wants none, ends without a step."""
        output = seq.output
        if output and output[-1] in seq.stops:
            self._end(seq, FinishReason.STOP, stop_token=output[-1])
        elif seq.constraint is not None and seq.constraint.stopped():
            self._end(seq, FinishReason.STOP)
        elif len(seq.tokens) >= seq.end and (output or not (seq.request.scored or seq.request.add.pooling)):
            self._end(seq, FinishReason.LENGTH)

    def _queue(self, seq: Sequence, status: Status = Status.WAITING) -> None:
        if seq.status is not status:
            seq.to(status)
        turn = self._fairness.ticket(seq.request.add.key) if seq.request.admitted is None else 0
        seq.key = waiting_key(seq, turn)
        heapq.heappush(self._waiting, (seq.key, seq.id, seq))

    def abort(self, id: str, choice: int = -1) -> None:
        """End a request or one of its choices. Idempotent."""
        request = self.requests.get(id)
        if request is not None:
            self._abort(request, choice)

    def _abort(self, request: Request, choice: int, error: str = "", kind: str = "") -> None:
        if request.beam is not None and choice >= 0:
            if choice in request.open:  # the search goes on for the other choices
                self._close(request, choice, FinishReason.ABORT)
            return
        for seq in list(request.sequences):
            if request.beam is not None:
                self._drop(seq)
            elif choice in (-1, seq.choice):
                self._end(seq, FinishReason.ABORT, error=error, kind=kind)
        for left in sorted(request.open) if choice < 0 else ():
            self._close(request, left, FinishReason.ABORT, error=error, kind=kind)

    def take_deltas(self) -> list[Delta]:
        deltas, self.deltas = self.deltas, []
        return deltas

    # ---------------------------------------------------------------- the plan

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can be computed now. One of the three loops over all sequences."""
        now = self._clock()
        self._expire(now)
        if self._compiling:
            self._begin_compiled()
        picked = self._picked
        budget = self._settings.max_num_batched_tokens
        prefills: list[Sequence] = []
        running, extend, propose = self.running, self.kv.extend, self._proposer is not None
        i = 0
        while i < len(running):  # victims leave at the end of the list
            seq = running[i]
            i += 1
            known = len(seq.tokens) + seq.pending
            if seq.computed != known - 1:
                if seq.computed < known:
                    prefills.append(seq)
                continue  # a beam that waits for the others
            if seq.pending and (known >= seq.end or seq.lockstep):
                continue  # what comes next depends on the result
            if budget == 0:
                break
            if propose and budget > 1:
                budget -= self._add_drafts(seq, known, budget - 1)
            if not seq.drafts and not extend(seq.id, seq.computed, known) and not self._make_room(seq, known, now):
                continue
            picked[seq] = 1 + len(seq.drafts)
            budget -= 1
        budget = self._prefill_allowance(budget)
        budget = self._pick_prefills(prefills, budget, now)
        self._admit(prefills, budget, now)
        if not picked and not self._flights and running:
            self._unpark(now)
            self._admit([], budget, now)
        return self._plan() if picked else None

    def _prefill_allowance(self, budget: int) -> int:
        """Prompt tokens of this step: while others decode they wait for it, so it is bounded."""
        if not self._picked:
            return budget
        if self._settings.prefill_budget:
            budget = min(budget, self._settings.prefill_budget)
        if self._settings.stall_s:
            budget = min(budget, max(16, int(self._settings.stall_s * self.costs.prefill_rate)))
        return budget

    def _pick_prefills(self, prefills: list[Sequence], budget: int, now: float) -> int:
        for seq in prefills:
            n = min(len(seq.tokens) - seq.computed, budget)
            if n == 0:
                break
            if seq.status is Status.RUNNING:  # not a victim of one before it
                total = seq.computed + n
                if self.kv.extend(seq.id, seq.computed, total) or self._make_room(seq, total, now):
                    self._picked[seq] = n
                    budget -= n
        return budget

    def _add_drafts(self, seq: Sequence, known: int, limit: int) -> int:
        """Guesses for this step; their number. Room for them is taken only when it is free."""
        assert self._proposer is not None
        limit = min(limit, self._settings.num_drafts, seq.end - known - 1)
        if limit < 1 or seq.request.beam is not None:
            return 0
        drafts = tuple(self._proposer.propose(seq.id, seq.tokens, limit))[:limit]
        if seq.constraint is not None:
            drafts = drafts[: _allowed(seq, drafts)]
        if drafts and self.kv.extend(seq.id, seq.computed, known + len(drafts)):
            seq.drafts = drafts
        return len(seq.drafts)

    def _make_room(self, seq: Sequence, total: int, now: float) -> bool:
        """Preempt from the end of the order until `seq` can grow; False when it was itself the last."""
        while True:
            victim = self.running[-1]
            if victim is seq and len(self.running) == 1:
                self._end(seq, FinishReason.LENGTH)  # alone, and still no room: it has outgrown the pool
                return False
            self._preempt(victim, now, "no free block")
            if victim is seq:
                return False
            if self.kv.extend(seq.id, seq.computed, total):
                return True

    def _preempt(self, seq: Sequence, now: float, why: str) -> None:
        """Take slot and blocks from a running sequence; it goes on later where it was, with the same tokens."""
        self._picked.pop(seq, None)
        seq.drafts = ()
        # The last token's KV is computed again, because its logits are wanted again.
        seq.confirmed = min(seq.confirmed, len(seq.tokens) - 1)
        decision = how(self._settings.preemption, seq, self.kv, self.costs)
        swapped = decision.kind == "swap" and seq.top is None and self.kv.swap_out(seq.id, seq.confirmed)
        if not swapped:
            self.kv.release(seq.id)
            seq.confirmed = 0
        seq.computed = seq.confirmed
        seq.pending = 0
        seq.epoch += 1
        seq.preemptions += 1
        self._vacate(seq)
        counters = self.counters
        counters.preemptions_swap += swapped
        counters.preemptions_recompute += not swapped
        counters.cost_swap_s = decision.swap_s if math.isfinite(decision.swap_s) else 0.0
        counters.cost_recompute_s = decision.recompute_s
        seq.request.note(
            now,
            "preempted",
            choice=seq.choice,
            how="swap" if swapped else "recompute",
            why=why,
            cost_swap_s=decision.swap_s if math.isfinite(decision.swap_s) else None,
            cost_recompute_s=decision.recompute_s,
        )
        if seq.top is not None:
            seq.to(Status.PARKED)
        else:
            self._queue(seq, Status.SWAPPED if swapped else Status.WAITING)

    def _unpark(self, now: float) -> None:
        """Only beams are left that wait for beams without room: they know what they need, so they give way."""
        for seq in [seq for seq in reversed(self.running) if seq.top is not None]:
            self._preempt(seq, now, "other beams need the room")

    def _admit(self, prefills: list[Sequence], budget: int, now: float) -> None:
        """Let waiting sequences in, in order: who can't have room holds up those behind, but not for ever."""
        kv, promised = self.kv, -1
        while budget > 0 and (seq := self._first_waiting()) is not None:
            if promised < 0:
                promised = sum(kv.missing(s.id, len(s.tokens)) for s in prefills if s.status is Status.RUNNING)
            # The watermark keeps admission from causing preemption. Where nothing runs there is nothing to preempt.
            spare = promised + self._watermark if self._picked or self._flights else 0
            if not self._slots or not self._enter(seq, spare):
                last = self.running[-1] if self.running else None
                if last is None or last.request.add.priority <= seq.request.add.priority:
                    break
                self._preempt(last, now, "a more urgent request")
                continue
            heapq.heappop(self._waiting)
            self._run(seq, now)
            n = min(len(seq.tokens) - seq.computed, budget)
            if not kv.extend(seq.id, seq.computed, seq.computed + n):
                raise AssertionError("an admitted sequence has room")
            self._picked[seq] = n
            budget -= n
            promised += kv.missing(seq.id, len(seq.tokens))

    def _first_waiting(self) -> Sequence | None:
        waiting = self._waiting
        while waiting:
            seq = waiting[0][2]
            if seq.status is Status.WAITING or seq.status is Status.SWAPPED:
                return seq
            heapq.heappop(waiting)
        return None

    def _enter(self, seq: Sequence, spare: int) -> bool:
        """Give the sequence its KV back, or what the prefix cache has of it."""
        request, total = seq.request, len(seq.tokens)
        if seq.status is Status.SWAPPED:
            return self.kv.swap_in(seq.id, total, spare)
        found = self.kv.admit(seq.id, seq.tokens, request.salt, min(total - 1, request.prefix_limit), spare)
        if found is None:
            return False
        seq.computed = seq.confirmed = found
        if request.cached < 0:
            request.cached = min(found, request.prompt_len)
        return True

    def _run(self, seq: Sequence, now: float) -> None:
        """The sequence takes a slot."""
        request = seq.request
        event = "resumed" if seq.preemptions else "admitted"
        request.note(now, event, choice=seq.choice, computed=seq.computed, swapped_in=seq.status is Status.SWAPPED)
        if request.admitted is None:
            request.admitted = now
            self._fairness.admitted(int(seq.key[2]))
            self.counters.prompt_tokens += request.prompt_len
        seq.to(Status.RUNNING)
        seq.slot = self._slots.pop()
        seq.resend = True
        self.kv.resend(seq.id)
        seq.key = running_key(seq)
        bisect.insort(self.running, seq, key=lambda s: s.key)
        self.running_requests += request.running == 0
        request.running += 1

    def _vacate(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._slots.append(seq.slot)
        seq.slot = -1
        seq.request.running -= 1
        self.running_requests -= seq.request.running == 0

    def _plan(self) -> Plan:
        """Rows of what was picked. From here on the tokens count as computed."""
        rows: list[Row] = []
        items: list[Item] = []
        slots: list[tuple[int, SlotParams]] = []
        changes = self.kv.changes
        for seq, n in self._picked.items():
            start = seq.computed
            if seq.pending:
                tokens: tuple[int, ...] = (LAST_SAMPLED,)
            elif n == 1:
                tokens = (seq.tokens[start],)
            else:
                tokens = (*seq.tokens[start : start + n], *seq.drafts)
            end = start + n
            table_start, table = changes(seq.id)
            if seq.resend:
                slots.append((seq.slot, seq.slot_params()))
                seq.resend = False
            sample = seq.samples and end >= len(seq.tokens) + seq.pending
            if seq.lockstep or not seq.samples or start < seq.request.prompt_len - 1:
                row = self._special_row(seq, start, tokens, table_start, table, sample)
            else:
                row = Row(seq.slot, start, tokens, table_start, table, sample, len(seq.drafts))
            rows.append(row)
            items.append(Item(seq, seq.epoch, start, end, seq.drafts))
            seq.drafts = ()
            seq.computed = end
            seq.pending += sample
        self._picked.clear()
        self._step += 1
        self._flights[self._step] = items
        return Plan(self._step, tuple(rows), self.kv.drain(), tuple(slots))

    def _special_row(
        self, seq: Sequence, start: int, tokens: tuple[int, ...], table_start: int, table: tuple[int, ...], sample: bool
    ) -> Row:
        """A row of prefill, of a grammar, of beam search or of an embedding."""
        request, params = seq.request, seq.request.add.params
        score = -1
        targets: tuple[int, ...] = ()
        if params.prompt_logprobs is not None and len(request.scores) < request.prompt_len:
            score = params.prompt_logprobs
            targets = tuple(seq.tokens[start + 1 : min(start + len(tokens) + 1, request.prompt_len)])
        if len(tokens) > 1 and not seq.drafts:
            request.note(self._clock(), "prefill", choice=seq.choice, start=start, tokens=len(tokens))
        return Row(
            seq.slot,
            start,
            tokens,
            table_start,
            table,
            sample,
            len(seq.drafts),
            _masks(seq) if sample and seq.constraint is not None else (),
            request.beam.alternatives if request.beam is not None and sample else -1,
            score,
            targets,
            request.add.pooling,
        )

    def _expire(self, now: float) -> None:
        """Deadlines cost nothing: what is too late is dropped before it is scheduled."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, until_first, request = heapq.heappop(self._deadlines)
            if request.finished is None and not (until_first and request.told):
                which = "time to first token" if until_first else "deadline"
                self._abort(request, -1, error=f"the {which} has passed", kind="deadline")

    def _begin_compiled(self) -> None:
        """Requests whose grammar has become ready join the queue; they hold no one up before that."""
        still: list[Request] = []
        for request in self._compiling:
            if request.finished is not None:
                continue
            assert request.grammar is not None
            if problem := request.grammar.failed():
                for seq in list(request.sequences):
                    self._end(seq, FinishReason.ERROR, error=problem, kind="invalid")
            elif request.grammar.ready():
                self._begin(request)
            else:
                still.append(request)
        self._compiling = still

    # ---------------------------------------------------------------- the result

    def update(self, plan: Plan, result: Result) -> None:
        """What a step gave. One of the three loops over all sequences."""
        commit = self.kv.commit
        beams: dict[Request, None] = {}
        for item, got in zip(self._flights.pop(plan.step), result.rows, strict=True):
            seq = item.seq
            if seq.epoch != item.epoch:
                continue  # preempted or ended meanwhile: the result is void
            end = item.end - len(item.drafts)
            seq.confirmed = end
            commit(seq.id, seq.tokens, end)
            request = seq.request
            if item.start < request.prompt_len:
                self._prompt_progress(seq, item, got)
            if got.sampled:
                seq.pending -= 1
                if request.beam is not None:
                    seq.top = got.sampled[0].top
                    beams[request] = None
                else:
                    self._accept(seq, got.sampled, item.drafts)
        for request in beams:
            if request.finished is None and all(seq.top is not None for seq in request.sequences):
                self._advance_beams(request)

    def _prompt_progress(self, seq: Sequence, item: Item, got: RowResult) -> None:
        """Scores, followers, and the end of what samples nothing."""
        request = seq.request
        for at, score in enumerate(got.scores, item.start + 1):
            if at == len(request.scores):
                request.scores.append(_logprobs(score))
        if item.end < request.prompt_len:
            return
        for follower in [s for s in request.sequences if s.status is Status.FOLLOWING]:
            self._start_follower(seq, follower)
        if not seq.samples and item.end >= len(seq.tokens):
            if request.add.pooling:
                embedding = _mean(got.hidden, request.prompt_len) if request.add.pooling == "mean" else got.hidden
                self._end(seq, FinishReason.STOP, embedding=embedding)
            else:
                self._end(seq, FinishReason.LENGTH)

    def _start_follower(self, leader: Sequence, seq: Sequence) -> None:
        """Share the prompt's KV but its last token's: computing that again gives each choice its own first sample."""
        shared = leader.request.prompt_len - 1
        if self._slots and self.kv.fork(leader.id, seq.id, shared):
            seq.computed = seq.confirmed = shared
            self._run(seq, self._clock())
        else:
            self._queue(seq)

    def _accept(self, seq: Sequence, sampled: tuple[Sampled, ...], drafts: tuple[int, ...]) -> None:
        """Append what was sampled as far as the drafts were right, and see whether the sequence ends."""
        request, tokens = seq.request, seq.tokens
        first = len(tokens)
        finish: FinishReason | None = None
        stop_token: int | None = None
        error = ""
        for i, sample in enumerate(sampled):
            token = sample.token
            tokens.append(token)
            if token in seq.stops:
                finish, stop_token = FinishReason.STOP, token
            elif seq.constraint is not None and not seq.constraint.advance(token):
                finish, error = FinishReason.ERROR, f"the grammar doesn't allow token {token}"
            elif seq.constraint is not None and seq.constraint.stopped():
                finish = FinishReason.STOP
            elif len(tokens) >= seq.end:
                finish = FinishReason.LENGTH
            if finish is not None or i == len(drafts) or drafts[i] != token:
                break
        n = len(tokens) - first
        if drafts:
            self.counters.spec_proposed += len(drafts)
            self.counters.spec_accepted += n - 1
            seq.computed = seq.confirmed = len(tokens) - 1
            self.kv.commit(seq.id, tokens, seq.confirmed)
        self.counters.generation_tokens += n
        if request.first_token is None:
            request.first_token = self._clock()
            request.note(request.first_token, "first token")
        new = (tokens[-1],) if n == 1 else tuple(tokens[first:])
        logprobs = () if request.add.params.logprobs is None else tuple(_logprobs(s) for s in sampled[:n])
        if finish is None:
            self._tell(request, seq.choice, new, logprobs, seq.preemptions)
        else:
            kind = "failed" if error else ""
            self._end(seq, finish, new, logprobs, stop_token=stop_token, error=error, kind=kind)

    def _advance_beams(self, request: Request) -> None:
        """All live beams know their continuations: fork, keep or drop each."""
        assert request.beam is not None
        live = request.sequences
        going = request.beam.advance(live)
        if not going:
            for choice, best in enumerate(request.beam.best(request.add.params.n)):
                self.counters.generation_tokens += len(best.tokens)
                if choice in request.open:
                    self._close(
                        request,
                        choice,
                        best.finish,
                        best.tokens,
                        best.trail,
                        stop_token=best.stop_token,
                        preemptions=max(seq.preemptions for seq in live),
                    )
            for seq in list(live):
                self._drop(seq)
            return
        parents = {beam.parent for beam in going}
        for seq in [seq for seq in live if seq not in parents]:
            self._drop(seq)
        beams: list[Sequence] = []
        for beam in going:  # the first child of a parent is the parent itself, extended when all have forked
            if beam.parent in parents:
                parents.remove(beam.parent)
                beams.append(beam.parent)
            else:
                beams.append(self._fork_beam(beam.parent))
        for seq, beam in zip(beams, going, strict=True):
            seq.tokens.append(beam.token)
            seq.cumulative, seq.trail, seq.top = beam.cumulative, beam.trail, None
            if seq.status is not Status.RUNNING:
                self._queue(seq)
        request.sequences = beams

    def _fork_beam(self, parent: Sequence) -> Sequence:
        child = Sequence(self._new_id(), parent.request, parent.choice, list(parent.tokens))
        child.preemptions = parent.preemptions
        child.to(Status.FOLLOWING)
        running = parent.status is Status.RUNNING
        if running and self._slots and self.kv.fork(parent.id, child.id, parent.confirmed):
            child.computed = child.confirmed = parent.confirmed
            self._run(child, self._clock())
        return child

    # ---------------------------------------------------------------- ends

    def fail(self, step: int, message: str) -> None:
        """A step raised. Its requests end; what it left in memory is trusted by nobody: the others recompute."""
        now = self._clock()
        failed = {item.seq.request: None for item in self._flights.pop(step) if item.seq.epoch == item.epoch}
        self._flights.clear()
        for request in failed:
            for seq in list(request.sequences):
                self._drop(seq)
            for choice in sorted(request.open):
                self._close(request, choice, FinishReason.ERROR, error=message, kind="failed")
        for request in self.requests.values():
            for seq in request.sequences:
                self._forget_kv(seq, now)
        self.kv.reset()
        self.kv.drain()

    def _forget_kv(self, seq: Sequence, now: float) -> None:
        self.kv.release(seq.id)
        seq.computed = seq.confirmed = seq.pending = 0
        seq.epoch += 1
        if seq.status is Status.SWAPPED:
            seq.to(Status.WAITING)  # it stands in the queue already
        elif seq.status is Status.RUNNING:
            self._vacate(seq)
            seq.request.note(now, "recomputed", choice=seq.choice, why="a step failed")
            if seq.top is not None:
                seq.to(Status.PARKED)
            else:
                self._queue(seq)

    def _end(
        self,
        seq: Sequence,
        finish: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        stop_token: int | None = None,
        error: str = "",
        kind: str = "",
        embedding: bytes = b"",
    ) -> None:
        """A sequence ends, and with it its choice."""
        request = seq.request
        self._drop(seq)
        self._close(
            request,
            seq.choice,
            finish,
            tokens,
            logprobs,
            stop_token=stop_token,
            error=error,
            kind=kind,
            embedding=embedding,
            preemptions=seq.preemptions,
        )

    def _drop(self, seq: Sequence) -> None:
        """A sequence ends: slot and blocks are free at once. If others waited for its prompt, the next one leads."""
        request = seq.request
        led = seq.status is not Status.FOLLOWING and seq.status is not Status.COMPILING
        if seq.status is Status.RUNNING:
            self._vacate(seq)
        self.kv.release(seq.id)
        self._picked.pop(seq, None)
        seq.epoch += 1
        seq.to(Status.FINISHED)
        if self._proposer is not None:
            self._proposer.forget(seq.id)
        request.sequences.remove(seq)
        followers = [s for s in request.sequences if s.status is Status.FOLLOWING]
        if led and followers and len(followers) == len(request.sequences) and request.beam is None:
            self._queue(followers[0])

    def _tell(
        self,
        request: Request,
        choice: int,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        preemptions: int,
        finish: FinishReason | None = None,
        stop_token: int | None = None,
        error: str = "",
        kind: str = "",
        embedding: bytes = b"",
    ) -> None:
        """One delta; a choice's first one says where the request had been."""
        cached, queued = -1, -1.0
        scores: tuple[TokenLogprobs | None, ...] = ()
        if choice not in request.told:
            if request.scored and not request.told:
                scores = tuple(request.scores)
            request.told.add(choice)
            cached = request.cached
            if request.admitted is not None:
                queued = max(0.0, request.admitted - request.add.arrival)
        self.deltas.append(
            Delta(
                request.add.id,
                choice,
                tokens,
                logprobs,
                finish,
                stop_token,
                error,
                kind,
                cached,
                preemptions,
                queued,
                scores,
                embedding,
            )
        )

    def _close(
        self,
        request: Request,
        choice: int,
        finish: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        stop_token: int | None = None,
        error: str = "",
        kind: str = "",
        embedding: bytes = b"",
        preemptions: int = 0,
    ) -> None:
        """The one terminal delta of a choice; with the last one the request is over."""
        request.open.remove(choice)
        self._tell(request, choice, tokens, logprobs, preemptions, finish, stop_token, error, kind, embedding)
        now = self._clock()
        request.note(now, "finished", choice=choice, reason=finish.value, error=error)
        request.ended(choice, finish)
        if not request.open:
            request.finished = now
            del self.requests[request.add.id]
            self.finished.append(request)


def _allowed(seq: Sequence, drafts: tuple[int, ...]) -> int:
    """How many of the drafts the grammar allows."""
    assert seq.constraint is not None
    n = 0
    for token in drafts:
        if token in seq.stops or not seq.constraint.advance(token):
            break
        n += 1
    seq.constraint.rollback(n)
    return n


def _masks(seq: Sequence) -> tuple[bytes | None, ...]:
    """A mask for each sampled position: after the known tokens, and after each draft."""
    constraint = seq.constraint
    assert constraint is not None
    masks = [constraint.mask()]
    for token in seq.drafts:
        constraint.advance(token)
        masks.append(constraint.mask())
    constraint.rollback(len(seq.drafts))
    return tuple(masks)


def _logprobs(sample: Sampled) -> TokenLogprobs:
    return TokenLogprobs(sample.logprob, sample.rank, sample.top)


def _mean(hidden: bytes, count: int) -> bytes:
    """The worker's running sum over all positions, divided by their number; float32 little-endian."""
    values = array.array("f", hidden)
    if sys.byteorder == "big":
        values.byteswap()
    values = array.array("f", (value / count for value in values))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
