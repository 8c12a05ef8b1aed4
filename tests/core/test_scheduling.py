"""Scenarios with a name: traps that random runs rarely meet, and rules that only a look at the plans can show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import FinishReason, Grammar
from engine.core.plan import LAST_SAMPLED, Geometry
from engine.core.settings import CoreSettings
from tests.core.world import VOCAB, World

LONG = {"ignore_eos": True}


def world(
    *,
    blocks: int = 32,
    size: int = 4,
    host: int = 0,
    slots: int = 8,
    window: int = 0,
    drafts: bool = False,
    **core: Any,
) -> World:
    geometry = Geometry(
        num_blocks=blocks,
        block_size=size,
        host_blocks=host,
        max_model_len=64,
        max_num_seqs=slots,
        vocab_size=VOCAB,
        bytes_per_block=1000,
        window=window,
    )
    made = World(geometry, CoreSettings(**{"max_num_seqs": slots, "max_num_batched_tokens": 64, **core}), drafts=drafts)
    made.executor.keep_plans = True
    return made


def finish(w: World, id: str, choice: int = 0) -> FinishReason:
    last = w.answers[id, choice].last
    assert last is not None
    assert last.finish is not None
    return last.finish


def events(w: World, id: str) -> list[dict[str, Any]]:
    return [e for e in w.core.inspect("request", id)["timeline"] if e["event"] != "prefill"]


# ---------------------------------------------------------------- room


def test_a_pool_of_exactly_one_request_serves_it() -> None:
    w = world(blocks=3, watermark=0.5)
    w.add("a", [5] * 11, max_tokens=1)
    w.run()
    w.check_answers()
    assert finish(w, "a") is FinishReason.LENGTH


def test_the_watermark_is_waived_when_nothing_runs() -> None:
    w = world(blocks=4, watermark=1.0)
    for id in "abc":
        w.add(id, [5] * 9, max_tokens=4, **LONG)
    w.run(limit=60)
    w.check_answers()


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_a_swapped_sequence_comes_back_although_the_watermark_is_the_whole_pool(preemption: str) -> None:
    w = world(blocks=6, host=12, watermark=1.0, preemption=preemption)
    w.add("a", [5] * 4, max_tokens=20, **LONG)
    w.step()
    w.add("b", [6] * 4, max_tokens=20, **LONG)
    w.run(limit=120)
    w.check_answers()


def test_requests_that_fit_only_one_by_one_all_finish() -> None:
    w = world(blocks=6, slots=6)
    for i in range(6):
        w.add(f"r{i}", [i + 1] * 3, max_tokens=20, **LONG)
    stats = w.run(limit=400)
    w.check_answers()
    assert stats.preemptions_recompute > 0


@pytest.mark.parametrize(("prompt", "limit"), [(64, "the context holds 64"), (100, "the context holds 64")])
def test_what_can_never_fit_the_context_is_refused_with_the_numbers(prompt: int, limit: str) -> None:
    w = world()
    w.add("a", [5] * prompt)
    w.step()
    last = w.answers["a", 0].last
    assert last is not None
    assert last.error_kind == "invalid"
    assert f"{prompt} tokens" in last.error
    assert limit in last.error


def test_what_can_never_fit_the_pool_is_refused_for_every_choice() -> None:
    w = world(blocks=3)
    w.add("a", [5] * 12, n=2)
    w.step()
    for choice in (0, 1):
        last = w.answers["a", choice].last
        assert last is not None
        assert last.error_kind == "invalid"
        assert "the KV pool holds 12" in last.error
    assert not w.core.has_work()


def test_a_request_that_outgrows_the_pool_ends_with_length_wherever_it_runs() -> None:
    w = world(blocks=4)
    w.add("a", [5] * 3, max_tokens=60, **LONG)
    w.add("b", [6] * 3, max_tokens=60, **LONG)
    w.run()
    w.check_answers()
    assert len(w.answers["a", 0].tokens) == 4 * 4 + 1 - 3


def test_too_many_waiting_requests_are_refused_but_not_those_that_have_a_place() -> None:
    w = world(slots=2, max_waiting=3)
    for i in range(7):
        w.add(f"r{i}", [5], max_tokens=2, **LONG)
    w.run()
    kinds = [w.answers[f"r{i}", 0].last.error_kind for i in range(7)]  # type: ignore[union-attr]
    assert kinds == [""] * 5 + ["overloaded"] * 2


def test_a_resumed_request_is_never_refused_for_the_queue() -> None:
    w = world(slots=1, max_waiting=1)
    w.add("a", [5], max_tokens=30, **LONG)
    for _ in range(3):
        w.step()
    w.add("b", [5], max_tokens=3, **LONG)
    w.crash()
    w.run()
    w.check_answers()


# ---------------------------------------------------------------- who gives way, and how


def test_the_newest_gives_way_and_is_the_first_to_come_back() -> None:
    w = world(blocks=8, slots=4)
    w.add("old", [1] * 8, max_tokens=18, arrival=1.0, **LONG)
    w.add("new", [2] * 8, max_tokens=12, arrival=2.0, **LONG)
    w.step()
    w.add("later", [3] * 8, max_tokens=2, arrival=3.0, **LONG)
    w.run()
    w.check_answers()
    assert [e["event"] for e in events(w, "new")].count("preempted") >= 1
    assert not any(e["event"] == "preempted" for e in events(w, "old"))
    back = next(e["t"] for e in events(w, "new") if e["event"] == "resumed")
    first = next(e["t"] for e in events(w, "later") if e["event"] == "admitted")
    assert back <= first


def test_the_less_urgent_gives_way_even_if_it_is_older() -> None:
    w = world(blocks=8)
    w.add("low", [1] * 8, max_tokens=16, priority=1, arrival=1.0, **LONG)
    w.add("high", [2] * 8, max_tokens=16, priority=0, arrival=2.0, **LONG)
    w.run()
    w.check_answers()
    assert any(e["event"] == "preempted" for e in events(w, "low"))
    assert not any(e["event"] == "preempted" for e in events(w, "high"))


def test_an_urgent_request_takes_the_slot_of_a_less_urgent_one() -> None:
    w = world(slots=1)
    w.add("low", [1] * 8, max_tokens=10, priority=5, **LONG)
    for _ in range(3):
        w.step()
    w.add("high", [2] * 8, max_tokens=2, priority=0, **LONG)
    w.run()
    w.check_answers()
    assert events(w, "high")[-1]["t"] < events(w, "low")[-1]["t"]


def test_whoever_was_preempted_twice_is_not_a_victim_while_another_is() -> None:
    w = world(blocks=64, slots=4)
    w.add("young", [2] * 4, max_tokens=40, arrival=2.0, **LONG)
    w.step()
    life, (seq,) = w.core.scheduler.life, w.core.scheduler.life.running.sequences
    for _ in range(2):
        life.preempt(seq, "test")
        w.step()
    w.add("old", [1] * 4, max_tokens=40, arrival=1.0, **LONG)
    w.step()
    assert [s.request.add.id for s in life.running.sequences] == ["young", "old"]
    w.run()
    w.check_answers()


@pytest.mark.parametrize(("copy_s", "kind"), [(1e-6, "swap"), (1.0, "recompute")])
def test_auto_takes_the_cheaper_way_and_writes_down_both_costs(copy_s: float, kind: str) -> None:
    w = world(blocks=7, host=16, preemption="auto", enable_prefix_caching=False)
    w.executor.copy_s_per_block = copy_s
    for kind_of_move in ("out", "in"):
        w.core.costs.saw_copy(kind_of_move, 1000, copy_s)
    w.core.costs.saw_prefill(1000, 1.0)
    w.add("a", [1] * 8, max_tokens=16, **LONG)
    w.add("b", [2] * 8, max_tokens=16, **LONG)
    w.run()
    w.check_answers()
    preempted = [e for e in events(w, "b") if e["event"] == "preempted"]
    assert preempted
    for event in preempted:
        assert event["how"] == kind
        assert (event["cost_swap_s"] < event["cost_recompute_s"]) == (kind == "swap")
    stats = w.core.stats()
    assert stats.cost_swap_s > 0
    assert stats.cost_recompute_s > 0


def test_what_others_hold_too_is_not_counted_as_lost() -> None:
    w = world(blocks=64, host=64)
    w.add("a", [1] * 16, max_tokens=30, **LONG)
    w.step()
    w.step()
    w.add("b", [1] * 17, max_tokens=30, **LONG)
    w.step()
    a, b = w.core.scheduler.life.running.sequences
    assert w.core.kv.survives(b.id) == 16
    assert w.core.kv.survives(a.id) == 16


# ---------------------------------------------------------------- what a step holds


def test_a_long_prompt_is_cut_so_that_those_who_decode_go_on() -> None:
    w = world(blocks=64, prefill_budget=6)
    w.add("chat", [1] * 3, max_tokens=30, **LONG)
    w.step()
    w.add("book", [2] * 40, max_tokens=2, **LONG)
    w.step()
    for plan in w.executor.plans[1:4]:
        assert [len(row.tokens) for row in plan.rows] == [1, 6]
    w.run()
    w.check_answers()


def test_the_chunk_follows_the_measured_rate_when_a_stall_is_bounded() -> None:
    w = world(blocks=64, stall_s=0.002)
    w.core.costs.saw_prefill(10_000, 1.0)
    w.add("chat", [1] * 3, max_tokens=30, **LONG)
    w.step()
    w.add("book", [2] * 40, max_tokens=2, **LONG)
    w.step()
    assert [len(row.tokens) for row in w.executor.plans[1].rows] == [1, 20]


def test_a_prompt_alone_gets_the_whole_budget() -> None:
    w = world(blocks=64, prefill_budget=6)
    w.add("book", [2] * 40, max_tokens=2, **LONG)
    w.step()
    assert [len(row.tokens) for row in w.executor.plans[0].rows] == [40]


def test_a_step_of_decoding_says_only_what_changes() -> None:
    w = world(blocks=64, size=16, max_num_batched_tokens=128)
    for i in range(4):
        w.add(f"r{i}", [i + 1] * 17, max_tokens=10, **LONG)
    w.step()
    w.step()
    assert all(row.table == () for row in w.executor.plans[1].rows)
    assert w.executor.plans[1].slots == ()
    assert w.executor.plans[1].ops == ()


def test_with_overlap_the_next_step_is_planned_before_the_last_has_come() -> None:
    w = world(overlap=1)
    w.add("a", [1] * 3, max_tokens=6, **LONG)
    assert w.step().step == 0
    w.step()
    assert w.executor.plans[1].rows[0].tokens == (LAST_SAMPLED,)
    w.run()
    w.check_answers()
    assert len(w.executor.plans) == 6


def test_right_drafts_save_steps_and_are_counted() -> None:
    plain, guessed = world(), world(drafts=True, num_drafts=4)
    for w in (plain, guessed):
        w.add("a", [1] * 3, max_tokens=30, seed=0, **LONG)
        w.run()
        w.check_answers()
    assert len(guessed.executor.plans) < len(plain.executor.plans) / 2
    stats = guessed.core.stats()
    assert stats.spec_proposed > stats.spec_accepted > 0


# ---------------------------------------------------------------- several choices


def test_choices_share_the_blocks_of_their_prompt() -> None:
    w = world(blocks=64, size=4)
    w.add("a", list(range(1, 19)), n=4, max_tokens=10, seed=3, **LONG)
    w.step()
    w.step()
    tables = [w.core.kv.table(s.id) for s in w.core.scheduler.life.running.sequences]
    assert len(tables) == 4
    assert all(t[:4] == tables[0][:4] for t in tables)
    assert len({t[4] for t in tables}) == 4
    stats = w.core.stats()
    assert stats.blocks_shared == 4
    assert stats.bytes_saved == 3 * 4 * 1000
    w.run()
    w.check_answers()
    assert len({tuple(w.answers["a", c].tokens) for c in range(4)}) == 4


def test_the_other_choices_go_on_when_the_one_that_computes_the_prompt_is_aborted() -> None:
    w = world(max_num_batched_tokens=4)
    w.add("a", [1] * 12, n=3, max_tokens=5, **LONG)
    w.step()
    w.abort("a", 0)
    w.run()
    w.check_answers()
    assert finish(w, "a", 0) is FinishReason.ABORT
    assert finish(w, "a", 1) is finish(w, "a", 2) is FinishReason.LENGTH


def test_more_choices_than_slots_are_served_one_after_the_other() -> None:
    w = world(slots=2)
    w.add("a", [1] * 9, n=5, max_tokens=6, **LONG)
    w.run()
    w.check_answers()


def test_beams_that_do_not_fit_together_are_served_all_the_same() -> None:
    w = world(blocks=6, size=2, slots=2)
    w.add("a", [1, 2, 3], beam_width=4, n=2, max_tokens=6, **LONG)
    w.run()
    w.check_answers()


def test_beam_search_refuses_what_changes_the_distribution() -> None:
    w = world()
    w.add("a", [1, 2, 3], beam_width=2, presence_penalty=0.5)
    w.step()
    last = w.answers["a", 0].last
    assert last is not None
    assert "presence_penalty" in last.error


# ---------------------------------------------------------------- time


def test_a_request_whose_deadline_passes_in_the_queue_costs_no_step() -> None:
    w = world(slots=1)
    w.add("a", [1], max_tokens=20, **LONG)
    w.add("late", [2], deadline=3.0, **LONG)
    w.run()
    last = w.answers["late", 0].last
    assert last is not None
    assert (last.finish, last.error_kind) == (FinishReason.ABORT, "deadline")
    assert all(len(plan.rows) == 1 for plan in w.executor.plans)
    assert len(w.answers["a", 0].tokens) == 20


def test_the_limit_on_the_first_token_no_longer_counts_after_it() -> None:
    w = world(slots=1)
    w.add("a", [1], max_tokens=20, ttft_deadline=5.0, **LONG)
    w.add("b", [1], max_tokens=20, ttft_deadline=5.0, **LONG)
    w.run()
    assert finish(w, "a") is FinishReason.LENGTH
    assert finish(w, "b") is FinishReason.ABORT


def test_a_grammar_that_is_still_compiled_holds_no_one_up() -> None:
    w = world()
    w.add("slow", [1], grammar=Grammar("regex", "2 4 10"), **LONG)
    w.add("plain", [2], max_tokens=3, **LONG)
    for _ in range(4):
        w.step()
    assert w.answers["plain", 0].last is not None
    w.run()
    w.check_answers()


def test_a_grammar_that_can_not_be_compiled_ends_the_request_as_invalid() -> None:
    w = world()
    w.add("bad", [1], grammar=Grammar("regex", "0 4 0"), n=2)
    w.run()
    for choice in (0, 1):
        last = w.answers["bad", choice].last
        assert last is not None
        assert (last.error_kind, last.error) == ("invalid", "stripes of zero")


def test_keys_take_turns_in_the_queue() -> None:
    w = world(slots=1)
    for i in range(4):
        w.add(f"many{i}", [1], key="many", max_tokens=1, arrival=float(i), **LONG)
    w.add("few", [2], key="few", max_tokens=1, arrival=9.0, **LONG)
    w.run()
    order = sorted(w.requests, key=lambda id: events(w, id)[-1]["t"])
    assert order.index("few") <= 1


# ---------------------------------------------------------------- what the client and the operator see


def test_the_first_delta_says_where_the_request_has_been() -> None:
    w = world(slots=1)
    w.add("a", list(range(1, 13)), max_tokens=4, **LONG)
    w.run()
    w.add("b", list(range(1, 13)), max_tokens=4, arrival=w.now - 2.0, **LONG)
    w.run()
    first, *others = w.answers["b", 0].deltas
    assert (first.cached_tokens, first.queued_s) == (8, 3.0)
    assert all((d.cached_tokens, d.queued_s) == (-1, -1.0) for d in others)
    assert w.answers["a", 0].deltas[0].cached_tokens == 0


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat() -> None:
    w = world(blocks=64)
    w.add("a", list(range(1, 13)), max_tokens=8, **LONG)
    w.run()
    w.add("b", [*range(1, 13), *w.answers["a", 0].tokens, 1, 2], max_tokens=2, **LONG)
    w.run()
    assert w.answers["b", 0].deltas[0].cached_tokens == 16
    w.check_answers()


def test_an_aborted_request_is_gone_at_once_and_its_prompt_stays_cached() -> None:
    w = world()
    w.add("a", list(range(1, 13)), max_tokens=30, **LONG)
    w.step()
    w.step()
    w.abort("a")
    usage = w.core.kv.usage()
    assert usage.free == usage.total
    assert usage.cached == 3
    w.run()
    w.check_answers()


def test_a_step_that_fails_ends_its_own_requests_and_the_others_do_not_notice() -> None:
    w = world(max_num_batched_tokens=4, slots=2)
    w.add("a", [1] * 4, max_tokens=10, **LONG)
    w.add("b", [2] * 12, max_tokens=10, **LONG)
    w.add("c", [3] * 4, max_tokens=10, **LONG)
    w.executor.fail_next = 1
    w.step()  # only a fits into this step
    w.disturbed.add("a")
    w.run()
    w.check_answers()
    last = w.answers["a", 0].last
    assert last is not None
    assert (last.error_kind, last.error) == ("failed", "the step failed: the shadow was told to fail")
    assert finish(w, "b") is finish(w, "c") is FinishReason.LENGTH


def test_snapshots_are_json_and_name_every_holder() -> None:
    w = world(blocks=24, host=4)
    w.add("a", list(range(1, 10)), n=2, max_tokens=10, **LONG)
    for _ in range(3):
        w.step()
    memory = json.loads(json.dumps(w.core.inspect("kv")))
    assert [b["id"] for b in memory["blocks"]] == list(range(24))
    shared = [b for b in memory["blocks"] if b["state"] == "shared"]
    assert shared
    assert shared[0]["holders"] == [{"request": "a", "choice": 0}, {"request": "a", "choice": 1}]
    assert w.core.inspect("live")["states"] == "".join(b["state"][0] for b in memory["blocks"])
    assert sum(b["tokens"] for b in memory["blocks"]) == 8 + 2 * (11 - 8)
    w.run()
    assert {b["state"] for b in w.core.inspect("kv")["blocks"]} == {"free", "cached"}
    assert set(w.core.inspect("live")["states"]) == {"f", "c"}
    everything = json.loads(json.dumps(w.core.inspect("requests")))
    assert [r["id"] for r in everything["finished"]] == ["a"]
    assert [e["event"] for e in events(w, "a")][:4] == ["queued", "admitted", "first token", "admitted"]
    assert w.core.inspect("request", "unknown") is None


def test_snapshots_leave_out_what_lies_behind_a_window() -> None:
    w = world(blocks=24, host=8, slots=1, window=8, preemption="swap", enable_prefix_caching=False)
    prompt = [1, 2, 3, 4, 5] * 8
    w.add("a", prompt, max_tokens=10, **LONG)
    for _ in range(3):
        w.step()
    (sequence,) = w.core.inspect("live")["sequences"]
    used = [b for b in w.core.inspect("kv")["blocks"] if b["state"] == "used"]
    assert sorted(sequence["table"]) == [b["id"] for b in used]
    assert {"f", "u"} == set(w.core.inspect("live")["states"])
    assert sum(b["tokens"] for b in used) == 42 - 8 // 4 * 4 * 4  # computed, without (42 - 1 - 8) // 4 = 8 blocks
    last = w.core.inspect("block", str(sequence["table"][0]))
    assert last["tokens"] == prompt[32:36]
    held = len(used)
    w.add("b", [9], max_tokens=3, priority=-1, **LONG)  # takes the only slot
    w.step()
    assert [(s["request"], s["host_blocks"]) for s in w.core.inspect("live")["sequences"]] == [("a", held), ("b", 0)]
    assert w.core.stats().host_blocks_used == held
    w.run()
    w.check_answers()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_whoever_has_left_blocks_behind_a_window_gives_way_and_goes_on(
    preemption: str, caching: bool, overlap: int
) -> None:
    w = world(size=2, host=32, slots=2, window=4, preemption=preemption, enable_prefix_caching=caching, overlap=overlap)
    w.add("a", range(1, 20), n=2, max_tokens=40, **LONG)
    for turn in range(3):
        for _ in range(12):
            w.step()
        w.add(f"urgent {turn}", range(1, 15 + turn), n=2, max_tokens=6, priority=-1, **LONG)
    stats = w.run()
    ways = {"swap": stats.preemptions_swap, "recompute": stats.preemptions_recompute}
    assert ways.pop(preemption) >= 2
    assert not any(ways.values())
    w.check_answers()


@pytest.mark.parametrize("caching", [False, True])
def test_a_choice_does_not_fork_from_one_that_has_left_the_prompt_behind_its_window(caching: bool) -> None:
    w = world(size=2, window=4, enable_prefix_caching=caching)
    w.add("a", range(1, 10), n=2, max_tokens=40, **LONG)
    for _ in range(25):
        w.step()
    w.crash()  # the first choice is computed again in one step, far beyond the prompt's end
    w.run()
    w.check_answers()


def test_the_operator_can_empty_the_prefix_cache() -> None:
    w = world()
    w.add("a", list(range(1, 13)), max_tokens=4, **LONG)
    w.run()
    assert w.core.kv.usage().cached > 0
    w.core.control("reset_prefix_cache", {})
    assert w.core.kv.usage().cached == 0


def test_resuming_continues_penalties_limits_and_grammars_where_they_were() -> None:
    w = world(blocks=64)
    w.add("plain", [1] * 5, max_tokens=12, logprobs=1, **LONG)
    w.add("early", [2] * 5, max_tokens=12, min_tokens=9, stop_token_ids=tuple(range(30)))
    w.add("striped", [3] * 5, grammar=Grammar("regex", "3 8 0"), **LONG)
    w.add("many", [4] * 5, n=3, max_tokens=12, **LONG)
    for _ in range(6):
        w.step()
    w.crash()
    w.run()
    w.check_answers()


def test_three_requests_share_one_pool_as_in_the_worked_example() -> None:
    """Blocks of 4 tokens, a pool of 6: A takes 2, B's two choices share one, C gets what A leaves."""
    w = world(blocks=6, size=4)
    w.add("A", [1] * 5, max_tokens=3, **LONG)
    w.step()
    running = w.core.scheduler.life.running.sequences
    assert list(w.core.kv.table(running[0].id)) == [0, 1]
    w.add("B", [2] * 4, n=2, max_tokens=4, **LONG)
    for _ in range(2):
        w.step()
    b1, b2 = (w.core.kv.table(s.id) for s in running if s.request.add.id == "B")
    assert b1[0] == b2[0] == 2
    assert w.answers["A", 0].last is not None
    w.step()
    b1, b2 = (w.core.kv.table(s.id) for s in running if s.request.add.id == "B")
    assert b1[:1] == b2[:1] == [2]
    assert b1[1] != b2[1]
    w.add("C", [3] * 7, max_tokens=1, **LONG)
    w.step()
    w.run()
    w.check_answers()
    assert w.core.stats().preemptions_recompute == 0


