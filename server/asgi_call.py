"""Runs one request through an ASGI application in this process, for whoever has it from elsewhere than a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message


async def read_body(request: Request, most: int) -> bytes | None:
    """The body; None as soon as it has more than `most` bytes."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > most:
            return None
    return body


async def respond(app: ASGIApp, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Any, None]:
    """(status, headers) first, then the parts of the body. Closing it early is the client's leaving."""
    parts: asyncio.Queue[Message | None] = asyncio.Queue()
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if not unread:
            await gone.wait()
        return unread.pop() if unread else {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app({"type": "http", **scope}, receive, parts.put)
        finally:
            parts.put_nowait(None)

    running = asyncio.ensure_future(run())
    try:
        while (part := await parts.get()) is not None:
            start = part["type"] == "http.response.start"
            yield (part["status"], list(part.get("headers", []))) if start else part.get("body", b"")
        await running
    finally:
        gone.set()
