"""The one hierarchy of errors.

OctavoError
├── InvalidRequest   400  the client's fault: says which field, which value, what to do
├── NotFound         404  a model, adapter or stored object that isn't there
├── Overloaded       429  the queue or a key's limit is full; `retry_after_s`
├── RequestFailed    500  this request failed, the others go on
├── EngineDead       503  the engine is gone or not ready; `retry_after_s`
└── ConfigError      start-up: one line, exit code 2, no traceback
"""

from __future__ import annotations


class OctavoError(Exception):
    """Root of all errors that Octavo raises on purpose; `str(error)` is fit for a user."""


class InvalidRequest(OctavoError):
    """The request can't be served as it is."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(OctavoError):
    """No such model, adapter or stored object."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(OctavoError):
    """Too much is waiting; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailed(OctavoError):
    """This request failed inside the engine; others are not touched."""


class EngineDead(OctavoError):
    """The engine process is not there to serve."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(OctavoError):
    """A setting, path or model that can't be used; the message names the value and what to do."""
