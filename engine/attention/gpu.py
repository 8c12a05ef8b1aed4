"""Attention by the kernels of csrc/gpu: `cuda` on NVIDIA, `rocm` on AMD."""

from __future__ import annotations

import torch

from csrc import build_gpu
from csrc.build import BuildError
from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.gpu_kernels import GpuKernels, Pages, problem_with
from engine.attention.sequences import PlacedStep, sequences_of
from engine.errors import ConfigError
from engine.model.spec import DecoderSpec, RopeSpec


class GpuAttention:
    """Writes and reads one cache by the paged views, never by the canonical order: the choice is the cache's for life.

    Which of a step's sequences are beside each other, and where prompts are cut, changes no bit of a row.
    """

    def __init__(self, spec: DecoderSpec, cache: KVCache, kernels: GpuKernels, *, rotate: int = 0) -> None:
        """rotate: queries and keys come as they were projected and are turned here; positions that may come, or 0."""
        storage = cache.layers[0]
        if problem := problem_with(cache.block_size, spec.head_size, storage.dtype):
            raise ConfigError(f"the GPU kernels can't serve this cache: {problem}")
        self._spec = spec
        self._kernels = kernels
        self._pages = [_pages(cache, layer) for layer in range(spec.num_layers)]
        self._device = storage.device
        self._turns = [_turns(rope, rotate, self._device) for rope in spec.rope] if rotate else []
        self._step: PlacedStep | None = None

    def plan(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        rows = [
            torch.arange(p, p + b - a)
            for p, a, b in zip(batch.pos_start, batch.q_start, batch.q_start[1:], strict=False)
        ]
        positions = torch.cat(rows).int().to(self._device)
        self.place(PlacedStep(sequences_of(batch, self._device), batch.slot_mapping, positions))

    def place(self, step: PlacedStep) -> None:
        """See `PlacedAttention`."""
        self._step = step

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """See `AttentionBackend`."""
        spec, step = self._spec, self._step
        assert step is not None, "plan() or place() comes first"
        q = q.contiguous()
        if k.stride() != v.stride() or k.stride(1) != spec.head_size:  # parts of one product share their strides
            k, v = k.contiguous(), v.contiguous()
        turn = spec.layers[layer].rope if spec.layers else 0
        if self._turns and turn >= 0:
            self._kernels.write(
                k, v, self._pages[layer], step.slot_mapping, q=q, positions=step.positions,
                cos_sin=self._turns[turn], interleaved=spec.rope_interleaved,
            )  # fmt: skip
        else:
            self._kernels.write(k, v, self._pages[layer], step.slot_mapping)
        window = spec.layers[layer].window if spec.layers else 0
        self._kernels.attention(
            out, q, self._pages[layer], step.sequences, spec.attn_scale, window=window, softcap=spec.attn_softcap
        )


def _turns(rope: RopeSpec, positions: int, device: torch.device) -> torch.Tensor:
    """Cosines, then sines, of every position: [positions, rotary_dim] float32."""
    frequencies = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(positions, device=device).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.scale


def _pages(cache: KVCache, layer: int) -> Pages:
    key, value = cache.paged_views(layer)
    if cache.scales:
        return Pages(key, value, cache.scales[layer][0], cache.scales[layer][1])
    if key.dtype.itemsize == 1:
        scale = torch.tensor([cache.fp8_scale], dtype=torch.float32, device=key.device)
        return Pages(key, value, scale, scale)
    return Pages(key, value)


def backend_name() -> str:
    """What this torch's GPUs are served with: "rocm" for an AMD build of torch, else "cuda"."""
    return "rocm" if torch.version.hip else "cuda"


def problem(spec: DecoderSpec, block_size: int, kv_dtype: str, dtype: str) -> str:
    """Why `cuda` or `rocm` can't be used here; "" when it can."""
    if kv_dtype != dtype and STORAGE_DTYPES[kv_dtype].itemsize > 1:
        return f"{kv_dtype} keys and values beside {dtype} activations"
    if shape := problem_with(block_size, spec.head_size, STORAGE_DTYPES[kv_dtype]):
        return shape
    compiler = "hipcc" if backend_name() == "rocm" else "nvcc"
    return "" if build_gpu.find_compiler(compiler) else f"{compiler} is not on the PATH"


def load_kernels(device: torch.device) -> GpuKernels:
    """The kernels for one GPU, compiled when they are not yet in the cache. Raises ConfigError."""
    if backend_name() == "rocm":
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        target = build_gpu.hip((arch,))
    else:
        major, minor = torch.cuda.get_device_capability(device)
        target = build_gpu.cuda((f"{major}{minor}",))
    try:
        return GpuKernels(build_gpu.build(target, jobs=len(build_gpu.UNITS)))
    except BuildError as error:
        raise ConfigError(f"the GPU kernels can't be compiled: {error}") from error
