"""Compile `gpu/vmm.cpp`, the virtual memory of a GPU. It is plain C++: nothing of CUDA or ROCm is needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from csrc.build import BuildError, compiler
from csrc.build_gpu import SOURCES, cache_folder

SOURCE = SOURCES / "vmm.cpp"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror")


def build(folder: Path | None = None) -> Path:
    """The shared library, kept under a hash of its source. Raises BuildError."""
    folder = folder or cache_folder()
    out = folder / f"vmm-{hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]}.so"
    if not out.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f".{os.getpid()}-{out.name}")
        compile_source("-shared", "-o", str(part), "-ldl")
        part.replace(out)
    return out


def compile_source(*flags: str) -> None:
    """Compile with further flags. Raises BuildError."""
    command = [compiler(), *FLAGS, str(SOURCE), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"can't run the compiler {command[0]!r}: {error.strerror}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
