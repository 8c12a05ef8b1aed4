"""POST /v1/completions: the whole legacy contract, with lists of prompts, token ids, echo, logprobs and best_of."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.api import Grammar, TokenLogprobs
from engine.errors import InvalidRequest
from engine.text.detokenize import Detokenizer
from engine.validate import check_field, check_token_ids
from server.chunks import Chunks
from server.generate import Entry, Generation, Piece, finite
from server.logprobs import LogprobsWriter
from server.protocol import CompletionRequest
from server.run import Run, begin
from server.sampling import check_stream_options, constraint_of, sampling_params, text_options, truncated
from server.service import Service, exchange_of, json_response, new_ids, service_of, usage_object
from server.sse import EventStream
from server.structured import checked

encode = msgspec.json.Encoder().encode

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
NULL = b"null"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and its text as the client wrote it (None when it came as token ids)."""

    tokens: list[int]
    text: str | None


async def read_prompts(service: Service, wire: CompletionRequest) -> list[Prompt]:
    """The `prompt` field in all of its forms. An empty text starts from the document separator."""
    given = wire.prompt
    if given is None or given == "":
        return [Prompt([_separator(service)], "")]
    special = wire.add_special_tokens is not False
    fits = "" if wire.truncate_prompt_tokens is not None else "prompt"
    if isinstance(given, str):
        given = [given]
    if not len(given) >= 1:
        raise InvalidRequest("prompt is an empty list", param="prompt")
    if all(isinstance(item, int) for item in given):
        given = [given]  # type: ignore[list-item]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(given)} entries, at most {MAX_PROMPTS} are allowed", param="prompt")
    prompts = []
    for item in given:
        if isinstance(item, str) and isinstance(given[0], str):
            tokens = await service.encode(item, add_special_tokens=special, fits=fits) or [_separator(service)]
            prompts.append(Prompt(tokens, item))
        elif isinstance(item, list) and isinstance(given[0], list):
            check_token_ids("prompt", item, service.limits.vocab_size)
            prompts.append(Prompt(item, None))
        else:
            raise InvalidRequest(
                "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
                param="prompt",
            )
    return prompts


def _separator(service: Service) -> int:
    tokenizer = service.tokenizer
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise InvalidRequest("prompt is empty, and this model has no start token", param="prompt")
    return found


async def completions(request: Request) -> Response:
    """Continue one or more prompts, whole or as a stream of server-sent events."""
    service = service_of(request)
    wire, _ = await service.read(request, CompletionRequest)
    service.require_model(wire.model)
    candidates = _check_fields(wire)
    prompts = await read_prompts(service, wire)
    constraint = constraint_of(wire)
    grammar = await checked(constraint.grammar, constraint.field) if constraint is not None else None
    shown, generations = _generations(service, request, wire, prompts, candidates, grammar)
    run = await begin(service, request, generations)
    writer = _Writer(service, wire, shown, run, prompts)
    if wire.stream:
        return EventStream(
            writer.events(),
            keep_alive_s=service.settings.keep_alive_s,
            on_close=run.close,
            headers=run.timing_headers(),
        )
    body = await run.unless_disconnected(writer.whole())
    return json_response(body, run.timing_headers())


def _check_fields(wire: CompletionRequest) -> int:
    """Checks what only this route has; how many candidates are computed for each prompt."""
    check_stream_options(wire)
    if wire.suffix:
        raise InvalidRequest("suffix needs a model that can fill in; this one can't", param="suffix")
    if wire.logprobs is not None:
        check_field("logprobs", wire.logprobs)
    if wire.stream and wire.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream=true", param="prompt_logprobs")
    n = 1 if wire.n is None else wire.n
    if wire.best_of is None:
        return n
    check_field("best_of", wire.best_of)
    if wire.best_of < n:
        raise InvalidRequest(f"best_of ({wire.best_of}) must not be smaller than n ({n})", param="best_of")
    if wire.stream and wire.best_of > n:
        raise InvalidRequest("best_of larger than n can't be streamed", param="best_of")
    if wire.use_beam_search and wire.best_of > n:
        raise InvalidRequest("best_of can't be combined with use_beam_search", param="best_of")
    return wire.best_of


def _generations(
    service: Service,
    request: Request,
    wire: CompletionRequest,
    prompts: list[Prompt],
    candidates: int,
    grammar: Grammar | None,
) -> tuple[str, list[Generation]]:
    n = 1 if wire.n is None else wire.n
    logprobs = wire.logprobs
    if logprobs is None and candidates > n:
        logprobs = 0  # the candidates are ranked by their own logprobs
    default = wire.max_tokens is None
    limit = DEFAULT_MAX_TOKENS if default else wire.max_tokens
    params = sampling_params(
        wire, service.tokenizer, service.defaults, max_tokens=limit, logprobs=logprobs, grammar=grammar
    )
    scored = wire.prompt_logprobs
    if wire.echo and wire.logprobs is not None:
        scored = max(wire.logprobs, scored or 0)
    params = msgspec.structs.replace(params, n=candidates, prompt_logprobs=scored)
    options = text_options(wire, service.limits)
    shown, ids = new_ids("cmpl-", wire, len(prompts))
    generations = []
    for id, prompt in zip(ids, prompts, strict=True):
        engine_request = service.add_request(
            exchange_of(request),
            wire,
            id,
            truncated(prompt.tokens, wire, service.limits, limit),
            params,
            prompt_field="prompt",
            max_tokens_policy="clamp" if default else "refuse",
        )
        generations.append(service.generation(engine_request, options))
    return shown, generations


