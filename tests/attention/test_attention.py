"""Attention backends against float64 arithmetic written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import AttentionBackend, AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.contiguous import ContiguousAttention, VirtualCache
from engine.attention.reference import ReferenceAttention
from engine.errors import ConfigError
from engine.model.spec import DecoderSpec, LayerSpec

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 64
LENGTHS = [1, 5, 40, 70]
SLOTS, MAX_LEN = 6, 128


def decoder_spec(window: int = 0, softcap: float = 0.0) -> DecoderSpec:
    return DecoderSpec(
        family="test",
        vocab_size=10,
        hidden_size=HEADS * HEAD_SIZE,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        intermediate_size=8,
        max_position=MAX_LEN,
        attn_scale=HEAD_SIZE**-0.5,
        attn_softcap=softcap,
        layers=(LayerSpec(window=window),) * 2,
    )


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, window: int, softcap: float) -> np.ndarray:
    out = np.zeros(q.shape)
    for row in range(len(q)):
        last = position + row
        first = max(0, last - window + 1) if window else 0
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = k[first : last + 1, kv] @ q[row, head] * HEAD_SIZE**-0.5
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            p = np.exp(scores - scores.max())
            out[row, head] = (p / p.sum()) @ v[first : last + 1, kv]
    return out


class Pass:
    """Random sequences of LENGTHS tokens in shuffled blocks (or their slots' ranges), run in chunks."""

    def __init__(self, block_size: int, *, contiguous: bool) -> None:
        generator = torch.Generator().manual_seed(4)
        pages = -(-MAX_LEN // block_size)
        blocks = torch.arange(SLOTS * pages) if contiguous else torch.randperm(SLOTS * pages, generator=generator)
        self.tables = blocks.view(SLOTS, pages)
        self.block_size = block_size
        self.q = [torch.randn(n, HEADS, HEAD_SIZE, generator=generator) for n in LENGTHS]
        self.k = [torch.randn(n, KV_HEADS, HEAD_SIZE, generator=generator) for n in LENGTHS]
        self.v = [torch.randn(n, KV_HEADS, HEAD_SIZE, generator=generator) for n in LENGTHS]

    def run(self, backend: AttentionBackend, layer: int, chunk: int, slots: list[int]) -> list[torch.Tensor]:
        """All sequences `chunk` tokens at a time, those with rows left in one batch."""
        out = [torch.zeros_like(q) for q in self.q]
        for start in range(0, max(LENGTHS), chunk):
            here = [i for i, n in enumerate(LENGTHS) if start < n]
            ends = [min(start + chunk, LENGTHS[i]) for i in here]
            positions = [torch.arange(start, end) for end in ends]
            mapping = [
                self.tables[slots[i]][p // self.block_size] * self.block_size + p % self.block_size
                for i, p in zip(here, positions, strict=True)
            ]
            q_start = [0, *np.cumsum([end - start for end in ends]).tolist()]
            backend.plan(
                AttentionBatch(q_start, [start] * len(here), [slots[i] for i in here], self.tables, torch.cat(mapping))
            )
            q, k, v = (
                torch.cat([x[i][start:end] for i, end in zip(here, ends, strict=True)])
                for x in (self.q, self.k, self.v)
            )
            got = torch.zeros_like(q)
            backend.run(layer, q, k, v, got)
            for i, first, last, end in zip(here, q_start, q_start[1:], ends, strict=False):
                out[i][start:end] = got[first:last]
        return out


def assert_exact(work: Pass, out: list[torch.Tensor], window: int, softcap: float, tolerance: float) -> None:
    for q, k, v, got in zip(work.q, work.k, work.v, out, strict=True):
        want = exact(q.double().numpy(), k.double().numpy(), v.double().numpy(), 0, window, softcap)
        assert np.abs(got.double().numpy() - want).max() < tolerance


@pytest.mark.parametrize("block_size", [1, 7, 16, 544])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (9, 0.0), (0, 5.0), (33, 2.0)])
@pytest.mark.parametrize("chunk", [13, 100])
def test_the_reference_is_exact_for_windows_soft_caps_and_chunks(
    block_size: int, window: int, softcap: float, chunk: int
) -> None:
    spec = decoder_spec(window, softcap)
    work = Pass(block_size, contiguous=False)
    cache = KVCache.allocate(2, work.tables.numel(), block_size, KV_HEADS, HEAD_SIZE, "float32", torch.device("cpu"))
    out = work.run(ReferenceAttention(spec, cache), 1, chunk, [3, 0, 5, 1])
    assert_exact(work, out, window, softcap, 1e-5)


@pytest.mark.parametrize(  # roundings of the stored dtype, on values of up to 4
    ("kv_dtype", "tolerance"), [("bfloat16", 0.03), ("int8", 0.06), ("fp8_e4m3", 0.25), ("fp8_e5m2", 0.5)]
)
def test_narrow_kv_stays_near(kv_dtype: str, tolerance: float) -> None:
    work = Pass(16, contiguous=False)
    cache = KVCache.allocate(2, work.tables.numel(), 16, KV_HEADS, HEAD_SIZE, kv_dtype, torch.device("cpu"))
    out = work.run(ReferenceAttention(decoder_spec(), cache), 0, 100, [3, 0, 5, 1])
    assert_exact(work, out, 0, 0.0, tolerance)


def test_what_a_sequence_gets_is_the_same_bits_alone_and_in_a_batch() -> None:
    work = Pass(16, contiguous=False)
    spec = decoder_spec()

    def cache() -> KVCache:
        return KVCache.allocate(2, work.tables.numel(), 16, KV_HEADS, HEAD_SIZE, "bfloat16", torch.device("cpu"))

    together = work.run(ReferenceAttention(spec, cache()), 0, 100, [3, 0, 5, 1])
    tables, q, k, v = work.tables, work.q, work.k, work.v
    for i, slot in enumerate([3, 0, 5, 1]):
        n = LENGTHS[i]
        backend = ReferenceAttention(spec, cache())
        at = torch.arange(n)
        backend.plan(AttentionBatch([0, n], [0], [slot], tables, tables[slot][at // 16] * 16 + at % 16))
        alone = torch.zeros_like(q[i])
        backend.run(0, q[i], k[i], v[i], alone)
        assert torch.equal(alone, together[i])


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("chunk", [13, 100])
def test_an_unmodified_contiguous_attention_serves_from_reserved_ranges(window: int, chunk: int) -> None:
    spec = decoder_spec(window)
    work = Pass(32, contiguous=True)
    cache = VirtualCache.reserve(spec, SLOTS, MAX_LEN // 32, 32, "float32")
    out = work.run(ContiguousAttention(spec, cache), 1, chunk, [3, 0, 5, 1])
    assert_exact(work, out, window, 0.0, 1e-5)
    keys, _ = cache.sequence(1, 5, 40)
    assert keys.untyped_storage().data_ptr() == cache.layers[1].untyped_storage().data_ptr()
    assert torch.equal(keys, work.k[2])


def test_reserved_memory_costs_only_what_is_written_and_a_released_page_comes_back_as_zeros() -> None:
    spec = decoder_spec()
    cache = VirtualCache.reserve(spec, 64, 4096, 32, "bfloat16")  # 4 GiB of addresses a layer
    assert sum(layer.numel() * 2 for layer in cache.layers) >= 8 << 30
    before = resident_bytes()
    rows = torch.ones(64, KV_HEADS, HEAD_SIZE)
    for page in (0, 1):
        cache.commit(40, page)
    cache.write(0, rows, rows, torch.arange(64) + 40 * 4096 * 32)
    assert resident_bytes() - before < 64 << 20

    keys, values = cache.sequence(0, 40, 64)
    cache.release(40, 1)
    assert keys[:32].min() == values[:32].min() == 1
    assert keys[32:].abs().max() == values[32:].abs().max() == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_what_the_virtual_cache_cannot_hold_is_refused_with_the_size_that_works() -> None:
    with pytest.raises(ConfigError, match="a multiple of 16"):
        VirtualCache.reserve(decoder_spec(), SLOTS, 8, 24, "bfloat16")
    with pytest.raises(ConfigError, match="not int8"):
        VirtualCache.reserve(decoder_spec(), SLOTS, 8, 32, "int8")
    cache = VirtualCache.reserve(decoder_spec(), SLOTS, 4, 32, "float32")
    with pytest.raises(ConfigError, match="soft cap"):
        ContiguousAttention(decoder_spec(softcap=3.0), cache)
