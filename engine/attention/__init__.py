"""Attention backends behind one protocol.

A backend is told once a step where its rows stand (`plan`), then runs layer by layer (`run`): it writes
the new keys and values into the cache and attends over the cache, never over the unrounded inputs, so that
a chunk boundary or a cache hit changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where the rows of one forward pass stand.

    Rows [q_start[i], q_start[i + 1]) belong to sequence i and stand at positions pos_start[i], pos_start[i] + 1 ...
    Lists live on the host, tensors on the device of the cache.
    """

    q_start: list[int]  # [sequences + 1]
    pos_start: list[int]  # [sequences]
    slots: list[int]  # [sequences], line of each sequence
    tables: torch.Tensor  # int64 [slots, blocks]: physical block of each logical one, one line a slot
    slot_mapping: torch.Tensor  # int64 [rows]: physical block * block_size + offset of each row's position


class AttentionBackend(Protocol):
    """What a decoder layer needs of attention."""

    def plan(self, batch: AttentionBatch) -> None:
        """Host work, once a step, before the first layer."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Write k, v [rows, kv_heads, head_size] to the cache and attend with q [rows, heads, head_size] into out."""
