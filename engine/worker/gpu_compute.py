"""Forward pass and sampling on a GPU: queued, not waited for.

A decode step of a known size is one graph. Draws that need no more than a temperature are made on the device, so
that the next step can be queued before the host knows their tokens; the others by the host, from their logits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.gpu_kernels import GpuKernels
from engine.attention.sequences import PlacedAttention
from engine.model.decoder import Decoder
from engine.sampling.reference import sample, score
from engine.worker.batch import Batch, Drawn, Draws, Float32, Int32, row_params, split_by_adapter
from engine.worker.device import Device, Event, Work
from engine.worker.gpu_inputs import Shape, StepInputs
from engine.worker.settings import ExecutorSettings
from engine.worker.slots import Slots

log = logging.getLogger(__name__)

ROW_TILE = 128  # rows of a product where bits may not depend on the batch; reading the weights takes longer than these
CAPTURE_SECONDS = 20.0  # graphs of all batch sizes together; what isn't captured by then runs without


@dataclass(slots=True)
class Outputs:
    """What a step leaves on the device."""

    hidden: torch.Tensor | None = None  # [rows, hidden_size]
    logits: torch.Tensor | None = None  # float32 [draws, vocab]
    tokens: torch.Tensor | None = None  # int32 [draws]


@dataclass(frozen=True, slots=True)
class Landing:
    """Where results of one model's rows will lie on the host, in pinned memory."""

    draws_at: Int32  # their places among the step's draws
    hidden_at: Int32
    by_host: npt.NDArray[np.intp]  # which of these draws the host makes
    tokens: torch.Tensor  # int32 [draws]
    logits: torch.Tensor  # float32 [by_host, vocab]
    hidden: torch.Tensor  # float32 [hidden rows, hidden_size]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is queued."""

    draws: Draws
    landings: list[Landing]
    began: Event
    landed: Event

    @property
    def settled(self) -> bool:
        """Whether the next step needs nothing of the host: each token is the device's own, and the last of its slot."""
        by_host = any(len(part.by_host) or len(part.hidden_at) for part in self.landings)
        return not by_host and len(np.unique(self.draws.slot)) == len(self.draws.slot)


