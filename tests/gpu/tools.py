"""Tools of the toolchains, where their packages put them."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")  # Debian: rocm-device-libs
ROCM_BITCODE = [DEVICE_LIBRARIES / f"{name}.bc" for name in ("ockl", "ocml", "oclc_abi_version_500")]


def find_tool(name: str) -> str:
    """Path of a tool on the PATH or in the triton package, which brings NVIDIA's disassembler; "" = not here."""
    if found := shutil.which(name):
        return found
    spec = importlib.util.find_spec("triton")
    beside = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name if spec and spec.origin else Path(name)
    return str(beside) if beside.exists() else ""
