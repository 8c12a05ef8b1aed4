"""Rows of consecutive blocks: pages mapped as they are needed (virtual), or reserved whole (the baseline)."""

from __future__ import annotations

from engine.core.plan import KVOp
from engine.kv.contiguous import ContiguousKV


def virtual(blocks: int = 8, pages: int = 6, slots: int = 4) -> ContiguousKV:
    return ContiguousKV(blocks, 4, pages, virtual=True, slots=slots)


def begin(kv: ContiguousKV, seq: int, slot: int, tokens: int) -> None:
    assert kv.admit(seq, [1] * tokens, "", 0, 0) == 0
    kv.seat(seq, slot)
    assert kv.extend(seq, 0, tokens)
    kv.check()


def test_pages_are_mapped_one_by_one_as_the_sequence_grows() -> None:
    kv = virtual()
    begin(kv, 1, 2, 5)
    assert list(kv.table(1)) == [12, 13]
    assert kv.drain()[0] == (KVOp("map", 2, 0), KVOp("map", 2, 1))
    assert kv.extend(1, 5, 8)
    assert kv.drain()[0] == ()
    assert kv.extend(1, 8, 9)
    assert kv.drain()[0] == (KVOp("map", 2, 2),)
    assert kv.changes(1) == (0, (12, 13, 14))


def test_what_a_row_leaves_mapped_serves_the_next_sequence_in_its_slot() -> None:
    kv = virtual()
    begin(kv, 1, 0, 16)
    kv.release(1)
    kv.drain()
    begin(kv, 2, 0, 12)
    assert kv.drain()[0] == ()


def test_spare_pages_are_unmapped_when_another_row_needs_the_memory() -> None:
    kv = virtual(blocks=4)
    begin(kv, 1, 0, 12)
    kv.release(1)
    kv.drain()
    begin(kv, 2, 1, 12)
    ops = kv.drain()[0]
    assert [op.kind for op in ops] == ["map", "unmap", "map", "unmap", "map"]
    assert kv.available() == 1


def test_more_pages_than_there_are_is_a_no_that_changes_nothing() -> None:
    kv = virtual(blocks=4)
    begin(kv, 1, 0, 12)
    assert kv.admit(2, [1] * 8, "", 0, 0) is None
    assert not kv.extend(1, 12, 20)
    kv.check()
    assert len(kv.table(1)) == 3


def test_a_fork_copies_into_the_childs_own_row() -> None:
    kv = virtual()
    begin(kv, 1, 0, 7)
    kv.drain()
    assert kv.fork(1, 2, 6)
    kv.seat(2, 3)
    assert kv.drain()[0] == (KVOp("map", 3, 0), KVOp("map", 3, 1), KVOp("copy", 0, 18), KVOp("copy", 1, 19))
    kv.check()


def test_after_a_reset_no_page_keeps_memory_that_no_sequence_uses() -> None:
    kv = virtual()
    begin(kv, 1, 0, 16)
    begin(kv, 2, 1, 4)
    kv.release(1)
    kv.drain()
    kv.reset()
    assert kv.drain()[0] == tuple(KVOp("unmap", 0, page) for page in range(4))
    kv.check()


def test_the_baseline_reserves_the_whole_row_at_once() -> None:
    kv = ContiguousKV(13, 4, 6, virtual=False, slots=4)
    assert kv.usage().total == 12
    begin(kv, 1, 3, 2)
    assert kv.usage().free == 6
    begin(kv, 2, 0, 2)
    assert kv.admit(3, [1], "", 0, 0) is None
    assert list(kv.table(1)) == [0]
    assert list(kv.table(2)) == [6]
    kv.release(1)
    begin(kv, 3, 1, 24)
    assert list(kv.table(3)) == [0, 1, 2, 3, 4, 5]
    assert kv.drain()[0] == ()
