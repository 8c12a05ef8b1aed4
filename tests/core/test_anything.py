"""Anything may happen at any moment, and every request still gets its own tokens, once.

Stateful: hypothesis chooses pool, block size, tiers, policy, overlap; then requests come, steps run or fail,
clients leave, the engine dies. Whatever survives is compared with an oracle that knows one request at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.api import Grammar
from engine.core.plan import Geometry
from engine.core.settings import CoreSettings
from tests.core.world import VOCAB, World

EXAMPLES = 300  # the same ones each time
PROMPTS = [[5, 6, 8, 9, 10, 11, 12, 13] * 5, [5, 6, 8, 9, 1, 1, 1, 1] * 5, [2, 3] * 20]


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts share prefixes; every feature comes up, alone or with others."""
    length = draw(st.integers(1, 26))
    fields: dict[str, Any] = {"prompt": draw(st.sampled_from(PROMPTS))[:length], "max_tokens": draw(st.integers(1, 20))}
    kind = draw(st.sampled_from(["plain", "plain", "plain", "choices", "choices", "beam", "grammar", "scores", "pool"]))
    fields["seed"] = draw(st.integers(0, 2))
    fields["priority"] = draw(st.sampled_from([0, 0, 0, 1]))
    fields["cache_salt"] = draw(st.sampled_from(["", "", "", "tenant"]))
    fields["key"] = draw(st.sampled_from(["", "a", "b"]))
    if kind == "pool":
        return fields | {"pooling": draw(st.sampled_from(["last", "mean"]))}
    fields["logprobs"] = draw(st.sampled_from([None, 0, 2]))
    fields["ignore_eos"] = draw(st.booleans())
    if draw(st.booleans()):
        fields["min_tokens"] = draw(st.integers(0, 4))
        fields["stop_token_ids"] = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=8)))
    if kind == "choices":
        fields["n"] = draw(st.integers(2, 4))
    elif kind == "beam":
        fields["n"] = draw(st.integers(1, 2))
        fields["beam_width"] = draw(st.integers(1, 4))
        fields["length_penalty"] = draw(st.sampled_from([1.0, 0.0, 2.0, -1.0]))
    elif kind == "grammar":
        stripe, size, delay = draw(st.integers(1, 5)), draw(st.integers(1, 8)), draw(st.integers(0, 3))
        fields["grammar"] = Grammar("regex", f"{stripe} {size} {delay}")
        fields["n"] = draw(st.integers(1, 2))
    elif kind == "scores":
        fields["prompt_logprobs"] = draw(st.integers(0, 2))
        fields["n"] = draw(st.integers(1, 2))
        fields["max_tokens"] = draw(st.integers(0, 6))
    return fields


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]))
    least = -(-28 // size)  # the longest prompt fits, alone
    blocks = least + draw(st.integers(0, 40 // size + 1))
    manager = draw(st.sampled_from(["paged"] * 6 + ["virtual", "reserve"]))
    max_len = draw(st.sampled_from([32, 48]))
    slots = draw(st.integers(1, 6))
    drafts = draw(st.booleans())
    host = draw(st.sampled_from([0, 0, 2, blocks, 3 * blocks]))
    geometry = Geometry(
        num_blocks=blocks,
        block_size=size,
        host_blocks=host,
        disk_blocks=draw(st.sampled_from([0, 3, 2 * blocks])) if host else 0,
        max_model_len=max_len,
        max_num_seqs=slots,
        vocab_size=VOCAB,
        bytes_per_block=1000,
        window=draw(st.sampled_from([0, 0, 1, 5, 12])),
        pages_per_slot=-(-max_len // size) if manager == "virtual" else 0,
    )
    core = CoreSettings(
        max_num_seqs=slots,
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 8, 64])),
        enable_prefix_caching=draw(st.booleans()),
        preemption=draw(st.sampled_from(["auto", "swap", "recompute"])),
        kv_manager=manager,
        prefill_budget=draw(st.sampled_from([0, 4])),
        overlap=draw(st.sampled_from([0, 1])),
        num_drafts=4,
    )
    return World(geometry, core, drafts=drafts)


class Anything(RuleBasedStateMachine):
    world: World
    count = 0

    @initialize(world=worlds(), slow_copies=st.booleans())
    def begin(self, world: World, slow_copies: bool) -> None:
        self.world = world
        if slow_copies:  # then recomputing is cheaper
            world.executor.copy_s_per_block = 1.0

    @rule(fields=requests())
    def a_request_comes(self, fields: dict[str, Any]) -> None:
        self.count += 1
        self.world.add(f"r{self.count}", **fields)

    @rule(fields=requests())
    def another_request_comes(self, fields: dict[str, Any]) -> None:
        self.a_request_comes(fields)

    @rule(n=st.integers(1, 12))
    def steps_run(self, n: int) -> None:
        for _ in range(n):
            if self.world.core.has_work():
                self.world.step()

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.count))
        self.world.abort(f"r{number}", data.draw(st.sampled_from([-1, -1, 0, 1])))

    @precondition(lambda self: self.count > 0)
    @rule(refused=st.booleans())
    def a_step_fails(self, refused: bool) -> None:
        alive = {id for (id, _), answer in self.world.answers.items() if answer.last is None}
        if refused:
            self.world.executor.refuse_next = True
        else:
            self.world.executor.fail_next = 1
        for _ in range(3):
            self.world.step()
        self.world.executor.fail_next = 0
        self.world.executor.refuse_next = False
        self.world.disturbed |= alive

    @precondition(lambda self: self.count > 0)
    @rule(cleanly=st.booleans())
    def the_engine_ends(self, cleanly: bool) -> None:
        if cleanly:
            self.world.core.save()
            self.world.core.kv.check()
        self.world.crash()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.core.kv.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run()
            self.world.check_answers()


def test_anything_may_happen(request: pytest.FixtureRequest) -> None:
    examples = request.config.getoption("--thorough") or EXAMPLES
    run_state_machine_as_test(
        Anything,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            deadline=None,
            derandomize=examples == EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
