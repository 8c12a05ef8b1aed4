"""Compile `vmm.cpp` against the drivers' headers, where there are any: its structs must have their layouts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from csrc.build_vmm import compile_source
from tests.gpu.tools import find_tool


def check_layouts() -> list[str]:
    """The header folders that it was compared with. Raises BuildError for a difference."""
    compile_source("-fsyntax-only")
    folders = []
    nvcc, triton = find_tool("nvcc"), importlib.util.find_spec("triton")
    for cuda in {Path(nvcc).resolve().parent.parent / "include", *Path("/usr/local").glob("cuda*/include")}:
        if (cuda / "cuda.h").exists():
            compile_source("-fsyntax-only", "-DOCT_CHECK_CUDA", f"-isystem{cuda}")
            folders.append(str(cuda))
    hip = Path(triton.origin).parent / "backends" / "amd" / "include" if triton and triton.origin else Path()
    if (hip / "hip" / "hip_runtime_api.h").exists():
        compile_source("-fsyntax-only", "-DOCT_CHECK_HIP", "-D__HIP_PLATFORM_AMD__", f"-isystem{hip}")
        folders.append(str(hip))
    return folders
