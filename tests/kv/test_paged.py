"""Block tables, sharing, copy-on-write, the prefix index and the tiers, looked at from outside of the manager."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.core.plan import KVOp
from engine.kv.costs import Costs
from engine.kv.paged import PagedKV

SIZES = [1, 2, 3, 7, 16, 544]


def make(
    blocks: int = 32, size: int = 4, *, host: int = 0, disk: int = 0, caching: bool = True, **more: object
) -> PagedKV:
    costs = Costs(bytes_per_block=1000, block_size=size)
    return PagedKV(blocks, size, costs, host_blocks=host, disk_blocks=disk, caching=caching, **more)  # type: ignore[arg-type]


def begin(kv: PagedKV, seq: int, tokens: list[int], salt: str = "") -> int:
    """Admit and compute all of it; returns what was cached."""
    cached = kv.admit(seq, tokens, salt, len(tokens) - 1, 0)
    assert cached is not None
    assert kv.extend(seq, cached, len(tokens))
    kv.commit(seq, tokens, len(tokens))
    kv.check()
    return cached


def kinds(kv: PagedKV) -> list[str]:
    return [op.kind for op in kv.drain()[0]]


def test_the_worked_example_of_three_requests_in_one_pool() -> None:
    kv = make(blocks=6, size=4, caching=False)
    begin(kv, 1, [1] * 5)  # A: 5 tokens, two blocks, one slot of the second in use
    assert kv.table(1) == [0, 1]
    begin(kv, 2, [2] * 4)  # B1 and B2: one prompt of 4 tokens, one block, held twice
    assert kv.fork(2, 3, 4)
    assert kv.table(2) == kv.table(3) == [2]
    assert kv.usage().shared == 1
    for seq in (2, 3):  # their first own token lies behind the shared block: nothing is copied
        assert kv.extend(seq, 4, 5)
    assert (kv.table(2), kv.table(3)) == ([2, 3], [2, 4])
    assert kv.drain() == ((), ())
    kv.release(1)  # A ends, C gets its blocks
    begin(kv, 4, [3] * 8)
    assert kv.table(4) == [0, 1]
    kv.check()


@pytest.mark.parametrize("size", SIZES)
def test_a_table_grows_one_block_at_a_time_and_wastes_less_than_one(size: int) -> None:
    kv = make(blocks=1200 // size + 2, size=size)
    kv.admit(1, [5], "", 0, 0)
    for total in range(1, 1100, 37):
        assert kv.extend(1, total - 1, total)
        assert 0 <= len(kv.table(1)) * size - total < size
    kv.release(1)
    kv.check()
    assert kv.usage().free == kv.usage().total


def test_the_first_write_into_a_shared_block_copies_that_block_alone() -> None:
    kv = make()
    begin(kv, 1, list(range(10)))
    kv.fork(1, 2, 10)
    assert kv.extend(2, 10, 11)
    assert kv.table(2)[:2] == kv.table(1)[:2]
    old, new = kv.table(1)[2], kv.table(2)[2]
    assert kv.drain()[0] == (KVOp("copy", old, new),)
    assert kv.extend(1, 10, 11)  # the last holder writes in place
    assert kv.table(1)[2] == old
    assert kv.drain()[0] == ()
    kv.check()


def test_nothing_is_copied_of_a_shared_block_that_is_written_from_its_start() -> None:
    kv = make()
    begin(kv, 1, list(range(8)))
    kv.fork(1, 2, 5)
    assert kv.extend(2, 4, 8)  # rolled back to a block border
    assert kv.table(2)[1] != kv.table(1)[1]
    assert kv.drain()[0] == ()


def test_a_child_that_lags_does_not_inherit_what_its_parent_published() -> None:
    kv = make()
    begin(kv, 1, list(range(16)))
    kv.fork(1, 2, 6)
    other = [*range(6), *range(50, 60)]
    assert kv.extend(2, 6, 16)
    kv.commit(2, other, 16)
    kv.check()
    assert kv.admit(3, list(range(16)), "", 15, 0) == 12
    assert kv.admit(4, other, "", 15, 0) == 12
    assert kv.table(3)[1:] == kv.table(1)[1:3]
    assert kv.table(4)[1:] == kv.table(2)[1:3]


def test_a_child_that_lags_counts_only_its_own_part_as_on_the_host() -> None:
    kv = make(host=32)
    begin(kv, 1, list(range(16)))
    assert kv.swap_out(1, 16)
    assert kv.swap_in(1, 16, 0)  # its four nodes have host copies now
    kv.fork(1, 2, 6)
    assert kv.swap_blocks(2, 6) == (1, 2)


def test_a_full_pool_changes_nothing() -> None:
    kv = make(blocks=4)
    begin(kv, 1, list(range(10)))
    assert kv.admit(2, [9] * 8, "", 7, 0) is None
    assert not kv.extend(1, 10, 17)
    kv.check()
    assert len(kv.table(1)) == 3


@pytest.mark.parametrize("size", SIZES)
def test_a_hit_covers_whole_nodes_and_leaves_a_token_to_compute(size: int) -> None:
    node = 16 if size == 1 else size
    kv = make(blocks=4000 // size, size=size)
    tokens = list(range(1000))
    begin(kv, 1, tokens)
    for seq, length in enumerate((1, node, node + 1, 3 * node, 3 * node + 1), 2):
        if length < 1000:
            assert kv.admit(seq, tokens[:length], "", length - 1, 0) == (length - 1) // node * node


def test_whoever_publishes_second_adopts_the_block_of_the_first() -> None:
    kv = make()
    kv.admit(1, [1] * 9, "", 8, 0)
    kv.admit(2, [1] * 9, "", 8, 0)
    for seq in (1, 2):
        kv.extend(seq, 0, 9)
    kv.changes(2)
    kv.commit(1, [1] * 9, 9)
    kv.commit(2, [1] * 9, 9)
    assert kv.table(1)[:2] == kv.table(2)[:2]
    assert kv.changes(2) == (0, tuple(kv.table(2)))
    assert kv.usage().shared == 2
    kv.check()


def test_salts_do_not_see_each_other() -> None:
    kv = make()
    begin(kv, 1, [1] * 12, salt="a")
    assert begin(kv, 2, [1] * 12, salt="b") == 0
    assert begin(kv, 3, [1] * 12, salt="a") == 8


def test_leaves_are_evicted_first_and_the_least_recent_before_others() -> None:
    kv = make(blocks=8)
    begin(kv, 1, [*range(16)])
    kv.release(1)
    begin(kv, 2, [*range(50, 66)])
    kv.release(2)
    assert kv.admit(3, [*range(16), 99], "", 16, 0) == 16  # now the first is the more recent
    kv.release(3)
    begin(kv, 4, [7] * 9)  # takes three blocks
    kv.check()
    assert kv.admit(5, [*range(16), 99], "", 16, 0) == 16
    kv.release(5)
    assert kv.admit(6, [*range(50, 66), 99], "", 16, 0) == 4


def test_what_is_evictable_counts_as_available() -> None:
    kv = make(blocks=8)
    begin(kv, 1, list(range(32)))
    assert kv.available() == 0
    kv.release(1)
    assert kv.available() == 8
    assert kv.usage().cached == 8
    begin(kv, 2, [9] * 32)
    assert kv.usage().cached == 0


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_swapped_sequence_comes_back_with_the_same_blocks_of_data(size: int) -> None:
    kv = make(blocks=40, size=size, host=40)
    tokens = list(range(25))
    begin(kv, 1, tokens)
    before = list(kv.table(1))
    assert kv.swap_blocks(1, 25) == (-(-25 // size), -(-25 // size))
    assert kv.swap_out(1, 25)
    out = kv.drain()[0]
    assert [op.src for op in out] == before
    kv.check()
    kv.reset()  # not even this forgets what a swapped sequence stands on
    begin(kv, 2, [99] * (40 * size))
    kv.release(2)
    kv.drain()
    assert kv.swap_in(1, 26, 0)
    came = {op.src: op.dst for op in kv.drain()[0]}
    assert [came[op.dst] for op in out] == list(kv.table(1))
    kv.release(1)
    kv.reset()
    kv.check()
    assert kv.usage().host_used == 0


def test_blocks_that_are_still_on_the_device_are_not_copied_back() -> None:
    kv = make(blocks=40, host=40)
    begin(kv, 1, list(range(10)))
    kv.swap_out(1, 10)
    kv.drain()
    assert kv.swap_in(1, 10, 0)
    assert len(kv.drain()[0]) == 1  # the two published ones had stayed; the partial one was given up


def test_swapping_is_refused_when_the_host_is_full() -> None:
    kv = make(blocks=40, host=2)
    begin(kv, 1, list(range(10)))
    assert not kv.swap_out(1, 10)
    kv.check()
    assert len(kv.table(1)) == 3


def test_evicted_prefixes_go_to_the_host_and_come_back_on_a_hit() -> None:
    kv = make(blocks=4, host=8)
    begin(kv, 1, list(range(16)))
    kv.release(1)
    assert kinds(kv) == []
    begin(kv, 2, [9] * 16)
    assert kinds(kv) == ["out"] * 4
    kv.release(2)
    assert begin(kv, 3, list(range(16))) == 12
    assert sorted(kinds(kv)) == ["in"] * 3 + ["out"] * 4
    assert kv.usage().hit_tokens_host == 12


def test_prefixes_that_are_cheaper_to_compute_are_dropped() -> None:
    kv = make(blocks=4, host=8)
    kv._costs.saw_copy("in", 1000, 10.0)
    begin(kv, 1, list(range(16)))
    kv.release(1)
    begin(kv, 2, [9] * 16)
    assert kinds(kv) == []
    assert kv.usage().host_used == 0


def test_without_a_hit_the_tiers_cost_nothing() -> None:
    kv = make(blocks=64, host=64, disk=64)
    for seq in range(3):
        begin(kv, seq, [seq] * 40)
        kv.release(seq)
    assert kv.drain() == ((), ())


def disk_of_an_earlier_run(size: int, blocks: int) -> dict[int, bytes]:
    kv = make(blocks=blocks, size=size, host=blocks, disk=8 * blocks)
    found: dict[int, bytes] = {}
    for seq, token in enumerate((1, 2, 3)):
        begin(kv, seq, [token] * (blocks * size), salt="tenant")
        kv.release(seq)
        ops, keys = kv.drain()
        assert [op.dst for op in ops if op.kind == "disk_out"] == [block for block, _ in keys]
        found.update(keys)
    assert kv.usage().disk_used == len(found) > 0
    return found


@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_disk_tier_is_found_again_by_the_next_run(size: int) -> None:
    blocks = 64 if size == 1 else 4
    index = tuple(disk_of_an_earlier_run(size, blocks).items())
    kv = make(blocks=blocks, size=size, host=blocks, disk=8 * blocks, disk_index=index)
    kv.check()
    assert kv.usage().disk_used == len(index)
    tokens = [1] * (blocks * size)
    assert begin(kv, 1, tokens, salt="other") == 0
    kv.release(1)
    node = 16 if size == 1 else size
    assert begin(kv, 2, tokens, salt="tenant") == (len(tokens) - 1) // node * node
    moved = kinds(kv)
    assert moved.count("disk_in") == moved.count("in") == (len(tokens) - 1) // node * node // size
    assert kv.usage().hit_tokens_disk == (len(tokens) - 1) // node * node
    kv.release(2)
    kv.reset()
    kv.check()
    assert kv.usage().disk_used == 0


def test_damaged_or_foreign_keys_on_disk_are_not_believed() -> None:
    index = [(block, key) for block, key in disk_of_an_earlier_run(1, 64).items()]
    broken = [(index[0][0], b""), (index[1][0], index[1][1][:10]), (99999, index[2][1]), *index[3:]]
    kv = make(blocks=64, size=1, host=64, disk=512, disk_index=tuple(broken))
    kv.check()
    begin(kv, 1, [1] * 64, salt="tenant")
    kv.check()


def test_blocks_that_no_one_asks_for_after_a_restart_make_room_first() -> None:
    index = tuple(disk_of_an_earlier_run(4, 4).items())
    kv = make(blocks=4, size=4, host=4, disk=len(index), disk_index=index)
    for seq in range(4):
        begin(kv, seq, [10 + seq] * 16)
        kv.release(seq)
    kv.check()
    assert kv.usage().disk_used <= len(index)


def test_a_new_salt_with_every_request_does_not_fill_the_memory() -> None:
    kv = make(blocks=8)
    for seq in range(3000):
        begin(kv, seq, [1] * 3, salt=str(seq))
        kv.release(seq)
    assert len(kv.index.roots) <= 1025


def test_a_trie_of_siblings_keeps_every_branch_apart() -> None:
    kv = make(blocks=200, size=2)
    branches = [[a, a, b, b, c, c, 0] for a in range(3) for b in range(3) for c in range(3)]
    for seq, tokens in enumerate(branches):
        begin(kv, seq, tokens)
    tables = {tuple(tokens): list(kv.table(seq)) for seq, tokens in enumerate(branches)}
    for one, two in pairwise(branches):
        common = sum(1 for _ in iter_common(one, two)) // 2
        assert tables[tuple(one)][:common] == tables[tuple(two)][:common]
        assert tables[tuple(one)][common] != tables[tuple(two)][common]


def iter_common(one: list[int], two: list[int]) -> list[int]:
    same = []
    for a, b in zip(one, two, strict=True):
        if a != b:
            break
        same.append(a)
    return same


@pytest.mark.parametrize(("size", "host"), [(1, 16), (4, 1), (16, 3), (16, 64)])
def test_what_is_cached_when_the_engine_ends_is_found_by_the_next_one(size: int, host: int) -> None:
    blocks, node = 64 if size == 1 else 8, 16 if size == 1 else size
    kv = make(blocks=blocks, size=size, host=host, disk=8 * blocks)
    prompts = [[token] * (blocks * size // 2) for token in (1, 2, 3)]
    for seq, tokens in enumerate(prompts):
        begin(kv, seq, tokens, salt="tenant")
        kv.release(seq)
    kv.drain()
    index: dict[int, bytes] = {}
    for ops, keys in kv.store():
        assert {op.kind for op in ops} <= {"out", "disk_out"}
        assert {block for block, _ in keys} == {op.dst for op in ops if op.kind == "disk_out"}
        index.update(keys)
    kv.check()
    after = make(blocks=blocks, size=size, host=64, disk=8 * blocks, disk_index=tuple(index.items()))
    for seq, tokens in enumerate(prompts[1:]):
        assert begin(after, seq, tokens, salt="tenant") == (len(tokens) - 1) // node * node
        after.release(seq)
    assert begin(after, 9, prompts[2], salt="other") == 0


def test_the_prefix_used_last_is_stored_first_and_nothing_without_what_stands_above_it() -> None:
    kv = make(blocks=32, size=4, host=2, disk=5)
    for seq, token in enumerate((1, 2)):
        begin(kv, seq, [token] * 16)
        kv.release(seq)
    index = dict(pair for _, keys in kv.store() for pair in keys)
    assert len(index) == 5
    kv.check()
    after = make(blocks=32, size=4, host=32, disk=5, disk_index=tuple(index.items()))
    assert begin(after, 1, [2] * 17) == 16
    assert begin(after, 2, [1] * 17) == 4


def test_nothing_is_stored_without_a_disk_or_when_computing_is_cheaper() -> None:
    for disk, slow in ((0, False), (32, True)):
        kv = make(blocks=8, host=8, disk=disk)
        begin(kv, 1, list(range(16)))
        kv.release(1)
        if slow:
            kv._costs.saw_copy("disk_in", 1000, 10.0)
        assert list(kv.store()) == []


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_sequence_that_is_aborted_leaves_nothing_on_the_host(caching: bool) -> None:
    kv = make(host=32, caching=caching)
    begin(kv, 1, list(range(18)))
    assert kv.swap_out(1, 18)
    assert kv.usage().host_used == 5
    kv.release(1)
    kv.check()
    assert kv.usage().host_used == (4 if caching else 0)  # copies of what is published stay, as cache
    kv.reset()
    kv.check()
    assert kv.usage().host_used == 0


def test_what_was_brought_up_from_the_host_leaves_it_from_the_leaves_too() -> None:
    kv = make(blocks=4, host=4)
    for seq, tokens in enumerate((list(range(16)), [90] * 16, list(range(16)), [91] * 16, [92] * 4)):
        begin(kv, seq, tokens)
        kv.release(seq)
    assert begin(kv, 9, list(range(12))) == 8


def test_what_is_on_disk_already_stays_when_something_below_it_is_stored() -> None:
    kv = make(blocks=16, size=4, host=8, disk=5)
    begin(kv, 1, [1] * 16)
    kv.release(1)
    index = dict(pair for _, keys in kv.store() for pair in keys)
    second = make(blocks=16, size=4, host=8, disk=5, disk_index=tuple(index.items()))
    for seq, tokens in enumerate(([3] * 16, [1] * 16 + [2] * 4)):
        begin(second, seq, tokens)
        second.release(seq)
    for _, keys in second.store():
        index.update(keys)
    second.check()
    third = make(blocks=16, size=4, host=8, disk=5, disk_index=tuple(index.items()))
    assert begin(third, 1, [1] * 16 + [2] * 5) == 20


# ---------------------------------------------------------------- a window in every layer


def grow(kv: PagedKV, seq: int, tokens: list[int], computed: int, step: int) -> None:
    """Compute the rest of the tokens, `step` at a time."""
    while computed < len(tokens):
        total = min(len(tokens), computed + step)
        assert kv.extend(seq, computed, total)
        kv.commit(seq, tokens, total)
        kv.check()
        computed = total


@pytest.mark.parametrize("step", [1, 5, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_blocks_behind_the_window_are_given_back_so_that_a_long_text_fits_a_small_pool(
    caching: bool, step: int
) -> None:
    kv = make(blocks=8, size=4, window=8, caching=caching)
    kv.admit(1, [0], "", 0, 0)
    grow(kv, 1, list(range(200)), 0, step)
    behind, table = kv.behind(1), kv.table(1)
    assert behind == (199 - 8) // 4
    assert len(table) == 50
    assert len(set(table[behind:])) == 50 - behind
    kv.seat(1, 0)
    assert kv.changes(1) == (0, tuple(table))  # the holes too have the id of some block
    assert all(0 <= block < 8 for block in table)
    kv.release(1)
    kv.check()
    assert kv.usage().free == kv.usage().total


def test_what_was_given_back_is_hit_until_its_room_is_needed_and_lost_from_the_tail() -> None:
    kv = make(blocks=16, size=4, window=8)
    tokens = list(range(41))
    begin(kv, 1, tokens)
    assert kv.behind(1) == 8
    assert begin(kv, 2, tokens) == 40
    kv.release(2)
    kv.drain()
    assert kv.available() == 16 - 3
    grow(kv, 3, [7] * 9, kv.admit(3, [7] * 9, "", 0, 0) or 0, 3)  # five were free, three are taken
    grow(kv, 4, [8] * 16, kv.admit(4, [8] * 16, "", 0, 0) or 0, 16)  # four: sequence 1 keeps its own, out of the index
    assert len(set(kv.table(1)[8:])) == 3
    assert kv.content(kv.table(1)[9]) == ()
    assert begin(kv, 5, tokens[:25]) == 24  # what stood nearer to the root has stayed
    grow(kv, 1, list(range(60)), 41, 4)  # and sequence 1 goes on, without a place in the index
    for seq in (1, 3, 4, 5):
        kv.release(seq)
    kv.reset()
    kv.check()
    assert kv.usage().free == 16


def test_the_operator_empties_the_cache_of_what_hangs_above_a_running_window() -> None:
    kv = make(blocks=16, size=4, window=8)
    begin(kv, 1, list(range(41)))
    kv.reset()
    kv.check()
    assert kv.usage().cached == 0
    assert begin(kv, 2, list(range(20))) == 0
    grow(kv, 1, list(range(60)), 41, 4)


@pytest.mark.parametrize("caching", [False, True])
def test_a_swap_moves_nothing_that_lies_behind_the_window(caching: bool) -> None:
    kv = make(blocks=16, size=4, window=8, host=16, caching=caching)
    tokens = list(range(41))
    begin(kv, 1, tokens)
    live = kv.table(1)[8:]
    assert kv.swap_blocks(1, 41) == (3, 3)
    assert kv.swap_out(1, 41)
    assert [(op.kind, op.src) for op in kv.drain()[0]] == [("out", block) for block in live]
    kv.reset()
    kv.check()
    assert kv.usage().free == 16
    assert kv.swap_in(1, 42, 13)  # the holes need no room
    assert kinds(kv) == ["in"] * 3
    assert kv.behind(1) == 8
    grow(kv, 1, list(range(60)), 41, 1)
    kv.release(1)
    kv.reset()
    kv.check()
    assert kv.usage().host_used == 0


def test_a_choice_shares_the_holes_of_the_one_it_forks_from_unless_it_would_read_them() -> None:
    kv = make(blocks=16, size=4, window=8)
    tokens = list(range(41))
    begin(kv, 1, tokens)
    assert not kv.fork(1, 2, 35)
    for child, computed in ((2, 40), (3, 41)):
        assert kv.fork(1, child, computed)
        kv.check()
        assert kv.behind(child) == 8
        grow(kv, child, [*tokens[:computed], *[child] * 30], computed, 1)
    kv.release(1)
    kv.check()


def test_a_path_that_comes_back_from_the_host_is_not_continued_by_one_that_has_left_it_behind() -> None:
    kv = make(blocks=16, size=4, window=8, host=32)
    tokens = list(range(90))
    begin(kv, 1, tokens[:41])
    begin(kv, 2, [7] * 21)  # room for it is taken from what stands above sequence 1, whose own nodes go first
    assert kv.content(kv.table(1)[9]) == ()
    kv.release(2)
    grow(kv, 1, tokens[:80], 41, 4)
    assert kv.behind(1) == 17
    assert begin(kv, 3, tokens[:41]) == 40
    grow(kv, 1, tokens, 80, 4)
    kv.release(3)
    assert begin(kv, 4, tokens[:45]) == 40
    kv.release(4)
    kv.release(1)
    kv.reset()
    kv.check()
