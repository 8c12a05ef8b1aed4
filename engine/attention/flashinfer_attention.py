"""Attention by the library FlashInfer, for those who have it: `--attention-backend flashinfer`.

Its paged wrapper (documentation of BatchPrefillWithPagedKVCacheWrapper) is told of a step once and then run for each
layer; decode rows are prefill of one row. The cache keeps its canonical order, which is FlashInfer's "NHD".
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.model.spec import DecoderSpec

WORKSPACE_BYTES = 256 << 20


class FlashInferAttention:
    """Writes the cache by torch and attends by FlashInfer, one plan for each width of window that the model has."""

    def __init__(self, spec: DecoderSpec, cache: KVCache) -> None:
        import flashinfer

        self._spec = spec
        self._cache = cache
        self._slot_mapping = torch.empty(0)
        device = cache.layers[0].device
        windows = {layer.window for layer in spec.layers} or {0}
        workspaces = {w: torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device) for w in windows}
        self._wrappers: dict[int, Any] = {
            w: flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD") for w, memory in workspaces.items()
        }

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        size, storage = self._cache.block_size, self._cache.layers[0]
        counts = [b - a for a, b in zip(batch.q_start, batch.q_start[1:], strict=False)]
        lens = [p + n for p, n in zip(batch.pos_start, counts, strict=True)]
        blocks = [-(-n // size) for n in lens]

        def on_device(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=storage.device)

        indptr = torch.tensor([0, *blocks]).cumsum(0).tolist()
        indices = torch.cat([batch.tables[line, :n] for line, n in zip(batch.slots, blocks, strict=True)]).int()
        self._slot_mapping = batch.slot_mapping
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                qo_indptr=on_device(batch.q_start),
                paged_kv_indptr=on_device(indptr),
                paged_kv_indices=indices,
                paged_kv_last_page_len=on_device([(n - 1) % size + 1 for n in lens]),
                num_qo_heads=self._spec.num_heads,
                num_kv_heads=self._spec.num_kv_heads,
                head_dim_qk=self._spec.head_size,
                page_size=size,
                causal=True,
                sm_scale=self._spec.attn_scale,
                window_left=window - 1,  # keys before the row's own; -1 = all
                logits_soft_cap=self._spec.attn_softcap or None,
                q_data_type=storage.dtype,
                kv_data_type=storage.dtype,
                disable_split_kv=True,  # how keys are split would depend on the batch
            )

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        self._cache.write(layer, k, v, self._slot_mapping)
        storage = self._cache.layers[layer]
        window = self._spec.layers[layer].window if self._spec.layers else 0
        self._wrappers[window].run(q.contiguous().to(storage.dtype), (storage[0], storage[1]), out=out)


def problem(kv_dtype: str, dtype: str) -> str:
    """Why FlashInfer can't be used; "" when it can."""
    if kv_dtype != dtype or dtype == "float32":
        return f"{kv_dtype} keys and values beside {dtype} activations: it is for 16-bit types"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (pip install octavo[flashinfer])"
    return ""
