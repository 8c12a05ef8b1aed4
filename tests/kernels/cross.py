"""Compile the kernels for 64-bit ARM, run a tiny decoder under qemu, and compare it with the portable set here.

    apt install g++-aarch64-linux-gnu qemu-user-static
    python -m tests.kernels.cross

Exit code 0: every row has the same bits alone and in a batch there, and the logits agree. Not part of the test suite,
which needs nothing but g++.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from csrc import build

PROGRAM = Path(__file__).with_suffix(".cpp")
TOLERANCES = (1e-5, 2e-2, 2e-2)  # float32, bf16 and int8 weights: bf16 rounds differently where sums differ


def logits(cxx: str, isa: str, folder: Path, *run: str) -> np.ndarray:
    """The program's output when it is compiled with one set."""
    out = folder / isa
    flags = [flag for flag in build.FLAGS if flag != "-fPIC"]
    objects = []
    for source in ("step", "dispatch", "model", "threads"):
        objects.append(str(folder / f"{isa}-{source}.o"))
        define = [f"-DOCT_ISA={isa}"] if source == "step" else [f"-DOCT_SETS=SET({isa})"]
        command = [cxx, *flags, *define, "-c", str(build.SOURCES / f"{source}.cpp"), "-o", objects[-1]]
        subprocess.run(command, check=True)
    link = [cxx, *flags, "-static", f"-I{build.SOURCES}", str(PROGRAM), *objects, "-o", str(out)]
    subprocess.run(link, check=True)
    done = subprocess.run([*run, str(out)], check=True, capture_output=True, text=True)
    return np.array(done.stdout.split(), np.float64).reshape(3, -1)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = logits("g++", "portable", folder)
        there = logits("aarch64-linux-gnu-g++", "neon", folder, "qemu-aarch64-static")
    errors = np.abs(here - there).max(1) / np.abs(here).max(1)
    for error, tolerance, kind in zip(errors, TOLERANCES, ("float32", "bf16", "int8"), strict=True):
        print(f"{kind}: largest difference {error:.2g} of the largest logit, at most {tolerance:g} allowed")
    return int(bool((errors > TOLERANCES).any()))


if __name__ == "__main__":
    sys.exit(main())
