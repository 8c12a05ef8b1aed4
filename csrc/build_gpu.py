"""Compile the GPU kernels: with nvcc, with hipcc, or with g++ for the host emulator that the tests run them on.

`python -m csrc.build_gpu [OUT]` builds for the GPUs of this machine. Objects are kept under a hash of sources, compiler
and flags, so that a second build links only. None of the three needs torch, and compiling needs no GPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from csrc.build import BuildError, compiler

SOURCES = Path(__file__).resolve().parent / "gpu"

# Attention is compiled a type of activations at a time, the rest in one unit.
UNITS = {
    "attention_bf16": ("attention.cu", ["-DOCT_TYPE=bf16"]),
    "attention_f16": ("attention.cu", ["-DOCT_TYPE=f16"]),
    "attention_float": ("attention.cu", ["-DOCT_TYPE=float"]),
    "kernels": ("kernels.cu", []),
}
CUDA_ARCHS = ("80", "90", "100")
HIP_ARCHS = ("gfx90a",)


@dataclass(frozen=True)
class Target:
    """A compiler with the flags for one kind of device."""

    name: str
    command: tuple[str, ...]
    link: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def with_flags(self, *flags: str) -> Target:
        """The same with more flags for each unit."""
        return replace(self, command=self.command + flags)


def emulator(*flags: str) -> Target:
    """The host. Contraction is off as on the GPU, where it is asked for by name (fmaf)."""
    cxx = compiler()
    common = (
        "-std=c++17",
        "-march=native",
        "-fPIC",
        "-ffp-contract=off",
        "-DOCT_EMULATE",
        "-Wall",
        "-Wno-unknown-pragmas",
    )
    return Target("emulator", (cxx, "-O2", *common, *flags, "-x", "c++"), (cxx, "-shared", *flags))


def cuda(archs: tuple[str, ...] = CUDA_ARCHS, *flags: str) -> Target:
    """NVIDIA: machine code for each architecture, and PTX of the last for what comes after it."""
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    common = ("-std=c++17", "-O3", "-fmad=false", "-Xcompiler=-fPIC", "-cudart=static", *targets, *flags)
    return Target("cuda-" + "-".join(archs), ("nvcc", *common), ("nvcc", "-shared", *common))


def hip(archs: tuple[str, ...] = HIP_ARCHS, *flags: str) -> Target:
    """AMD. The platform must be named: with nvcc in sight hipcc would only call that."""
    targets = [f"--offload-arch={a}" for a in archs]
    common = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", *targets, *flags)
    return Target(
        "hip-" + "-".join(archs),
        ("hipcc", *common, "-x", "hip"),
        ("hipcc", "-shared", *common),
        {"HIP_PLATFORM": "amd"},
    )


def cache_folder() -> Path:
    """Where objects and libraries are kept."""
    base = os.environ.get("OCTAVO_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "octavo-kernels"


def fingerprint(target: Target, unit: str = "", sources: Path = SOURCES) -> str:
    """Hash of what decides the bytes of a unit, or of the whole library."""
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        if path.suffix in (".h", ".cu") and not (unit.startswith("attention") and path.name == "kernels.cu"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    flags = UNITS[unit][1] if unit else sorted(UNITS)
    digest.update(repr((target, flags, _version(target.command[0]))).encode())
    return digest.hexdigest()[:16]


def build_object(target: Target, unit: str, folder: Path | None = None) -> tuple[Path, str]:
    """The object of a unit and what its compiler said (kept beside it). Raises BuildError."""
    folder = folder or cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{target.name}-{unit}-{fingerprint(target, unit)}.o"
    said = out.with_suffix(".txt")
    if not (out.exists() and said.exists()):
        source, flags = UNITS[unit]
        part = out.with_name(f".{os.getpid()}-{out.name}")
        text = _run([*target.command, *flags, "-c", str(SOURCES / source), "-o", str(part)], target.environment)
        said.write_text(text)
        part.replace(out)
    return out, said.read_text()


def build(target: Target, folder: Path | None = None, *, jobs: int = 1) -> Path:
    """The shared library of a target. Raises BuildError when the compiler is missing or fails."""
    folder = folder or cache_folder()
    out = folder / f"{target.name}-{fingerprint(target)}.so"
    if not out.exists():
        with ThreadPoolExecutor(jobs) as pool:
            objects = [o for o, _ in pool.map(lambda unit: build_object(target, unit, folder), UNITS)]
        part = out.with_name(f".{os.getpid()}-{out.name}")
        _run([*target.link, "-o", str(part), *map(str, objects)], target.environment)
        part.replace(out)
    return out


def find_compiler(*names: str) -> str:
    """The first of the names (default: nvcc, hipcc) that is on the PATH, or ""."""
    return next((name for name in names or ("nvcc", "hipcc") if shutil.which(name)), "")


def _version(command: str) -> str:
    try:
        return subprocess.run([command, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"can't run the compiler {command!r}: {error.strerror}") from error


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-20:])
        raise BuildError(f"{command[0]} failed with status {done.returncode}:\n{tail}")
    return done.stdout + done.stderr


def main() -> int:
    try:
        name = find_compiler()
        if not name:
            raise BuildError("neither nvcc nor hipcc is on the PATH: there is nothing to compile GPU kernels with")
        target = cuda() if name == "nvcc" else hip()
        built = build(target, jobs=os.cpu_count() or 1)
        if len(sys.argv) > 1:
            shutil.copy(built, sys.argv[1])
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(sys.argv[1] if len(sys.argv) > 1 else built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
