"""EngineClient: what the server knows of the engine (skeleton; the contract is the protocol below)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from engine.api import AddRequest, Delta, Ready, Stats


class EngineClient(Protocol):
    """Submit requests, stream their deltas, restart the engine when it dies. Lives on one asyncio loop."""

    async def start(self) -> Ready:
        """Start the engine and wait until it is ready. Raises ConfigError."""

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        """Queue a request; iterate its deltas until every choice has a terminal one.

        Deltas of a slow reader are merged in a one-slot mailbox per choice. Raises Overloaded or
        InvalidRequest (can never fit) at once, EngineDead when the engine is gone for good.
        Closing the iterator early (`aclose`) aborts the request.
        """

    def abort(self, request_id: str, choice: int = -1) -> None:
        """Idempotent."""

    @property
    def ready(self) -> Ready: ...

    @property
    def stats(self) -> Stats:
        """The latest snapshot, no round trip."""

    def health(self) -> dict[str, Any]:
        """{"status": loading|ready|degraded|draining|dead, "engine": {"pid", "state", "last_step_age_s", "restarts"}}"""

    async def inspect(self, what: str, request_id: str = "") -> Any:
        """The JSON value of an `Inspect` round trip."""

    async def control(self, command: str, argument: dict[str, str]) -> Any:
        """The JSON value of a `Control` round trip."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; wait until those in flight have ended, or abort them at the time limit."""

    async def close(self) -> None:
        """Stop the engine; leave no process and no file behind. Idempotent."""