def test_a_prompt_that_fills_the_whole_pool_can_be_embedded() -> None:
    w = world(blocks=4)
    w.add("a", [1] * 16, pooling="last")
    w.add("b", [2] * 16, pooling="mean")
    w.run()
    w.check_answers()


def test_scoring_a_prompt_without_generating_gives_every_score() -> None:
    w = world(max_num_batched_tokens=5)
    w.add("a", list(range(1, 13)), max_tokens=0, prompt_logprobs=2)
    w.run()
    w.check_answers()
    assert finish(w, "a") is FinishReason.LENGTH
    (delta,) = w.answers["a", 0].deltas
    assert len(delta.prompt_logprobs) == 12


def test_a_finished_request_with_a_far_deadline_is_not_kept_alive() -> None:
    w = world()
    for i in range(3):
        w.add("same id", [i + 1] * 8, max_tokens=2, deadline=1e9 if i < 2 else 5.0, **LONG)
        w.run()
    request = w.core.scheduler.ledger.finished[0]
    assert request.add.prompt == ()
    w.now = 2e9
    w.add("same id", [9], max_tokens=2, **LONG)
    w.run()
    w.check_answers()


def test_a_queue_of_which_most_have_left_does_not_grow() -> None:
    w = world(slots=1)
    w.add("a", [1], max_tokens=60, **LONG)
    w.step()
    for i in range(5000):
        w.add(f"r{i}", [2], max_tokens=1, **LONG)
        w.abort(f"r{i}")
    assert len(w.core.scheduler.life.waiting._heap) <= 1025
    w.run()
    w.check_answers()


