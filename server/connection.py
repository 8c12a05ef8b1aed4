"""One HTTP connection: uvicorn's protocol with bounds on what a client may send before a request is complete.

Without them a head (request line and headers, or the trailers behind a chunked body) may grow until memory ends,
and a connection that says nothing keeps its place for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 60.0  # from the connection, or the first byte of a later request, to the end of its head
STALL_TIMEOUT_S = 300.0  # a client that takes nothing of its response for so long is gone


class BoundedProtocol(HttpToolsProtocol):
    """Refuses a head that is too large (431) or too slow (408), and says in JSON what it can't parse (400)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unparsed = 0  # bytes since the parser last had something to hand over
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._late is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
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
        self._late = self.loop.call_later(HEAD_TIMEOUT_S, self._too_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        if self._answering:  # what came of the next request may be waiting for this response
            self._wait_for_head()
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
