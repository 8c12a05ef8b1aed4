"""One HTTP request's share of the engine, from admission to the last token: its key's place and its generations.

run = await begin(service, request, generations)    # refusals and their status come from here
async with run: async for index, piece in run.pieces(): ...
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from starlette.requests import Request

from server.generate import Generation, Piece, Usage, close_all, merged, start_all
from server.service import Service, exchange_of
from server.sse import or_disconnect

logger = logging.getLogger("octavo.http")

T = TypeVar("T")


class Run:
    """Generations that were admitted. `close` must be called in the end; it is idempotent."""

    def __init__(self, service: Service, request: Request, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._service = service
        self._request = request
        self._exchange = exchange_of(request)
        self._place = ExitStack()
        self._starting: asyncio.Task[None] | None = None
        self._began = time.monotonic()
        self._closed = False

    async def start(self) -> None:
        """Submit, and wait for the first tokens: so refusals have a status, and the headers can tell the first wait.

        After `keep_alive_s` it returns all the same, and the response begins without them.
        """
        key = self._exchange.key
        if self._service.settings.log_prompts:
            for generation in self.generations:
                text = self._service.tokenizer.decode(generation.request.prompt)
                logger.info("%s prompt %r", generation.request.id, text)
        try:
            self._place.enter_context(self._service.key_limits.admitted(key))
            self._place.callback(lambda: self._service.key_limits.spend(key, self.usage.total))
            starting = self._starting = asyncio.ensure_future(start_all(self.generations))
            timeout = self._service.settings.keep_alive_s
            await or_disconnect(self._request.receive, _wait(starting, timeout))
            if starting.done():
                starting.result()
        except BaseException:
            await self.close()
            self._exchange.generated = any(g.record is not None and g.record.counted for g in self.generations)
            raise
        self._exchange.generated = True

    @property
    def has_begun(self) -> bool:
        """Every generation has its first tokens."""
        return self._starting is not None and self._starting.done()

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all generations as they come, with the index of their generation."""
        if self._starting is not None:
            await self._starting
        async for item in merged(self.generations):
            yield item

    async def unless_disconnected(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of a response that isn't streamed; when the client leaves, it is cancelled (HTTPError 499)."""
        async with self:
            return await or_disconnect(self._request.receive, work)

    @property
    def usage(self) -> Usage:
        total = Usage()
        for generation in self.generations:
            total += generation.usage
        return total

    @property
    def timing(self) -> dict[str, float | int]:
        """Seconds of the slowest generation, and the preemptions of all."""
        timings = [generation.timing for generation in self.generations]
        return {
            "queue_s": max(timing["queue_s"] for timing in timings),
            "ttft_s": max(timing["ttft_s"] for timing in timings),
            "preemptions": sum(timing["preemptions"] for timing in timings),
        }

    def timing_headers(self) -> dict[str, str]:
        """What a client asks for by `x-octavo-timing: 1`; nothing while no token has come."""
        if self._request.headers.get("x-octavo-timing", "0") in ("", "0") or not self.has_begun:
            return {}
        timing = self.timing
        return {
            "x-octavo-queue-ms": f"{timing['queue_s'] * 1000:.3f}",
            "x-octavo-ttft-ms": f"{timing['ttft_s'] * 1000:.3f}",
            "x-octavo-preemptions": str(timing["preemptions"]),
        }

    async def close(self) -> None:
        """Abort what still runs and give the place back."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await close_all(self.generations)
        self._place.close()
        if self._closed:
            return
        self._closed = True
        if self._service.traces:
            self._service.traces.ended(self._request, self.generations)
        if self._exchange.generated:
            usage, timing = self.usage, self.timing
            logger.info(
                "%s %s: %d + %d tokens, %d cached, queued %.3f s, first token %.3f s, in all %.3f s%s",
                self.generations[0].request.id,
                self._request.url.path,
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                timing["queue_s"],
                timing["ttft_s"],
                time.monotonic() - self._began,
                f", key {self._exchange.key.label}" if self._exchange.key else "",
            )

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def begin(service: Service, request: Request, generations: Sequence[Generation]) -> Run:
    """Admit and start. Raises Overloaded, InvalidRequest, EngineDead, RequestFailed or HTTPError 499."""
    run = Run(service, request, generations)
    await run.start()
    return run


async def _wait(task: asyncio.Task[None], seconds: float) -> None:
    await asyncio.wait({task}, timeout=seconds)