def test_the_virtual_managers_pages_are_shown_although_their_ids_are_addresses() -> None:
    geometry = Geometry(
        num_blocks=6,
        block_size=4,
        max_model_len=16,
        max_num_seqs=4,
        vocab_size=VOCAB,
        bytes_per_block=1000,
        pages_per_slot=4,
    )
    w = World(geometry, CoreSettings(max_num_seqs=4, kv_manager="virtual"))
    for i in range(2):
        w.add(f"r{i}", [i + 1] * 5, max_tokens=3, **LONG)
    w.step()
    memory = w.core.inspect("kv")
    assert [b["state"] for b in memory["blocks"]] == ["used"] * 4 + ["free"] * 2
    assert w.core.inspect("live")["states"] == "uuuuff"
    assert w.core.inspect("block", "0")["tokens"] in ([1] * 4, [2] * 4)
    w.run()
    w.check_answers()


@pytest.mark.parametrize("field", ["cache_salt", "adapter"])
def test_tenants_and_adapters_never_find_each_others_prefixes(field: str) -> None:
    w = world(blocks=64)
    for name in ("a", "b"):
        w.core.control("load_adapter", {"name": name, "path": "here"})
    for i, value in enumerate(["a", "b", "a"]):
        w.add(f"r{i}", [1] * 12, max_tokens=2, **{field: value}, **LONG)
        w.run()
    w.check_answers()
    assert [w.answers[f"r{i}", 0].deltas[0].cached_tokens for i in range(3)] == [0, 0, 8]


