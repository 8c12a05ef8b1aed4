"""The oracle: attention over block tables in plain torch, float32 throughout."""

from __future__ import annotations

import torch

from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.model.spec import DecoderSpec


class ReferenceAttention:
    """Gathers a sequence's keys and values through its block table, one sequence after another.

    A sequence's result does not depend on the others of the batch. Cutting its rows into chunks may change the
    last bits: torch's matrix products do not promise the same order of additions for every shape.
    """

    def __init__(self, spec: DecoderSpec, cache: KVCache) -> None:
        self._spec = spec
        self._cache = cache
        self._slot_mapping = torch.empty(0)
        self._sequences: list[tuple[int, int, int, torch.Tensor]] = []  # first row, last row, first position, slots

    def plan(self, batch: AttentionBatch) -> None:
        """Resolve each sequence's block table into the token slots of positions 0 .. its last row."""
        size = self._cache.block_size
        device = self._cache.layers[0].device
        window = self._spec.widest_window
        self._slot_mapping = batch.slot_mapping
        self._sequences = []
        for i, line in enumerate(batch.slots):
            first, last = batch.q_start[i], batch.q_start[i + 1]
            position = batch.pos_start[i]
            steps = torch.arange(position + last - first, device=device)
            if window:  # blocks wholly behind it may be another sequence's by now: masked, whatever is read instead
                steps = steps.clamp(min=max(0, position - window + 1))
            blocks = batch.tables[line][torch.div(steps, size, rounding_mode="floor")]
            self._sequences.append((first, last, position, blocks * size + steps % size))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See `AttentionBackend.run`."""
        spec = self._spec
        self._cache.write(layer, k, v, self._slot_mapping)
        window = spec.layers[layer].window if spec.layers else 0
        for first, last, position, slots in self._sequences:
            keys, values = self._cache.read(layer, slots)
            mask = causal_mask(last - first, position, window, q.device)
            mixed = attend(q[first:last], keys, values, mask, spec.attn_scale, spec.attn_softcap)
            out[first:last] = mixed.to(out.dtype)


def causal_mask(rows: int, position: int, window: int, device: torch.device) -> torch.Tensor:
    """Which keys [0, position + rows) each of the rows at position, position + 1 ... may see. [rows, keys] bool.

    window > 0: only the last `window` tokens, the row's own included.
    """
    at = torch.arange(position, position + rows, device=device).unsqueeze(1)
    key = torch.arange(position + rows, device=device).unsqueeze(0)
    seen = key <= at
    return seen & (key > at - window) if window else seen


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """softmax(scale * q k^T) v in float32, query heads grouped over their KV head.

    q [rows, heads, head], k and v [keys, kv_heads, head], mask [rows, keys] -> [rows, heads, head].
    """
    rows, heads, head_size = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, head_size)
    scores = torch.einsum("rhgd,khd->hgrk", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    mixed = torch.einsum("hgrk,khd->rhgd", torch.softmax(scores, dim=-1), v)
    return mixed.reshape(rows, heads, head_size)
