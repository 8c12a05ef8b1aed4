"""Kernels on a device: right against float64, and decode attention against the bandwidth measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention import AttentionBackend, AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.gpu_kernels import AUTO, PLAIN, TENSOR, GpuKernels, Pages
from engine.attention.paged import read_from_paged_cache, split_kv_cache
from engine.attention.reference import ReferenceAttention, attend, causal_mask
from engine.attention.sequences import Sequences
from engine.bench.gpu_model import spec_of

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16  # a layer of an 8B model
CELLS = [(b, n) for b in (1, 4, 16, 64, 256) for n in (1024, 4096, 32768) if b * n <= 1 << 20]
CACHE_BYTES = 180 << 20  # more than a GPU's own cache holds: inputs rotate over that much
COPY_BYTES = 2 << 30


@dataclass(frozen=True)
class Layer:
    """A filled cache of random values with scattered blocks, and one query row for each sequence."""

    pages: Pages
    seqs: Sequences
    q: torch.Tensor

    @classmethod
    def random(cls, batch: int, tokens: int, kv_dtype: str, device: torch.device) -> Layer:
        blocks, stored = tokens // BLOCK, STORAGE_DTYPES[kv_dtype]
        shape = (2, batch * blocks, BLOCK, KV_HEADS, HEAD_SIZE)
        storage = torch.randn(shape, device=device, dtype=torch.bfloat16).to(stored)
        scale = torch.ones(1, device=device) if stored.itemsize == 1 else None
        pages = Pages(*split_kv_cache(storage, KV_HEADS, HEAD_SIZE), scale, scale)
        tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
        lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        seqs = Sequences(tables, torch.arange(batch + 1, dtype=torch.int32, device=device), lens, 1, tokens)
        return cls(pages, seqs, torch.randn(batch, HEADS, HEAD_SIZE, device=device, dtype=torch.bfloat16))


def correctness(kernels: GpuKernels, device: torch.device, tokens: int = 1024) -> dict[str, float]:
    """Largest differences from float32 over the cache. Raises AssertionError above what rounding explains."""
    worst: dict[str, float] = {}
    paths = {"tensor cores": (TENSOR, "bfloat16"), "plain": (PLAIN, "bfloat16"), "fp8": (PLAIN, "fp8_e4m3")}
    if kernels.platform == "hip":
        del paths["tensor cores"]
    one = torch.ones((), device=device)
    for name, (path, kv_dtype) in paths.items():
        layer = Layer.random(3, tokens, kv_dtype, device)
        out = torch.empty_like(layer.q)
        kernels.attention(out, layer.q, layer.pages, layer.seqs, HEAD_SIZE**-0.5, path=path)
        for i in range(3):
            at = torch.arange(tokens, device=device)
            slots = layer.seqs.tables[i].long()[at // BLOCK] * BLOCK + at % BLOCK
            k, v = read_from_paged_cache(layer.pages.key, layer.pages.value, slots, one, one)
            mask = causal_mask(1, tokens - 1, 0, device)
            expected = attend(layer.q[i : i + 1], k, v, mask, HEAD_SIZE**-0.5, 0.0)
            worst[name] = max(worst.get(name, 0.0), float((out[i : i + 1].float() - expected).abs().max()))
        assert worst[name] < 2e-2, f"{name}: off by {worst[name]}"
    return worst


def triton_correctness(device: torch.device, block_size: int = 544) -> dict[str, float]:
    """The same for the Triton kernels at a block size that the native ones don't have."""
    from engine.attention.triton_attention import TritonAttention

    spec = spec_of({"hidden": 1, "layers": 1, "heads": 8, "kv_heads": 2, "head": 80, "inter": 1, "vocab": 1}, 4096)
    caches = [KVCache.allocate(1, 8, block_size, 2, 80, "bfloat16", device) for _ in range(2)]
    backends: list[AttentionBackend] = [TritonAttention(spec, caches[0]), ReferenceAttention(spec, caches[1])]
    tables = torch.tensor([[3, 1], [6, 0]], device=device)
    worst = 0.0
    for starts, counts in (([0, 0], [700, 40]), ([700, 40], [1, 1])):
        at = [torch.arange(p, p + n, device=device) for p, n in zip(starts, counts, strict=True)]
        mapping = torch.cat([tables[i][p // block_size] * block_size + p % block_size for i, p in enumerate(at)])
        batch = AttentionBatch([0, counts[0], sum(counts)], starts, [0, 1], tables, mapping)
        q, k, v = (torch.randn(sum(counts), h, 80, device=device, dtype=torch.bfloat16) for h in (8, 2, 2))
        outs = [torch.empty_like(q) for _ in backends]
        for backend, out in zip(backends, outs, strict=True):
            backend.plan(batch)
            backend.run(0, q, k, v, out)
        worst = max(worst, float((outs[0].float() - outs[1].float()).abs().max()))
    assert worst < 3e-2, f"Triton at block size {block_size}: off by {worst}"
    return {f"block size {block_size}": worst}


def row_bits(device: torch.device, tile: int, inner: int = 4096) -> dict[str, bool]:
    """Whether a row of a product of `tile` rows gets the same bits at every place and beside any others."""
    weight = torch.randn(inner, inner, device=device, dtype=torch.bfloat16)
    rows = torch.randn(tile, inner, device=device, dtype=torch.bfloat16)
    whole = F.linear(rows, weight)
    order = torch.randperm(tile, device=device)
    moved = F.linear(rows[order], weight)
    beside = torch.zeros_like(rows)
    beside[0] = rows[0]
    found = {
        "at every place": torch.equal(moved, whole[order]),
        "beside any rows": torch.equal(F.linear(beside, weight)[0], whole[0]),
    }
    assert all(found.values()), f"products of {tile} rows depend on the batch: {found}"
    return found


def seconds(work: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of `work`; of a graph of it where the device has graphs, so that launches don't count."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 3):
        first, last = torch.Event(device=device, enable_timing=True), torch.Event(device=device, enable_timing=True)
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) / 1e3)
    return sorted(times[3:])[repeats // 2]


def copy_rate(device: torch.device, size: int = COPY_BYTES) -> float:
    """Bytes read and written per second by a copy."""
    src = torch.ones(size, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return 2 * size / seconds(lambda: dst.copy_(src), device)


def decode_cells(
    kernels: GpuKernels, device: torch.device, rate: float, cells: list[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """One layer's decode attention by batch and context: time, share of the copy rate, torch's own beside it."""
    for kv_dtype in ("bfloat16", "fp8_e4m3"):
        for batch, tokens in cells:
            size = 2 * batch * tokens * KV_HEADS * HEAD_SIZE * STORAGE_DTYPES[kv_dtype].itemsize
            copies = max(1, min(8, -(-CACHE_BYTES // size))) if device.type != "cpu" else 1
            layers = [Layer.random(batch, tokens, kv_dtype, device) for _ in range(copies)]
            taken = _rotating(layers, kernels, device)
            cell = {"kv": kv_dtype, "batch": batch, "tokens": tokens, "us": taken * 1e6, "share": size / taken / rate}
            if kv_dtype == "bfloat16" and batch * tokens <= 1 << 18:
                cell["torch_us"] = _torch_seconds(batch, tokens, device) * 1e6
            yield cell


def _rotating(layers: list[Layer], kernels: GpuKernels, device: torch.device) -> float:
    outs = [torch.empty_like(layer.q) for layer in layers]

    def work() -> None:
        for layer, out in zip(layers, outs, strict=True):
            kernels.attention(out, layer.q, layer.pages, layer.seqs, HEAD_SIZE**-0.5, path=AUTO)

    return seconds(work, device) / len(layers)


def _torch_seconds(batch: int, tokens: int, device: torch.device) -> float:
    q = torch.randn(batch, HEADS, 1, HEAD_SIZE, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, KV_HEADS, tokens, HEAD_SIZE, device=device, dtype=torch.bfloat16) for _ in "kv")
    return seconds(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), device)
