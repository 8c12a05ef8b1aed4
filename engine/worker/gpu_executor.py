"""The executor of a GPU: torch's matrix products, our attention and small kernels, graphs, swaps beside the step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine.attention.cache import KVCache
from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.gpu_kernels import GpuKernels
from engine.attention.sequences import PlacedAttention
from engine.core.plan import Geometry, Plan, Result
from engine.errors import ConfigError
from engine.model.decoder import Decoder
from engine.model.fused import FusedDecoder, can_fuse
from engine.model.lora import LoraAdapter, merged_weights
from engine.model.spec import DecoderSpec
from engine.worker.device import Device
from engine.worker.fingerprint import fingerprint, identity
from engine.worker.gpu_blocks import STAGING_BYTES, GpuBlocks
from engine.worker.gpu_compute import ROW_TILE, GpuCompute
from engine.worker.gpu_steps import GpuRunner, GpuSteps
from engine.worker.settings import ExecutorSettings, device_blocks
from engine.worker.slots import Slots
from engine.worker.storage import KVStorage
from engine.worker.tiers import geometry_of, open_tiers
from engine.worker.torch_blocks import block_bytes

WORKSPACE_BYTES = 4 << 26  # of split attention at most; kernels.h, OCTG_MOST_WORKSPACE


class GpuExecutor:
    """Executes plans on a device. See `engine.core.plan.Executor`.

    kernels: those of csrc/gpu; None computes attention by Triton, everything else by torch.
    """

    def __init__(
        self,
        model_dir: str | Path,
        spec: DecoderSpec,
        settings: ExecutorSettings,
        device: Device,
        kernels: GpuKernels | None,
        *,
        row_tile: int = ROW_TILE,
    ) -> None:
        self._model = Path(model_dir)
        self._spec = spec
        self._settings = settings
        self._device = device
        self._kernels = kernels
        self._row_tile = row_tile
        self._running: _Running | None = None

    def start(self) -> Geometry:
        """Load the model, size the pool by what a step was seen to take, make the graphs. Raises ConfigError."""
        spec, where = self._spec, self._device.torch_device
        kind = FusedDecoder if self._fuses() else Decoder
        try:
            decoder = self.fused(kind.load(spec, self._model, STORAGE_DTYPES[self._settings.dtype], where))
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the weights don't fit on {where}: {error}") from error
        return self.start_with(decoder)

    def start_with(self, decoder: Decoder) -> Geometry:
        """The same with a decoder that is there."""
        spec, settings, device = self._spec, self._settings, self._device
        per_block = block_bytes(spec, settings.block_size, settings.kv_dtype)
        blocks = pool_blocks(settings, per_block, device.memory(), self._step_bytes(decoder))
        cache = KVCache.allocate(
            spec.num_layers, blocks, settings.block_size, spec.num_kv_heads, spec.head_size, settings.kv_dtype,
            device.torch_device,
        )  # fmt: skip
        moved = GpuBlocks(cache, device)
        name = self._kernels.platform if self._kernels else "triton"
        mark = fingerprint(self._model, spec, name, settings.dtype, settings.kv_dtype, settings.block_size)
        host, disk = open_tiers(settings, moved.bytes_per_block, mark)
        device.pin(host.blocks)
        storage = KVStorage(moved, host, disk)
        slots = Slots(settings, spec.vocab_size, blocks)
        compute = GpuCompute(
            decoder, self._attention(cache, decoder), self._kernels, device, settings, row_tile=self._row_tile
        )
        if not any(layer.moe for layer in spec.layers):  # which experts there are is asked on the host
            compute.capture()
        device.settle()
        steps = GpuSteps(GpuRunner(compute, slots, storage, moved))
        self._running = _Running(compute, slots, storage, steps)
        geometry = geometry_of(settings, spec, blocks, moved.bytes_per_block, host, disk)
        backend = f"{name} {settings.attention} torch {torch.__version__}"
        return msgspec.structs.replace(geometry, identity=identity(self._model, spec, settings, backend))

    def submit(self, plan: Plan) -> None:
        """See `Executor`."""
        self._started().steps.submit(plan)

    def collect(self) -> Result:
        """See `Executor`."""
        return self._started().steps.collect()

    def load_adapter(self, name: str, directory: str) -> None:
        """See `Executor`. Takes the memory of another model."""
        running, spec = self._started(), self._spec
        base = running.compute.decoder
        weights = merged_weights(spec, self._model, LoraAdapter(directory, spec))
        try:
            decoder = self.fused(type(base)(spec, weights, base.dtype, base.device))
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"adapter {name!r} doesn't fit: {error}; lower --gpu-memory-utilization") from error
        decoder.row_tile = base.row_tile
        self._device.settle()
        running.compute.adapters[name] = decoder
        running.slots.adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """See `Executor`."""
        running = self._started()
        running.slots.adapters.discard(name)
        running.compute.adapters.pop(name, None)

    def close(self) -> None:
        """See `Executor`."""
        if self._running is not None:
            self._running.steps.close()
            self._device.settle()
            self._running.storage.close()

    def _fuses(self) -> bool:
        return self._kernels is not None and can_fuse(self._spec)

    def fused(self, decoder: Decoder) -> Decoder:
        """A loaded decoder, ready for `start_with`."""
        if isinstance(decoder, FusedDecoder) and self._kernels is not None:
            decoder.fuse(self._kernels)
        return decoder

    def _attention(self, cache: KVCache, decoder: Decoder) -> PlacedAttention:
        if self._kernels is None:
            from engine.attention.triton_attention import TritonAttention

            return TritonAttention(self._spec, cache)
        from engine.attention.gpu import GpuAttention

        rotate = self._settings.max_model_len if isinstance(decoder, FusedDecoder) else 0
        return GpuAttention(self._spec, cache, self._kernels, rotate=rotate)

    def _step_bytes(self, decoder: Decoder) -> int:
        """What the largest step takes beside weights and KV: measured, but for attention's bounded workspace."""
        rows = (
            -(-max(self._settings.max_batched_tokens, self._settings.max_num_seqs) // self._row_tile) * self._row_tile
        )

        @torch.inference_mode()
        def step() -> None:
            at = torch.zeros(rows, dtype=torch.int32, device=decoder.device)
            decoder.logits(decoder.forward(at, at, lambda _layer, q, _k, _v: q.clone()))

        # Twice: graphs keep memory of their own.
        return 2 * self._device.peak(step) + WORKSPACE_BYTES + STAGING_BYTES

    def _started(self) -> _Running:
        assert self._running is not None, "start() comes first"
        return self._running


@dataclass(frozen=True, slots=True)
class _Running:
    """What `start` makes."""

    compute: GpuCompute
    slots: Slots
    storage: KVStorage
    steps: GpuSteps


def pool_blocks(settings: ExecutorSettings, per_block: int, memory: tuple[int, int], step_bytes: int) -> int:
    """Blocks of the pool: what the device's share leaves beside weights and steps, or what was asked for if it fits.

    memory: bytes free, and there, with the weights loaded. Raises ConfigError with the arithmetic.
    """
    free, total = memory
    kept = int(total * (1 - settings.gpu_memory)) if settings.gpu_memory else 0
    room = free - kept - step_bytes
    words = f"{free} bytes are free beside the weights, a step takes {step_bytes}"
    if not settings.gpu_memory:
        blocks = device_blocks(settings, per_block)
        if blocks * per_block > room:
            raise ConfigError(f"{blocks} KV blocks of {per_block} bytes don't fit on the GPU: {words}")
        return blocks
    if room < per_block:
        raise ConfigError(
            f"no room for KV blocks of {per_block} bytes: {words}, and {kept} of {total} are not to be used; raise "
            f"--gpu-memory-utilization, or lower --max-num-batched-tokens"
        )
    return room // per_block
