"""Cached prefixes in a file, for another replica: written by one engine, verified whole and taken in by another.

File: MAGIC, then frames of a length (4 bytes, little-endian) and msgpack: a `Head`; for each piece an `Entry`, behind
it the bytes of its blocks; an `End`. Every entry has a checksum over its tokens and bytes, and the end counts them.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from engine.core.handover import Piece, Taken
from engine.errors import InvalidRequest

MAGIC = b"octavo kv 1\n"
MOST = 1 << 20  # bytes of one frame


class Head(msgspec.Struct, frozen=True, tag="head"):
    """What the bytes mean: only an engine whose identity is equal can use them."""

    identity: dict[str, str]
    bytes_per_block: int
    blocks_per_piece: int
    tokens_per_piece: int


class Entry(msgspec.Struct, frozen=True, tag="piece"):
    parent: int
    salt: str
    tokens: tuple[int, ...]
    checksum: int


class End(msgspec.Struct, frozen=True, tag="end"):
    count: int


class Source(Protocol):
    """What is needed of `engine.core.engine.EngineCore`."""

    def handover_head(self) -> tuple[dict[str, str], int, int, int]:
        """The fields of `Head`. Raises InvalidRequest where prefixes can't be handed over."""

    def pieces(self) -> Iterator[Piece]: ...
    def take_pieces(self, given: Iterator[Piece]) -> Taken: ...


def export_kv(core: Source, path: Path) -> dict[str, Any]:
    """Write what is cached on the device; the file appears when it is whole. Raises InvalidRequest."""
    head = Head(*core.handover_head())
    count = 0
    try:
        file, name = tempfile.mkstemp(dir=path.parent, prefix=".octavo-kv-")
        try:
            with os.fdopen(file, "wb") as out:
                out.write(MAGIC)
                _write(out, head)
                for piece in core.pieces():
                    _write(out, Entry(piece.parent, piece.salt, piece.tokens, _checksum(piece)))
                    out.writelines(piece.blocks)
                    count += 1
                _write(out, End(count))
                size = out.tell()
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise InvalidRequest(f"{path.name} can't be written: {error.strerror}") from None
    return {"file": path.name, "tokens": count * head.tokens_per_piece, "bytes": size}


def import_kv(core: Source, path: Path) -> dict[str, Any]:
    """Verify a file, then cache what it holds. Raises InvalidRequest for one that can't be used: nothing changed."""
    want = Head(*core.handover_head())
    try:
        with path.open("rb") as file:
            for _ in _read(file, want, path.name):
                pass
            file.seek(0)
            taken = core.take_pieces(_read(file, want, path.name))
    except OSError as error:
        raise InvalidRequest(f"{path.name} can't be read: {error.strerror}") from None
    size = want.tokens_per_piece
    return {
        "file": path.name,
        "tokens": taken.taken * size,
        "known_tokens": taken.known * size,
        "left_tokens": taken.left * size,
    }


def _write(out: IO[bytes], frame: Head | Entry | End) -> None:
    data = msgspec.msgpack.encode(frame)
    out.write(struct.pack("<I", len(data)) + data)


def _read(file: IO[bytes], want: Head, name: str) -> Iterator[Piece]:
    """The pieces of a file. Raises InvalidRequest at the first byte that isn't right."""
    if file.read(len(MAGIC)) != MAGIC:
        raise InvalidRequest(f"{name} is no file of exported prefixes")
    head = _frame(file, name)
    if not isinstance(head, Head):
        raise InvalidRequest(f"{name} is damaged: it has no head")
    _compare(head, want, name)
    count = 0
    while isinstance(entry := _frame(file, name), Entry):
        blocks = tuple(file.read(want.bytes_per_block) for _ in range(want.blocks_per_piece))
        piece = Piece(entry.parent, entry.salt, entry.tokens, blocks)
        whole = len(entry.tokens) == want.tokens_per_piece and -1 <= entry.parent < count
        if not whole or _checksum(piece) != entry.checksum:
            raise InvalidRequest(f"{name} is damaged: the checksum of its piece {count} doesn't match")
        yield piece
        count += 1
    if not isinstance(entry, End) or entry.count != count or file.read(1):
        raise InvalidRequest(f"{name} is damaged: it should end after {count} pieces")


def _frame(file: IO[bytes], name: str) -> Head | Entry | End:
    with contextlib.suppress(struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        (size,) = struct.unpack("<I", file.read(4))
        if size <= MOST:
            return msgspec.msgpack.decode(file.read(size), type=Head | Entry | End)
    raise InvalidRequest(f"{name} is damaged: at byte {file.tell()} it can't be read")


def _compare(head: Head, want: Head, name: str) -> None:
    """Raise with the first thing that differs."""
    theirs, ours = ({**h.identity, "block bytes": str(h.bytes_per_block)} for h in (head, want))
    for what in sorted({*theirs, *ours}):
        if theirs.get(what) != ours.get(what):
            raise InvalidRequest(
                f"{name} can't be used here: its {what} is {theirs.get(what)}, that of this engine {ours.get(what)}"
            )
    if (head.blocks_per_piece, head.tokens_per_piece) != (want.blocks_per_piece, want.tokens_per_piece):
        raise InvalidRequest(f"{name} can't be used here: its blocks are of another size")


def _checksum(piece: Piece) -> int:
    total = zlib.crc32(msgspec.msgpack.encode((piece.parent, piece.salt, piece.tokens)))
    for block in piece.blocks:
        total = zlib.crc32(block, total)
    return total
