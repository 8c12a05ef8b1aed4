"""Policy: who goes first, who gives way when blocks run out, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.core.request import Sequence
from engine.kv import KVManager
from engine.kv.costs import Costs

PROTECTED_AFTER = 2  # preemptions


@dataclass(frozen=True, slots=True)
class Decision:
    """How a sequence is preempted, and what both ways would cost in seconds (swap_s is inf when impossible)."""

    kind: Literal["swap", "recompute"]
    swap_s: float
    recompute_s: float


class Fairness:
    """Start-time fair queueing over keys with unit costs: a key's n-th waiting request stands in round n.

    With one key this is first come, first served.
    """

    def __init__(self) -> None:
        self._round = 0  # of the request admitted last
        self._next: dict[str, int] = {}  # by key, for keys that are ahead of the round

    def ticket(self, key: str) -> int:
        turn = max(self._round, self._next.get(key, 0))
        self._next[key] = turn + 1
        return turn

    def admitted(self, turn: int) -> None:
        if turn > self._round:
            self._round = turn
            self._next = {key: ahead for key, ahead in self._next.items() if ahead > turn}


def waiting_key(seq: Sequence, turn: int) -> tuple[float, ...]:
    """Order of admission: priority, what has begun (preempted, other choices), the key's turn, arrival."""
    add = seq.request.add
    begun = seq.request.admitted is not None
    return (add.priority, 0 if begun else 1, 0 if begun else turn, add.arrival, seq.id)


def running_key(seq: Sequence) -> tuple[float, ...]:
    """Order in which steps are filled; the last one is the first victim. Twice preempted = protected."""
    add = seq.request.add
    return (add.priority, 0 if seq.preemptions >= PROTECTED_AFTER else 1, add.arrival, seq.id)


def how(mode: str, seq: Sequence, kv: KVManager, costs: Costs) -> Decision:
    """Swap moves the KV out and in; recompute pays for the tokens that nobody else holds."""
    recompute_s = costs.compute_s(max(0, seq.confirmed - kv.survives(seq.id)))
    blocks = None if mode == "recompute" or seq.request.add.pooling == "mean" else kv.swap_blocks(seq.id, seq.confirmed)
    if blocks is None or seq.confirmed == 0:
        return Decision("recompute", float("inf"), recompute_s)
    swap_s = costs.swap_s(*blocks)
    if mode == "swap" or swap_s < recompute_s:
        return Decision("swap", swap_s, recompute_s)
    costs.doubt(blocks[1], "out", "in")
    return Decision("recompute", swap_s, recompute_s)
