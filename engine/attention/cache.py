"""The canonical KV storage of torch backends.

Per layer one tensor (2, num_blocks, block_size, num_kv_heads, head_size): keys at index 0, values at 1; int8 keeps
its scales beside it. Moving blocks never re-rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.encoding import STORAGE_DTYPES, byte_view, decode, encode, token_head_scales
from engine.attention.paged import split_kv_cache


@dataclass(slots=True)
class KVCache:
    """Keys and values of all layers, read and written by token slot (block * block_size + offset)."""

    layers: list[torch.Tensor]  # each (2, num_blocks, block_size, num_kv_heads, head_size)
    scales: list[torch.Tensor]  # int8: each (2, num_blocks, block_size, num_kv_heads) float32; else empty
    fp8_scale: float = 1.0

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        kv_dtype: str,
        device: torch.device,
    ) -> KVCache:
        """Zeroed storage on one device."""
        shape = (2, num_blocks, block_size, num_kv_heads, head_size)
        dtype = STORAGE_DTYPES[kv_dtype]
        layers = [
            torch.zeros(*shape[:-1], head_size * dtype.itemsize, dtype=torch.uint8, device=device).view(dtype)
            for _ in range(num_layers)
        ]
        scales = (
            [torch.zeros(shape[:-1], dtype=torch.float32, device=device) for _ in range(num_layers)]
            if kv_dtype == "int8"
            else []
        )
        return cls(layers, scales)

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.layers[0].shape[2]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Scatter k, v [rows, kv_heads, head_size] to their token slots [rows]; negative slots are padding."""
        if bool((slot_mapping < 0).any()):
            keep = slot_mapping >= 0
            k, v, slot_mapping = k[keep], v[keep], slot_mapping[keep]
        storage = self.layers[layer]
        for side, x in enumerate((k, v)):
            scale: torch.Tensor | float = self.fp8_scale
            if self.scales:
                scale = token_head_scales(x)
                self.scales[layer][side].flatten(0, 1)[slot_mapping] = scale
            flat = byte_view(storage[side].flatten(0, 1))  # [num_blocks * block_size, kv_heads, head_size]
            flat[slot_mapping] = byte_view(encode(x, storage.dtype, scale))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of token slots [tokens] as float32 [tokens, kv_heads, head_size]."""
        storage = self.layers[layer]
        sides: list[torch.Tensor] = []
        for side in (0, 1):
            stored = byte_view(storage[side].flatten(0, 1))[slots].view(storage.dtype)
            scale: torch.Tensor | float = self.fp8_scale
            if self.scales:
                scale = self.scales[layer][side].flatten(0, 1)[slots]
            sides.append(decode(stored, scale))
        return sides[0], sides[1]

    def paged_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same bytes as a paged kernel reads them; see `paged.split_kv_cache`."""
        storage = self.layers[layer]
        return split_kv_cache(storage, storage.shape[3], storage.shape[4])
