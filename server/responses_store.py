"""Stored responses: bounded in number and bytes, the oldest go first; each is seen by its own API key alone."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import NotFound

MAX_RESPONSES = 10_000
MAX_BYTES = 128 << 20


@dataclass
class Stored:
    """A response, what it was asked, and the conversation up to and with it (without instructions)."""

    body: dict[str, Any]
    input: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    key: str
    task: asyncio.Task[None] | None = None  # of a background response that still runs
    events: list[bytes] = field(default_factory=list)  # of a background response
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    size: int = 0

    def add_events(self, events: Iterable[bytes]) -> None:
        """And wake whoever follows, also when there are none but the end."""
        self.events += events
        self.changed.set()
        self.changed = asyncio.Event()

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events with a sequence number above `after`, until the response has ended."""
        sent = after + 1
        while True:
            changed, ended = self.changed, self.task is None
            while sent < len(self.events):
                yield self.events[sent]
                sent += 1
            if ended:
                return
            await changed.wait()


class ResponseStore:
    """By id. A response that still runs is never evicted."""

    def __init__(self) -> None:
        self._all: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep it, or its new state."""
        self._remove(stored.body["id"])
        shared = stored.messages[: -len(stored.input) - 1]  # belongs to the responses before it
        size = len(msgspec.json.encode([stored.body, stored.input])) + 64 * len(shared)
        stored.size = size + sum(map(len, stored.events))
        self._all[stored.body["id"]] = stored
        self._bytes += stored.size
        for id in list(self._all):
            if len(self._all) <= MAX_RESPONSES and self._bytes <= MAX_BYTES:
                break
            if self._all[id].task is None and id != stored.body["id"]:
                self._remove(id)

    def get(self, id: str, key: str, param: str | None = None) -> Stored:
        """Raises NotFound."""
        found = self._all.get(id)
        if found is None or found.key != key:
            raise NotFound(f"there is no stored response {id[:80]!r}", param=param)
        return found

    def delete(self, id: str, key: str) -> None:
        stored = self.get(id, key)
        if stored.task is not None:
            stored.task.cancel()
        self._remove(id)

    def find_item(self, id: str, key: str) -> dict[str, Any] | None:
        """An input or output item of any stored response."""
        for stored in reversed(self._all.values()):
            if stored.key == key:
                for item in (*stored.body["output"], *stored.input):
                    if item.get("id") == id:
                        return dict(item)
        return None

    def _remove(self, id: str) -> None:
        stored = self._all.pop(id, None)
        if stored is not None:
            self._bytes -= stored.size
