"""One engine request as text: deltas in, visible pieces out. Every route that generates goes through here.

    generation = Generation(client, tokenizer, metrics, request, options)
    await generation.start()                    # admission; what can be refused is refused here
    async for piece in generation.pieces(): ...
    generation.usage

Stop strings are found here, over token borders; the choice is then aborted in the engine and what it
computed beyond the match is neither shown nor counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from engine.api import AddRequest, Delta, FinishReason, TokenLogprobs
from engine.client import EngineClient
from engine.errors import EngineDead, InvalidRequest, OctavoError, Overloaded, RequestFailed
from engine.text.detokenize import Detokenizer, StopChecker
from engine.text.tokenizer import Tokenizer
from server.errors import DeadlineExceeded
from server.metrics import Metrics, RequestRecord

REFUSALS = (InvalidRequest, Overloaded, EngineDead)  # before the first token: it never ran
LOWEST_LOGPROB = -9999.0  # stands for -inf and NaN, which JSON has no word for


def finite(logprob: float) -> float:
    """A logprob that is a JSON number."""
    return logprob if math.isfinite(logprob) and logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


@dataclass(frozen=True)
class TextOptions:
    """How tokens become visible text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings are not looked for before


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One output token with its logprobs. `start`: characters of the choice's text before it."""

    token: int
    logprobs: TokenLogprobs
    start: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one delta made visible of one choice.

    `tokens` are the new output tokens, a stop token included, whether or not their text is visible yet.
    `entries` come with the text they belong to: they are held back with it and cut with it.
    """

    choice: int
    text: str
    tokens: tuple[int, ...]
    entries: tuple[Entry, ...] = ()
    finish: str | None = None  # "stop" or "length"
    stop_reason: str | int | None = None  # the stop string or stop token id that matched, or "timeout"


@dataclass(slots=True)
class Usage:
    """Token counts of a response: a prompt once for all its choices, every candidate's output."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


