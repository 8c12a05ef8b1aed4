"""The one door into the engine: nothing behind `add_request` checks a request again.

Ranges, sizes, token ids and the room in the context. Every refusal is an InvalidRequest whose message names
the field, the value and the limit, and whose `param` is the field's public name.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.api import AddRequest, Grammar, Pooling, Ready, SamplingParams
from engine.errors import InvalidRequest

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. Token counts and entries; the first two come from the model."""

    max_model_len: int
    vocab_size: int
    n: int = 128
    logprobs: int = 20
    logit_bias: int = 1024
    token_ids: int = 1024  # entries of stop_token_ids, and of bad_words
    bad_word_tokens: int = 64
    beam_width: int = 32
    stop_strings: int = 4
    stop_characters: int = 256
    grammar_bytes: int = 256 * 1024  # engine.text.grammar's limit, which 128 tools with their schemas need
    generates: bool = True
    poolings: tuple[Pooling, ...] = ("mean", "last")  # the default first

    @classmethod
    def of(cls, ready: Ready) -> Limits:
        """Those of a loaded model."""
        return cls(ready.max_model_len, ready.vocab_size, generates=ready.generates, poolings=ready.poolings)


# Field of the API -> its smallest and its largest value. The OpenAPI document shows the same numbers.
RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, Limits.n),
    "best_of": (1, 20),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logprobs": (0, Limits.logprobs),
    "top_logprobs": (0, Limits.logprobs),
    "prompt_logprobs": (0, Limits.logprobs),
    "min_tokens": (0, math.inf),
    "max_completion_tokens": (1, math.inf),
    "max_output_tokens": (1, math.inf),
    "seed": (-(2**63), 2**63 - 1),
    "beam_width": (1, Limits.beam_width),
    "length_penalty": (-10, 10),
    "priority": (-1_000_000, 1_000_000),
    "dimensions": (1, math.inf),
    "top_n": (1, math.inf),
}
# The same for what must be above its lower end.
OPEN_RANGES: Mapping[str, tuple[float, float]] = {
    "repetition_penalty": (0, 1000),
    "timeout_s": (0, 86_400),
    "timeout_ttft_s": (0, 86_400),
}


def check_field(field: str, value: float) -> None:
    """The value is within the field's range, or InvalidRequest."""
    check_range(field, value, *RANGES[field])


def _check_open(field: str, value: float) -> None:
    low, high = OPEN_RANGES[field]
    if not low < value <= high:
        raise InvalidRequest(f"{field} must be above {low:g} and at most {high:g}, got {_shown(value)}", param=field)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_range(field: str, value: float, low: float, high: float) -> None:
    """`low <= value <= high`, or InvalidRequest; NaN is outside of every range."""
    if not low <= value <= high:
        bound = f"at least {low:g}" if math.isinf(high) or high >= 2**31 else f"from {low:g} to {high:g}"
        raise InvalidRequest(f"{field} must be {bound}, got {_shown(value)}", param=field)


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Every id is inside the vocabulary, or InvalidRequest naming the first that isn't."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"{field} has the token id {_shown(bad)}, but the vocabulary ends at {vocab_size - 1}", param=field
        )


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{field} has {count} entries, at most {limit} are allowed", param=field)


def stop_strings(value: str | Sequence[str] | None, limits: Limits) -> tuple[str, ...]:
    """The `stop` field as a tuple. None is empty and not too long."""
    stops = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    _check_count("stop", len(stops), limits.stop_strings)
    for stop in stops:
        if not stop:
            raise InvalidRequest("stop has an empty string; leave it out to have no stop string", param="stop")
        if len(stop) > limits.stop_characters:
            raise InvalidRequest(
                f"a stop string has {len(stop)} characters, at most {limits.stop_characters} are allowed", param="stop"
            )
    return stops


def sampling_params(params: SamplingParams, limits: Limits) -> SamplingParams:
    """Check every field; fill in a random seed where there is none, so that a request is a function of itself."""
    check_range("n", params.n, 1, limits.n)
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "min_tokens"):
        check_field(name, getattr(params, name))
    _check_open("repetition_penalty", params.repetition_penalty)
    if params.logprobs is not None:
        check_range("logprobs", params.logprobs, 0, limits.logprobs)
    if params.prompt_logprobs is not None:
        check_range("prompt_logprobs", params.prompt_logprobs, 0, limits.logprobs)
    if params.max_tokens is not None:
        check_range("max_tokens", params.max_tokens, 0, math.inf)
        if params.min_tokens > params.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) is larger than max_tokens ({params.max_tokens})", param="min_tokens"
            )
    _check_token_fields(params, limits)
    _check_beam(params, limits)
    if params.grammar is not None:
        _check_grammar(params.grammar, limits)
    if params.seed is not None:
        check_field("seed", params.seed)
    seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed & MAX_SEED
    return msgspec.structs.replace(params, seed=seed, top_k=max(params.top_k, 0))


