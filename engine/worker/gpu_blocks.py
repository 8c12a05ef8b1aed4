"""The device side of the KV operations on a GPU: swaps on a stream of their own, beside the step that computes.

A block that is on its way is remembered. Whoever touches it next waits for the last event of the side stream, on the
device; the host waits only before it reads or reuses host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from engine.attention.cache import KVCache
from engine.core.plan import Copied
from engine.errors import RequestFailed
from engine.worker.device import Bytes, Device, Event
from engine.worker.torch_blocks import TorchBlocks

STAGING_BYTES = 16 << 20  # blocks are gathered on the device, so that the bus sees long copies


class GpuBlocks(TorchBlocks):
    """Blocks of a cache on the device. Host blocks have the layout of `TorchBlocks`, in pinned memory."""

    def __init__(self, cache: KVCache, device: Device) -> None:
        super().__init__(cache)
        self._device = device
        self._moving: set[int] = set()  # device blocks that the side stream reads or writes
        self._last: Event | None = None  # of the side stream
        self._timed: list[tuple[str, int, Event, Event]] = []
        self._staged = max(1, STAGING_BYTES // self.bytes_per_block)
        shape = (self._staged, self.bytes_per_block)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=device.torch_device)

    def copy(self, src: int, dst: int, n: int) -> None:
        """See `DeviceBlocks`."""
        self.touch([*range(src, src + n), *range(dst, dst + n)])
        self._device.main.run(lambda: super(GpuBlocks, self).copy(src, dst, n))

    def read(self, src: int, into: Bytes) -> None:
        """See `DeviceBlocks`. `into` is filled when the side stream gets there; `wait` waits for it."""
        self._move("out", src, torch.from_numpy(into), self._out)

    def write(self, dst: int, data: Bytes) -> None:
        """See `DeviceBlocks`. `data` must stay as it is until `wait`."""
        self._move("in", dst, torch.from_numpy(data), self._in)

    def wait(self) -> None:
        """See `DeviceBlocks`."""
        if self._last is not None:
            self._last.wait()

    def touch(self, blocks: Iterable[int]) -> None:
        """The main stream is about to read or write these blocks: what moves them comes first."""
        if self._last is not None and not self._moving.isdisjoint(blocks):
            self._device.main.wait(self._last)
            self._moving.clear()  # the last event comes after every move

    def finished(self) -> tuple[Copied, ...]:
        """The moves that ended since the last call, by kind."""
        found: dict[str, tuple[int, float]] = {}
        while self._timed and self._timed[0][3].done():
            kind, size, began, ended = self._timed.pop(0)
            total, seconds = found.get(kind, (0, 0.0))
            found[kind] = (total + size, seconds + ended.seconds_since(began))
        return tuple(Copied(kind, *sizes) for kind, sizes in found.items())

    def commit(self, slot: int, page: int) -> None:
        """See `TorchBlocks`."""
        raise RequestFailed(f"a GPU has paged KV storage only: no page {page} of slot {slot}")

    def _move(self, kind: str, block: int, host: torch.Tensor, move: Callable[[int, torch.Tensor], None]) -> None:
        side, n = self._device.side, host.shape[0]
        side.wait(self._device.main.record())  # steps before this may still write the blocks, or read them
        began = side.record()
        for first in range(0, n, self._staged):
            part = host[first : first + self._staged]
            side.run(functools.partial(move, block + first, part))
        self._last = side.record()
        self._moving.update(range(block, block + n))
        self._timed.append((kind, n * self.bytes_per_block, began, self._last))

    def _out(self, src: int, host: torch.Tensor) -> None:
        n, at = host.shape[0], 0
        for part in self._parts:
            width = part.shape[2]
            for side in (0, 1):
                self._staging[:n, at : at + width] = part[side, src : src + n]
                at += width
        host.copy_(self._staging[:n], non_blocking=True)

    def _in(self, dst: int, host: torch.Tensor) -> None:
        n, at = host.shape[0], 0
        self._staging[:n].copy_(host, non_blocking=True)
        for part in self._parts:
            width = part.shape[2]
            for side in (0, 1):
                part[side, dst : dst + n] = self._staging[:n, at : at + width]
                at += width
