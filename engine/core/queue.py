"""Who runs and who waits: slots in the order of the policy, and the queue before them."""

from __future__ import annotations

import bisect
import heapq

from engine.core.policy import Fairness, running_key, waiting_key
from engine.core.request import Sequence, Status

SMALL_QUEUE = 1024  # entries; a longer queue is cleaned whenever it has doubled


class Running:
    """Sequences with a slot, in policy order: steps are filled from the front, victims taken from the end."""

    def __init__(self, slots: int) -> None:
        self.sequences: list[Sequence] = []
        self.requests = 0  # with at least one slot
        self._slots = list(range(slots - 1, -1, -1))

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    @property
    def last(self) -> Sequence | None:
        return self.sequences[-1] if self.sequences else None

    def enter(self, seq: Sequence) -> None:
        """Take a slot; the worker learns of it with the sequence's next row."""
        seq.to(Status.RUNNING)
        seq.slot = self._slots.pop()
        seq.resend = True
        seq.key = running_key(seq)
        bisect.insort(self.sequences, seq, key=lambda s: s.key)
        self.requests += seq.request.running == 0
        seq.request.running += 1

    def leave(self, seq: Sequence) -> None:
        """Give the slot back."""
        self.sequences.remove(seq)
        self._slots.append(seq.slot)
        seq.slot = -1
        seq.request.running -= 1
        self.requests -= seq.request.running == 0


class Waiting:
    """A heap in the order of admission. Who ends while waiting is skipped when it comes to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []
        self._fairness = Fairness()
        self._clean_at = SMALL_QUEUE

    def push(self, seq: Sequence) -> None:
        """A sequence waits: for the first time, or because it was preempted."""
        turn = self._fairness.ticket(seq.request.add.key) if seq.request.admitted is None else 0
        seq.turn = turn
        heapq.heappush(self._heap, (waiting_key(seq, turn), seq.id, seq))
        if len(self._heap) > self._clean_at:  # who has ended far from the front is not kept for ever
            self._heap = [entry for entry in self._heap if _waits(entry[2])]
            heapq.heapify(self._heap)
            self._clean_at = max(SMALL_QUEUE, 2 * len(self._heap))

    def first(self) -> Sequence | None:
        """Who is next."""
        while self._heap:
            seq = self._heap[0][2]
            if _waits(seq):
                return seq
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """`first` is admitted."""
        _, _, seq = heapq.heappop(self._heap)
        self._fairness.admitted(seq.turn)


def _waits(seq: Sequence) -> bool:
    return seq.status is Status.WAITING or seq.status is Status.SWAPPED
