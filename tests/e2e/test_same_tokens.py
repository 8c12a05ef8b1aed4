"""What a request gets is a function of the request alone: the same ids and logprobs, bit for bit.

The undisturbed run of each configuration (one request at a time) is the oracle for all schedules.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.api import Grammar
from tests.texts import english

CONFIGS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-kv": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "batch of 32": {"max_num_seqs": 32},
    "chunks of 37 tokens": {"max_num_batched_tokens": 37, "max_num_seqs": 8},
    "block size 1": {"block_size": 1},
    "block size 7": {"block_size": 7},
    "block size 544": {"block_size": 544},
    # Without guesses, whose number depends on the time that steps take: so many sequences meet in the pool each time.
    "pool so small that it recomputes": {"num_kv_blocks": 42, "preemption": "recompute", "speculate": "off"},
    "pool so small that it swaps": {
        "num_kv_blocks": 42,
        "preemption": "swap",
        "swap_space": "64MiB",
        "speculate": "off",
    },
    "no prefix cache": {"enable_prefix_caching": False},
    "one thread": {"threads": 1},
}
PRESSED = ("pool so small that it recomputes", "pool so small that it swaps")


def requests() -> tuple[list[str], list[SamplingParams]]:
    """32 requests: greedy, seeded sampling, penalties, biases; prompts of 3 to 350 tokens, some sharing a prefix."""
    text = english(40_000)
    prompts, params = [], []
    for i in range(32):
        start, length = 900 * i, (12, 60, 250, 900)[i % 4]
        shared = text[:600] if i % 5 == 0 else ""
        prompts.append(shared + text[start : start + length])
        common: dict[str, Any] = {"max_tokens": 16, "logprobs": 3, "seed": i, "ignore_eos": True}
        kinds: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.9, "top_p": 0.9},
            {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2},
            {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.6, "frequency_penalty": 0.3},
        ]
        params.append(SamplingParams(**common, **kinds[(i // 4) % 4]))
    return prompts, params


def run(*, one_by_one: bool = False, **config: Any) -> tuple[list[Any], Any]:
    prompts, params = requests()
    with LLM("smollm2", **config) as llm:
        if one_by_one:
            answers = [llm.generate([p], [s], progress=False)[0] for p, s in zip(prompts, params, strict=True)]
        else:
            answers = llm.generate(prompts, params, progress=False)
        stats = llm.stats()
    return [(a.choices[0].tokens, a.choices[0].logprobs) for a in answers], stats


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    return {}


def undisturbed(alone: dict[str, list[Any]], name: str) -> list[Any]:
    if name not in alone:
        alone[name] = run(one_by_one=True, enable_prefix_caching=False, **CONFIGS[name])[0]
    return alone[name]


# Every schedule in the default precision; elsewhere those that take another path through the kernels.
CASES = [("bf16", schedule) for schedule in SCHEDULES]
CASES += [(c, s) for c in CONFIGS if c != "bf16" for s in ("batch of 32", "block size 7", PRESSED[1])]


@pytest.mark.parametrize(("config", "schedule"), CASES)
def test_the_same_tokens_and_logprobs_bit_for_bit(alone, config: str, schedule: str) -> None:
    want = undisturbed(alone, config)
    got, stats = run(**{**CONFIGS[config], **SCHEDULES[schedule]})
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert a == b, f"request {i} differs under {schedule!r}"
    if schedule in PRESSED:
        assert stats.preemptions_swap + stats.preemptions_recompute > 0, "the pool was not small enough to preempt"
    assert stats.blocks_free == stats.blocks_total, "blocks leaked"


def rivers() -> tuple[list[str], list[SamplingParams]]:
    """JSON under a schema, greedy and sampled, with logprobs; its own repetitions are there to be guessed."""
    thing = {
        "type": "object",
        "properties": {"name": {"enum": ["river", "lake", "mountain"]}, "size": {"type": "integer", "minimum": 0}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": thing, "minItems": 3, "maxItems": 3}))
    prompts = [f"List {i}, as JSON: " + "rivers and lakes and mountains " * 5 for i in range(4)]
    params = [
        SamplingParams(max_tokens=48, logprobs=2, seed=i, temperature=(0, 0.9)[i % 2], grammar=grammar)
        for i in range(4)
    ]
    return prompts, params


def test_a_grammar_with_guesses_and_logprobs_survives_preemption_bit_for_bit() -> None:
    prompts, params = rivers()

    def lists(llm: LLM) -> list[Any]:
        answers = llm.generate(prompts, params, progress=False)
        return [(a.choices[0].tokens, a.choices[0].logprobs) for a in answers]

    with LLM("smollm2", max_num_seqs=1, enable_prefix_caching=False, speculate="off") as llm:
        want = lists(llm)
    for preemption in ("recompute", "swap"):
        with LLM("smollm2", num_kv_blocks=10, preemption=preemption, swap_space="64MiB", speculate="ngram") as llm:
            assert lists(llm) == want, f"differs under {preemption}"
            stats = llm.stats()
        assert stats.spec_accepted > 0, "nothing was guessed"
        assert getattr(stats, f"preemptions_{preemption}") > 0, "the pool was not small enough to preempt"
