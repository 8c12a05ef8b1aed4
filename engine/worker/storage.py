"""Runs a plan's KV operations: copies, swaps and tier moves, batched into contiguous runs.

Bytes are moved, never re-rounded, so a block that went out and came back is the block it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.core.plan import Copied, KVOp
from engine.errors import OctavoError, RequestFailed
from engine.worker.disk_writer import DiskWriter
from engine.worker.tiers import DiskTier, HostPool

Bytes = npt.NDArray[np.uint8]


class DeviceBlocks(Protocol):
    """The device's blocks as the storage moves them: n consecutive ones at a time."""

    num_blocks: int
    bytes_per_block: int

    def copy(self, src: int, dst: int, n: int) -> None:
        """Device to device; the two ranges don't overlap."""

    def read(self, src: int, into: Bytes) -> None:
        """Device to host. into [n, bytes_per_block]."""

    def write(self, dst: int, data: Bytes) -> None:
        """Host to device. data [n, bytes_per_block]."""

    def wait(self) -> None:
        """Until host memory that `read` and `write` were given may be used again."""

    def commit(self, slot: int, page: int) -> None:
        """Back page `page` of a slot's reserved range with memory (virtual-contiguous storage)."""

    def release(self, slot: int, page: int) -> None:
        """Give that page's memory back."""


@dataclass(frozen=True, slots=True)
class Run:
    """n operations of one kind on consecutive sources and consecutive destinations."""

    kind: str
    src: int
    dst: int
    n: int


def runs(ops: tuple[KVOp, ...]) -> Iterator[Run]:
    """The same effect as the operations one by one, in few moves.

    Neighbours of one kind are reordered only when none of them touches what another of them writes.
    """
    for kind, group in groupby(ops, key=lambda op: op.kind):
        batch = list(group)
        sources, targets = {op.src for op in batch}, {op.dst for op in batch}
        chained = kind == "copy" and bool(sources & targets)
        if kind in ("map", "unmap") or chained or len(targets) < len(batch):
            yield from (Run(kind, op.src, op.dst, 1) for op in batch)
            continue
        batch.sort(key=lambda op: op.src)
        first, n = batch[0], 1
        for op in batch[1:]:
            if op.src == first.src + n and op.dst == first.dst + n:
                n += 1
                continue
            yield Run(kind, first.src, first.dst, n)
            first, n = op, 1
        yield Run(kind, first.src, first.dst, n)


class KVStorage:
    """Device blocks, host pool and disk tier of one executor."""

    def __init__(self, device: DeviceBlocks, host: HostPool, disk: DiskTier | None) -> None:
        self._device = device
        self._host = host.blocks
        self._disk = DiskWriter(disk, device.bytes_per_block) if disk is not None else None

    def run(self, ops: tuple[KVOp, ...], disk_keys: dict[int, bytes]) -> tuple[Copied, ...]:
        """Run the operations in order. Returns what was moved, by kind.

        An operation that fails keeps none of the others from running: they may belong to sequences that are not in
        this plan. The first failure is raised at the end.
        """
        blocks: dict[str, int] = {}
        seconds: dict[str, float] = {}
        failure: OctavoError | None = None
        for run in runs(ops):
            start = time.perf_counter()
            try:
                self._check(run)
                self._move(run, disk_keys)
            except OctavoError as error:
                failure = failure or error
            if run.kind not in ("map", "unmap"):
                blocks[run.kind] = blocks.get(run.kind, 0) + run.n
                seconds[run.kind] = seconds.get(run.kind, 0.0) + time.perf_counter() - start
        if failure is not None:
            raise failure
        size = self._device.bytes_per_block
        return tuple(Copied(kind, n * size, seconds[kind]) for kind, n in blocks.items())

    def _move(self, run: Run, disk_keys: dict[int, bytes]) -> None:
        device, host, (src, dst, n) = self._device, self._host, (run.src, run.dst, run.n)
        match run.kind:
            case "copy":
                device.copy(src, dst, n)
            case "out":
                device.read(src, host[dst : dst + n])
            case "in":
                device.write(dst, host[src : src + n])
            case "map":
                device.commit(src, dst)
            case "unmap":
                device.release(src, dst)
            case "disk_out" if self._disk is not None:
                device.wait()
                for i in range(n):
                    self._disk.write(dst + i, host[src + i], disk_keys.get(dst + i, b""))
            case "disk_in" if self._disk is not None:
                device.wait()
                for i in range(n):
                    self._disk.read(src + i, host[dst + i])

    def _check(self, run: Run) -> None:
        """Block ids index raw memory: none outside of its pool gets further."""
        disk = self._disk.num_blocks if self._disk is not None else 0
        device, host = self._device.num_blocks, len(self._host)
        limits = {
            "copy": (device, device),
            "out": (device, host),
            "in": (host, device),
            "disk_out": (host, disk),
            "disk_in": (disk, host),
        }
        if run.kind not in limits:
            return
        for first, limit in zip((run.src, run.dst), limits[run.kind], strict=True):
            if first < 0 or first + run.n > limit:
                raise RequestFailed(f"KV operation {run.kind} {run.src} -> {run.dst} is outside of its {limit} blocks")

    def read_block(self, block: int) -> bytes:
        """See `BlockAccess`."""
        into = np.empty((1, self._device.bytes_per_block), np.uint8)
        self._device.read(block, into)
        return into.tobytes()

    def write_block(self, block: int, data: bytes) -> None:
        """See `BlockAccess`."""
        if not 0 <= block < self._device.num_blocks or len(data) != self._device.bytes_per_block:
            raise RequestFailed(f"{len(data)} bytes can't become KV block {block}")
        self._device.write(block, np.frombuffer(data, np.uint8)[None])

    def close(self) -> None:
        """Close the disk tier; idempotent."""
        if self._disk is not None:
            self._disk.close()
