"""Where the rows of a step stand, as GPU kernels are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.attention import AttentionBackend, AttentionBatch


@dataclass(frozen=True, slots=True)
class Sequences:
    """int32 on the device; a sequence without rows is padding."""

    tables: torch.Tensor  # [seqs, max_blocks]
    q_start: torch.Tensor  # [seqs + 1]
    seq_lens: torch.Tensor  # [seqs], the rows of this step included
    max_q: int
    max_len: int


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step's rows in tensors on the device, which may be larger than what is in them."""

    sequences: Sequences
    slot_mapping: torch.Tensor  # int64 [rows], negative = padding
    positions: torch.Tensor  # int32 [rows]


class PlacedAttention(AttentionBackend, Protocol):
    """A backend that can be told of a step in tensors alone: no host work, so that a graph can hold it."""

    def place(self, step: PlacedStep) -> None:
        """Instead of `plan`."""


def sequences_of(batch: AttentionBatch, device: torch.device) -> Sequences:
    """The sequences of a batch, on the device of their cache."""
    counts = [b - a for a, b in zip(batch.q_start, batch.q_start[1:], strict=False)]
    lens = [p + n for p, n in zip(batch.pos_start, counts, strict=True)]
    lines = torch.tensor(batch.slots, dtype=torch.int64, device=device)
    return Sequences(
        batch.tables[lines].int(),
        torch.tensor(batch.q_start, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        max(counts),
        max(lens),
    )
