"""Which of several replicas a request goes to: the one that has the least to compute before its first token.

That is the part of the prompt that was not sent there before, and what is before it in the queue. The index knows
prefixes by a chain of hashes, a block of tokens each, and no more of them than the replica's pool has blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

SMALLEST_BLOCK = 16  # tokens; with smaller ones the index would be longer than it is worth
LIVE_TOKENS = 64  # a running request delays a new one by as much as so many tokens of a prompt


class Router:
    """Prefixes by replica. Nothing here is exact: a wrong guess costs time and nothing else."""

    def __init__(self, blocks: Sequence[int], block_size: int) -> None:
        """`blocks`: the size of each replica's pool."""
        self._step = max(block_size, SMALLEST_BLOCK)
        self._room = [max(1, n * block_size // self._step) for n in blocks]
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in blocks]
        self._turn = 0

    def order(self, prompt: Sequence[int], salt: str, loads: Sequence[int]) -> list[int]:
        """Replicas, the best first. `loads`: tokens that are before a new request, for each replica."""
        cached = [0] * len(loads)
        open_ = set(range(len(loads)))
        for length, name in self._names(prompt, salt):
            open_ = {i for i in open_ if name in self._known[i]}
            if not open_:
                break
            for i in open_:
                cached[i] = length
        self._turn += 1
        turns = [(i - self._turn) % len(loads) for i in range(len(loads))]  # equals take turns
        return sorted(range(len(loads)), key=lambda i: (loads[i] - cached[i], turns[i]))

    def sent(self, replica: int, prompt: Sequence[int], salt: str) -> None:
        """A request went there: its prefixes will be cached, and push out the oldest."""
        known = self._known[replica]
        for _, name in self._names(prompt, salt):
            known[name] = None
            known.move_to_end(name)
        while len(known) > self._room[replica]:
            known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its cache is empty."""
        self._known[replica].clear()

    def _names(self, prompt: Sequence[int], salt: str) -> Iterator[tuple[int, int]]:
        """(length, hash) of every prefix of whole blocks."""
        name = hash(salt)
        for end in range(self._step, len(prompt) + 1, self._step):
            name = hash((name, tuple(prompt[end - self._step : end])))
            yield end, name
