"""Ranges of addresses that get memory part by part: what virtual-contiguous KV lies in.

On the host by mmap, on a GPU by the driver's virtual memory calls (`csrc/gpu/vmm.cpp`).
"""

from __future__ import annotations

import ctypes
import mmap
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Protocol

import torch

from engine.errors import ConfigError, OctavoError, RequestFailed

MAP_NORESERVE = 0x4000  # Linux's number; Python 3.11's mmap doesn't name it
ERROR_BYTES = 200
DRIVERS = {"cuda": ("libcuda.so.1", "cu"), "hip": ("libamdhip64.so", "hip")}


class AddressRange(Protocol):
    """`size` bytes of addresses. A part is committed once before it is touched, and released once."""

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 [size]; valid until `close`."""

    def commit(self, at: int, size: int) -> None:
        """Put memory behind [at, at + size). Raises RequestFailed, and nothing changed, when there is none."""

    def release(self, at: int, size: int) -> None:
        """Give that memory back; the part's bytes are lost."""

    def close(self) -> None:
        """Give everything back; idempotent."""


class HostRange:
    """Memory of the host, which the system commits by itself when a part is first written."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)

    def tensor(self) -> torch.Tensor:
        """See `AddressRange`."""
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def commit(self, at: int, size: int) -> None:
        """See `AddressRange`."""

    def release(self, at: int, size: int) -> None:
        """See `AddressRange`. It reads as zeros until it is written again. `at`, `size`: whole memory pages."""
        self._memory.madvise(mmap.MADV_DONTNEED, at, size)

    def close(self) -> None:
        """See `AddressRange`. The system takes it when the last tensor over it has gone."""


class DeviceRange:
    """Memory of a GPU. It comes in granules of 2 MiB or so; one stays as long as any committed part lies in it."""

    def __init__(self, size: int, device: torch.device, library: str, prefix: str) -> None:
        """`library`: the driver's file, `prefix`: of its functions. Raises ConfigError."""
        self._device = device
        self._size = size
        self._lib = _load()
        self._error = ctypes.create_string_buffer(ERROR_BYTES)
        text = (self._error, ERROR_BYTES)
        index = device.index or 0
        self._range = self._lib.oct_vmm_reserve(library.encode(), prefix.encode(), index, size, *text)
        if not self._range:
            raise ConfigError(f"no {size} bytes of addresses on {device} by {library}: {self._problem()}")

    def tensor(self) -> torch.Tensor:
        """See `AddressRange`."""
        address = int(self._lib.oct_vmm_address(self._range))
        if self._device.type == "cpu":
            return torch.frombuffer((ctypes.c_uint8 * self._size).from_address(address), dtype=torch.uint8)
        return torch.as_tensor(_Array(address, self._size), device=self._device)

    def commit(self, at: int, size: int) -> None:
        """See `AddressRange`."""
        if self._lib.oct_vmm_commit(self._range, at, size, self._error, ERROR_BYTES):
            raise RequestFailed(f"no memory for {size} bytes at {at} on {self._device}: {self._problem()}")

    def release(self, at: int, size: int) -> None:
        """See `AddressRange`. Waits for the device first: what it still runs may read the part."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._lib.oct_vmm_release(self._range, at, size, self._error, ERROR_BYTES):
            raise RequestFailed(f"{size} bytes at {at} on {self._device} can't be released: {self._problem()}")

    @property
    def committed(self) -> int:
        """Bytes of memory behind the range."""
        return int(self._lib.oct_vmm_committed(self._range))

    def close(self) -> None:
        """See `AddressRange`."""
        if self._range:
            self._lib.oct_vmm_free(self._range)
            self._range = None

    def _problem(self) -> str:
        return self._error.value.decode()


class _Array:
    """An address as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def reserve(size: int, device: torch.device) -> AddressRange:
    """A range on a device. Raises ConfigError."""
    if device.type == "cpu":
        return HostRange(size)
    return DeviceRange(size, device, *DRIVERS["hip" if torch.version.hip else "cuda"])


def commit_all(parts: list[tuple[AddressRange, int, int]]) -> None:
    """Commit every (range, at, size), or none. Raises RequestFailed."""
    done: list[tuple[AddressRange, int, int]] = []
    try:
        for memory, at, size in parts:
            memory.commit(at, size)
            done.append((memory, at, size))
    except OctavoError:
        for memory, at, size in done:
            memory.release(at, size)
        raise


def _load() -> ctypes.CDLL:
    from csrc.build import BuildError
    from csrc.build_vmm import build

    try:
        path: Path = build()
    except BuildError as error:
        raise ConfigError(f"--kv-manager virtual on a GPU needs a C++ compiler: {error}") from error
    lib = ctypes.CDLL(str(path))
    lib.oct_vmm_reserve.restype = c_void_p
    lib.oct_vmm_reserve.argtypes = (c_char_p, c_char_p, c_int, c_size_t, c_char_p, c_int)
    for name in ("commit", "release"):
        getattr(lib, f"oct_vmm_{name}").argtypes = (c_void_p, c_size_t, c_size_t, c_char_p, c_int)
    lib.oct_vmm_address.restype = c_uint64
    lib.oct_vmm_committed.restype = c_size_t
    for name in ("address", "committed", "free"):
        getattr(lib, f"oct_vmm_{name}").argtypes = (c_void_p,)
    return lib
