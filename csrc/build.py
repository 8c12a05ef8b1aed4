"""Compile the CPU kernels: one object per instruction set, one shared library.

`python -m csrc.build [OUT]` builds `engine/_kernels.so`; `build(out)` is what the package's build step calls.
Needs g++ (or $CXX) and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cpu"

# Lowest set first, and that order matters at link time: a library template that two objects instantiate is taken
# from the first, so a machine never runs one that was compiled for more than it has.
_X86 = {
    "portable": [],
    "avx2": ["-march=x86-64-v3"],
    "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mprefer-vector-width=512"],
    "amx": [
        "-march=x86-64-v4",
        "-mavx512bf16",
        "-mavx512vnni",
        "-mprefer-vector-width=512",
        "-mamx-tile",
        "-mamx-bf16",
        "-mamx-int8",
    ],
}
_ARM: dict[str, list[str]] = {"neon": []}
_OTHER: dict[str, list[str]] = {"portable": []}

# No -ffast-math: it would set flush-to-zero for the whole process and break the NaN checks. No contraction: which
# products fuse must not depend on how the compiler sees a tile.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread"]
FLAGS += ["-fvisibility=hidden", "-Wall", "-Wno-psabi", "-Wno-unused-function", "-Wno-ignored-attributes"]
FLAGS += ["-Wno-maybe-uninitialized"]  # GCC 12 warns about its own intrinsics


class BuildError(Exception):
    """The compiler is missing or failed; the message holds its last lines."""


def instruction_sets(machine: str | None = None) -> dict[str, list[str]]:
    """Name -> compiler flags of the sets this machine's family (or `machine`, as uname says it) is built with."""
    machine = (machine or platform.machine()).lower()
    if machine in ("x86_64", "amd64"):
        return _X86
    return _ARM if machine in ("aarch64", "arm64") else _OTHER


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def fingerprint() -> str:
    """Hash of sources and flags: what decides whether a built library is up to date."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((instruction_sets(), FLAGS)).encode())
    return digest.hexdigest()[:16]


def compiler_version(cxx: str | None = None) -> str:
    """First line of `g++ --version`. Raises BuildError when there is no compiler."""
    return _run([cxx or compiler(), "--version"]).splitlines()[0]


def build(out: Path, *, cxx: str | None = None, machine: str | None = None, jobs: int | None = None) -> None:
    """Build the library at `out`, replaced as a whole when it is done, and its fingerprint beside it.

    Raises BuildError.
    """
    cxx = cxx or compiler()
    printed = fingerprint()
    sets = instruction_sets(machine)
    with tempfile.TemporaryDirectory() as tmp:
        # The linker sees the neutral objects first, then the sets from the lowest up.
        commands: list[list[str]] = []
        objects: list[str] = []
        names = "-DOCT_SETS=" + " ".join(f"SET({name})" for name in sets)
        for source in ("dispatch.cpp", "model.cpp", "threads.cpp"):
            objects.append(f"{tmp}/{source}.o")
            commands.append([cxx, *FLAGS, names, "-c", str(SOURCES / source), "-o", objects[-1]])
        for name, flags in sets.items():
            objects.append(f"{tmp}/{name}.o")
            define = f"-DOCT_ISA={name}"
            commands.append([cxx, *FLAGS, *flags, define, "-c", str(SOURCES / "step.cpp"), "-o", objects[-1]])
        with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
            list(pool.map(_run, reversed(commands)))
        linked = f"{tmp}/kernels.so"
        _run([cxx, "-shared", "-pthread", "-o", linked, *objects])
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f".{out.name}.{os.getpid()}")
        part.write_bytes(Path(linked).read_bytes())
        part.chmod(0o755)
        part.replace(out)
        fingerprint_file(out).write_text(printed)


def fingerprint_file(library: Path) -> Path:
    return library.with_suffix(".fingerprint")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"can't run the C++ compiler {command[0]!r}: {error.strerror}") from error
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-12:])
        raise BuildError(f"{' '.join(command[:1])} failed with status {done.returncode}:\n{tail}")
    return done.stdout


def main() -> int:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCES.parent.parent / "engine" / "_kernels.so"
    try:
        build(out)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
