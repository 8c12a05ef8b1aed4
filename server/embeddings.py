"""POST /v1/embeddings, /v1/score and /v1/rerank: vectors of texts from the served model, and how near they are."""

from __future__ import annotations

import base64
import math
import secrets
import time
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.api import Pooling
from engine.errors import InvalidRequest, RequestFailed
from engine.validate import check_field, check_range, check_token_ids, pooling_request
from server.generate import Generation, TextOptions
from server.run import begin
from server.service import Service, exchange_of, json_response, service_of

MAX_INPUTS = 2048
AT_ONCE = 32  # texts of one request in the engine: the others wait here, so that a long list keeps nobody out


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings. `pooling`: the mean of all tokens' states, that of the last, or (encoders) of the first.

    `truncate_prompt_tokens`: keep this many tokens of each input from its start, special ones included; -1 = what fits.
    """

    model: str
    input: str | list[str | int | list[int]]
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /v1/score: one text against each of a list, or pairs of two lists of equal length."""

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


class Document(msgspec.Struct):
    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """POST /v1/rerank."""

    model: str
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    pooling: Pooling | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None


async def create_embeddings(request: Request) -> Response:
    """One vector of unit length for each input, in order."""
    service = service_of(request)
    wire, _ = await service.read(request, EmbeddingsRequest)
    service.require_model(wire.model)
    if wire.dimensions is not None:
        check_field("dimensions", wire.dimensions)
    keep = _kept(service, wire.truncate_prompt_tokens)
    prompts = await _prompts(service, wire.input, keep)
    vectors = await _embed(service, request, wire.model, prompts, wire.pooling, wire.priority, ["input"] * len(prompts))
    if wire.dimensions is not None:
        vectors = [_shortened(vector, wire.dimensions) for vector in vectors]
    encode = _base64 if wire.encoding_format == "base64" else list
    data = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
    return json_response({"object": "list", "data": data, "model": wire.model, "usage": _usage(prompts)})


async def score(request: Request) -> Response:
    """The cosine of the angle between the two texts of each pair: 1 for equal texts."""
    service = service_of(request)
    wire, _ = await service.read(request, ScoreRequest)
    service.require_model(wire.model)
    left = [wire.text_1] if isinstance(wire.text_1, str) else wire.text_1
    right = [wire.text_2] if isinstance(wire.text_2, str) else wire.text_2
    for name, texts in (("text_1", left), ("text_2", right)):
        if not texts:
            raise InvalidRequest(f"{name} is empty", param=name)
    if len(left) not in (1, len(right)):
        raise InvalidRequest(
            f"text_1 must be one text or as many as text_2, got {len(left)} and {len(right)}", param="text_1"
        )
    keep = _kept(service, wire.truncate_prompt_tokens)
    prompts = await _texts(service, left, "text_1", keep) + await _texts(service, right, "text_2", keep)
    fields = ["text_1"] * len(left) + ["text_2"] * len(right)
    vectors = await _embed(service, request, wire.model, prompts, wire.pooling, wire.priority, fields)
    ones, others = vectors[: len(left)], vectors[len(left) :]
    if len(ones) == 1:
        ones = ones * len(others)
    data = [
        {"index": i, "object": "score", "score": _dot(a, b)} for i, (a, b) in enumerate(zip(ones, others, strict=True))
    ]
    body = {"id": "score-" + secrets.token_hex(12), "object": "list", "created": int(time.time()), "model": wire.model}
    return json_response({**body, "data": data, "usage": _usage(prompts)})


async def rerank(request: Request) -> Response:
    """The documents by their nearness to the query, the nearest first."""
    service = service_of(request)
    wire, _ = await service.read(request, RerankRequest)
    service.require_model(wire.model)
    if wire.top_n is not None:
        check_field("top_n", wire.top_n)
    texts = [document if isinstance(document, str) else document.text for document in wire.documents]
    if not texts:
        raise InvalidRequest("documents is empty", param="documents")
    keep = _kept(service, wire.truncate_prompt_tokens)
    prompts = await _texts(service, [wire.query], "query", keep) + await _texts(service, texts, "documents", keep)
    fields = ["query"] + ["documents"] * len(texts)
    query, *vectors = await _embed(service, request, wire.model, prompts, wire.pooling, wire.priority, fields)
    scores = [_dot(query, vector) for vector in vectors]
    order = sorted(range(len(texts)), key=lambda i: (-scores[i], i))[: wire.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in order]
    if wire.return_documents is not False:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    return json_response(
        {"id": "rerank-" + secrets.token_hex(12), "model": wire.model, "results": results, "usage": _usage(prompts)}
    )