class GpuCompute:
    """One model on one device."""

    def __init__(
        self,
        decoder: Decoder,
        attention: PlacedAttention,
        kernels: GpuKernels | None,
        device: Device,
        settings: ExecutorSettings,
        *,
        row_tile: int = ROW_TILE,
    ) -> None:
        self.adapters: dict[str, Decoder] = {}  # merged models beside the base
        self.decoder = decoder
        self._attention = attention
        self._kernels = kernels  # None: the host draws
        self._device = device
        self._max_len = settings.max_model_len
        self._row_tile = row_tile if settings.deterministic else 1
        seqs = settings.max_num_seqs
        self._sizes = [2**i for i in range(seqs.bit_length()) if 2**i < seqs] + [seqs]
        rows = self._padded(max(settings.max_batched_tokens, seqs))
        # A step draws at most once for each of its rows, and once for each choice that takes a slot after it.
        self._inputs = StepInputs(device, rows, seqs, rows + seqs, -(-self._max_len // settings.block_size))
        self._last = torch.zeros(seqs + 1, dtype=torch.int32, device=device.torch_device)  # token of each slot
        self._graphs: dict[int, tuple[Work, Outputs]] = {}
        decoder.row_tile = self._row_tile if settings.deterministic else 0

    @torch.inference_mode()
    def launch(self, batch: Batch, slots: Slots) -> Flight:
        """Queue a step. Tokens of LAST_SAMPLED are what the step before drew on the device."""
        began = self._device.main.record()
        landings = [self._launch(batch, slots, *part) for part in split_by_adapter(batch, slots)]
        return Flight(batch.draws, landings, began, self._device.main.record())

    def _launch(
        self, whole: Batch, slots: Slots, adapter: str, batch: Batch, draws_at: Int32, hidden_at: Int32
    ) -> Landing:
        main, draws = self._device.main, whole.draws
        n, longest = len(draws_at), int(np.diff(batch.q_start).max())
        size = next((s for s in self._sizes if s >= len(batch.pos_start)), 0)
        graph = self._graphs.get(size) if not adapter and longest == 1 and n <= size else None
        shape = self._decode_shape(size) if graph else self._shape(batch, n, longest)
        self._inputs.fill(batch, draws.slot[draws_at], draws.position[draws_at], draws.choice[draws_at], slots, shape)
        if graph:
            repeat, outputs = graph
            main.run(repeat)
        else:
            outputs = Outputs()
            decoder = self.adapters[adapter] if adapter else self.decoder
            main.run(partial(self._step, decoder, shape, outputs))
        by_host = np.flatnonzero(self._needs_host(draws, slots)[draws_at])
        pinned, spec = self._device.pinned, self.decoder.spec
        landing = Landing(
            draws_at,
            hidden_at,
            by_host,
            pinned((n,), torch.int32),
            pinned((len(by_host), spec.vocab_size), torch.float32),
            pinned((len(batch.hidden_rows), spec.hidden_size), torch.float32),
        )
        main.run(partial(_hand_over, outputs, landing, batch.hidden_rows))
        return landing

    def _needs_host(self, draws: Draws, slots: Slots) -> npt.NDArray[np.bool_]:
        """A draw's own parameters decide, never those beside it."""
        if self._kernels is None:
            return np.ones(len(draws.slot), np.bool_)
        slot = draws.slot
        host = (draws.n_top >= 0) | (slots.top_p[slot] < 1) | (slots.top_k[slot] > 0) | (slots.min_p[slot] > 0)
        if draws.forced is not None:
            host |= draws.forced >= 0
        for lists in (draws.masks, draws.seen, draws.bias):
            if lists is not None:
                host |= np.array([entry is not None for entry in lists], np.bool_)
        return np.asarray(host, np.bool_)

    def _padded(self, rows: int) -> int:
        return -(-rows // self._row_tile) * self._row_tile

    def _shape(self, batch: Batch, draws: int, longest: int) -> Shape:
        last = int((batch.pos_start + np.diff(batch.q_start)).max())
        rows = len(batch.tokens)
        return Shape(self._padded(rows), rows, len(batch.pos_start), draws, longest, last)

    def _decode_shape(self, size: int) -> Shape:
        return Shape(self._padded(size), size, size, size, 1, self._max_len)

    def _step(self, decoder: Decoder, shape: Shape, outputs: Outputs) -> None:
        """Device operations alone, on the inputs and of sizes that the shape has."""
        at, rows, n = self._inputs.at, shape.rows, shape.draws
        tokens = at["tokens"][:rows]
        tokens = torch.where(tokens < 0, self._last[at["lines"][:rows]], tokens)
        placed = self._inputs.placed(shape)
        self._attention.place(placed)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = q.new_zeros(q.shape)  # rows of padding belong to no sequence
            live = slice(shape.live)
            self._attention.run(layer, q[live], k[live], v[live], out[live])
            return out

        outputs.hidden = decoder.forward(tokens, placed.positions, attend)
        if not n:
            return
        outputs.logits = decoder.logits(outputs.hidden[at["logit_rows"][:n]])
        if self._kernels is None:
            outputs.tokens = torch.zeros(n, dtype=torch.int32, device=tokens.device)
            return
        columns = (at[name][:n] for name in ("temperature", "seed", "choice", "draw_position"))
        outputs.tokens = self._kernels.sample(outputs.logits, *columns)
        self._last.index_put_((at["draw_lines"][:n],), outputs.tokens)

    @torch.inference_mode()
    def finish(self, flight: Flight, slots: Slots) -> tuple[Drawn, Float32]:
        """Wait for a step: its draws, and hidden states [hidden rows, hidden_size]."""
        flight.landed.wait()
        draws, n = flight.draws, len(flight.draws.slot)
        width = max(0, int(draws.n_top.max())) if n else 0
        drawn = Drawn(
            np.zeros(n, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros((n, width), np.int32),
            np.zeros((n, width), np.float32),
        )  # fmt: skip
        pooled = np.zeros(
            (sum(len(part.hidden_at) for part in flight.landings), self.decoder.spec.hidden_size), np.float32
        )
        for part in flight.landings:
            drawn.token[part.draws_at] = part.tokens.numpy()
            pooled[part.hidden_at] = part.hidden.numpy()
            for row, i in enumerate(part.draws_at[part.by_host].tolist()):
                _draw(drawn, draws, slots, i, part.logits[row].numpy())
        return drawn, pooled

    @torch.inference_mode()
    def capture(self, seconds: float = CAPTURE_SECONDS) -> None:
        """Make the graphs, the largest first: the others fit into its memory. Comes before the first step."""
        began = time.monotonic()
        for size in reversed(self._sizes):
            if time.monotonic() - began > seconds:
                log.warning("no time for graphs of fewer than %d sequences: such steps run without", min(self._graphs))
                return
            outputs, shape = Outputs(), self._decode_shape(size)
            self._device.main.run(partial(self._inputs.blank, shape))
            self._graphs[size] = (self._device.capture(partial(self._step, self.decoder, shape, outputs)), outputs)
        log.info("%d graphs captured in %.1f s", len(self._graphs), time.monotonic() - began)


def _hand_over(outputs: Outputs, landing: Landing, hidden_rows: Int32) -> None:
    if len(landing.tokens):
        assert outputs.tokens is not None
        assert outputs.logits is not None
        landing.tokens.copy_(outputs.tokens[: len(landing.tokens)], non_blocking=True)
        for row, i in enumerate(landing.by_host.tolist()):
            landing.logits[row].copy_(outputs.logits[i], non_blocking=True)
    for row, i in enumerate(hidden_rows.tolist()):
        assert outputs.hidden is not None
        landing.hidden[row].copy_(outputs.hidden[i].float(), non_blocking=True)


def _draw(drawn: Drawn, draws: Draws, slots: Slots, i: int, logits: Float32) -> None:
    forced = -1 if draws.forced is None else int(draws.forced[i])
    token = forced if forced >= 0 else sample(logits, row_params(draws, slots, i))
    drawn.token[i] = token
    k = int(draws.n_top[i])
    if k >= 0:
        drawn.logprob[i], drawn.rank[i], drawn.top_ids[i, :k], drawn.top_logprobs[i, :k] = score(logits, token, k)
