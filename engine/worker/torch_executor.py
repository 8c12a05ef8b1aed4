"""The oracle executor: the torch decoder, reference attention, reference sampler; on the CPU or any torch device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.attention import AttentionBackend, AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.contiguous import ContiguousAttention, VirtualCache
from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.reference import ReferenceAttention
from engine.core.plan import Geometry, Plan, Result
from engine.errors import ConfigError
from engine.model.decoder import Decoder, TorchDecoder, load_decoder
from engine.model.lora import LoraAdapter, merged_weights
from engine.model.sharded import ShardedDecoder, Sharding
from engine.model.spec import TRANSFORMERS, DecoderSpec
from engine.model.weights import iter_weights
from engine.sampling.reference import sample, score
from engine.worker.batch import Batch, Drawn, Draws, Float32, row_params, split_by_adapter
from engine.worker.fingerprint import fingerprint, identity
from engine.worker.runner import Runner, StepThread
from engine.worker.settings import ExecutorSettings, device_blocks
from engine.worker.slots import Slots
from engine.worker.storage import KVStorage
from engine.worker.tiers import geometry_of, open_tiers
from engine.worker.torch_blocks import TorchBlocks, VirtualBlocks, block_bytes


class TorchCompute:
    """Forward pass and sampling in torch.

    one_by_one: a sequence at a time, so that what it gets never depends on the others of its batch (a library's
    matrix product may round differently for another number of rows).
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        attention: AttentionBackend,
        block_size: int,
        device: torch.device,
        *,
        one_by_one: bool,
    ) -> None:
        self.adapters: dict[str, TorchDecoder] = {}  # merged models beside the base
        self.decoder = decoder
        self._attention = attention
        self._block_size = block_size
        self._device = device
        self._one_by_one = one_by_one
        self._logits = np.zeros((0, 0), np.float32)

    @torch.inference_mode()
    def forward(self, batch: Batch, slots: Slots) -> Float32:
        """See `Compute`."""
        self._logits = np.empty((len(batch.logit_rows), slots.vocab_size), np.float32)
        pooled = np.empty((len(batch.hidden_rows), self.decoder.spec.hidden_size), np.float32)
        for adapter, part, logits_at, pooled_at in split_by_adapter(batch, slots):
            decoder = self.adapters[adapter] if adapter else self.decoder
            sequences = range(len(part.pos_start))
            for group in [[i] for i in sequences] if self._one_by_one else [list(sequences)]:
                first, last = int(part.q_start[group[0]]), int(part.q_start[group[-1] + 1])
                hidden = self._hidden(decoder, part, slots, group)
                mine = (part.logit_rows >= first) & (part.logit_rows < last)
                if mine.any():
                    states = hidden[torch.from_numpy(part.logit_rows[mine] - first).long().to(hidden.device)]
                    self._logits[logits_at[mine]] = decoder.logits(states).float().cpu().numpy()
                mine = (part.hidden_rows >= first) & (part.hidden_rows < last)
                pooled[pooled_at[mine]] = hidden.float().cpu().numpy()[part.hidden_rows[mine] - first]
        return pooled

    def _hidden(self, decoder: TorchDecoder, batch: Batch, slots: Slots, group: list[int]) -> torch.Tensor:
        """Hidden states of the rows of some neighbouring sequences."""
        base = int(batch.q_start[group[0]])
        q_start = [int(batch.q_start[i]) - base for i in group] + [int(batch.q_start[group[-1] + 1]) - base]
        pos_start = [int(batch.pos_start[i]) for i in group]
        lines = [int(batch.slots[i]) for i in group]
        positions = np.concatenate([np.arange(p, p + q_start[i + 1] - q_start[i]) for i, p in enumerate(pos_start)])
        line_of_row = np.repeat(lines, np.diff(q_start))
        blocks = slots.tables[line_of_row, positions // self._block_size].astype(np.int64)
        device = self._device
        self._attention.plan(
            AttentionBatch(
                q_start=q_start,
                pos_start=pos_start,
                slots=lines,
                tables=torch.from_numpy(slots.tables).long().to(device),
                slot_mapping=torch.from_numpy(blocks * self._block_size + positions % self._block_size).to(device),
            )
        )

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(q)
            self._attention.run(layer, q, k, v, out)
            return out

        tokens = torch.from_numpy(batch.tokens[base : base + q_start[-1]]).long().to(device)
        return decoder.forward(tokens, torch.from_numpy(positions).to(device), attend)

    def sample(self, draws: Draws, slots: Slots) -> Drawn:
        """See `Compute`."""
        n = len(draws.slot)
        width = max(0, int(draws.n_top.max())) if n else 0
        drawn = Drawn(
            np.zeros(n, np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.int32),
            np.zeros((n, width), np.int32),
            np.zeros((n, width), np.float32),
        )
        for i in range(n):
            logits = self._logits[i]
            forced = -1 if draws.forced is None else int(draws.forced[i])
            token = forced if forced >= 0 else sample(logits, row_params(draws, slots, i))
            drawn.token[i] = token
            k = int(draws.n_top[i])
            if k >= 0:
                drawn.logprob[i], drawn.rank[i], drawn.top_ids[i, :k], drawn.top_logprobs[i, :k] = score(
                    logits, token, k
                )
        return drawn


class TorchExecutor:
    """Executes plans in torch. See `engine.core.plan.Executor`."""

    def __init__(
        self,
        model_dir: str | Path,
        spec: DecoderSpec,
        settings: ExecutorSettings,
        sharding: Sharding | None = None,
        around: Callable[[Callable[[Plan], Result]], Callable[[Plan], Result]] = lambda run: run,
    ) -> None:
        """`sharding`: this is a rank of several. `around` wraps what runs a step."""
        self._model = Path(model_dir)
        self._spec = spec
        self._sharding = sharding
        self._around = around
        self._settings = settings
        self._running: _Running | None = None

    def start(self) -> Geometry:
        """Load the model and make the storage. Raises ConfigError."""
        settings, device = self._settings, torch_device(self._settings.device)
        decoder = self._load(STORAGE_DTYPES[settings.dtype], device)
        spec = decoder.spec
        blocks = device_blocks(settings, block_bytes(spec, settings.block_size, settings.kv_dtype))
        if settings.kv_manager == "virtual":
            pages = -(-settings.max_model_len // settings.block_size)
            sizes = settings.max_num_seqs, pages, settings.block_size
            virtual = VirtualCache.reserve(spec, *sizes, settings.kv_dtype, device)
            return self._assemble(decoder, ContiguousAttention(spec, virtual), VirtualBlocks(virtual), blocks)
        cache = KVCache.allocate(
            spec.num_layers, blocks, settings.block_size, spec.num_kv_heads, spec.head_size, settings.kv_dtype, device
        )
        attention: AttentionBackend = ReferenceAttention(spec, cache)
        if settings.attention == "flashinfer":
            from engine.attention.flashinfer_attention import FlashInferAttention

            attention = FlashInferAttention(spec, cache)
        return self._assemble(decoder, attention, TorchBlocks(cache), blocks)

    def _load(self, dtype: torch.dtype, device: torch.device) -> TorchDecoder:
        if self._sharding is None:
            return load_decoder(self._spec, self._model, dtype, device)
        weights = iter_weights(self._spec, self._model)
        return ShardedDecoder(self._spec, weights, dtype, device, self._sharding)

    def _assemble(
        self, decoder: TorchDecoder, attention: AttentionBackend, device: TorchBlocks, blocks: int
    ) -> Geometry:
        spec, settings = decoder.spec, self._settings
        mark = fingerprint(self._model, spec, "torch", settings.dtype, settings.kv_dtype, settings.block_size)
        host, disk = open_tiers(settings, device.bytes_per_block, mark)
        storage = KVStorage(device, host, disk)
        slots = Slots(settings, spec.vocab_size, device.num_blocks)
        alone = settings.deterministic or decoder.device.type == "cpu"
        compute = TorchCompute(decoder, attention, settings.block_size, decoder.device, one_by_one=alone)
        run = self._around(Runner(compute, slots, storage).run)
        self._running = _Running(compute, slots, storage, StepThread(run))
        geometry = geometry_of(settings, spec, blocks, device.bytes_per_block, host, disk)
        backend = f"torch {torch.__version__} {decoder.device.type} {settings.attention}"
        return msgspec.structs.replace(geometry, identity=identity(self._model, spec, settings, backend))

    def submit(self, plan: Plan) -> None:
        """See `Executor`."""
        self._started().thread.submit(plan)

    def collect(self) -> Result:
        """See `Executor`."""
        return self._started().thread.collect()

    def read_block(self, block: int) -> bytes:
        """See `BlockAccess`."""
        return self._started().storage.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        """See `BlockAccess`."""
        self._started().storage.write_block(block, data)

    def load_adapter(self, name: str, directory: str) -> None:
        """See `Executor`. Takes the memory of another model."""
        running, spec = self._started(), self._spec
        if spec.family == TRANSFORMERS:
            raise ConfigError("adapters are served on native decoders only, not on models that transformers computes")
        weights = merged_weights(spec, self._model, LoraAdapter(directory, spec))
        base = running.compute.decoder
        running.compute.adapters[name] = (
            Decoder(spec, weights, base.dtype, base.device)
            if self._sharding is None
            else ShardedDecoder(spec, weights, base.dtype, base.device, self._sharding)
        )
        running.slots.adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """See `Executor`."""
        running = self._started()
        running.slots.adapters.discard(name)
        running.compute.adapters.pop(name, None)

    def close(self) -> None:
        """See `Executor`."""
        if self._running is not None:
            self._running.thread.close()
            self._running.storage.close()

    def _started(self) -> _Running:
        assert self._running is not None, "start() comes first"
        return self._running


@dataclass(frozen=True, slots=True)
class _Running:
    """What `start` makes."""

    compute: TorchCompute
    slots: Slots
    storage: KVStorage
    thread: StepThread


def torch_device(name: str) -> torch.device:
    """The device of that name. Raises ConfigError when torch can't use it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"torch can't use the device {name!r}: {str(error).splitlines()[0]}") from error
    return device
