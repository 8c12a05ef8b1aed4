"""Exception -> status and error body: one table for every route.

The body is OpenAI's `{"error": {"message", "type", "param", "code"}}`; under /v1/messages it is Anthropic's
`{"type": "error", "error": {"type", "message"}}`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import EngineDead, InvalidRequest, NotFound, OctavoError, Overloaded, RequestFailed

CLIENT_CLOSED = 499  # nobody is there to read it: for logs and counters only
_MAX_MESSAGE = 2_000  # a bad value of megabytes is not sent back


class HTTPError(OctavoError):
    """An error that has no place in the engine's tree: authentication, methods, sizes."""

    def __init__(self, status: int, message: str, *, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class DeadlineExceeded(OctavoError):
    """The request's own time limit passed before its first token."""


@dataclass(frozen=True)
class ErrorReply:
    """What a client gets for an exception."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self, path: str) -> bytes:
        """The JSON body in the form that the route of `path` speaks."""
        if path.startswith("/v1/messages"):
            kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
            return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})
        return msgspec.json.encode(self.openai())


_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}


def reply_to(error: BaseException) -> ErrorReply:
    """The one table. Anything that isn't ours is a bug: 500 with a message that gives nothing away."""
    message = str(error)[:_MAX_MESSAGE]
    match error:
        case InvalidRequest():
            return ErrorReply(400, "invalid_request_error", message, error.param, error.code)
        case NotFound():
            return ErrorReply(404, "invalid_request_error", message, error.param, error.code)
        case Overloaded():
            retry = _retry_after(error.retry_after_s)
            return ErrorReply(429, "rate_limit_error", message, code="rate_limit_exceeded", headers=retry)
        case EngineDead():
            retry = _retry_after(error.retry_after_s)
            return ErrorReply(503, "server_error", message, code="engine_unavailable", headers=retry)
        case DeadlineExceeded():
            return ErrorReply(504, "server_error", message, code="deadline_exceeded")
        case RequestFailed():
            return ErrorReply(500, "server_error", message, code="request_failed")
        case HTTPError():
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            return ErrorReply(error.status, kind, message, code=error.code, headers=error.headers)
        case _:
            return ErrorReply(500, "server_error", "internal error; the server's log has the details")


def event(error: BaseException) -> bytes:
    """The error as an SSE event, for a stream that has begun."""
    return b"data: " + msgspec.json.encode(reply_to(error).openai()) + b"\n\n"
