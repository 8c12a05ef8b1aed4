"""The kernels compiled for 64-bit ARM: a tiny decoder under qemu, beside the portable set of this machine."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from csrc import build

PROGRAM = Path(__file__).with_name("arm.cpp")
# Of the largest logit, for float32, bf16 and int8 weights: bf16 rounds differently where sums differ.
TOLERANCES = (1e-5, 2e-2, 2e-2)


def compiled(cxx: str, isa: str, folder: Path) -> Path:
    """The program with one set's kernels, optimised for a quick compilation."""
    flags = [flag for flag in build.FLAGS if flag not in ("-fPIC", "-O3")] + ["-O1"]
    sources = {
        build.SOURCES / "step.cpp": f"-DOCT_ISA={isa}",
        build.SOURCES / "dispatch.cpp": f"-DOCT_SETS=SET({isa})",
        build.SOURCES / "model.cpp": "",
        build.SOURCES / "threads.cpp": "",
        PROGRAM: f"-I{build.SOURCES}",
    }

    def compile_one(source: Path) -> str:
        out = str(folder / f"{isa}-{source.stem}.o")
        define = [sources[source]] if sources[source] else []
        subprocess.run([cxx, *flags, *define, "-c", str(source), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run([cxx, "-pthread", "-static", *objects, "-o", str(folder / isa)], check=True)
    return folder / isa


def logits(*run: str | Path) -> np.ndarray:
    """One line of logits a kind of weights; the program fails when a row's bits depend on its batch."""
    done = subprocess.run([str(word) for word in run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.array(done.stdout.split(), np.float64).reshape(len(TOLERANCES), -1)


def test_arm_gives_the_logits_of_this_machine_and_bits_that_no_batch_changes(tmp_path: Path) -> None:
    here = logits(compiled(build.compiler(), "portable", tmp_path))
    there = logits("qemu-aarch64-static", compiled("aarch64-linux-gnu-g++", "neon", tmp_path))
    errors = np.abs(here - there).max(1) / np.abs(here).max(1)
    assert (errors <= TOLERANCES).all(), errors