def _check_token_fields(params: SamplingParams, limits: Limits) -> None:
    if params.logit_bias:
        _check_count("logit_bias", len(params.logit_bias), limits.logit_bias)
        check_token_ids("logit_bias", list(params.logit_bias), limits.vocab_size)
        for value in params.logit_bias.values():
            check_range("logit_bias", value, -100, 100)
    _check_count("stop_token_ids", len(params.stop_token_ids), limits.token_ids)
    check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_count("allowed_token_ids", len(params.allowed_token_ids), limits.vocab_size)
    check_token_ids("allowed_token_ids", params.allowed_token_ids, limits.vocab_size)
    _check_count("bad_words", len(params.bad_words), limits.token_ids)
    for word in params.bad_words:
        if not 1 <= len(word) <= limits.bad_word_tokens:
            raise InvalidRequest(
                f"bad_words has a word of {len(word)} tokens, it must have from 1 to {limits.bad_word_tokens}",
                param="bad_words",
            )
        check_token_ids("bad_words", word, limits.vocab_size)


def _check_beam(params: SamplingParams, limits: Limits) -> None:
    if params.beam_width == 0:
        return
    check_range("beam_width", params.beam_width, 1, limits.beam_width)
    check_field("length_penalty", params.length_penalty)
    if params.n > params.beam_width:
        raise InvalidRequest(
            f"n ({params.n}) is larger than beam_width ({params.beam_width}); a beam search returns its best beams",
            param="n",
        )
    if params.grammar is not None:
        raise InvalidRequest("beam search can't be combined with structured output", param="use_beam_search")


def _check_grammar(grammar: Grammar, limits: Limits) -> None:
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > limits.grammar_bytes:
        raise InvalidRequest(
            f"the {grammar.kind} of the structured output has {size} bytes, at most {limits.grammar_bytes} are allowed",
            param="response_format",
        )


def check_generates(limits: Limits) -> None:
    """Raise InvalidRequest when the model writes no text."""
    if not limits.generates:
        raise InvalidRequest(
            "this model is an encoder: it gives vectors (/v1/embeddings, /v1/score, /v1/rerank) and writes no text",
            param="model",
        )


def add_request(
    limits: Limits,
    *,
    id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    arrival: float,
    max_tokens_policy: Literal["clamp", "refuse"] = "refuse",
    prompt_field: str = "prompt",
    priority: int = 0,
    cache_salt: str = "",
    adapter: str = "",
    timeout_s: float | None = None,
    timeout_ttft_s: float | None = None,
    key: str = "",
) -> AddRequest:
    """Check `params` and the prompt against each other and the context; the only constructor of a valid AddRequest.

    `max_tokens_policy` decides what becomes of a max_tokens beyond the room that the prompt leaves: cut to
    the room, or refused. Without max_tokens it is the room.
    """
    check_generates(limits)
    params = sampling_params(params, limits)
    if not prompt:
        raise InvalidRequest(f"{prompt_field} has no tokens", param=prompt_field)
    check_token_ids(prompt_field, prompt, limits.vocab_size)
    context = limits.max_model_len
    room = context - len(prompt)
    if room < 1:
        raise InvalidRequest(
            f"{prompt_field} has {len(prompt)} tokens; the context has room for {context} with the answer",
            param=prompt_field,
            code="context_length_exceeded",
        )
    if params.max_tokens is None:
        params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    elif params.max_tokens > room:
        if max_tokens_policy == "refuse":
            raise InvalidRequest(
                f"{prompt_field} has {len(prompt)} tokens and max_tokens is {params.max_tokens}: "
                f"{len(prompt) + params.max_tokens} together, but the context has {context}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        params = msgspec.structs.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    check_field("priority", priority)
    if len(cache_salt) > 256:
        raise InvalidRequest(f"cache_salt has {len(cache_salt)} characters, the limit is 256", param="cache_salt")
    return AddRequest(
        id=id,
        prompt=tuple(prompt),
        params=params,
        arrival=arrival,
        priority=priority,
        cache_salt=cache_salt,
        adapter=adapter,
        deadline=_deadline("timeout_s", timeout_s, arrival),
        ttft_deadline=_deadline("timeout_ttft_s", timeout_ttft_s, arrival),
        key=key,
    )


def pooling_request(
    limits: Limits,
    *,
    id: str,
    prompt: Sequence[int],
    pooling: Pooling | None,
    arrival: float,
    prompt_field: str = "input",
    priority: int = 0,
    adapter: str = "",
    key: str = "",
) -> AddRequest:
    """An embedding request: a prompt that fits the context, and nothing is generated. Without `pooling` the model's."""
    pooling = pooling or limits.poolings[0]
    if pooling not in limits.poolings:
        raise InvalidRequest(f"pooling is {pooling!r}; this model does {' or '.join(limits.poolings)}", param="pooling")
    if not prompt:
        raise InvalidRequest(f"{prompt_field} has no tokens", param=prompt_field)
    check_token_ids(prompt_field, prompt, limits.vocab_size)
    if len(prompt) > limits.max_model_len:
        raise InvalidRequest(
            f"{prompt_field} has {len(prompt)} tokens, the context has {limits.max_model_len}",
            param=prompt_field,
            code="context_length_exceeded",
        )
    check_field("priority", priority)
    params = SamplingParams(max_tokens=0, seed=0)
    return AddRequest(
        id=id,
        prompt=tuple(prompt),
        params=params,
        arrival=arrival,
        priority=priority,
        adapter=adapter,
        pooling=pooling,
        key=key,
    )


def _deadline(field: str, seconds: float | None, arrival: float) -> float | None:
    if seconds is None:
        return None
    _check_open(field, seconds)
    return arrival + seconds
