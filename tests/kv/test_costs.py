"""What a move and a computed token cost: measured for each kind of move, and used for each decision."""

from __future__ import annotations

import pytest

from engine.kv.costs import MOVES, Costs
from engine.kv.paged import PagedKV
from tests.kv.test_paged import begin, kinds

BLOCK, TOKENS = 1000, 4  # bytes, tokens


def measured(*, prefill_s: float = 1.0, **seconds: float) -> Costs:
    """A block's tokens take `prefill_s`; a block moves in so many seconds, 0.001 unless said."""
    costs = Costs(BLOCK, TOKENS)
    for kind in MOVES:
        costs.saw_copy(kind, BLOCK, seconds.get(kind, 0.001))
    costs.saw_prefill(TOKENS, prefill_s)
    return costs


def test_each_kind_of_move_has_a_rate_of_its_own() -> None:
    costs = measured(out=1.0, **{"in": 2.0}, disk_out=3.0, disk_in=4.0)
    assert costs.swap_s(3, 5) == pytest.approx(3 * 1.0 + 5 * 2.0)
    assert costs.bring_s(host=3, disk=5) == pytest.approx(8 * 2.0 + 5 * 4.0)
    costs.saw_copy("copy", BLOCK, 99.0)  # within the device: there is nothing to decide about it
    costs.saw_copy("in", 0, 99.0)
    assert costs.swap_s(1, 1) == pytest.approx(3.0)


def test_the_first_measurement_counts_whole_and_later_ones_a_fifth() -> None:
    costs = measured(out=1.0)
    costs.saw_copy("out", BLOCK, 0.5)
    assert costs.copy_rates["out"] == pytest.approx(BLOCK * (0.8 * 1 + 0.2 * 2))


@pytest.mark.parametrize(
    ("slow", "keeping", "storing"),
    [("out", False, True), ("in", False, False), ("disk_out", True, False), ("disk_in", True, False)],
)
def test_a_slow_move_forbids_only_what_needs_it(slow: str, keeping: bool, storing: bool) -> None:
    costs = measured(**{slow: 2.0})
    assert costs.worth_keeping() == keeping
    assert costs.worth_storing() == storing


def test_a_rate_that_forbids_a_move_gets_better_until_it_is_tried_again() -> None:
    costs = measured(out=2.0)
    refused = 0
    while not costs.worth_keeping():
        costs.doubt(1, "out", "in")
        refused += 1
    assert 500 < refused < 1000  # a thousandth for each block
    costs.saw_copy("out", BLOCK, 2.0)
    assert not costs.worth_keeping()


def tiered(costs: Costs) -> PagedKV:
    """A prefix of eight blocks, of which the first four lie on the host and the others on disk."""
    kv = PagedKV(9, TOKENS, costs, host_blocks=8, disk_blocks=32)
    begin(kv, 1, list(range(32)))
    kv.release(1)
    for seq, pressing in ((2, 9), (3, 4)):
        begin(kv, seq, [90 + seq] * (pressing * TOKENS))
        kv.release(seq)
    kv.drain()
    return kv


@pytest.mark.parametrize(
    ("slow", "prefill_s", "brought"),
    [({}, 1.0, 8), ({"disk_in": 2.0}, 1.0, 4), ({"in": 2.0}, 1.0, 0), ({"disk_in": 1.2}, 1.0, 4), ({}, 0.0001, 0)],
)
def test_a_hit_brings_up_as_much_as_saves_time_and_says_what_both_ways_cost(
    slow: dict[str, float], prefill_s: float, brought: int
) -> None:
    costs = measured()
    kv = tiered(costs)
    for kind, seconds in slow.items():
        costs.copy_rates[kind] = BLOCK / seconds
    costs.prefill_rate = TOKENS / prefill_s
    bring_s = costs.bring_s(4, 4)
    assert kv.admit(9, [*range(32), 99], "", 32, 0) == brought * TOKENS
    promotion = kv.promotion(9)
    assert promotion is not None
    assert (promotion.host, promotion.disk, promotion.worth) == (4, 4, brought)
    assert promotion.compute_s == pytest.approx(8 * prefill_s)
    assert promotion.bring_s == pytest.approx(bring_s, rel=0.01)
    kv.check()


def test_a_hit_on_the_device_promotes_nothing() -> None:
    kv = PagedKV(8, TOKENS, measured(), host_blocks=8)
    begin(kv, 1, list(range(16)))
    assert kv.admit(2, list(range(16)), "", 15, 0) == 12
    assert kv.promotion(2) is None


def test_what_is_dear_to_read_from_disk_is_not_written_there() -> None:
    costs = measured(disk_in=2.0)
    kv = PagedKV(4, TOKENS, costs, host_blocks=4, disk_blocks=32)
    for seq in range(3):
        begin(kv, seq, [seq] * 16)
        kv.release(seq)
    moved = kinds(kv)
    assert "out" in moved
    assert "disk_out" not in moved
    kv.check()