def test_a_step_that_is_refused_does_not_touch_the_one_before_it() -> None:
    w = world(max_num_batched_tokens=4, slots=2, overlap=1, kv_manager="paged")
    w.add("a", [1] * 4, max_tokens=1, **LONG)
    w.add("b", [2] * 4, max_tokens=3, **LONG)
    w.step()  # a alone is in flight
    w.executor.refuse_next = True
    w.step()
    w.disturbed.add("b")
    w.run()
    w.check_answers()
    assert finish(w, "a") is FinishReason.LENGTH
    assert finish(w, "b") is FinishReason.ERROR


@pytest.mark.parametrize("size", [1, 4])
def test_prefixes_come_back_from_host_and_disk_and_from_the_disk_of_an_engine_that_died(size: int) -> None:
    geometry = Geometry(
        num_blocks=48 // size,
        block_size=size,
        host_blocks=48 // size,
        disk_blocks=400 // size,
        max_model_len=48,
        max_num_seqs=2,
        vocab_size=VOCAB,
        bytes_per_block=1000,
    )
    w = World(geometry, CoreSettings(max_num_seqs=2))

    def ask_all(turn: str) -> int:
        for i in range(6):
            w.add(f"{turn}{i}", [i + 1, *range(1, 34)], max_tokens=3, **LONG)
            w.run()
        return sum(w.answers[f"{turn}{i}", 0].deltas[0].cached_tokens for i in range(6))

    assert ask_all("first") == 0
    assert ask_all("second") == 6 * 32
    stats = w.core.stats()
    assert stats.prefix_hits_host + stats.prefix_hits_disk == 6 * 32
    assert stats.prefix_hits_disk > 0
    w.crash()
    assert ask_all("third") > 0
    assert w.core.stats().prefix_hits_disk > 0
    w.check_answers()


def test_all_choices_draw_their_first_token_in_the_step_that_ends_the_prompt() -> None:
    w = world(blocks=32, overlap=0)
    w.executor.keep_plans = True
    w.add("a", [1] * 9, n=4, max_tokens=1)
    w.add("b", [2] * 9, n=3, max_tokens=3, **LONG)
    w.step()
    (plan,) = w.executor.plans
    assert [row.choices for row in plan.rows] == [(1, 2, 3), (1, 2)]
    assert all(w.answers["a", choice].last for choice in range(4))
    w.run()
    assert sum(len(row.tokens) for plan in w.executor.plans for row in plan.rows) == 9 + 9 + 3 * 2
    w.check_answers()


def test_choices_without_a_place_compute_the_prompts_end_when_they_get_one() -> None:
    w = world(blocks=32, max_num_seqs=2)
    w.executor.keep_plans = True
    w.add("a", [1] * 9, n=4, max_tokens=3, **LONG)
    w.run()
    assert w.executor.plans[0].rows[0].choices == (1,)
    w.check_answers()
