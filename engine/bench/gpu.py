"""What `octavo bench gpu` measures, in stages: each has its own share of the time, and one that can't run says why.

On the CPU everything but the shapes is the same: kernels in the emulator, a device that runs at once. That run is to
see that nothing fails by a slip; its figures mean nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from csrc import build_gpu
from engine.attention.gpu import load_kernels
from engine.attention.gpu_kernels import GpuKernels
from engine.bench import gpu_attention, gpu_steps
from engine.bench.gpu_model import LLAMA_8B, TINY, spec_of
from engine.errors import OctavoError
from engine.worker.device import CudaDevice, Device, HostDevice
from engine.worker.gpu_compute import ROW_TILE

PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time"]


@dataclass(frozen=True)
class Stage:
    """What one stage found, or why it didn't run."""

    name: str
    ok: bool
    seconds: float
    found: Any


@dataclass
class Bench:
    """One run. `rate`: bytes a second of a copy, measured before what is compared with it."""

    model: str
    dry: bool  # on the CPU
    kernels: GpuKernels | None = None
    rate: float = 0.0

    def __post_init__(self) -> None:
        self.where = torch.device("cpu" if self.dry else "cuda:0")

    def stages(self) -> list[tuple[str, float, Callable[[], Any]]]:
        """Name, seconds that must be left to begin it, and work; in order of what one wants to know first."""
        return [
            ("device", 0, self.describe),
            ("build", 60, self.build),
            (
                "correctness",
                20,
                lambda: gpu_attention.correctness(self._kernels(), self.where, 64 if self.dry else 1024),
            ),
            ("bandwidth", 10, self.bandwidth),
            ("decode attention", 40, lambda: list(self.attention())),
            ("bits of a row", 5, lambda: gpu_attention.row_bits(self.where, ROW_TILE, 64 if self.dry else 4096)),
            ("8B, batch-invariant", 90, lambda: self.end_to_end(deterministic=True)),
            ("8B, free", 60, lambda: self.end_to_end(deterministic=False)),
            ("8B, static batch", 40, self.static),
            ("Triton", 30, self.triton),
            ("greedy tokens", 60, self.greedy),
            ("transformers", 60, self.transformers),
        ]

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"torch": torch.__version__, "compiler": build_gpu.find_compiler() or "none"}
        if not self.dry:
            p = torch.cuda.get_device_properties(self.where)
            found |= {"name": p.name, "memory": p.total_memory, "processors": p.multi_processor_count}
        return found

    def build(self) -> str:
        self.kernels = GpuKernels(build_gpu.build(build_gpu.emulator())) if self.dry else load_kernels(self.where)
        return self.kernels.platform

    def bandwidth(self) -> dict[str, float]:
        self.rate = gpu_attention.copy_rate(self.where, 1 << 24 if self.dry else gpu_attention.COPY_BYTES)
        return {"bytes_s": self.rate}

    def attention(self) -> Iterator[dict[str, Any]]:
        cells = [(2, 64)] if self.dry else gpu_attention.CELLS
        return gpu_attention.decode_cells(self._kernels(), self.where, self._rate(), cells)

    def end_to_end(self, *, deterministic: bool) -> list[dict[str, Any]]:
        spec = spec_of(TINY, 64) if self.dry else spec_of(LLAMA_8B, 8192)
        cells = [(2, 20)] if self.dry else [(1, 1024), (16, 1024), (64, 1024), (16, 4096)]
        context, steps = (64, 3) if self.dry else (4096 + 128, 64)
        seqs = max(batch for batch, _ in cells)
        device: Device = HostDevice() if self.dry else CudaDevice(self.where)
        served = gpu_steps.Served(
            spec, device, self._kernels(), seqs=seqs, context=context, dtype="bfloat16",
            deterministic=deterministic,
        )  # fmt: skip
        try:
            return [gpu_steps.decode_cell(served, b, n, steps, self._rate(), torch.bfloat16) for b, n in cells]
        finally:
            served.close()

    def static(self) -> dict[str, float]:
        spec = spec_of(TINY, 64) if self.dry else spec_of(LLAMA_8B, 8192)
        batch, tokens, steps = (2, 20, 3) if self.dry else (16, 1024, 64)
        return {"tokens_s": gpu_steps.static_batch(spec, self.where, torch.bfloat16, batch, tokens, steps)}

    def triton(self) -> Any:
        if self.dry:
            return "compiles for a GPU only"
        return gpu_attention.triton_correctness(self.where)

    def greedy(self) -> dict[str, Any]:
        """How many greedy answers the device and the CPU backend agree on."""
        answers = [self._generate(device)[0] for device in (("cpu",) if self.dry else ("cuda", "cpu"))]
        same = [a == b for a, b in zip(answers[0], answers[-1], strict=True)]
        return {"prompts": len(same), "same": sum(same), "answers": answers}

    def transformers(self) -> dict[str, float]:
        """Tokens a second of the default model, ours and by `transformers`, with the same prompts."""
        from engine.bench.gpu_transformers import tokens_per_second

        new = 4 if self.dry else 64
        _, ours = self._generate("cpu" if self.dry else "cuda", new)
        theirs = tokens_per_second(self.model, PROMPTS, new, str(self.where))
        return {"tokens_s": ours, "transformers_tokens_s": theirs}

    def _generate(self, device: str, new_tokens: int = 64) -> tuple[list[str], float]:
        from engine.api import SamplingParams
        from engine.config import EngineConfig, ModelConfig, ParallelConfig
        from engine.llm import LLM

        config = EngineConfig(model=ModelConfig(model=self.model), parallel=ParallelConfig(device=device))
        params = SamplingParams(max_tokens=4 if self.dry else new_tokens, temperature=0, ignore_eos=True)
        with LLM(config) as llm:
            llm.generate(PROMPTS, params)
            began = time.perf_counter()
            answers = llm.generate(PROMPTS, params)
            taken = time.perf_counter() - began
        return [a.choices[0].text for a in answers], len(
            PROMPTS
        ) * params.max_tokens / taken if params.max_tokens else 0.0

    def _kernels(self) -> GpuKernels:
        assert self.kernels is not None, "the kernels could not be built"
        return self.kernels

    def _rate(self) -> float:
        assert self.rate, "the bandwidth was not measured"
        return self.rate


def run(model: str, device: str, deadline_s: float, report: Callable[[Stage], None]) -> list[Stage]:
    """All stages in order; each is reported when it is done, so that nothing is lost when the last one hangs."""
    if device != "cpu" and not torch.cuda.is_available():
        stage = Stage(
            "device", False, 0.0, "torch sees no GPU on this machine; --device cpu tries the stages without one"
        )
        report(stage)
        return [stage]
    began, done = time.monotonic(), []
    for name, needed, work in Bench(model, device == "cpu").stages():
        left = deadline_s - (time.monotonic() - began)
        started = time.monotonic()
        ok, found = False, f"no time left: {left:.0f} s of {deadline_s:.0f}"
        if left > needed:
            try:
                ok, found = True, work()
            except (OctavoError, RuntimeError, AssertionError, ImportError, OSError, ValueError) as error:
                ok, found = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        gc.collect()  # models of gigabytes, held by cycles
        if device != "cpu":
            torch.cuda.empty_cache()
        done.append(Stage(name, ok, time.monotonic() - started, found))
        report(done[-1])
    return done
