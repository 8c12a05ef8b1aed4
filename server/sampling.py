"""Wire fields of a generation -> SamplingParams, TextOptions and Grammar: defaults and names.

Ranges are checked by `engine.validate`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from engine.api import Grammar, SamplingParams
from engine.errors import InvalidRequest
from engine.text.tokenizer import Tokenizer
from engine.validate import Limits, check_range, stop_strings
from server.generate import TextOptions
from server.protocol import GenerationRequest, JsonObjectFormat, JsonSchemaFormat

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def sampling_params(
    wire: GenerationRequest,
    tokenizer: Tokenizer,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingParams:
    """Unchecked parameters of `wire`: null fields are the model's `defaults`, or those of the API."""
    n = 1 if wire.n is None else wire.n
    beams = 0
    if wire.use_beam_search:
        beams = max(n, 1) if wire.beam_width is None else wire.beam_width
    elif wire.beam_width is not None or wire.length_penalty is not None:
        name = "beam_width" if wire.beam_width is not None else "length_penalty"
        raise InvalidRequest(f"{name} needs use_beam_search=true", param=name)
    if wire.allowed_token_ids is not None and not wire.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids is empty: no token could follow", param="allowed_token_ids")
    if beams:
        defaults = SamplingParams()  # a search ranks what the model says itself
    return SamplingParams(
        n=n,
        temperature=defaults.temperature if wire.temperature is None else wire.temperature,
        top_p=defaults.top_p if wire.top_p is None else wire.top_p,
        top_k=defaults.top_k if wire.top_k is None else wire.top_k,
        min_p=defaults.min_p if wire.min_p is None else wire.min_p,
        repetition_penalty=defaults.repetition_penalty if wire.repetition_penalty is None else wire.repetition_penalty,
        presence_penalty=wire.presence_penalty or 0.0,
        frequency_penalty=wire.frequency_penalty or 0.0,
        logit_bias=_logit_bias(wire.logit_bias),
        allowed_token_ids=tuple(wire.allowed_token_ids or ()),
        bad_words=_bad_words(wire.bad_words, tokenizer),
        seed=wire.seed,
        max_tokens=max_tokens,
        min_tokens=wire.min_tokens or 0,
        stop_token_ids=tuple(wire.stop_token_ids or ()),
        ignore_eos=bool(wire.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=wire.prompt_logprobs,
        grammar=grammar,
        beam_width=beams,
        length_penalty=1.0 if wire.length_penalty is None else wire.length_penalty,
    )


def text_options(wire: GenerationRequest, limits: Limits) -> TextOptions:
    """How the tokens of `wire` become text."""
    skip = wire.skip_special_tokens is not False
    if wire.spaces_between_special_tokens and not skip:
        raise InvalidRequest(
            "spaces_between_special_tokens=true is not supported: special tokens are shown as they are",
            param="spaces_between_special_tokens",
        )
    return TextOptions(
        stop=stop_strings(wire.stop, limits),
        include_stop=bool(wire.include_stop_str_in_output),
        skip_special_tokens=skip,
        min_tokens=wire.min_tokens or 0,
    )


def check_stream_options(wire: GenerationRequest) -> None:
    """stream_options only means something on a stream."""
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")


def truncated(prompt: list[int], wire: GenerationRequest, limits: Limits, max_tokens: int | None) -> list[int]:
    """The last `truncate_prompt_tokens` tokens; -1 keeps what fits beside the answer."""
    keep = wire.truncate_prompt_tokens
    if keep is None:
        return prompt
    check_range("truncate_prompt_tokens", keep, -1, limits.max_model_len)
    if keep == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, got 0", param="truncate_prompt_tokens")
    if keep == -1:
        keep = max(1, limits.max_model_len - (1 if max_tokens is None else max_tokens))
    return prompt[-keep:]


@dataclass(frozen=True)
class Constraint:
    """What an answer must obey, and the field of the request that asks for it."""

    field: str
    grammar: Grammar


def constraint_of(wire: GenerationRequest) -> Constraint | None:
    """The one constraint that `response_format`, `structured_outputs` or a guided_* field asks for."""
    asked: dict[str, Grammar] = {}
    match wire.response_format:
        case JsonObjectFormat():
            asked["response_format"] = Grammar("json_object", "{}")
        case JsonSchemaFormat(json_schema=schema):
            if not NAME.fullmatch(schema.name):
                raise InvalidRequest(
                    "response_format.json_schema.name must have 1 to 64 of the characters A-Z a-z 0-9 _ -",
                    param="response_format.json_schema.name",
                )
            asked["response_format"] = Grammar("json_schema", msgspec.json.encode(schema.schema).decode())
    so = wire.structured_outputs
    if so is not None:
        asked |= _structured("structured_outputs", so.json, so.regex, so.choice, so.grammar)
        if so.json_object:
            asked["structured_outputs.json_object"] = Grammar("json_object", "{}")
        if not asked:
            raise InvalidRequest(
                "structured_outputs needs one of json, regex, choice, grammar, json_object", param="structured_outputs"
            )
    asked |= _structured("guided", wire.guided_json, wire.guided_regex, wire.guided_choice, wire.guided_grammar)
    if len(asked) > 1:
        names = ", ".join(asked)
        raise InvalidRequest(f"only one constraint can be enforced, got {names}", param=next(iter(asked)))
    return next((Constraint(field, grammar) for field, grammar in asked.items()), None)


def _structured(
    prefix: str, schema: object, regex: str | None, choice: list[str] | None, grammar: str | None
) -> dict[str, Grammar]:
    separator = "_" if prefix == "guided" else "."
    asked: dict[str, Grammar] = {}
    if schema is not None:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(
                f"{prefix}{separator}json is not valid JSON", param=f"{prefix}{separator}json"
            ) from None
        asked[f"{prefix}{separator}json"] = Grammar("json_schema", text)
    if regex is not None:
        asked[f"{prefix}{separator}regex"] = Grammar("regex", regex)
    if choice is not None:
        if not choice or "" in choice:
            name = f"{prefix}{separator}choice"
            raise InvalidRequest(f"{name} must be a list of strings that are not empty", param=name)
        asked[f"{prefix}{separator}choice"] = Grammar("choice", msgspec.json.encode(choice).decode())
    if grammar is not None:
        asked[f"{prefix}{separator}grammar"] = Grammar("lark", grammar)
    return asked


def _logit_bias(wire: dict[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (wire or {}).items():
        if not re.fullmatch(r"-?\d{1,12}", key):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}, which is no token id", param="logit_bias")
        bias[int(key)] = value
    return bias


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word, alone and after a space: most vocabularies write the two differently."""
    if words is not None and (len(words) > 1024 or any(not word or len(word) > 256 for word in words)):
        raise InvalidRequest("bad_words may have 1024 words of 1 to 256 characters", param="bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in words or ():
        for text in (word, " " + word.lstrip()):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)
