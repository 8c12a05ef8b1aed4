"""Offline use with the real model: answers, stop strings, streams that are left early, embeddings, refusals."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from engine import LLM, EngineConfig, SamplingParams
from engine.errors import ConfigError, InvalidRequest

GREEDY = SamplingParams(temperature=0, max_tokens=16)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", kv_memory="64MiB", max_num_seqs=8) as loaded:
        yield loaded


def test_a_question_is_answered(llm: LLM) -> None:
    (answer,) = llm.chat(QUESTION, GREEDY, progress=False)
    assert answer.choices[0].text == "The capital of France is Paris."
    assert answer.choices[0].finish == "stop"


def test_texts_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    text = "Once upon a time"
    a, b = llm.generate([text, llm.tokenizer.encode(text)], GREEDY, progress=False)
    (c,) = llm.generate(text, GREEDY, progress=False)
    assert a.choices == b.choices == c.choices


def test_answers_come_in_the_order_of_the_prompts_with_their_own_parameters(llm: LLM) -> None:
    prompts = [f"{i} plus one is" for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=3 + i % 4, n=1 + i % 2) for i in range(12)]
    together = llm.generate(prompts, params, progress=False)
    alone = [llm.generate([p], [s], progress=False)[0] for p, s in zip(prompts, params, strict=True)]
    assert [a.choices for a in together] == [a.choices for a in alone]
    with pytest.raises(InvalidRequest, match="12 prompts, but 2"):
        llm.generate(prompts, params[:2], progress=False)


def test_a_stop_string_cuts_the_text_and_ends_the_choice(llm: LLM) -> None:
    (whole,) = llm.generate("Count: one, two,", GREEDY, progress=False)
    text = whole.choices[0].text
    stop = text[5:8]
    (cut,) = llm.generate("Count: one, two,", GREEDY, stop=stop, progress=False)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish == "stop"
    assert "".join(llm.stream("Count: one, two,", GREEDY, stop=[stop])) == cut.choices[0].text


def test_a_stream_gives_the_same_text_and_can_be_left_early(llm: LLM) -> None:
    (whole,) = llm.generate("Once upon a time", GREEDY, progress=False)
    assert "".join(llm.stream("Once upon a time", GREEDY)) == whole.choices[0].text
    for _ in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=500)):
        break
    llm.generate("x", GREEDY, progress=False)
    assert llm.stats().running == 0
    assert llm.stats().blocks_free == llm.stats().blocks_total


def test_embeddings_are_vectors_that_depend_on_the_text(llm: LLM) -> None:
    a, b, c = llm.embed(["a cat", "a cat", "the law of large numbers"])
    assert a == b != c
    assert len(a) == 576
    assert all(map(math.isfinite, a))


def test_what_cannot_be_served_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().step
    for prompts, params in (
        ("", GREEDY),
        ([[10**6]], GREEDY),
        ("a", SamplingParams(temperature=-1)),
        ([[5] * 10_000], GREEDY),
    ):
        with pytest.raises(InvalidRequest):
            llm.generate(prompts, params, progress=False)
    assert llm.stats().step == steps


def test_a_wrong_setting_is_refused_before_the_model_is_touched() -> None:
    with pytest.raises(ConfigError, match="did you mean kv-memory"):
        LLM("smollm2", kv_memry="1GiB")
    with pytest.raises(ConfigError, match="at most"):
        LLM(EngineConfig.of("smollm2", max_model_len=10**6))
