"""One HTTP connection: uvicorn's protocol with bounds on what a client may send before a request is complete.

Without them a head (request line and headers, or the trailers behind a chunked body) may grow until memory ends,
a connection that says nothing keeps its place for ever, and there may be any number of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0  # from the connection, or the first byte of a later request, to the end of its head
STALL_TIMEOUT_S = 300.0  # a client that takes nothing of its response for so long is gone
MAX_PIPELINED = 16  # requests that wait on one connection for the response before theirs
CROWD = 64  # connections beyond the limit that are told so, within CROWD_TIMEOUT_S; more are closed unheard
CROWD_TIMEOUT_S = 5.0


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that is too large (431) or too slow (408), and says in JSON what it can't parse (400).

    A connection beyond the limit is marked: `scope["state"]["crowded"]`, and has one request only. The application
    decides what it answers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limit, self.limit_concurrency = self.limit_concurrency, None  # uvicorn would answer in plain text
        self._crowded = False
        self._in_body = False  # a request's body hasn't ended
        self._unparsed = 0  # bytes since the parser last had something to hand over
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        beyond = len(self.connections) - self._limit if self._limit else 0
        self._crowded = beyond > 0
        if beyond > CROWD:
            transport.abort()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", f"the headers exceed {MAX_HEAD_BYTES} bytes")
        # What has come after a response (the rest of a body, empty lines) has ended its keep-alive time.
        if not self._answering and self._late is None and self.timeout_keep_alive_task is None:
            self._wait_for_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["crowded"] = self._crowded
        if self._late is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._in_body = True
        self._stop_waiting()
        super().on_headers_complete()
        if self._crowded:
            self.cycle.keep_alive = False
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # the parser stops at it

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._stalled = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", "this is not an HTTP request")

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(CROWD_TIMEOUT_S if self._crowded else HEAD_TIMEOUT_S, self._too_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        if self._answering:  # what came of the next request may be waiting for this response
            self._wait_for_head()
            return
        if self._in_body:  # its response was sent already
            self.transport.close()
            return
        self._refuse(b"408 Request Timeout", f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s")

    def _refuse(self, status: bytes, message: str) -> None:
        """Answer and close. While a response is on its way nothing can be said between its bytes."""
        if not self._answering:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = msgspec.json.encode({"error": error})
            head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
