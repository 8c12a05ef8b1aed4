"""Life: how a sequence begins, waits, runs, gives way and ends. The only code that gives KV, slots and epochs away."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.api import FinishReason, TokenLogprobs
from engine.core.ledger import Ledger
from engine.core.policy import how
from engine.core.proposer import Proposer
from engine.core.queue import Running, Waiting
from engine.core.request import Request, Sequence, Status
from engine.kv import KVManager, Promotion
from engine.kv.costs import Costs


class Life:
    """Owns who runs and who waits."""

    def __init__(
        self,
        kv: KVManager,
        costs: Costs,
        ledger: Ledger,
        slots: int,
        preemption: str,
        proposer: Proposer | None,
        clock: Callable[[], float],
    ) -> None:
        self.running = Running(slots)
        self.waiting = Waiting()
        self._kv = kv
        self._costs = costs
        self._ledger = ledger
        self._preemption = preemption
        self._proposer = proposer
        self._clock = clock
        self._born = 0

    # ---------------------------------------------------------------- beginning

    def bear(self, request: Request, choice: int, tokens: list[int]) -> Sequence:
        """A new sequence, not yet waiting for anything but its grammar."""
        self._born += 1
        return Sequence(self._born, request, choice, tokens)

    def wait(self, seq: Sequence) -> None:
        """Queue a sequence without KV."""
        seq.to(Status.WAITING)
        self.waiting.push(seq)

    def enter(self, seq: Sequence, spare: int) -> bool:
        """Give a waiting sequence its KV back, or what the prefix cache has of it; False when there is no room."""
        request, total = seq.request, len(seq.tokens)
        if seq.status is Status.SWAPPED:
            return self._kv.swap_in(seq.id, total, spare)
        found = self._kv.admit(seq.id, seq.tokens, request.salt, min(total - 1, request.prefix_limit), spare)
        if found is None:
            return False
        seq.computed = seq.confirmed = found
        if request.cached < 0:
            request.cached = min(found, request.prompt_len)
        if (promotion := self._kv.promotion(seq.id)) is not None:
            self._note_promotion(seq, promotion)
        return True

    def _note_promotion(self, seq: Sequence, promotion: Promotion) -> None:
        counters, rates = self._ledger.counters, self._costs.copy_rates
        counters.cost_bring_s, counters.cost_compute_s = promotion.bring_s, promotion.compute_s
        seq.request.note(
            self._clock(),
            "promoted",
            choice=seq.choice,
            **promotion._asdict(),
            in_bytes_per_s=rates["in"],
            disk_in_bytes_per_s=rates["disk_in"],
            prefill_tokens_per_s=self._costs.prefill_rate,
        )

    def run(self, seq: Sequence) -> None:
        """A sequence that has its KV takes a slot."""
        request, now = seq.request, self._clock()
        event = "resumed" if seq.preemptions else "admitted"
        request.note(now, event, choice=seq.choice, computed=seq.computed, swapped_in=seq.status is Status.SWAPPED)
        if request.admitted is None:
            request.admitted = now
            self._ledger.counters.prompt_tokens += request.prompt_len
        self.running.enter(seq)
        self._kv.seat(seq.id, seq.slot)

    def fork(self, leader: Sequence, seq: Sequence, computed: int) -> None:
        """`seq` begins with the leader's KV of [0, computed), or waits when there is no place for it."""
        if self.running.free_slots and self._kv.fork(leader.id, seq.id, computed):
            seq.computed = seq.confirmed = computed
            self.run(seq)
        else:
            self.wait(seq)

    def fork_beam(self, parent: Sequence) -> Sequence:
        """A copy of a beam, with its KV when there is a place; else it is left for the caller to queue."""
        child = self.bear(parent.request, parent.choice, list(parent.tokens))
        child.preemptions = parent.preemptions
        child.to(Status.FOLLOWING)
        running = parent.status is Status.RUNNING
        if running and self.running.free_slots and self._kv.fork(parent.id, child.id, parent.confirmed):
            child.computed = child.confirmed = parent.confirmed
            self.run(child)
        return child

    # ---------------------------------------------------------------- giving way

    def preempt(self, seq: Sequence, why: str, *, anew: bool = False) -> None:
        """Take slot and blocks from a running sequence; it goes on later where it was, with the same tokens.

        `anew`: it must let go of every block, so it isn't swapped.
        """
        kv, counters = self._kv, self._ledger.counters
        decision = how(self._preemption, seq, kv, self._costs)
        swapped = decision.kind == "swap" and not anew and seq.top is None and kv.swap_out(seq.id, seq.confirmed)
        if not swapped:
            kv.release(seq.id)
            seq.confirmed = 0
        seq.preemptions += 1
        seq.request.preemptions += 1
        counters.preemptions_swap += swapped
        counters.preemptions_recompute += not swapped
        counters.cost_swap_s = decision.swap_s if math.isfinite(decision.swap_s) else 0.0
        counters.cost_recompute_s = decision.recompute_s
        seq.request.note(
            self._clock(),
            "preempted",
            choice=seq.choice,
            how="swap" if swapped else "recompute",
            why=why,
            cost_swap_s=decision.swap_s if math.isfinite(decision.swap_s) else None,
            cost_recompute_s=decision.recompute_s,
            out_bytes_per_s=self._costs.copy_rates["out"],
            in_bytes_per_s=self._costs.copy_rates["in"],
            prefill_tokens_per_s=self._costs.prefill_rate,
        )
        self._stop_running(seq, Status.SWAPPED if swapped else Status.WAITING)

    def forget_kv(self, seq: Sequence) -> None:
        """The KV of this sequence can't be trusted any more: it will be computed again."""
        self._kv.release(seq.id)
        seq.computed = seq.confirmed = 0
        if seq.status is Status.SWAPPED:
            seq.to(Status.WAITING)  # it stands in the queue already
        elif seq.status is Status.RUNNING:
            seq.request.note(self._clock(), "recomputed", choice=seq.choice, why="a step failed")
            self._stop_running(seq, Status.WAITING)

    def _stop_running(self, seq: Sequence, status: Status) -> None:
        """No slot any more; results on their way are void."""
        seq.computed = seq.confirmed
        seq.pending = 0
        seq.drafts = ()
        seq.epoch += 1
        self.running.leave(seq)
        if seq.top is not None:
            seq.to(Status.PARKED)
        else:
            seq.to(status)
            self.waiting.push(seq)

    # ---------------------------------------------------------------- ending

    def end(
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
        self.drop(seq)
        self._ledger.close(
            seq.request,
            seq.choice,
            self._clock(),
            finish,
            tokens,
            logprobs,
            preemptions=seq.preemptions,
            stop_token=stop_token,
            error=error,
            kind=kind,
            embedding=embedding,
        )

    def drop(self, seq: Sequence) -> None:
        """A sequence ends: slot and blocks are free at once. If others waited for its prompt, the next one leads."""
        request = seq.request
        led = seq.status not in (Status.FOLLOWING, Status.COMPILING)
        if seq.status is Status.RUNNING:
            self.running.leave(seq)
        self._kv.release(seq.id)
        seq.epoch += 1
        seq.to(Status.FINISHED)
        if self._proposer is not None:
            self._proposer.forget(seq.id)
        request.sequences.remove(seq)
        left = request.sequences
        if led and left and all(s.status is Status.FOLLOWING for s in left):
            self.wait(left[0])

    def end_all(self, request: Request, finish: FinishReason, error: str = "", kind: str = "") -> None:
        """Every choice of the request ends alike."""
        for seq in reversed(list(request.sequences)):  # the leader last, so that no other begins to lead
            self.drop(seq)
        for choice in sorted(request.open):
            self._ledger.close(request, choice, self._clock(), finish, error=error, kind=kind)
