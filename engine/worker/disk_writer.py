"""Writes to the disk tier on a thread of its own: checksums and the page cache keep no step waiting.

A block is copied to a buffer first, so its place on the host may be used again at once. Writes happen in the order in
which they were asked for, and a read waits for those of its block. Buffers are few: who writes faster than the disk
takes it waits, and the end has little left to write.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections import Counter

import numpy as np
import numpy.typing as npt

from engine.errors import EngineDead
from engine.worker.tiers import DiskTier

Bytes = npt.NDArray[np.uint8]
BUFFER_BYTES = 32 << 20
NICE = 10  # below the threads that compute


class DiskWriter:
    """A `DiskTier` whose writes are done later. One thread calls it."""

    def __init__(self, disk: DiskTier, bytes_per_block: int) -> None:
        self.num_blocks = disk.num_blocks
        self._disk = disk
        self._buffers: Bytes = np.empty((max(1, BUFFER_BYTES // bytes_per_block), bytes_per_block), np.uint8)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for buffer in range(len(self._buffers)):
            self._free.put(buffer)
        self._asked: queue.SimpleQueue[tuple[int, int, bytes] | None] = queue.SimpleQueue()
        self._pending: Counter[int] = Counter()  # by disk block
        self._written = threading.Condition()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="octavo-disk", daemon=True)
        self._thread.start()

    def write(self, block: int, data: Bytes, key: bytes) -> None:
        """See `DiskTier`; `data` may change as soon as this returns. Raises EngineDead if an earlier write failed."""
        buffer = self._free.get()
        self._check()
        self._buffers[buffer] = data
        with self._written:
            self._pending[block] += 1
        self._asked.put((block, buffer, key))

    def read(self, block: int, into: Bytes) -> None:
        """See `DiskTier`."""
        with self._written:
            self._written.wait_for(lambda: not self._pending[block])
        self._check()
        self._disk.read(block, into)

    def close(self) -> None:
        """Finish what was asked for, and close the tier; idempotent."""
        if self._thread.is_alive():
            self._asked.put(None)
            self._thread.join()
        self._disk.close()

    def _check(self) -> None:
        if self._problem is not None:
            raise EngineDead(f"the disk tier can't be written: {self._problem}") from self._problem

    def _work(self) -> None:
        if sys.platform == "linux":  # elsewhere this would be the priority of the whole process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (asked := self._asked.get()) is not None:
            block, buffer, key = asked
            try:
                self._disk.write(block, self._buffers[buffer], key)
            except Exception as error:
                self._problem = error
            with self._written:
                self._pending[block] -= 1
                self._written.notify_all()
            self._free.put(buffer)
