"""The GPU kernels in the host emulator, and attention in float64 to hold them against."""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from csrc import build_gpu
from engine.attention.encoding import STORAGE_DTYPES
from engine.attention.gpu_kernels import AUTO, GpuKernels, Pages
from engine.attention.paged import read_from_paged_cache, split_kv_cache
from engine.attention.reference import causal_mask
from engine.attention.sequences import Sequences

HERE = Path(__file__).resolve().parent
BUILT = Path(tempfile.gettempdir()) / "octavo-gpu-tests"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@cache
def emulator() -> GpuKernels:
    """The kernels compiled for the host; compiled once for each state of the sources."""
    return build_emulator()


def build_emulator() -> GpuKernels:
    """The same as an object of one's own."""
    return GpuKernels(build_gpu.build(build_gpu.emulator(), BUILT))


@cache
def driver(*flags: str, sources: Path = build_gpu.SOURCES) -> Path:
    """driver.cpp as a program."""
    target = build_gpu.emulator()
    words = [f.strip("-").replace("=", "-") for f in flags]
    digest = "-".join([build_gpu.fingerprint(target, sources=sources), *words])
    program = BUILT / f"driver-{digest}-{(HERE / 'driver.cpp').stat().st_mtime_ns:x}"
    if not program.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        command = [*target.command, "-O1", *flags, f"-I{sources}", str(HERE / "driver.cpp"), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
    return program


def run_driver(program: Path, kernel: str, left_out: int = 0) -> subprocess.CompletedProcess[str]:
    """Status 0 = right results and nothing for a sanitizer to say."""
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}  # one report will do; each takes a second
    command = [str(program), kernel, str(left_out)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)


@dataclass(frozen=True)
class Case:
    """A batch of sequences: `lens` tokens each, of which the last `rows` are this step's queries."""

    dtype: torch.dtype = torch.bfloat16
    kv_dtype: str = "bfloat16"
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 128
    block_size: int = 16
    lens: tuple[int, ...] = (1, 17, 300)
    rows: tuple[int, ...] = (1, 1, 1)
    window: int = 0
    softcap: float = 0.0
    path: int = AUTO

    @property
    def scale(self) -> float:
        return float(self.head_size) ** -0.5


class World:
    """A case's inputs and its cache, filled by the kernels; what no token was written to is NaN."""

    def __init__(self, case: Case, kernels: GpuKernels, device: str = "cpu") -> None:
        torch.manual_seed(len(case.lens) + case.head_size)
        self.case, self.kernels, self.device = case, kernels, device
        size = case.block_size
        needed = [-(-n // size) for n in case.lens]
        num_blocks = sum(needed) + 3
        order = torch.randperm(num_blocks).int()
        self.tables = torch.full((len(case.lens), max(needed)), 0, dtype=torch.int32)
        for i, (n, at) in enumerate(zip(needed, torch.tensor([0, *needed]).cumsum(0).tolist(), strict=False)):
            self.tables[i, :n] = order[at : at + n]
        dtype = STORAGE_DTYPES[case.kv_dtype]
        poison = 0x80 if dtype == torch.int8 else 0xFF  # NaN in every floating type
        shape = (2, num_blocks, size, case.kv_heads, case.head_size * dtype.itemsize)
        self.storage = torch.full(shape, poison, dtype=torch.uint8, device=device).view(dtype)
        key, value = split_kv_cache(self.storage, case.kv_heads, case.head_size)
        scales: list[torch.Tensor | None] = [None, None]
        if case.kv_dtype == "int8":
            scales = [torch.full((num_blocks, size, case.kv_heads), float("nan"), device=device) for _ in range(2)]
        elif dtype.itemsize == 1:
            scales = [torch.tensor([0.5], device=device), torch.tensor([0.25], device=device)]
        self.pages = Pages(key, value, scales[0], scales[1])
        self.k, self.v = (
            [torch.randn(n, case.kv_heads, case.head_size).to(case.dtype).to(device) for n in case.lens] for _ in "kv"
        )
        for i in range(len(case.lens)):
            kernels.write(self.k[i], self.v[i], self.pages, self.slots(i).to(device))
        self.q = torch.randn(sum(case.rows), case.heads, case.head_size).to(case.dtype).to(device)
        self.q_start = torch.tensor([0, *case.rows]).cumsum(0)

    def slots(self, i: int) -> torch.Tensor:
        """Token slots of all positions of sequence i."""
        at = torch.arange(self.case.lens[i])
        return self.tables[i].long()[at // self.case.block_size] * self.case.block_size + at % self.case.block_size

    def run(self, sequences: tuple[int, ...] | None = None, rows: int | None = None) -> torch.Tensor:
        """Attention of all sequences, or of some of them alone; `rows`: only their first so many rows."""
        case, chosen = self.case, sequences if sequences is not None else tuple(range(len(self.case.lens)))
        counts = [case.rows[i] if rows is None else rows for i in chosen]
        lens = [case.lens[i] - case.rows[i] + n for i, n in zip(chosen, counts, strict=True)]
        q = torch.cat([self.q[self.q_start[i] : self.q_start[i] + n] for i, n in zip(chosen, counts, strict=True)])
        out = torch.full_like(q, float("nan"))
        step = Sequences(
            self.tables[list(chosen)].to(self.device),
            torch.tensor([0, *counts]).cumsum(0).int().to(self.device),
            torch.tensor(lens, dtype=torch.int32, device=self.device),
            max(counts),
            max(lens),
        )
        self.kernels.attention(
            out, q, self.pages, step, case.scale, window=case.window, softcap=case.softcap, path=case.path
        )
        return out

    def expected(self) -> torch.Tensor:
        """The same in float64 over what the cache holds."""
        case, parts = self.case, []
        for i, length in enumerate(case.lens):
            slots = self.slots(i)
            one = torch.ones(())
            scales = [one if s is None else s.cpu() for s in (self.pages.k_scale, self.pages.v_scale)]
            if case.kv_dtype == "int8":
                scales = [s.flatten(0, 1)[slots] for s in scales]
            keys, values = read_from_paged_cache(self.pages.key.cpu(), self.pages.value.cpu(), slots, *scales)
            n = case.rows[i]
            q = self.q[self.q_start[i] : self.q_start[i] + n].cpu().double()
            grouped = q.view(n, case.kv_heads, case.heads // case.kv_heads, case.head_size)
            scores = torch.einsum("rhgd,khd->hgrk", grouped, keys.double()) * case.scale
            if case.softcap:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            mask = causal_mask(n, length - n, case.window, q.device)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hgrk,khd->rhgd", weights, values.double()).flatten(1, 2))
        return torch.cat(parts)

    def error(self) -> float:
        """Largest difference from float64."""
        return float((self.run().cpu().double() - self.expected()).abs().max().nan_to_num(nan=float("inf")))