class _Choice:
    """Text state of one choice."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions, stop_token_ids: tuple[int, ...]) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopChecker(options.stop, include_stop=options.include_stop)
        self._has_stops = bool(options.stop)
        self._options = options
        self._stop_token_ids = stop_token_ids  # the request's own; the model's end token is no reason to name
        self._pending: list[Entry] = []
        self._seen = 0  # characters detokenised
        self._shown = 0  # characters made visible
        self.tokens = 0
        self.done = False

    def take(self, index: int, delta: Delta) -> Piece:
        """Text of a delta that is no error."""
        tokens = delta.tokens
        visible: Sequence[int] = tokens
        if delta.stop_token is not None and not self._options.include_stop:
            visible = tokens[:-1]
        if self._has_stops or delta.logprobs:
            text, used = self._take_one_by_one(visible, delta.logprobs)
            if self._stops.matched is not None:
                tokens = tokens[:used]
        else:
            text = self._detokenizer.push(visible)
        self.tokens += len(tokens)
        finish, reason = self._finish(delta)
        if finish is not None:
            self.done = True
            if self._stops.matched is None:
                tail = self._detokenizer.flush()
                text += self._stops.push(tail) + self._stops.flush() if self._has_stops else tail
        self._shown += len(text)
        return Piece(index, text, tokens, self._release(), finish, reason)

    def _take_one_by_one(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[str, int]:
        """Visible text of `tokens`, and how many of them come up to the end of a matched stop string."""
        shown = ""
        for i, token in enumerate(tokens):
            if logprobs:
                self._pending.append(Entry(token, logprobs[i], self._seen))
            text = self._detokenizer.push((token,))
            self._seen += len(text)
            if self.tokens + i < self._options.min_tokens or not self._has_stops:
                shown += text
                continue
            shown += self._stops.push(text)
            if self._stops.matched is not None:
                return shown, i + 1
        return shown, len(tokens)

    def _finish(self, delta: Delta) -> tuple[str | None, str | int | None]:
        if self._stops.matched is not None:
            return "stop", self._stops.matched
        match delta.finish:
            case None:
                return None, None
            case FinishReason.STOP:
                return "stop", delta.stop_token if delta.stop_token in self._stop_token_ids else None
            case FinishReason.LENGTH:
                return "length", None
            case _:
                return "length", "timeout"

    def _release(self) -> tuple[Entry, ...]:
        """Entries whose text is visible. A cut drops those behind it; one that it goes through stays."""
        if not self._pending:
            return ()
        if self._stops.matched is None and (self.done or self._shown == self._seen):
            ready, self._pending = tuple(self._pending), []
            return ready
        ready = tuple(entry for entry in self._pending if entry.start < self._shown)
        self._pending = [] if self.done else self._pending[len(ready) :]
        return ready


@dataclass
class Generation:
    """A request on its way. `close` may be called at any time, and must be called in the end."""

    client: EngineClient
    tokenizer: Tokenizer
    metrics: Metrics
    request: AddRequest
    options: TextOptions
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    embedding: bytes = b""  # float32, little-endian: the whole answer to a pooling request
    _deltas: AsyncIterator[Delta] | None = None
    _first: Delta | None = None

    def __post_init__(self) -> None:
        params = self.request.params
        n = params.n
        self._choices = [_Choice(self.tokenizer, self.options, params.stop_token_ids) for _ in range(n)]
        self._left = n
        self.reasons: dict[int, str] = {}  # of the choices that have ended
        self.record: RequestRecord | None = None

    async def start(self) -> None:
        """Submit, and wait for the first delta. Raises what refuses the request before its first token."""
        params = self.request.params
        record = self.record = RequestRecord(self.metrics, len(self.request.prompt), params.n, params.max_tokens or 0)
        try:
            self._deltas = self.client.submit(self.request)
            first = await anext(self._deltas)
            if first.finish in (FinishReason.ERROR, FinishReason.ABORT) and not first.tokens:
                raise _error_of(first)
        except REFUSALS:
            record.dismiss()
            raise
        except StopAsyncIteration:
            record.close("error")
            raise RequestFailed("the engine ended the request without a result") from None
        except OctavoError as error:
            record.close("abort" if isinstance(error, DeadlineExceeded) else "error")
            raise
        except asyncio.CancelledError:
            record.close("abort")
            raise
        self.usage.prompt_tokens = len(self.request.prompt)
        self.prompt_logprobs = first.prompt_logprobs
        self.embedding = first.embedding
        self._first = first

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Visible pieces until every choice has one with `finish`. Raises what ends the request early."""
        record = self.record
        if record is None or self._deltas is None or self._first is None:
            raise RuntimeError("pieces() before start()")
        try:
            delta: Delta | None = self._first
            while delta is not None and self._left:
                choice = self._choices[delta.choice]
                if not choice.done:
                    yield self._take(choice, delta, record)
                if self._left:
                    delta = await anext(self._deltas, None)
            if self._left:
                raise RequestFailed("the engine ended the request without a result")
            record.close(_worst(set(self.reasons.values())))
        except (asyncio.CancelledError, GeneratorExit):
            record.close("abort")
            raise
        except DeadlineExceeded:
            record.close("abort")
            raise
        except Exception:
            record.close("error")
            raise
        finally:
            await self.close()

    def _take(self, choice: _Choice, delta: Delta, record: RequestRecord) -> Piece:
        if delta.cached_tokens >= 0:
            self.metrics.cached_tokens += delta.cached_tokens - self.usage.cached_tokens
            self.usage.cached_tokens = delta.cached_tokens
        if delta.queued_s >= 0:
            record.queued_s = delta.queued_s
        record.preemptions = max(record.preemptions, delta.preemptions)
        if delta.finish is FinishReason.ERROR:
            raise _error_of(delta)
        if delta.finish is FinishReason.ABORT and (delta.error_kind != "deadline" or not (self._any or delta.tokens)):
            raise _error_of(delta)
        piece = choice.take(delta.choice, delta)
        self.usage.completion_tokens += len(piece.tokens)
        record.tokens(delta.choice, len(piece.tokens))
        if piece.finish is not None:
            self._left -= 1
            self.reasons[delta.choice] = "abort" if piece.stop_reason == "timeout" else piece.finish
            if delta.finish is None:
                self.client.abort(self.request.id, delta.choice)
        return piece

    @property
    def _any(self) -> bool:
        return self.usage.completion_tokens > 0

    @property
    def timing(self) -> dict[str, float | int]:
        """Queue time and time to first token in seconds, and preemptions so far."""
        if self.record is None:
            return {}
        return {
            "queue_s": round(self.record.queued_s, 6),
            "ttft_s": round(self.record.ttft_s, 6),
            "preemptions": self.record.preemptions,
        }

    async def close(self) -> None:
        """Abort what still runs. Idempotent."""
        deltas, self._deltas = self._deltas, None
        if deltas is not None and hasattr(deltas, "aclose"):
            await deltas.aclose()
        if self.record is not None:
            self.record.close("abort")


def _error_of(delta: Delta) -> OctavoError:
    message = delta.error or "the request failed in the engine"
    match delta.error_kind:
        case "invalid":
            return InvalidRequest(message)
        case "overloaded":
            return Overloaded(message)
        case "deadline":
            return DeadlineExceeded(delta.error or "the time limit of the request passed before its first token")
        case _ if delta.finish is FinishReason.ABORT:
            return EngineDead(delta.error or "the server is shutting down; the request was ended")
        case _:
            return RequestFailed(message)


def _worst(reasons: set[str]) -> str:
    """The one counter of a request with several choices."""
    return next((reason for reason in ("abort", "length") if reason in reasons), "stop")


async def start_all(generations: Sequence[Generation]) -> None:
    """Start several generations of one HTTP request; if one is refused, all are."""
    tasks = [asyncio.ensure_future(generation.start()) for generation in generations]
    try:
        await asyncio.gather(*tasks)
    except BaseException as error:
        for task in tasks:
            task.cancel()
        if isinstance(error, REFUSALS):
            for generation in generations:
                if generation.record is not None:
                    generation.record.dismiss()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def close_all(generations: Sequence[Generation]) -> None:
    """Abort whatever still runs."""
    for generation in generations:
        await generation.close()


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of several started generations as they come, with the index of their generation.

    The queue holds one piece for each, so a slow reader holds all of them back.
    """
    if len(generations) == 1:
        async with aclosing(generations[0].pieces()) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue(len(generations))

    async def pump(index: int, generation: Generation) -> None:
        try:
            async with aclosing(generation.pieces()) as pieces:
                async for piece in pieces:
                    await queue.put((index, piece))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(i, generation)) for i, generation in enumerate(generations)]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_all(generations)
