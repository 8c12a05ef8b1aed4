"""Cached prefixes of one engine for another: read out block by block, and taken in where blocks are free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.core.plan import BlockAccess
from engine.kv.paged import PagedKV
from engine.kv.tiers import Node


class Piece(NamedTuple):
    """A run of tokens and its KV. `parent`: its place in the row of pieces, -1 = the prompt's start."""

    parent: int
    salt: str
    tokens: tuple[int, ...]
    blocks: tuple[bytes, ...]


class Taken(NamedTuple):
    """What became of the pieces."""

    taken: int
    known: int  # were cached already
    left: int  # for want of free blocks


def pieces(kv: PagedKV, access: BlockAccess) -> Iterator[Piece]:
    """What is cached on the device, each piece after its parent. Prefixes of adapters stay: they belong to a name."""
    places: dict[Node, int] = {}
    pending = [child for salt, root in kv.index.roots.items() if salt[:1] == "\0" for child in root.children.values()]
    while pending:
        node = pending.pop()
        if not node.blocks:
            continue
        parent = places.get(node.parent, -1) if node.parent else -1
        places[node] = len(places)
        pending.extend(node.children.values())
        yield Piece(parent, node.salt, node.key, tuple(access.read_block(block) for block in node.blocks))


def take(kv: PagedKV, access: BlockAccess, given: Iterable[Piece]) -> Taken:
    """Cache the pieces as if a request had computed them. Nothing that is cached is pushed out for them."""
    index, span = kv.index, kv.index.blocks_per_node
    held: list[Node | None] = []
    counts = [0, 0, 0]
    try:
        for piece in given:
            parent = held[piece.parent] if piece.parent >= 0 else None
            if piece.parent >= 0 and parent is None:
                held.append(None)
                counts[2] += 1
                continue
            node = (parent or index.root(piece.salt)).children.get(piece.tokens)
            if node is not None and node.blocks:
                for block in node.blocks:
                    index.hold(block)
                counts[1] += 1
            elif index.pool.free >= span:
                blocks = tuple(index.take() for _ in range(span))
                node = index.publish(parent, piece.salt, piece.tokens, blocks)
                for block, data in zip(blocks, piece.blocks, strict=True):
                    access.write_block(block, data)
                counts[0] += 1
            else:
                node = None
                counts[2] += 1
            held.append(node)
    finally:
        for done in reversed(held):  # the deepest first, as sequences do
            for block in reversed(done.blocks if done else ()):
                index.drop(block)
    return Taken(*counts)
