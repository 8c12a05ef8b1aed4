"""What `octavo bench gpu` measures: kernels built, held against float64, timed against the measured copy bandwidth.

A stage that can't run says why; the others go on. Everything ends before `deadline_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.gpu import load_kernels
from engine.attention.gpu_kernels import PLAIN, TENSOR, GpuKernels, Pages
from engine.attention.paged import read_from_paged_cache, split_kv_cache
from engine.attention.reference import attend, causal_mask
from engine.attention.sequences import Sequences
from engine.errors import OctavoError

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 32, 8, 128, 16  # a layer of an 8B model
CELLS = [(1, 1024), (1, 32768), (16, 4096), (64, 4096), (256, 1024), (256, 4096)]
COPY_BYTES = 2 << 30
PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time"]


@dataclass(frozen=True)
class Stage:
    """What one stage found, or why it didn't run."""

    name: str
    ok: bool
    found: Any


def run(model: str, deadline_s: float) -> list[Stage]:
    """All stages in order."""
    began, stages = time.monotonic(), []
    kernels: GpuKernels | None = None

    def stage(name: str, work: Callable[[], Any]) -> Any:
        if time.monotonic() - began > deadline_s:
            stages.append(Stage(name, False, "no time left"))
            return None
        try:
            found = work()
        except (OctavoError, RuntimeError, AssertionError) as error:
            stages.append(Stage(name, False, str(error).splitlines()[0]))
            return None
        stages.append(Stage(name, True, found))
        return found

    if not torch.cuda.is_available():
        names = ("device", "build", "correctness", "bandwidth", "decode attention", "greedy tokens")
        return [Stage(name, False, "torch sees no GPU on this machine") for name in names]
    device = torch.device("cuda:0")
    stage("device", lambda: torch.cuda.get_device_name(device))

    def built() -> str:
        nonlocal kernels
        kernels = load_kernels(device)
        return kernels.platform

    stage("build", built)
    if kernels is not None:
        native = kernels
        stage("correctness", lambda: correctness(native, device))
        rate = stage("bandwidth", lambda: copy_rate(device))
        if rate:
            stage("decode attention", lambda: [decode_cell(native, device, b, n, rate) for b, n in CELLS])
    stage("greedy tokens", lambda: greedy_tokens(model))
    return stages


def _layer(
    batch: int, tokens: int, kv_dtype: str, device: torch.device, dtype: torch.dtype
) -> tuple[Pages, Sequences, torch.Tensor]:
    """A filled cache of random values with scattered blocks, and one query row for each sequence."""
    blocks = tokens // BLOCK
    stored = STORAGE_DTYPES[kv_dtype]
    storage = torch.randn(2, batch * blocks, BLOCK, KV_HEADS, HEAD_SIZE, device=device, dtype=dtype).to(stored)
    scale = torch.ones(1, device=device) if stored.itemsize == 1 else None
    pages = Pages(*split_kv_cache(storage, KV_HEADS, HEAD_SIZE), scale, scale)
    tables = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    seqs = Sequences(tables, torch.arange(batch + 1, dtype=torch.int32, device=device), lens, 1, tokens)
    return pages, seqs, torch.randn(batch, HEADS, HEAD_SIZE, device=device, dtype=dtype)


def correctness(kernels: GpuKernels, device: torch.device) -> dict[str, float]:
    """Largest differences from float64 by path and KV dtype. Raises AssertionError above what rounding explains."""
    worst: dict[str, float] = {}
    for name, path, kv_dtype in (
        ("tensor cores", TENSOR, "bfloat16"),
        ("plain", PLAIN, "bfloat16"),
        ("fp8", PLAIN, "fp8_e4m3"),
    ):
        pages, seqs, q = _layer(3, 1024, kv_dtype, device, torch.bfloat16)
        out = torch.empty_like(q)
        kernels.attention(out, q, pages, seqs, HEAD_SIZE**-0.5, path=path)
        one = torch.ones((), device=device)
        for i in range(3):
            at = torch.arange(1024, device=device)
            slots = seqs.tables[i].long()[at // BLOCK] * BLOCK + at % BLOCK
            k, v = read_from_paged_cache(pages.key, pages.value, slots, one, one)
            mask = causal_mask(1, 1023, 0, device)
            expected = attend(q[i : i + 1], k, v, mask, HEAD_SIZE**-0.5, 0.0)
            error = float((out[i : i + 1].float() - expected).abs().max())
            worst[name] = max(worst.get(name, 0.0), error)
        assert worst[name] < 2e-2, f"{name}: off by {worst[name]}"
    return worst


def _seconds(work: Callable[[], object], repeats: int = 20) -> float:
    """Median time of `work` on the device."""
    times = []
    for _ in range(repeats + 3):
        first, last = torch.Event(device="cuda", enable_timing=True), torch.Event(device="cuda", enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(float(first.elapsed_time(last)) / 1e3)
    return sorted(times[3:])[repeats // 2]


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second by a copy."""
    src = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return 2 * COPY_BYTES / _seconds(lambda: dst.copy_(src))


def decode_cell(kernels: GpuKernels, device: torch.device, batch: int, tokens: int, rate: float) -> dict[str, float]:
    """One layer's decode attention: microseconds, bytes per second of keys and values, share of the copy rate."""
    pages, seqs, q = _layer(batch, tokens, "bfloat16", device, torch.bfloat16)
    out = torch.empty_like(q)
    seconds = _seconds(lambda: kernels.attention(out, q, pages, seqs, HEAD_SIZE**-0.5))
    read = batch * tokens * 2 * KV_HEADS * HEAD_SIZE * 2 / seconds
    return {"batch": batch, "tokens": tokens, "us": seconds * 1e6, "bytes_s": read, "share_of_copy": read / rate}


def greedy_tokens(model: str) -> dict[str, Any]:
    """How many tokens of greedy answers the GPU and the CPU agree on before they first differ."""
    from engine.api import SamplingParams
    from engine.config import EngineConfig, ModelConfig, ParallelConfig
    from engine.llm import LLM

    answers = []
    for device in ("cuda", "cpu"):
        config = EngineConfig(model=ModelConfig(model=model), parallel=ParallelConfig(device=device))
        with LLM(config) as llm:
            params = SamplingParams(max_tokens=64, temperature=0)
            answers.append([answer.choices[0].text for answer in llm.generate(PROMPTS, params)])
    same = [a == b for a, b in zip(*answers, strict=True)]
    return {"prompts": len(same), "same": sum(same), "gpu": answers[0], "cpu": answers[1]}
