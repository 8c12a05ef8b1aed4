"""Attention by the Triton kernels: for shapes that the native ones don't have, on any GPU that Triton knows."""

from __future__ import annotations

import importlib.util

import torch

from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.encoding import STORAGE_DTYPES, byte_view
from engine.attention.sequences import PlacedStep, sequences_of
from engine.model.spec import DecoderSpec

WORKSPACE_FLOATS = 1 << 24  # 64 MiB of parts; more are not split
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}  # else 0; see triton_kernels.py
INT8 = 1


class TritonAttention:
    """Writes and reads one cache in its canonical order."""

    def __init__(self, spec: DecoderSpec, cache: KVCache) -> None:
        from engine.attention import triton_kernels

        self._kernels = triton_kernels
        self._spec = spec
        self._cache = cache
        self._device = cache.layers[0].device
        self._kind = KINDS.get(cache.layers[0].dtype, 0)
        self._wide = max(16, 1 << (spec.head_size - 1).bit_length())
        self._scale = torch.tensor([cache.fp8_scale], dtype=torch.float32, device=self._device)
        # The interpreter runs on the CPU, and can't multiply bfloat16.
        self._interpreted = self._device.type == "cpu"
        self._step: PlacedStep | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self.place(PlacedStep(sequences_of(batch, self._device), batch.slot_mapping, torch.empty(0)))

    def place(self, step: PlacedStep) -> None:
        """See `PlacedAttention`. Rows come rotated."""
        self._step = step

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        spec, step, kernels = self._spec, self._step, self._kernels
        assert step is not None, "plan() or place() comes first"
        seqs = step.sequences
        keys, values = byte_view(self._cache.layers[layer]) if self._kind > INT8 else self._cache.layers[layer]
        scales = self._cache.scales[layer] if self._cache.scales else (self._scale, self._scale)
        shape = {"KV_HEADS": spec.num_kv_heads, "HEAD": spec.head_size, "WIDE": self._wide, "KIND": self._kind}
        kernels.cache_write[(k.shape[0], spec.num_kv_heads)](
            k.contiguous(), v.contiguous(), keys, values, *scales, step.slot_mapping, **shape, enable_fp_fusion=False
        )
        rows, group = q.shape[0], spec.num_heads // spec.num_kv_heads
        window = spec.layers[layer].window if spec.layers else 0
        parts = -(-seqs.max_len // kernels.PART)
        floats = rows * spec.num_heads * parts * (spec.head_size + 2)
        split = parts > 1 and seqs.max_q * group <= kernels.ROWS and floats <= WORKSPACE_FLOATS
        sums = torch.empty(floats if split else 0, dtype=torch.float32, device=self._device)
        states = sums[rows * spec.num_heads * parts * spec.head_size :]
        tiles = -(-seqs.max_q * group // kernels.ROWS)
        count = seqs.seq_lens.shape[0]
        kernels.attention[(tiles * (parts if split else 1), spec.num_kv_heads, count)](
            out, q.contiguous(), keys, values, *scales, seqs.tables, seqs.q_start, seqs.seq_lens, sums, states, parts,
            seqs.tables.shape[1], spec.attn_scale, spec.attn_softcap, window, HEADS=spec.num_heads,
            BLOCK=self._cache.block_size, SOFTCAP=spec.attn_softcap > 0, WINDOW=window > 0, SPLIT=split, EXACT="ieee",
            WIDE_DOT=self._interpreted, **shape, enable_fp_fusion=False,
        )  # fmt: skip
        if split:
            kernels.merge_parts[(seqs.max_q * spec.num_heads, count)](
                out, seqs.q_start, seqs.seq_lens, sums, states, parts, window,
                HEADS=spec.num_heads, HEAD=spec.head_size, WIDE=self._wide, WINDOW=window > 0,
                enable_fp_fusion=False,
            )  # fmt: skip


def problem(kv_dtype: str, dtype: str) -> str:
    """Why Triton can't be used; "" when it can."""
    if kv_dtype != dtype and STORAGE_DTYPES[kv_dtype].itemsize > 1:
        return f"{kv_dtype} keys and values beside {dtype} activations"
    return "" if importlib.util.find_spec("triton") else "the package triton is not installed"
