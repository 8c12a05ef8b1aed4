"""The device side of the KV operations for torch storage."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.cache import KVCache
from engine.attention.contiguous import VirtualCache
from engine.attention.encoding import STORAGE_DTYPES
from engine.errors import RequestFailed
from engine.model.spec import DecoderSpec

Bytes = npt.NDArray[np.uint8]


class TorchBlocks:
    """Moves blocks of a `KVCache`. On the host a block is the bytes of its layers one after another, each as keys,
    values and, for int8, their scales."""

    def __init__(self, cache: KVCache) -> None:
        self.num_blocks = cache.layers[0].shape[1]
        # [2, num_blocks, bytes of one side of one block]
        tensors = (
            [t for pair in zip(cache.layers, cache.scales, strict=True) for t in pair] if cache.scales else cache.layers
        )
        self._parts = [t.view(torch.uint8).flatten(2) for t in tensors]
        self.bytes_per_block = sum(2 * part.shape[2] for part in self._parts)

    def copy(self, src: int, dst: int, n: int) -> None:
        """See `DeviceBlocks`."""
        for part in self._parts:
            part[:, dst : dst + n] = part[:, src : src + n]

    def read(self, src: int, into: Bytes) -> None:
        """See `DeviceBlocks`."""
        n, at = len(into), 0
        for part in self._parts:
            width = part.shape[2]
            sides = part[:, src : src + n].cpu().numpy()  # [2, n, width]
            into[:, at : at + width], into[:, at + width : at + 2 * width] = sides[0], sides[1]
            at += 2 * width

    def write(self, dst: int, data: Bytes) -> None:
        """See `DeviceBlocks`."""
        n, at = len(data), 0
        for part in self._parts:
            width = part.shape[2]
            for side in (0, 1):
                piece = np.ascontiguousarray(data[:, at : at + width])
                part[side, dst : dst + n] = torch.from_numpy(piece).to(part.device)
                at += width

    def wait(self) -> None:
        """See `DeviceBlocks`. Every move has ended when it returns."""

    def commit(self, slot: int, page: int) -> None:
        """Paged storage is there from the start: nothing to map."""
        raise RequestFailed(f"paged KV storage has no page {page} of slot {slot} to map")

    def release(self, slot: int, page: int) -> None:
        """See `commit`."""
        raise RequestFailed(f"paged KV storage has no page {page} of slot {slot} to unmap")


class VirtualBlocks(TorchBlocks):
    """The same over reserved ranges, whose pages are mapped and unmapped."""

    def __init__(self, cache: VirtualCache) -> None:
        super().__init__(cache)
        self._cache = cache

    def commit(self, slot: int, page: int) -> None:
        """See `DeviceBlocks`."""
        self._cache.commit(slot, page)

    def release(self, slot: int, page: int) -> None:
        """See `DeviceBlocks`."""
        self._cache.release(slot, page)


def block_bytes(spec: DecoderSpec, block_size: int, kv_dtype: str) -> int:
    """Bytes of one block over all layers: keys, values and, for int8, a float32 scale per token and head."""
    per_head = spec.head_size * STORAGE_DTYPES[kv_dtype].itemsize + (4 if kv_dtype == "int8" else 0)
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * per_head
