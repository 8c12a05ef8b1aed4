"""The seed's layouts: paged views of the canonical storage, in-place writes, every block size and KV dtype."""

from __future__ import annotations

import pytest
import torch

from engine.attention.cache import KVCache
from engine.attention.encoding import STORAGE_DTYPES, decode, encode, token_head_scales
from engine.attention.paged import read_from_paged_cache, split_kv_cache, write_to_paged_cache

KV_HEADS, HEAD_SIZE, BLOCKS = 3, 64, 5
BLOCK_SIZES = [1, 7, 16, 64, 544]
ONE = torch.tensor(1.0)


def storage(block_size: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.zeros(2, BLOCKS, block_size, KV_HEADS, HEAD_SIZE * dtype.itemsize, dtype=torch.uint8)
    return raw.view(dtype)


def some_slots(block_size: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randperm(BLOCKS * block_size, generator=generator)[:rows]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn])
def test_split_gives_views_of_the_same_bytes_with_sixteen_byte_vectors(block_size: int, dtype: torch.dtype) -> None:
    cache = storage(block_size, dtype)
    key, value = split_kv_cache(cache, KV_HEADS, HEAD_SIZE)
    x = 16 // dtype.itemsize

    assert key.shape == (BLOCKS, KV_HEADS, HEAD_SIZE // x, block_size, x)
    assert value.shape == (BLOCKS, KV_HEADS, HEAD_SIZE, block_size)
    assert key.data_ptr() == cache.data_ptr()
    assert value.data_ptr() == cache[1].data_ptr()
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    block = block_size * KV_HEADS * HEAD_SIZE
    assert key.stride() == (block, block // KV_HEADS, block_size * x, x, 1)
    assert value.stride() == (block, block // KV_HEADS, block_size, 1)


def test_split_refuses_storage_that_only_a_copy_could_rearrange() -> None:
    cache = storage(16, torch.bfloat16).transpose(2, 3)
    with pytest.raises(ValueError, match="not contiguous"):
        split_kv_cache(cache, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match="head_size 60"):
        split_kv_cache(torch.zeros(2, 4, 16, 2, 60, dtype=torch.bfloat16), 2, 60)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float32", "int8", "fp8_e4m3", "fp8_e5m2"])
def test_what_is_written_through_a_slot_mapping_is_read_back_from_it(block_size: int, kv_cache_dtype: str) -> None:
    generator = torch.Generator().manual_seed(block_size)
    rows = min(BLOCKS * block_size, 40)
    dtype = torch.bfloat16 if kv_cache_dtype == "auto" else STORAGE_DTYPES[kv_cache_dtype]
    cache = storage(block_size, dtype)
    views = split_kv_cache(cache, KV_HEADS, HEAD_SIZE)
    key = torch.randn(rows, KV_HEADS, HEAD_SIZE, generator=generator)
    value = torch.randn(rows, KV_HEADS, HEAD_SIZE, generator=generator)
    k_scale, v_scale = torch.tensor(0.5), torch.tensor(0.25)
    if kv_cache_dtype == "int8":
        k_scale, v_scale = token_head_scales(key), token_head_scales(value)
    slots = some_slots(block_size, rows, generator)

    address = cache.data_ptr()
    write_to_paged_cache(key, value, *views, slots, kv_cache_dtype, k_scale, v_scale)
    assert cache.data_ptr() == address
    read_key, read_value = read_from_paged_cache(*views, slots, k_scale, v_scale)

    assert torch.equal(read_key, decode(encode(key, dtype, k_scale), k_scale))
    assert torch.equal(read_value, decode(encode(value, dtype, v_scale), v_scale))
    # the error of one rounding: half a step of 127 for int8, 2^-4 for e4m3, 2^-3 for e5m2, 2^-8 for bfloat16
    step = {"int8": 0.5 / 127, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "auto": 2**-8, "float32": 0.0}[kv_cache_dtype]
    largest = key.abs().amax(-1, keepdim=True) if kv_cache_dtype == "int8" else key.abs() + 2**-6
    assert ((read_key - key).abs() <= step * largest * 1.001).all()


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_padding_rows_are_skipped_and_no_other_slot_changes(block_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    cache = storage(block_size, torch.float32)
    views = split_kv_cache(cache, KV_HEADS, HEAD_SIZE)
    slots = some_slots(block_size, 4, generator)
    slots[1] = -1
    rows = torch.randn(4, KV_HEADS, HEAD_SIZE, generator=generator) + 10.0
    write_to_paged_cache(rows, rows, *views, slots, "auto", ONE, ONE)
    everything = torch.arange(BLOCKS * block_size)
    key, value = read_from_paged_cache(*views, everything, ONE, ONE)
    written = torch.isin(everything, slots[slots >= 0])
    for side in (key, value):
        assert (side[~written] == 0).all()
        assert (side[written] != 0).all()


def test_a_cache_of_another_width_is_refused() -> None:
    views = split_kv_cache(storage(16, torch.bfloat16), KV_HEADS, HEAD_SIZE)
    rows = torch.zeros(1, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match="can't hold int8"):
        write_to_paged_cache(rows, rows, *views, torch.tensor([0]), "int8", ONE, ONE)


@pytest.mark.parametrize("kv_dtype", list(STORAGE_DTYPES))
def test_the_canonical_storage_reads_what_it_was_given_in_any_dtype(kv_dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    cache = KVCache.allocate(2, BLOCKS, 7, KV_HEADS, HEAD_SIZE, kv_dtype, torch.device("cpu"))
    key = torch.randn(9, KV_HEADS, HEAD_SIZE, generator=generator)
    value = torch.randn(9, KV_HEADS, HEAD_SIZE, generator=generator)
    slots = some_slots(7, 9, generator)
    cache.write(1, key, value, slots)
    read_key, read_value = cache.read(1, slots)
    for read, given in ((read_key, key), (read_value, value)):
        scale = token_head_scales(given) if kv_dtype == "int8" else 1.0
        assert torch.equal(read, decode(encode(given, STORAGE_DTYPES[kv_dtype], scale), scale))
    assert (cache.layers[0].view(torch.uint8) == 0).all()


def test_the_paged_views_of_the_storage_are_no_copies() -> None:
    cache = KVCache.allocate(1, BLOCKS, 16, KV_HEADS, HEAD_SIZE, "bfloat16", torch.device("cpu"))
    key, value = cache.paged_views(0)
    rows = torch.ones(1, KV_HEADS, HEAD_SIZE)
    write_to_paged_cache(rows, rows, key, value, torch.tensor([17]), "auto", ONE, ONE)
    assert key.data_ptr() == cache.layers[0].data_ptr()
    assert int((cache.layers[0] != 0).sum()) == 2 * KV_HEADS * HEAD_SIZE


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates_instead_of_overflowing(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    stored = encode(torch.tensor([[1e6, -1e6, 0.0]]), dtype)
    assert stored.float().tolist() == [[limit, -limit, 0.0]]


def test_int8_keeps_a_row_of_zeros_as_zeros() -> None:
    zeros = torch.zeros(2, KV_HEADS, HEAD_SIZE)
    scale = token_head_scales(zeros)
    assert torch.equal(decode(encode(zeros, torch.int8, scale), scale), zeros)
