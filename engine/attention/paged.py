"""The paged layout of GPU kernels as zero-copy views of the canonical storage.

    storage  (2, num_blocks, block_size, num_kv_heads, head_size)
    key      (num_blocks, num_kv_heads, head_size // x, block_size, x)     x = 16 // element size
    value    (num_blocks, num_kv_heads, head_size, block_size)

x elements are 16 bytes: one vector load (8 elements of a 16-bit type). A view reinterprets the bytes of a block
and moves none, so a block belongs to the layout it was written through: whoever writes by one reads by the same.
Source: PagedAttention (Kwon et al. 2023).
"""

from __future__ import annotations

import torch

from engine.attention.encoding import STORAGE_DTYPES, byte_view, decode, encode

VECTOR_BYTES = 16


def split_kv_cache(kv_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Paged key and value views of one layer's storage (2, num_blocks, ...); no byte is copied.

    Raises ValueError when the blocks are not contiguous (a view would have to copy) or a head is no whole number
    of vectors.
    """
    x = VECTOR_BYTES // kv_cache.element_size()
    num_blocks = kv_cache.shape[1]
    if head_size % x:
        raise ValueError(f"head_size {head_size} is no multiple of {x} elements ({VECTOR_BYTES} bytes)")
    if not (kv_cache[0].is_contiguous() and kv_cache[1].is_contiguous()):
        raise ValueError(f"KV storage with strides {kv_cache.stride()} is not contiguous; a paged view would copy it")
    key = kv_cache[0].view(num_blocks, num_kv_heads, head_size // x, -1, x)
    value = kv_cache[1].view(num_blocks, num_kv_heads, head_size, -1)
    return key, value


def block_and_offset(slots: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical block and offset of token slots; a shift and a mask when the block size is a power of two."""
    if block_size & (block_size - 1) == 0:
        return slots >> (block_size.bit_length() - 1), slots & (block_size - 1)
    block = torch.div(slots, block_size, rounding_mode="floor")
    return block, slots - block * block_size


def write_to_paged_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Scatter new tokens into the paged views, in place.

    key, value [rows, num_kv_heads, head_size]; slot_mapping [rows], negative = padding, skipped.
    kv_cache_dtype: "auto" keeps the caches' own floating type; "int8", "fp8_e4m3", "fp8_e5m2" store
    x / scale, where a scale is one number (per tensor) or [rows, num_kv_heads] (per token and head).
    """
    dtype = key_cache.dtype if kv_cache_dtype == "auto" else STORAGE_DTYPES[kv_cache_dtype]
    if dtype.itemsize != key_cache.element_size():
        raise ValueError(f"a {key_cache.dtype} cache can't hold {kv_cache_dtype} values")
    keep = slot_mapping >= 0
    block, offset = block_and_offset(slot_mapping[keep], key_cache.shape[3])
    rows = block.shape[0]
    num_kv_heads, head_size = key.shape[1:]
    x = key_cache.shape[4]

    stored = byte_view(encode(key[keep], dtype, _of_rows(k_scale, keep)))
    # Advanced indices around a slice put the row first: [rows, kv_heads, head_size // x, x].
    byte_view(key_cache)[block, :, :, offset] = stored.view(rows, num_kv_heads, head_size // x, x)
    stored = byte_view(encode(value[keep], dtype, _of_rows(v_scale, keep)))
    byte_view(value_cache)[block, :, :, offset] = stored.view(rows, num_kv_heads, head_size)


def read_from_paged_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of token slots [tokens] as float32 [tokens, num_kv_heads, head_size].

    The scales are those that the tokens were written with.
    """
    block, offset = block_and_offset(slots, key_cache.shape[3])
    key = byte_view(key_cache)[block, :, :, offset].flatten(2)
    value = byte_view(value_cache)[block, :, :, offset]
    return (
        decode(key.contiguous().view(key_cache.dtype), k_scale),
        decode(value.contiguous().view(value_cache.dtype), v_scale),
    )


def _of_rows(scale: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return scale[keep] if scale.dim() else scale
