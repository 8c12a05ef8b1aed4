"""ContiguousKV: one row of consecutive blocks a sequence, so that a contiguous attention kernel can read it.

`virtual` (vAttention, Prabhu et al., arXiv 2405.04437): a row is a range of addresses as long as the context; pages
are mapped behind it as the sequence grows. What a row leaves mapped when its sequence ends serves the next one.
Otherwise the baseline that the PagedAttention paper measures against: a row is real memory, reserved whole.

Block ids are row * pages_per_row + page. In `virtual` a row is the scheduler's slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from engine.core.plan import KVOp
from engine.kv import BlockView, Promotion, Usage


class _Row:
    """What one sequence holds."""

    __slots__ = ("dirty", "row", "source")

    def __init__(self) -> None:
        self.row = -1  # not seated yet
        self.dirty = 0  # pages sent to the worker
        self.source: tuple[int, int] | None = None  # (row, pages) to copy once seated: a fork


class ContiguousKV:
    """Nothing is shared: no prefix cache, forks copy, preemption recomputes."""

    def __init__(self, num_blocks: int, block_size: int, pages_per_row: int, *, virtual: bool, slots: int) -> None:
        self.block_size = block_size
        self.pages_per_row = pages_per_row if virtual else min(pages_per_row, num_blocks)
        rows = slots if virtual else min(slots, num_blocks // self.pages_per_row)
        self._total = num_blocks if virtual else rows * self.pages_per_row
        self._virtual = virtual
        self._rows: dict[int, _Row] = {}
        self._free_rows = list(range(rows - 1, -1, -1))  # of the baseline
        # Of each row, counted from its start: pages in use <= pages with memory behind them.
        self._used = [0] * rows
        self._mapped = [0] * rows
        self._peak = [0] * rows  # the most that was ever mapped
        self._all_used = self._all_mapped = 0
        self._surplus: dict[int, None] = {}  # rows with more pages mapped than in use, the longest unused first
        self._ops: list[KVOp] = []
        self._copies = 0

    @property
    def ids_are_addresses(self) -> bool:
        return self._virtual

    @property
    def max_tokens(self) -> int:
        return min(self.pages_per_row, self._total) * self.block_size

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def available(self) -> int:
        if self._virtual:
            return self._total - self._all_used
        unseated = sum(1 for row in self._rows.values() if row.row < 0)
        return (len(self._free_rows) - unseated) * self.pages_per_row

    # ---------------------------------------------------------------- a sequence's life

    def admit(self, seq: int, tokens: Sequence[int], salt: str, limit: int, spare: int) -> int | None:
        assert seq not in self._rows, "a sequence is admitted once"
        need = self._pages_for(len(tokens)) + spare if self._virtual else self.pages_per_row
        if need > self.available():
            return None
        self._rows[seq] = _Row()
        return 0

    def promotion(self, seq: int) -> Promotion | None:
        return None

    def fork(self, parent: int, child: int, computed: int) -> bool:
        """The copies are made when the child is seated."""
        assert child not in self._rows, "a sequence is begun once"
        pages = self._pages_for(computed)
        if (pages if self._virtual else self.pages_per_row) > self.available():
            return False
        record = self._rows[child] = _Row()
        record.source = (self._rows[parent].row, pages)
        return True

    def seat(self, seq: int, slot: int) -> None:
        record = self._rows[seq]
        record.row = slot if self._virtual else self._free_rows.pop()
        record.dirty = 0
        if record.source is not None:
            source, pages = record.source
            self._grow(record.row, pages)
            src, dst = source * self.pages_per_row, record.row * self.pages_per_row
            self._ops.extend(KVOp("copy", src + i, dst + i) for i in range(pages))
            self._copies += pages
            record.source = None

    def extend(self, seq: int, computed: int, total: int) -> bool:
        row, pages = self._rows[seq].row, self._pages_for(total)
        more = pages - self._used[row]
        if more > 0:
            if self._virtual and more > self.available():
                return False
            self._grow(row, pages)
        return True

    def _grow(self, row: int, pages: int) -> None:
        self._all_used += pages - self._used[row]
        self._used[row] = pages
        if not self._virtual:
            return
        if self._mapped[row] <= pages:
            self._surplus.pop(row, None)
        for page in range(self._mapped[row], pages):
            if self._all_mapped == self._total:
                self._unmap_one()
            self._ops.append(KVOp("map", row, page))
            self._all_mapped += 1
            self._mapped[row] += 1
            self._peak[row] = max(self._peak[row], self._mapped[row])

    def _unmap_one(self) -> None:
        """Take the memory of a page that no sequence uses; `available` has counted it."""
        row = next(iter(self._surplus))
        self._mapped[row] -= 1
        self._all_mapped -= 1
        self._ops.append(KVOp("unmap", row, self._mapped[row]))
        if self._mapped[row] == self._used[row]:
            del self._surplus[row]

    def release(self, seq: int) -> None:
        record = self._rows.pop(seq, None)
        if record is None or record.row < 0:
            return
        row = record.row
        self._all_used -= self._used[row]
        self._used[row] = 0
        if not self._virtual:
            self._free_rows.append(row)
        elif self._mapped[row]:
            self._surplus.setdefault(row)

    def commit(self, seq: int, tokens: Sequence[int], computed: int) -> None:
        """Nothing is shared with later sequences."""

    # ---------------------------------------------------------------- what a row can't do

    def survives(self, seq: int) -> int:
        return 0

    def swap_blocks(self, seq: int, computed: int) -> tuple[int, int] | None:
        return None

    def swap_out(self, seq: int, computed: int) -> bool:
        return False

    def swap_in(self, seq: int, total: int, spare: int) -> bool:
        raise AssertionError("nothing was swapped out")

    def store(self) -> Iterator[tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]]:
        return iter(())

    def reset(self) -> None:
        """Nothing is cached; but memory behind pages that no sequence uses goes back.

        After a step that failed nobody knows which pages have memory, so every page that ever had some is unmapped.
        """
        for row, used in enumerate(self._used):
            self._ops.extend(KVOp("unmap", row, page) for page in range(used, self._peak[row]))
            self._mapped[row] = min(self._mapped[row], used)
        self._all_mapped = sum(self._mapped)
        self._surplus.clear()

    # ---------------------------------------------------------------- views

    def table(self, seq: int) -> Sequence[int]:
        row = self._rows[seq].row
        first = row * self.pages_per_row
        return range(first, first + self._used[row])

    def behind(self, seq: int) -> int:
        return 0

    def changes(self, seq: int) -> tuple[int, tuple[int, ...]]:
        record = self._rows[seq]
        start, used = record.dirty, self._used[record.row]
        if start == used:
            return 0, ()
        record.dirty = used
        first = record.row * self.pages_per_row
        return start, tuple(range(first + start, first + used))

    def missing(self, seq: int, total: int) -> int:
        return max(0, self._pages_for(total) - self._used[self._rows[seq].row]) if self._virtual else 0

    def drain(self) -> tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]:
        ops, self._ops = tuple(self._ops), []
        return ops, ()

    def usage(self) -> Usage:
        return Usage(total=self._total, free=self.available(), copies=self._copies)

    def held(self) -> Iterable[int]:
        return chain.from_iterable(map(self._held, self._rows.values()))

    def blocks(self) -> list[BlockView]:
        """Ids are places in rows: for the virtual manager they may exceed the number of pages with memory."""
        return [
            BlockView(block, 1, False, (seq,)) for seq, record in self._rows.items() for block in self._held(record)
        ]

    def content(self, block: int) -> tuple[int, ...]:
        return ()

    def _held(self, record: _Row) -> range:
        first = record.row * self.pages_per_row
        return range(first, first + (self._used[record.row] if self._virtual else self.pages_per_row))

    def check(self) -> None:
        live = {record.row for record in self._rows.values() if record.row >= 0}
        assert self._all_used == sum(self._used), "the count of used pages is wrong"
        assert all(used == 0 or row in live for row, used in enumerate(self._used)), "a row without sequence is used"
        if self._virtual:
            assert self._all_mapped == sum(self._mapped) <= self._total, "the count of mapped pages is wrong"
            for row, (used, mapped) in enumerate(zip(self._used, self._mapped, strict=True)):
                assert used <= mapped, "a page in use has no memory"
                assert (row in self._surplus) == (used < mapped), "a row's spare pages are misfiled"
        else:
            assert sorted([*self._free_rows, *live]) == list(range(len(self._used))), "a row is lost"
