"""How near the CPU kernels come to this machine's ceilings, which are measured in the same run.

`ceilings` measures them; `steps` times whole decoder steps of a model by batch and context, beside the roofline:
the larger of (bytes that must be read / memory bandwidth) and (products / peak of their kind).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from engine import native
from engine.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Per second, with all threads."""

    memory: float  # bytes
    f32: float  # operations
    bf16: float
    int8: float


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `context` tokens get `new` tokens each."""

    batch: int
    new: int
    context: int


@dataclass(frozen=True, slots=True)
class StepTime:
    case: Case
    median_s: float
    best_s: float
    roofline_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.case.batch * self.case.new / self.median_s


DECODE = tuple(Case(batch, 1, 256) for batch in (1, 4, 16, 64))
PREFILL = (Case(1, 512, 0),)


def ceilings(kernels: native.Kernels) -> Ceilings:
    """Takes about a second."""
    return Ceilings(*(kernels.measure(what) for what in range(4)))


def steps(
    kernels: native.Kernels,
    spec: DecoderSpec,
    model: native.Model,
    top: Ceilings,
    *,
    weights: str = "bf16",
    kv_dtype: int = native.BF16,
    block_size: int = 16,
    cases: tuple[Case, ...] = DECODE + PREFILL,
    repeats: int = 9,
) -> Iterator[StepTime]:
    """Times each case. `weights` names the products: "f32", "bf16" or "int8" (4-bit weights multiply as int8)."""
    peak = {"f32": top.f32, "bf16": top.bf16, "int8": top.int8}[weights]
    for case in cases:
        times = _time(kernels, spec, model, case, kv_dtype, block_size, repeats)
        bound = max(_bytes(kernels, spec, model, case, kv_dtype) / top.memory, _operations(spec, case) / peak)
        yield StepTime(case, statistics.median(times), min(times), bound)


def _bytes(kernels: native.Kernels, spec: DecoderSpec, model: native.Model, case: Case, kv_dtype: int) -> float:
    """What a step must read: the weights, and the KV of every sequence once."""
    per_token = kernels.kv_block_bytes(spec, 16, kv_dtype) / 16
    element = 4 if spec.vocab_size * spec.hidden_size * 4 > model.size_bytes else 2
    embeddings = spec.vocab_size * spec.hidden_size * element  # only a few rows are looked up
    return max(model.size_bytes - embeddings, 0) + case.batch * (case.context + case.new) * per_token


def _operations(spec: DecoderSpec, case: Case) -> float:
    rows = case.batch * case.new
    h, heads, kv = spec.hidden_size, spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    mlp = (3 if spec.gated else 2) * h * spec.intermediate_size
    attention = 2 * heads * (case.context + (case.new + 1) / 2)
    layer = h * (heads + 2 * kv) + heads * h + mlp + attention
    return 2 * (rows * spec.num_layers * layer + case.batch * h * spec.vocab_size)


def _time(
    kernels: native.Kernels,
    spec: DecoderSpec,
    model: native.Model,
    case: Case,
    kv_dtype: int,
    block_size: int,
    repeats: int,
) -> list[float]:
    """Seconds of each step, after one that warms up. Every sequence has blocks of its own, in random order."""
    rng = np.random.default_rng(0)
    blocks = -(-(case.context + case.new) // block_size)
    count = blocks * case.batch
    size = kernels.kv_block_bytes(spec, block_size, kv_dtype) * count
    kv = native.KV(kernels.alloc(size), count, block_size, kv_dtype)
    at, n = native.pointer, case.batch * case.new
    tables = rng.permutation(count).astype(np.int32)
    tokens = rng.integers(0, spec.vocab_size, n).astype(np.int32)
    q_start = (np.arange(case.batch + 1) * case.new).astype(np.int32)
    positions = np.full(case.batch, case.context, np.int32)
    lines, last = np.arange(case.batch, dtype=np.int32), (q_start[1:] - 1).astype(np.int32)
    logits = np.zeros((case.batch, spec.vocab_size), np.float32)
    batch = native.Batch(n_rows=n, n_seqs=case.batch, tokens=at(tokens), q_start=at(q_start), pos_start=at(positions))
    batch.tables, batch.table_stride, batch.table_line = at(tables), blocks, at(lines)
    batch.n_logits, batch.logit_rows, batch.logits = case.batch, at(last), at(logits)
    # The whole cache is touched, as it would be in service: untouched pages all read from one page of zeros.
    if case.context:
        _fill(model, kv, batch, case, spec.vocab_size)
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        model.step(kv, batch)
        if repeat:
            times.append(time.perf_counter() - start)
    kernels.free(kv.data, size)
    return times


def _fill(model: native.Model, kv: native.KV, batch: native.Batch, case: Case, vocab: int) -> None:
    """Computes the context of every sequence, one after the other."""
    at = native.pointer
    prompt = np.random.default_rng(1).integers(0, vocab, case.context).astype(np.int32)
    ends, zero = np.array([0, case.context], np.int32), np.zeros(1, np.int32)
    for sequence in range(case.batch):
        line = np.array([sequence], np.int32)
        fill = native.Batch(n_rows=case.context, n_seqs=1, tokens=at(prompt), q_start=at(ends), pos_start=at(zero))
        fill.tables, fill.table_stride, fill.table_line = batch.tables, batch.table_stride, at(line)
        model.step(kv, fill)
