"""The one door into the engine: what passes fits, what doesn't is refused with the field, the value and the limit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.validate import Limits, add_request, pooling_request, sampling_params, stop_strings

LIMITS = Limits(max_model_len=100, vocab_size=50)


def make(prompt=(1, 2, 3), policy="refuse", **fields):
    params = SamplingParams(**fields)
    return add_request(LIMITS, id="r", prompt=prompt, params=params, arrival=10.0, max_tokens_policy=policy)


@given(prompt=st.lists(st.integers(0, 49), max_size=120), wanted=st.none() | st.integers(0, 150))
def test_an_accepted_request_fits_the_context_and_a_refused_one_does_not(prompt, wanted):
    fits = 0 < len(prompt) < 100 and (wanted is None or len(prompt) + wanted <= 100)
    if not fits:
        with pytest.raises(InvalidRequest) as refused:
            make(prompt, max_tokens=wanted)
        assert refused.value.code == ("context_length_exceeded" if prompt else None)
        return
    request = make(prompt, max_tokens=wanted)
    assert len(request.prompt) + request.params.max_tokens <= 100
    assert request.params.max_tokens == (100 - len(prompt) if wanted is None else wanted)


def test_a_limit_beyond_the_room_is_cut_where_the_policy_says_so():
    request = make(policy="clamp", max_tokens=500, min_tokens=300)
    assert (request.params.max_tokens, request.params.min_tokens) == (97, 97)
    with pytest.raises(InvalidRequest, match=r"3 tokens and max_tokens is 500: 503 together, but the context has 100"):
        make(max_tokens=500)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 129), ("temperature", -0.1), ("temperature", 2.01), ("temperature", math.nan), ("top_p", 1.1),
        ("top_p", math.inf), ("top_k", -2), ("top_k", 2**31), ("min_p", -0.5), ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan), ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("logprobs", 21),
        ("logprobs", -1), ("prompt_logprobs", 21), ("min_tokens", -1), ("max_tokens", -1), ("seed", 2**63),
        ("logit_bias", {50: 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101.0}),
        ("stop_token_ids", (50,)), ("allowed_token_ids", (-1,)), ("bad_words", ((),)), ("bad_words", ((1,) * 65,)),
        ("bad_words", ((50,),)), ("beam_width", 33),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as refused:
        make(**{field: value})
    assert refused.value.param == field
    assert field in str(refused.value)


@pytest.mark.parametrize("prompt", [[], [50], [-1], [1, 2, 10**12]])
def test_a_prompt_of_unknown_or_no_tokens_is_refused(prompt):
    with pytest.raises(InvalidRequest) as refused:
        make(prompt)
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest):
        pooling_request(LIMITS, id="r", prompt=prompt, pooling="mean", arrival=0)


def test_contradictions_are_refused():
    for fields in (
        {"min_tokens": 5, "max_tokens": 4},
        {"beam_width": 2, "n": 3},
        {"beam_width": 2, "grammar": Grammar("regex", "a")},
        {"grammar": Grammar("json_schema", "x" * 300_000)},
    ):
        with pytest.raises(InvalidRequest):
            make(**fields)


@given(seed=st.none() | st.integers(-(2**63), 2**63 - 1))
def test_every_accepted_request_has_a_seed_that_fits_a_signed_word(seed):
    first, second = [sampling_params(SamplingParams(seed=seed), LIMITS).seed for _ in range(2)]
    assert first is not None
    assert 0 <= first < 2**63
    assert (first == second) == (seed is not None)


def test_top_k_of_minus_one_is_off():
    assert sampling_params(SamplingParams(top_k=-1), LIMITS).top_k == 0


def test_stop_strings_are_few_short_and_never_empty():
    assert stop_strings(None, LIMITS) == ()
    assert stop_strings("a", LIMITS) == ("a",)
    assert stop_strings(["a", "b", "c", "d"], LIMITS) == ("a", "b", "c", "d")
    for bad in ("", ["a", ""], list("abcde"), "x" * 257):
        with pytest.raises(InvalidRequest, match="stop"):
            stop_strings(bad, LIMITS)


def test_deadlines_count_from_the_arrival():
    request = add_request(
        LIMITS, id="r", prompt=[1], params=SamplingParams(), arrival=10.0, timeout_s=5, timeout_ttft_s=0.5
    )
    assert (request.deadline, request.ttft_deadline) == (15.0, 10.5)
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            add_request(LIMITS, id="r", prompt=[1], params=SamplingParams(), arrival=0, timeout_s=bad)


def test_an_embedding_request_may_fill_the_context():
    assert pooling_request(LIMITS, id="r", prompt=[1] * 100, pooling="last", arrival=0).pooling == "last"
    with pytest.raises(InvalidRequest, match="101 tokens"):
        pooling_request(LIMITS, id="r", prompt=[1] * 101, pooling="last", arrival=0)
