"""Who may call, and how much: API keys by digest, and each key's rate, token and concurrency limits."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import Overloaded
from server.errors import HTTPError
from server.settings import ApiKey


class KeyRing:
    """Finds the key of a request. The time it takes does not depend on how much of a key is right."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = keys

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> ApiKey | None:
        """The key of these headers; None when no keys are configured. Raises HTTPError 401."""
        if not self._keys:
            return None
        given = x_api_key
        if given is None and authorization is not None:
            scheme, _, rest = authorization.partition(" ")
            given = rest.strip() if scheme.lower() == "bearer" else None
        if not given:
            raise _unauthorized("no API key: send it as 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise _unauthorized("this API key is not valid here")
        return found


def _unauthorized(message: str) -> HTTPError:
    return HTTPError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


class _Bucket:
    """A token bucket of one minute's worth. It may go below zero when a cost is only known afterwards."""

    def __init__(self, per_minute: int) -> None:
        self._rate = per_minute / 60
        self._size = float(per_minute)
        self._level = self._size
        self._at = time.monotonic()

    def wait_for(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 = now."""
        now = time.monotonic()
        self._level = min(self._size, self._level + (now - self._at) * self._rate)
        self._at = now
        return max(0.0, (amount - self._level) / self._rate)

    def take(self, amount: float) -> None:
        self._level -= amount


class KeyLimits:
    """The running totals of every key."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._requests = {key.label: _Bucket(key.requests_per_minute) for key in keys if key.requests_per_minute}
        self._tokens = {key.label: _Bucket(key.tokens_per_minute) for key in keys if key.tokens_per_minute}
        self._running = {key.label: 0 for key in keys}

    def check(self, key: ApiKey | None) -> None:
        """Raise Overloaded, which says when to come again, where the key has no place left."""
        if key is None:
            return
        if key.max_concurrency and self._running[key.label] >= key.max_concurrency:
            raise Overloaded(f"this key may run {key.max_concurrency} requests at once", retry_after_s=1)
        tokens = self._tokens.get(key.label)
        if tokens is not None and (wait := tokens.wait_for(1)) > 0:
            raise Overloaded(f"this key may use {key.tokens_per_minute} tokens per minute", retry_after_s=wait)
        requests = self._requests.get(key.label)
        if requests is not None and (wait := requests.wait_for(1)) > 0:
            raise Overloaded(f"this key may send {key.requests_per_minute} requests per minute", retry_after_s=wait)

    @contextmanager
    def admitted(self, key: ApiKey | None) -> Iterator[None]:
        """Hold one of the key's places. Raises Overloaded."""
        if key is None:
            yield
            return
        self.check(key)
        if requests := self._requests.get(key.label):
            requests.take(1)
        self._running[key.label] += 1
        try:
            yield
        finally:
            self._running[key.label] -= 1

    def spend(self, key: ApiKey | None, tokens: int) -> None:
        """Charge the tokens of a request that has ended."""
        bucket = self._tokens.get(key.label) if key is not None else None
        if bucket is not None:
            bucket.take(tokens)
