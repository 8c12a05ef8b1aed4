"""A step's inputs on the device: laid out on the host, copied once, then read through views.

The host's side exists twice, and is written again only when the copy from it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.sequences import PlacedStep, Sequences
from engine.worker.batch import Batch, Int32
from engine.worker.device import Device, Event
from engine.worker.slots import Slots

_INT32, _INT64, _FLOAT = torch.int32, torch.int64, torch.float32


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides the launches of a step: the same for every step that a graph repeats."""

    rows: int  # as the products have them
    live: int  # of these, that belong to sequences
    seqs: int
    draws: int
    max_q: int
    max_len: int


class StepInputs:
    """Tensors [most rows], [most sequences] and [most draws] on the device, filled to a step's shape."""

    def __init__(self, device: Device, rows: int, seqs: int, draws: int, table: int) -> None:
        self._device = device
        self._table = table
        columns = {
            "tokens": (rows, _INT32), "positions": (rows, _INT32), "lines": (rows, _INT64), "slots": (rows, _INT64),
            "q_start": (seqs + 1, _INT32), "seq_lens": (seqs, _INT32), "tables": (seqs * table, _INT32),
            "logit_rows": (draws, _INT64), "draw_lines": (draws, _INT64), "temperature": (draws, _FLOAT),
            "seed": (draws, _INT64), "choice": (draws, _INT32), "draw_position": (draws, _INT32),
        }  # fmt: skip
        places, size = {}, 0
        for name, (n, dtype) in columns.items():
            places[name] = (size, n * dtype.itemsize, dtype)
            size += -(-n * dtype.itemsize // 16) * 16
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self._on_host = [device.pinned((size,), torch.uint8) for _ in range(2)]
        self._copied: list[Event | None] = [None, None]
        self._turn = 0

        def views(memory: torch.Tensor) -> dict[str, torch.Tensor]:
            return {name: memory[at : at + n].view(dtype) for name, (at, n, dtype) in places.items()}

        self.at = views(self._on_device)
        self._host: list[dict[str, npt.NDArray[Any]]] = [
            {name: view.numpy() for name, view in views(memory).items()} for memory in self._on_host
        ]

    def fill(
        self,
        batch: Batch,
        drawing: Int32,
        position: npt.NDArray[np.uint32],
        choice: npt.NDArray[np.uint32],
        slots: Slots,
        shape: Shape,
    ) -> None:
        """Lay out a step and queue its copy; drawing, position, choice [draws]: of its draws.

        Rows, sequences and draws beyond its own are padding.
        """
        self._turn ^= 1
        if (event := self._copied[self._turn]) is not None:
            event.wait()
        host, rows, seqs = self._host[self._turn], len(batch.tokens), len(batch.pos_start)
        counts = np.diff(batch.q_start)
        positions = np.concatenate([np.arange(p, p + c) for p, c in zip(batch.pos_start, counts, strict=True)])
        lines = np.repeat(batch.slots, counts).astype(np.int64)
        blocks = slots.tables[lines, positions // slots.block_size].astype(np.int64)
        _put(host["tokens"], batch.tokens, shape.rows, 0)
        _put(host["positions"], positions, shape.rows, 0)
        _put(host["lines"], lines, shape.rows, 0)
        _put(host["slots"], blocks * slots.block_size + positions % slots.block_size, shape.rows, -1)
        _put(host["q_start"], batch.q_start, shape.seqs + 1, rows)
        _put(host["seq_lens"], batch.pos_start + counts, shape.seqs, 0)
        host["tables"][: seqs * self._table] = slots.tables[batch.slots].reshape(-1)
        _put(host["logit_rows"], batch.logit_rows, shape.draws, 0)
        _put(host["draw_lines"], drawing, shape.draws, len(slots.temperature))  # a line that nobody reads
        _put(host["temperature"], slots.temperature[drawing], shape.draws, 0)
        _put(host["seed"], slots.seed[drawing].view(np.int64), shape.draws, 0)
        _put(host["choice"], choice.view(np.int32), shape.draws, 0)
        _put(host["draw_position"], position.view(np.int32), shape.draws, 0)
        source, target = self._on_host[self._turn], self._on_device
        self._device.main.run(lambda: _copy(target, source))
        self._copied[self._turn] = self._device.main.record()

    def blank(self, shape: Shape) -> None:
        """Padding alone, for a graph to be made with."""
        at = self.at
        at["slots"][: shape.rows].fill_(-1)
        at["draw_lines"][: shape.draws].fill_(len(at["seq_lens"]))
        at["q_start"][: shape.seqs + 1].zero_()

    def placed(self, shape: Shape) -> PlacedStep:
        """The step as attention is told."""
        at = self.at
        sequences = Sequences(
            at["tables"].view(-1, self._table)[: shape.seqs],
            at["q_start"][: shape.seqs + 1],
            at["seq_lens"][: shape.seqs],
            shape.max_q,
            shape.max_len,
        )
        return PlacedStep(sequences, at["slots"][: shape.live], at["positions"][: shape.rows])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _put(column: npt.NDArray[Any], values: npt.NDArray[Any], n: int, padding: int) -> None:
    column[: len(values)] = values
    column[len(values) : n] = padding
