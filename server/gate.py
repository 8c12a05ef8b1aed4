"""What every request passes: id, key, room, body size, error replies, counters. Pure ASGI, so streams cost nothing."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import OctavoError
from server.auth import KeyRing
from server.errors import CLIENT_CLOSED, HTTPError, reply_to
from server.metrics import Metrics
from server.settings import ApiKey, ServerSettings

logger = logging.getLogger("octavo.http")

_OPEN_ROUTES = frozenset({"/", "/health", "/health/live", "/health/ready"})  # the page holds nothing but code
_LABEL = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_IGNORED = "x-octavo-ignored-fields"


class Exchange:
    """One HTTP request and its response, as the routes see it: `scope["octavo"]`."""

    __slots__ = ("generated", "headers", "id", "key", "started", "status")

    def __init__(self, id: str) -> None:
        self.id = id
        self.key: ApiKey | None = None
        self.headers: dict[str, str] = {}  # added to the response
        self.generated = False  # a generation was submitted: its own record counts it
        self.started = False
        self.status = 0

    def ignores(self, *names: str) -> None:
        """Report fields of the request that have no effect: a response header lists them."""
        known = self.headers.get(_IGNORED, "").split(", ")
        clean = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names]
        listed = [name for name in dict.fromkeys([*known, *clean]) if name]
        if listed:
            self.headers[_IGNORED] = ", ".join(listed[:32])


class Gate:
    """Outermost part of the application, below CORS.

    Under overload most requests are refused, so that must cost next to nothing: `admit` raises for them here, before
    their body is read, parsed, rendered and tokenised. `queued` are the paths of those that it is asked about.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        metrics: Metrics,
        admit: Callable[[ApiKey | None], None],
        queued: frozenset[str],
    ) -> None:
        self._app = app
        self._check_room = admit
        self._queued = queued
        self._ring = KeyRing(settings.api_keys)
        self._metrics = metrics
        self._max_body = settings.max_body_bytes
        self._open = _OPEN_ROUTES | ({"/metrics"} if settings.public_metrics else frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        asked = headers.get(b"x-request-id", "")
        exchange = Exchange(asked if _LABEL.fullmatch(asked) else secrets.token_hex(12))
        scope["octavo"] = exchange

        async def send_out(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                exchange.status = message["status"]
                extra = {"x-request-id": exchange.id, **exchange.headers}
                message["headers"] = [
                    *message.get("headers", ()),
                    *((name.encode(), value.encode("latin-1", "replace")) for name, value in extra.items()),
                ]
            await send(message)

        try:
            self._admit(scope, headers, exchange)
            await self._app(scope, self._counted(receive, headers), send_out)
        except Exception as error:
            await self._fail(error, scope, exchange, send_out)
        self._count(scope, exchange, time.monotonic() - began)

    def _admit(self, scope: Scope, headers: dict[bytes, str], exchange: Exchange) -> None:
        path = scope["path"]
        is_open = path in self._open or path.startswith("/static/")
        if not is_open and scope.get("state", {}).get("crowded"):
            text = "too many connections are open (--max-connections); try again later"
            raise HTTPError(503, text, code="too_many_connections", headers={"retry-after": "1"})
        if not is_open and scope["method"] != "OPTIONS":
            x_api_key = headers.get(b"x-api-key") if path.startswith("/v1/messages") else None
            exchange.key = self._ring.authenticate(headers.get(b"authorization"), x_api_key)
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise self._too_large(int(length))
        if self._is_queued(scope):
            self._check_room(exchange.key)

    def _is_queued(self, scope: Scope) -> bool:
        return scope["method"] == "POST" and scope["path"] in self._queued

    def _too_large(self, size: int) -> HTTPError:
        return HTTPError(413, f"the body has {size} bytes or more, the limit is {self._max_body}")

    def _counted(self, receive: Receive, headers: dict[bytes, str]) -> Receive:
        """`receive` that stops at the limit: a body without content-length may have any size."""
        if b"content-length" in headers or b"transfer-encoding" not in headers:
            return receive
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise self._too_large(size)
            return message

        return counted

    async def _fail(self, error: Exception, scope: Scope, exchange: Exchange, send: Send) -> None:
        reply = reply_to(error)
        if reply.status >= 500 and reply.status != 503:  # what makes it unavailable is logged once, where it happens
            bug = None if isinstance(error, OctavoError) else error  # ours say what happened; a bug needs its trace
            logger.error("%s %s [%s]: %s", scope["method"], scope["path"], exchange.id, error, exc_info=bug)
        elif scope["method"] == "POST":
            logger.info("POST %s [%s] %d: %s", scope["path"], exchange.id, reply.status, reply.message[:200])
        if exchange.started:
            raise error  # the server closes the connection: a cut response must not look complete
        body = reply.body(scope["path"])
        exchange.headers |= reply.headers
        await send({"type": "http.response.start", "status": reply.status, "headers": _json_headers(body)})
        await send({"type": "http.response.body", "body": body})

    def _count(self, scope: Scope, exchange: Exchange, took_s: float) -> None:
        route: Any = scope.get("route")
        label = getattr(route, "path", scope["path"] if self._is_queued(scope) else "other")
        self._metrics.http[scope["method"] if label != "other" else "other", label, exchange.status] += 1
        if exchange.status >= 400 and scope["method"] == "POST" and not exchange.generated:
            self._metrics.refused[_REFUSED.get(exchange.status, "failed")] += 1
            if exchange.status in (429, 503):
                self._metrics.refusal_time.observe(took_s)


_REFUSED = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    405: "invalid",
    408: "disconnect",
    413: "too_large",
    415: "invalid",
    429: "overloaded",
    CLIENT_CLOSED: "disconnect",
    503: "unavailable",
    504: "deadline",
}


def _json_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
