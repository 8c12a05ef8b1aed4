"""Virtual-contiguous KV (vAttention, Prabhu et al. 2024) and an attention that knows nothing of blocks.

Every slot owns a range of addresses long enough for the longest sequence; memory is behind only those pages that
were mapped (`address_ranges`). So a sequence's keys are one strided tensor, and torch's own
scaled_dot_product_attention serves.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from engine.attention import AttentionBatch
from engine.attention.address_ranges import AddressRange, commit_all, reserve
from engine.attention.cache import KVCache
from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.reference import causal_mask
from engine.errors import ConfigError
from engine.model.spec import DecoderSpec

PAGE = mmap.PAGESIZE


CPU = torch.device("cpu")


@dataclass(slots=True)
class VirtualCache(KVCache):
    """A `KVCache` over reserved memory: page p of slot s is block s * pages_per_slot + p.

    Reserving takes addresses only. `commit` puts memory behind a page and `release` gives it back, so the memory in use
    is that of the committed pages (on a GPU: of the driver's granules that they lie in).
    """

    pages_per_slot: int = 0
    memory: list[AddressRange] = field(default_factory=list)  # one range a layer
    committed: set[int] = field(default_factory=set)  # pages, as block ids

    @classmethod
    def reserve(
        cls,
        spec: DecoderSpec,
        slots: int,
        pages_per_slot: int,
        page_tokens: int,
        kv_dtype: str,
        device: torch.device = CPU,
    ) -> VirtualCache:
        """Address ranges for all slots and layers. Raises ConfigError when a page of tokens is no whole memory page."""
        dtype = STORAGE_DTYPES[kv_dtype]
        if dtype.itemsize == 1:
            raise ConfigError(f"the virtual KV manager stores float types, not {kv_dtype}: its attention has no scales")
        page_bytes = page_tokens * spec.num_kv_heads * spec.head_size * dtype.itemsize
        if device.type == "cpu" and page_bytes % PAGE:
            row = spec.num_kv_heads * spec.head_size * dtype.itemsize
            step = next(n for n in range(1, PAGE + 1) if n * row % PAGE == 0)
            raise ConfigError(
                f"block size {page_tokens} is {page_bytes} bytes a layer, no multiple of the memory page of {PAGE}: "
                f"the virtual KV manager needs a multiple of {step}"
            )
        shape = (2, slots * pages_per_slot, page_tokens, spec.num_kv_heads, spec.head_size)
        memory = [reserve(2 * shape[1] * page_bytes, device) for _ in range(spec.num_layers)]
        layers = [m.tensor().view(dtype).view(shape) for m in memory]
        return cls(layers, [], pages_per_slot=pages_per_slot, memory=memory)

    def sequence(self, layer: int, slot: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the first tokens of a slot, [tokens, kv_heads, head_size] each; no byte is copied."""
        storage = self.layers[layer]
        first = slot * self.pages_per_slot
        both = storage[:, first : first + self.pages_per_slot].flatten(1, 2)
        return both[0, :tokens], both[1, :tokens]

    def commit(self, slot: int, page: int) -> None:
        """Put memory behind a page, in all layers; harmless when it has some. Raises RequestFailed: nothing changed."""
        block = slot * self.pages_per_slot + page
        if block not in self.committed:
            commit_all(self._parts(block))
            self.committed.add(block)

    def release(self, slot: int, page: int) -> None:
        """Give a page's memory back, in all layers; harmless when it has none."""
        block = slot * self.pages_per_slot + page
        if block in self.committed:
            self.committed.remove(block)
            for memory, at, size in self._parts(block):
                memory.release(at, size)

    def _parts(self, block: int) -> list[tuple[AddressRange, int, int]]:
        """Where a page's keys and values lie: (range, offset, bytes)."""
        storage = self.layers[0]
        size = storage[0, 0].numel() * storage.element_size()
        side = storage.shape[1] * size
        return [(memory, at, size) for memory in self.memory for at in (block * size, side + block * size)]


class ContiguousAttention:
    """Writes rows to their slots' ranges and lets torch attend over the strided view of each sequence."""

    def __init__(self, spec: DecoderSpec, cache: VirtualCache) -> None:
        if spec.attn_softcap:
            raise ConfigError(f"the virtual KV manager can't serve {spec.family}: torch's attention has no soft cap")
        self._spec = spec
        self._cache = cache
        self._slot_mapping = torch.empty(0)
        self._sequences: list[tuple[int, int, int, int]] = []  # first row, last row, first position, slot

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._slot_mapping = batch.slot_mapping
        self._sequences = list(zip(batch.q_start, batch.q_start[1:], batch.pos_start, batch.slots, strict=False))

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        spec = self._spec
        self._cache.write(layer, k, v, self._slot_mapping)
        window = spec.layers[layer].window if spec.layers else 0
        for first, last, position, slot in self._sequences:
            keys, values = self._cache.sequence(layer, slot, position + last - first)
            mixed = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1).unsqueeze(0).to(keys.dtype),
                keys.transpose(0, 1).unsqueeze(0),
                values.transpose(0, 1).unsqueeze(0),
                attn_mask=causal_mask(last - first, position, window, q.device),
                scale=spec.attn_scale,
                enable_gqa=True,
            )
            out[first:last] = mixed[0].transpose(0, 1).to(out.dtype)
