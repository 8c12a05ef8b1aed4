"""KV blocks outside of the device: the host pool, and the disk tier that survives a restart.

A block is opaque bytes here; what it holds is known to the prefix index alone, which gives each disk block a key.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.core.plan import Geometry
from engine.errors import ConfigError, EngineDead
from engine.model.spec import DecoderSpec
from engine.worker.settings import ExecutorSettings, host_blocks

Bytes = npt.NDArray[np.uint8]
PAGE = mmap.PAGESIZE
HEADER = 64
READ_TOGETHER = 128  # keys: kernels read whole groups of them, at most so many, and mask what lies before a window


class HostPool:
    """Swap space: blocks [num_blocks, bytes_per_block] in memory that the system commits when it is first written."""

    def __init__(self, num_blocks: int, bytes_per_block: int) -> None:
        self.blocks: Bytes = np.zeros((0, bytes_per_block), np.uint8)
        if num_blocks:
            memory = mmap.mmap(-1, num_blocks * bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            self.blocks = np.frombuffer(memory, np.uint8).reshape(num_blocks, bytes_per_block)


class DiskTier:
    """Blocks in a memory-mapped file, each with a key and a checksum over both.

    The file is named by a fingerprint of everything that decides a block's bytes (model, kernels, dtype, layout), so
    that another model's blocks are never read; files of other fingerprints in the directory are removed unless an
    engine holds them, so that the size given bounds the directory.

    File: the id of the boot it was last used in, for each block one record of 16 bytes (checksum, key length,
    0 = unknown), the keys, and from a page boundary the blocks. A record is cleared before its block is written and
    set after, so a killed process leaves no block that looks whole and isn't.
    """

    def __init__(
        self, directory: Path, size_bytes: int, bytes_per_block: int, block_size: int, fingerprint: str
    ) -> None:
        self._key_bytes = 256 + 8 * block_size
        self.num_blocks = size_bytes // (bytes_per_block + self._key_bytes + 16)
        if self.num_blocks < 1:
            raise ConfigError(f"the disk tier of {size_bytes} bytes is smaller than one KV block of {bytes_per_block}")
        self.path = directory / f"kv-{fingerprint}.blocks"
        n = self.num_blocks
        first = -(-(HEADER + n * (16 + self._key_bytes)) // PAGE) * PAGE
        self._file = self._open(first + n * bytes_per_block)
        self._map = mmap.mmap(self._file, first + n * bytes_per_block)
        everything = np.frombuffer(self._map, np.uint8)
        self._boot = everything[:HEADER]
        self._records = everything[HEADER : HEADER + 16 * n].view(np.uint64).reshape(n, 2)
        self._keys = everything[HEADER + 16 * n :][: n * self._key_bytes].reshape(n, self._key_bytes)
        self._blocks = everything[first:].reshape(n, bytes_per_block)

    def _open(self, size: int) -> int:
        """A file of that size whose room on the disk is taken now: a full disk must not surface as a bus error."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            if not _lock(file):
                raise ConfigError(f"another engine uses the disk tier {self.path}; give each a directory of its own")
            _remove_unused(self.path)
            if os.fstat(file).st_size != size:
                os.ftruncate(file, 0)  # another size is another layout: nothing in it can be used
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            raise ConfigError(f"the disk tier can't use {self.path} ({size} bytes): {error.strerror}") from error
        return file

    def index(self) -> tuple[tuple[int, bytes], ...]:
        """Known blocks with their keys.

        Within one boot the system keeps what a killed process had written; after another boot (the power may have
        failed), or when one was found damaged, every block is read and those that are damaged are cleared.
        """
        boot = np.frombuffer(Path("/proc/sys/kernel/random/boot_id").read_bytes()[:36].ljust(HEADER), np.uint8)
        if not (self._boot == boot).all():
            for block in np.flatnonzero(self._records[:, 1]).tolist():
                if not self._is_whole(block):
                    self._records[block] = 0
            self._boot[:] = boot
        known = np.flatnonzero(self._records[:, 1]).tolist()
        return tuple((block, self._keys[block, : int(self._records[block, 1])].tobytes()) for block in known)

    def write(self, block: int, data: Bytes, key: bytes) -> None:
        """Keep a block. A key that is empty or too long leaves it readable now but unknown after a restart."""
        self._records[block] = 0
        self._blocks[block] = data
        key = key if len(key) <= self._key_bytes else b""
        self._keys[block, : len(key)] = np.frombuffer(key, np.uint8)
        self._records[block, 0] = self._checksum(block, len(key))
        self._records[block, 1] = len(key)

    def read(self, block: int, into: Bytes) -> None:
        """Bring a block back.

        Raises EngineDead when its bytes are not what was written: the prefix index counts on them for whoever comes,
        so only a fresh engine can go on. It finds the block cleared, and checks all others, lest each of them end it.
        """
        if not self._is_whole(block):
            self._records[block] = 0
            self._boot[:] = 0
            raise EngineDead(f"KV block {block} in {self.path} is damaged: its checksum doesn't match")
        into[:] = self._blocks[block]

    def _is_whole(self, block: int) -> bool:
        checksum, key_length = self._records[block].tolist()
        return self._checksum(block, int(key_length)) == int(checksum)

    def _checksum(self, block: int, key_length: int) -> int:
        key = self._keys[block, :key_length]
        return zlib.crc32(self._blocks[block].data, zlib.crc32(key.data))

    def close(self) -> None:
        """Unmap the file; the system writes what it holds in its own time, for the next run. Idempotent."""
        if self._file < 0:
            return
        self._boot = self._keys = self._blocks = np.zeros((0, 0), np.uint8)
        self._records = np.zeros((0, 2), np.uint64)
        self._map.close()
        os.close(self._file)
        self._file = -1


def _lock(file: int) -> bool:
    """Hold the file as long as it is open; False when another process does."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unused(path: Path) -> None:
    for other in path.parent.glob("kv-*.blocks"):
        if other != path:
            file = os.open(other, os.O_RDWR)
            if _lock(file):
                other.unlink()
            os.close(file)


def open_tiers(settings: ExecutorSettings, bytes_per_block: int, fingerprint: str) -> tuple[HostPool, DiskTier | None]:
    """The host pool, and the disk tier if there is one. Raises ConfigError."""
    host = HostPool(host_blocks(settings, bytes_per_block), bytes_per_block)
    if not settings.disk_dir:
        return host, None
    disk = DiskTier(Path(settings.disk_dir), settings.disk_bytes, bytes_per_block, settings.block_size, fingerprint)
    return host, disk


def geometry_of(
    settings: ExecutorSettings,
    spec: DecoderSpec,
    num_blocks: int,
    bytes_per_block: int,
    host: HostPool,
    disk: DiskTier | None,
) -> Geometry:
    """What an executor with these pools offers."""
    return Geometry(
        num_blocks=num_blocks,
        block_size=settings.block_size,
        host_blocks=len(host.blocks),
        disk_blocks=disk.num_blocks if disk else 0,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        vocab_size=spec.vocab_size,
        bytes_per_block=bytes_per_block,
        hidden_size=spec.hidden_size,
        window=spec.widest_window and spec.widest_window + READ_TOGETHER,
        pages_per_slot=-(-settings.max_model_len // settings.block_size),
        disk_index=disk.index() if disk else (),
    )
