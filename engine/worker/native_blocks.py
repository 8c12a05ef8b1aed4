"""The device side of the KV operations for the CPU kernels: a block is one contiguous run of bytes."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from engine import native
from engine.errors import ConfigError, RequestFailed

Bytes = npt.NDArray[np.uint8]

HUGE_PAGE = 2 << 20
MAP_NORESERVE = 0x4000  # Linux's number; Python 3.11's mmap doesn't name it


class NativeBlocks:
    """Blocks [num_blocks, bytes_per_block] on huge pages that the system commits when they are first written.

    pages_per_slot > 0: virtual-contiguous storage. Page p of slot s is block s * pages_per_slot + p; addresses are
    reserved for all of them, memory is behind the mapped ones only, so it goes without huge pages.
    """

    def __init__(
        self, num_blocks: int, bytes_per_block: int, block_size: int, dtype: int, *, pages_per_slot: int
    ) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = bytes_per_block
        self._pages_per_slot = pages_per_slot
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        size = num_blocks * bytes_per_block
        try:
            self._memory = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"no memory for {num_blocks} KV blocks of {bytes_per_block} bytes: {error}") from error
        everything = np.frombuffer(self._memory, np.uint8)
        self._first = -everything.ctypes.data % HUGE_PAGE
        self._blocks: Bytes = everything[self._first : self._first + size].reshape(num_blocks, bytes_per_block)
        if not pages_per_slot:
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.kv = native.KV(
            data=native.pointer(self._blocks), num_blocks=num_blocks, block_size=block_size, dtype=dtype
        )

    def copy(self, src: int, dst: int, n: int) -> None:
        """See `DeviceBlocks`."""
        self._blocks[dst : dst + n] = self._blocks[src : src + n]

    def read(self, src: int, into: Bytes) -> None:
        """See `DeviceBlocks`."""
        into[:] = self._blocks[src : src + len(into)]

    def write(self, dst: int, data: Bytes) -> None:
        """See `DeviceBlocks`."""
        self._blocks[dst : dst + len(data)] = data

    def wait(self) -> None:
        """See `DeviceBlocks`. Every move has ended when it returns."""

    def commit(self, slot: int, page: int) -> None:
        """See `DeviceBlocks`. The system backs a page when it is first written."""
        self._block_of(slot, page)

    def release(self, slot: int, page: int) -> None:
        """See `DeviceBlocks`. Memory pages shared with a neighbouring block stay."""
        at = self._first + self._block_of(slot, page) * self.bytes_per_block
        start = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (at + self.bytes_per_block) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _block_of(self, slot: int, page: int) -> int:
        pages = self._pages_per_slot
        if not (0 <= page < pages and 0 <= slot * pages < self.num_blocks):
            raise RequestFailed(f"there is no page {page} of slot {slot}: a slot has {pages}")
        return slot * pages + page

    def close(self) -> None:
        """Free the memory; idempotent."""
        self.kv = native.KV()
        self._blocks = np.zeros((0, 0), np.uint8)
        if not self._memory.closed:
            self._memory.close()
