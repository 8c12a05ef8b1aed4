"""End to end on a device: the GPU executor driven by plans, beside a static batch with torch's attention."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.gpu_kernels import GpuKernels
from engine.bench.gpu_model import random_decoder, shapes
from engine.core.plan import LAST_SAMPLED, Geometry, Plan, Row, SlotParams
from engine.model.decoder import Decoder
from engine.model.spec import DecoderSpec
from engine.worker.device import Device
from engine.worker.gpu_executor import GpuExecutor
from engine.worker.settings import Dtype, ExecutorSettings

CHUNK = 512


def weight_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes that one decode step reads of the weights: all but the table of embeddings."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes(spec) if name != "embed")


class Served:
    """A random-weight model behind the executor of a device."""

    def __init__(
        self, spec: DecoderSpec, device: Device, kernels: GpuKernels, *, seqs: int, context: int, dtype: Dtype,
        deterministic: bool,
    ) -> None:  # fmt: skip
        self.spec, self.context = spec, context
        self._folder = tempfile.TemporaryDirectory()
        settings = ExecutorSettings(
            max_model_len=context, max_num_seqs=seqs, max_batched_tokens=max(CHUNK, seqs), dtype=dtype, kv_dtype=dtype,
            num_blocks=seqs * (-(-context // 16)), attention=kernels.platform, deterministic=deterministic,
        )  # fmt: skip
        self._executor = GpuExecutor(Path(self._folder.name), spec, settings, device, kernels)
        decoder = random_decoder(spec, getattr(torch, dtype), device.torch_device)
        self.geometry: Geometry = self._executor.start_with(self._executor.fused(decoder))
        self._step = 0

    def decode(self, batch: int, tokens: int, steps: int) -> dict[str, float]:
        """Seconds a step of `batch` sequences whose contexts begin at `tokens`, two steps in flight."""
        blocks = -(-self.context // 16)
        began = time.perf_counter()
        for slot in range(batch):
            table = tuple(range(slot * blocks, (slot + 1) * blocks))
            for start in range(0, tokens, CHUNK):
                ids = tuple((slot + i) % self.spec.vocab_size for i in range(start, min(start + CHUNK, tokens)))
                row = Row(slot, start, ids, 0, table if not start else (), sample=start + len(ids) == tokens)
                self._run(Plan(self._step, (row,), slots=((slot, SlotParams(temperature=0.0)),) if not start else ()))
        prefilled = time.perf_counter()
        for i in range(steps):
            rows = tuple(Row(slot, tokens + i, (LAST_SAMPLED,), sample=True) for slot in range(batch))
            self._executor.submit(Plan(self._step, rows))
            self._step += 1
            if i:
                self._executor.collect()
        self._executor.collect()
        taken = (time.perf_counter() - prefilled) / steps
        return {"step_s": taken, "tokens_s": batch / taken, "prefill_tokens_s": batch * tokens / (prefilled - began)}

    def close(self) -> None:
        self._executor.close()
        self._folder.cleanup()

    def _run(self, plan: Plan) -> None:
        self._executor.submit(plan)
        self._executor.collect()
        self._step += 1


def decode_cell(served: Served, batch: int, tokens: int, steps: int, rate: float, dtype: torch.dtype) -> dict[str, Any]:
    """A cell of the table: beside the time of reading weights and KV at the measured rate."""
    spec = served.spec
    kv = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * dtype.itemsize * batch * (tokens + steps // 2)
    bound = (weight_bytes(spec, dtype) + kv) / rate
    found = served.decode(batch, tokens, steps)
    return {"batch": batch, "tokens": tokens, **found, "bound_s": bound, "share": bound / found["step_s"]}


@torch.inference_mode()
def static_batch(
    spec: DecoderSpec, device: torch.device, dtype: torch.dtype, batch: int, tokens: int, steps: int
) -> float:
    """Tokens a second of a fixed batch with keys and values in plain tensors and torch's own attention."""
    decoder = random_decoder(spec, dtype, device, Decoder)
    shape = (spec.num_layers, batch, spec.num_kv_heads, tokens + steps, spec.head_size)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in "kv")
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    last = torch.zeros(batch, dtype=torch.int64, device=device)
    wait()
    began = time.perf_counter()
    for at in range(tokens, tokens + steps):

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: int = at) -> torch.Tensor:
            keys[layer, :, :, at], values[layer, :, :, at] = k, v
            past = slice(at + 1)
            mixed = F.scaled_dot_product_attention(
                q.unsqueeze(2),
                keys[layer, :, :, past],
                values[layer, :, :, past],
                scale=spec.attn_scale,
                enable_gqa=True,
            )
            return mixed.squeeze(2)

        hidden = decoder.forward(last, torch.full((batch,), at, device=device), attend)
        last = decoder.logits(hidden).argmax(-1)
    wait()
    return batch * steps / (time.perf_counter() - began)
