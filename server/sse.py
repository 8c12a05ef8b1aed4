"""Server-sent events straight to the socket: a raw ASGI response, no framework between a token and its bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.errors import OctavoError
from server.errors import CLIENT_CLOSED, HTTPError, event

logger = logging.getLogger("octavo.http")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

T = TypeVar("T")


async def until_disconnect(receive: Callable[[], Awaitable[Message]]) -> None:
    """Return when the client has gone. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def or_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, or cancel it when the client goes: then HTTPError 499."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPError(CLIENT_CLOSED, "the client went away")
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class EventStream(Response):
    """Sends `events` as they come. Ends them when the client leaves; sends a comment when they are silent.

    `on_close` runs in any case, also when `events` were never asked for. An exception of `events` becomes
    `error_event` and ends the stream: a client that sees neither it nor [DONE] knows that the connection broke.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_close: Callable[[], Awaitable[None]],
        headers: Mapping[str, str] | None = None,
        error_event: Callable[[BaseException], bytes] = event,
        ping: bytes = KEEP_ALIVE,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._on_close = on_close
        self._error_event = error_event
        self._ping = ping
        self._quiet = False
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
            | dict(headers or {})
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks: list[asyncio.Future[None]] = []
        results: list[BaseException | None] = []
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            tasks = [
                asyncio.ensure_future(work)
                for work in (self._pump(send), until_disconnect(receive), self._keep_alive(send))
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await self._events.aclose()
            await self._on_close()
        if isinstance(results[0], Exception):
            raise results[0]

    async def _pump(self, send: Send) -> None:
        try:
            async for data in self._events:
                self._quiet = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.error("a stream failed", exc_info=error)
            await send({"type": "http.response.body", "body": self._error_event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._quiet = True
            await asyncio.sleep(self._keep_alive_s)
            if self._quiet:
                await send({"type": "http.response.body", "body": self._ping, "more_body": True})
