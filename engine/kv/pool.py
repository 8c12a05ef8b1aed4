"""BlockPool: which block ids are free, and how many hold each of the others. Used for every tier."""

from __future__ import annotations


class BlockPool:
    """Ids 0 .. size-1 with reference counts. The prefix index is a holder like any sequence."""

    __slots__ = ("_free", "refs", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.refs = [0] * size
        self._free = list(range(size - 1, -1, -1))  # a stack: the block freed last is warm in the caches

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free block, held once. The caller has made sure that there is one."""
        block = self._free.pop()
        self.refs[block] = 1
        return block

    def claim(self, blocks: set[int]) -> None:
        """Take these very blocks, all of them free: what an earlier run left there."""
        self._free = [block for block in self._free if block not in blocks]
        for block in blocks:
            self.refs[block] = 1

    def hold(self, block: int) -> None:
        """One more holder of a block that has some."""
        assert self.refs[block] > 0, "only a block in use can be shared"
        self.refs[block] += 1

    def drop(self, block: int) -> int:
        """One holder less; returns how many are left. At 0 the block is free again."""
        left = self.refs[block] - 1
        assert left >= 0, "a free block can't be given back"
        self.refs[block] = left
        if left == 0:
            self._free.append(block)
        return left

    def check(self, holders: list[int]) -> None:
        """Raise unless `holders` (per block, counted by the caller) are the counts kept here."""
        assert self.refs == holders, f"reference counts differ: {self.refs} kept, {holders} found"
        assert sorted(self._free) == [b for b, n in enumerate(holders) if n == 0], "the free list is wrong"