class _Candidate:
    """One completion, put together."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.entries: list[Entry] = []
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.entries += piece.entries
        self.tokens += piece.tokens
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason

    @property
    def score(self) -> float:
        """Mean logprob per token: what best_of ranks by."""
        return sum(finite(entry.logprobs.logprob) for entry in self.entries) / max(1, len(self.entries))


class _Writer:
    """The completions of one HTTP request, as one object or as chunks."""

    def __init__(self, service: Service, wire: CompletionRequest, shown: str, run: Run, prompts: list[Prompt]) -> None:
        self._service = service
        self._wire = wire
        self._run = run
        self._prompts = prompts
        self._n = 1 if wire.n is None else wire.n
        self._logprobs = LogprobsWriter(service.tokenizer, as_token_ids=bool(wire.return_tokens_as_token_ids))
        self._head = {
            "id": shown,
            "object": "text_completion",
            "created": int(time.time()),
            "model": wire.model,
            "system_fingerprint": service.fingerprint,
        }

    def _echo(self, index: int) -> str:
        """The prompt in front of the choices of generation `index`, as it was given."""
        if not self._wire.echo:
            return ""
        prompt, used = self._prompts[index], self._run.generations[index].request.prompt
        if prompt.text is not None and (len(used) == len(prompt.tokens) or not prompt.text):
            return prompt.text
        return self._detokenized(used)

    def _detokenized(self, tokens: tuple[int, ...]) -> str:
        detokenizer = Detokenizer(
            self._service.tokenizer, skip_special_tokens=self._wire.skip_special_tokens is not False
        )
        return detokenizer.push(tokens) + detokenizer.flush()

    def _prompt_entries(self, index: int) -> list[tuple[int, TokenLogprobs | None, int]]:
        """Prompt tokens with their logprobs and offsets, for echo."""
        generation = self._run.generations[index]
        detokenizer = Detokenizer(
            self._service.tokenizer, skip_special_tokens=self._wire.skip_special_tokens is not False
        )
        entries = []
        offset = 0
        for token, logprobs in zip(generation.request.prompt, generation.prompt_logprobs, strict=False):
            entries.append((token, logprobs, offset))
            offset += len(detokenizer.push((token,)))
        return entries

    def _logprobs_of(self, entries: list[Entry] | tuple[Entry, ...], echo: str, index: int, *, first: bool) -> Any:
        top = self._wire.logprobs
        if top is None:
            return None
        rows: list[tuple[int, TokenLogprobs | None, int]] = []
        if first and self._wire.echo:
            rows += self._prompt_entries(index)
        rows += [(entry.token, entry.logprobs, len(echo) + entry.start) for entry in entries]
        return self._logprobs.completion(rows, top)

    # ---- whole

    async def whole(self) -> dict[str, Any]:
        candidates = [[_Candidate() for _ in range(g.request.params.n)] for g in self._run.generations]
        async for index, piece in self._run.pieces():
            candidates[index][piece.choice].add(piece)
        choices = []
        for index, group in enumerate(candidates):
            if len(group) > self._n:
                group = sorted(group, key=lambda candidate: -candidate.score)[: self._n]
            echo = self._echo(index)
            choices += [self._choice(index * self._n + i, index, candidate, echo) for i, candidate in enumerate(group)]
        return {**self._head, "choices": choices, "usage": usage_object(self._run.usage)}

    def _choice(self, number: int, index: int, candidate: _Candidate, echo: str) -> dict[str, Any]:
        generation = self._run.generations[index]
        choice: dict[str, Any] = {
            "index": number,
            "text": echo + "".join(candidate.text),
            "logprobs": self._logprobs_of(candidate.entries, echo, index, first=True),
            "finish_reason": candidate.finish,
            "stop_reason": candidate.stop_reason,
        }
        if self._wire.return_token_ids:
            choice |= {"token_ids": candidate.tokens, "prompt_token_ids": generation.request.prompt}
        if self._wire.prompt_logprobs is not None:
            rows = self._logprobs.prompt(generation.request.prompt, generation.prompt_logprobs)
            choice["prompt_logprobs"] = rows
        return choice

    # ---- streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._head, self._wire.stream_options, self._run)
        begun: set[int] = set()
        echoes = [self._echo(index) for index in range(len(self._prompts))]
        async for index, piece in self._run.pieces():
            number = index * self._n + piece.choice
            first = number not in begun
            begun.add(number)
            body = self._body(number, index, piece, echoes[index], first=first)
            if body:
                yield chunks.choice(body)
        yield chunks.end()

    def _body(self, number: int, index: int, piece: Piece, echo: str, *, first: bool) -> bytes:
        text = echo + piece.text if first else piece.text
        extra = b""
        if self._wire.return_token_ids:
            extra = b',"token_ids":' + encode(piece.tokens)
            if first:
                extra += b',"prompt_token_ids":' + encode(self._run.generations[index].request.prompt)
        if not (text or piece.entries or extra or piece.finish):
            return b""
        logprobs = NULL
        if self._wire.logprobs is not None and (piece.entries or first):
            logprobs = encode(self._logprobs_of(piece.entries, echo, index, first=first))
        finish = NULL
        if piece.finish is not None:
            finish = encode(piece.finish)
            extra += b',"stop_reason":' + encode(piece.stop_reason)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % (
            number,
            encode(text),
            logprobs,
            finish,
            extra,
        )
