"""KV events: which blocks of tokens the device's prefix cache holds, in the shape that vLLM publishes.

A router that hears them knows what each replica has cached. Only the device's tier is told of; its medium is "GPU",
as routers expect, whatever the device is. A block's hash stands for all tokens from the start, the tenant's salt and
the adapter: the first 8 bytes of its name.
"""

from __future__ import annotations

import zlib

import msgspec

from engine.kv.tiers import Node

MEDIUM = "GPU"


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks in a row, each the continuation of the one before; the first one's parent is None at a prompt's start.

    `lora_id` is a number made of the adapter's name.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks that are no longer cached."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing is cached: the first event of an engine."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """What happened since the last `take`, in order; neighbours are told in one event."""

    def __init__(self, tokens_per_node: int) -> None:
        self._size = tokens_per_node
        self._events: list[Event] = [AllBlocksCleared()]
        self._last: Node | None = None  # of the event that is still growing

    def stored(self, node: Node) -> None:
        """A node got device blocks."""
        grown = self._events[-1] if self._events else None
        if isinstance(grown, BlockStored) and self._last is node.parent:
            grown.block_hashes.append(_hash(node))
            grown.token_ids.extend(node.key)
        else:
            assert node.parent is not None, "a root has no blocks"
            parent = _hash(node.parent) if node.parent.parent else None
            adapter = node.salt.partition("\0")[0]
            number = zlib.crc32(adapter.encode()) if adapter else None
            event = BlockStored([_hash(node)], parent, list(node.key), self._size, number, MEDIUM, adapter or None)
            self._events.append(event)
        self._last = node

    def removed(self, node: Node) -> None:
        """A node lost its device blocks."""
        grown = self._events[-1] if self._events else None
        if isinstance(grown, BlockRemoved):
            grown.block_hashes.append(_hash(node))
        else:
            self._events.append(BlockRemoved([_hash(node)], MEDIUM))
        self._last = None

    def take(self) -> list[Event]:
        """The events; the log is empty then."""
        events, self._events, self._last = self._events, [], None
        return events


def _hash(node: Node) -> int:
    return int.from_bytes(node.name[:8], "big")