# ---------------------------------------------------------------- texts to vectors


def _kept(service: Service, given: int | None) -> int | None:
    """How many tokens of each input are kept; None = all, and what is too long is refused."""
    if given is None:
        return None
    longest = service.limits.max_model_len
    check_range("truncate_prompt_tokens", given, -1, longest)
    if 0 <= given <= service.tokenizer.special_tokens_added:
        added = service.tokenizer.special_tokens_added
        raise InvalidRequest(
            f"truncate_prompt_tokens is {given}; the {added} special tokens leave no room for a text",
            param="truncate_prompt_tokens",
        )
    return longest if given == -1 else given


async def _prompts(service: Service, given: str | Sequence[str | int | list[int]], keep: int | None) -> list[list[int]]:
    """The `input` field in all of its forms."""
    if isinstance(given, str):
        return await _texts(service, [given], "input", keep)
    if not given:
        raise InvalidRequest("input is empty", param="input")
    if all(isinstance(item, int) for item in given):
        given = [[item for item in given if isinstance(item, int)]]
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) == len(given):
        return await _texts(service, texts, "input", keep)
    lists = [item for item in given if isinstance(item, list)]
    if len(lists) != len(given):
        raise InvalidRequest(
            "input must be a string, a list of strings, a list of token ids or a list of such lists", param="input"
        )
    _check_count(lists, "input")
    for ids in lists:
        if not ids:
            raise InvalidRequest("input has an empty list of token ids", param="input")
        check_token_ids("input", ids, service.limits.vocab_size)
    return [ids[:keep] for ids in lists]


async def _texts(service: Service, texts: list[str], param: str, keep: int | None) -> list[list[int]]:
    _check_count(texts, param)
    if "" in texts:
        raise InvalidRequest(f"{param} has an empty text; there is no vector for nothing", param=param)
    if keep is not None:
        return [await service.encode_start(text, keep) for text in texts]
    return [await service.encode(text, add_special_tokens=True, fits=param) for text in texts]


def _check_count(inputs: Sequence[object], param: str) -> None:
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(f"{param} has {len(inputs)} entries, at most {MAX_INPUTS} are allowed", param=param)


async def _embed(
    service: Service,
    request: Request,
    model: str,
    prompts: list[list[int]],
    pooling: Pooling | None,
    priority: int | None,
    fields: list[str],
) -> list[array[float]]:
    """Vectors of unit length of `prompts`, which came in `fields`. All are checked before the first is computed."""
    exchange = exchange_of(request)
    key = exchange.key
    id = "embd-" + secrets.token_hex(12)
    requests = [
        pooling_request(
            service.limits,
            id=f"{id}-{i}",
            prompt=prompt,
            pooling=pooling,
            arrival=time.time(),
            prompt_field=field,
            priority=(priority or 0) + (key.priority if key else 0),
            adapter=service.adapter_of(model),
            key=key.label if key else "",
        )
        for i, (prompt, field) in enumerate(zip(prompts, fields, strict=True))
    ]
    vectors = []
    for start in range(0, len(requests), AT_ONCE):
        generations = [service.generation(r, TextOptions()) for r in requests[start : start + AT_ONCE]]
        run = await begin(service, request, generations)

        async def finish(run: Any = run) -> None:
            async for _ in run.pieces():
                pass

        await run.unless_disconnected(finish())
        vectors += [_unit(_vector(generation)) for generation in generations]
    return vectors


def _vector(generation: Generation) -> array[float]:
    vector = array("f")
    vector.frombytes(generation.embedding)
    if not vector or not all(map(math.isfinite, vector)):
        raise RequestFailed("the model gave no finite vector for this input")
    return vector


def _unit(vector: array[float]) -> array[float]:
    length = math.sqrt(_dot(vector, vector))
    return array("f", (x / length for x in vector)) if length > 0 else vector


def _shortened(vector: array[float], dimensions: int) -> array[float]:
    """The first `dimensions` numbers, at unit length again."""
    if dimensions > len(vector):
        raise InvalidRequest(f"dimensions is {dimensions}, the model's vectors have {len(vector)}", param="dimensions")
    return _unit(vector[:dimensions])


def _dot(a: array[float], b: array[float]) -> float:
    return math.fsum(map(mul, a, b))


def _base64(vector: array[float]) -> str:
    """Little-endian float32, as the engine sent it: every machine this runs on is little-endian."""
    return base64.b64encode(vector.tobytes()).decode()


def _usage(prompts: list[list[int]]) -> dict[str, int]:
    tokens = sum(map(len, prompts))
    return {"prompt_tokens": tokens, "total_tokens": tokens}
