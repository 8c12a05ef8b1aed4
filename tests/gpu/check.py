"""The slow half of `make check-gpu`: a grid of shapes in the emulator, sanitizers, and every compiler that is here.

Prints what was checked and what could not be. Status 1 when something is wrong.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from csrc import build_gpu
from csrc.build import BuildError
from engine.bench.gpu import Bench
from tests.gpu.harness import BUILT, TOLERANCE, Case, World, driver, emulator, run_driver
from tests.gpu.tools import ROCM_BITCODE, find_tool
from tests.gpu.triton_targets import compile_triton
from tests.gpu.vmm_layouts import check_layouts

KERNELS = ("plain", "plain_fp8", "tensor", "cache_write", "rms_norm", "sample")
HEAD_SIZES, BLOCK_SIZES = (64, 80, 96, 128, 256), (16, 32, 128)
DTYPES = (
    (torch.bfloat16, "bfloat16"),
    (torch.float16, "float16"),
    (torch.float32, "float32"),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "fp8_e4m3"),
    (torch.float16, "fp8_e5m2"),
)
BATCHES = {"decode": ((33, 300), (1, 1)), "prefill": ((40, 270), (40, 3))}
# Loads that are no keys, values or queries: block tables, lengths, and the two scales.
OTHER_LOADS = 8

ATTENTION = re.compile(r"\d+attention_(plain|tensor)")  # in a mangled name
Found = tuple[str, list[str]]  # what was counted, what is wrong


def grid() -> Found:
    """Attention of every head size, block size, dtype and kind of step against float64."""
    wrong, n = [], 0
    for head, block, (dtype, kv_dtype), step in itertools.product(HEAD_SIZES, BLOCK_SIZES, DTYPES, BATCHES):
        lens, rows = BATCHES[step]
        case = Case(dtype, kv_dtype, 4, 2, head, block, lens, rows)
        error = World(case, emulator()).error()
        n += 1
        if not error < TOLERANCE[dtype]:
            wrong.append(f"{step}, head {head}, block {block}, {kv_dtype}: off by {error}")
    shapes = len(HEAD_SIZES) * len(BLOCK_SIZES)
    return f"emulator: {n} cases = {shapes} shapes x {len(DTYPES)} dtypes x {len(BATCHES)} kinds of step", wrong


def sanitizers() -> Found:
    program = driver("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    wrong = []
    for kernel in KERNELS:
        done = run_driver(program, kernel)
        if done.returncode:
            wrong.append(f"{kernel} under AddressSanitizer: {(done.stdout + done.stderr)[:2000]}")
    return f"sanitizers: {len(KERNELS)} kernels under AddressSanitizer and UBSan", wrong


def nvidia() -> Found:
    """Every kernel for every architecture: no spills; the decode kernel's loads and products; the library loads."""
    if not build_gpu.find_compiler("nvcc"):
        return "nvcc: not checked, it is not on the PATH", []
    target = build_gpu.cuda(build_gpu.CUDA_ARCHS, "-Xptxas=-v")
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda unit: build_gpu.build_object(target, unit, BUILT), build_gpu.UNITS))
    n, most, wrong = 0, 0, []
    for _, said in objects:
        for name, arch, stores, loads, registers in re.findall(
            r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
            r".*?Used (\d+) registers",
            said,
            re.DOTALL,
        ):
            n, most = n + 1, max(most, int(registers))
            if int(stores) or int(loads):
                wrong.append(f"{arch} {name}: {stores} bytes spilled with {registers} registers")
    loads = products = 0
    cuobjdump = find_tool("cuobjdump")
    for path, _ in objects if cuobjdump else []:
        for arch in build_gpu.CUDA_ARCHS:
            a, b, more = machine_code(cuobjdump, path, arch)
            loads, products, wrong = loads + a, products + b, wrong + more
    if not (loads and products):
        wrong.append("no disassembly: cuobjdump comes with the triton package")
    wrong += loaded(build_gpu.build(target, BUILT), "cuda")
    return (
        f"nvcc: {n} kernels for sm_{', sm_'.join(build_gpu.CUDA_ARCHS)}, none spills, at most {most} registers; "
        f"attention: {loads} loads of 16 bytes, {products} tensor-core instructions"
    ), wrong


def machine_code(cuobjdump: str, path: Path, arch: str) -> tuple[int, int, list[str]]:
    """16-byte loads and tensor-core products of the attention kernels of an object, and what is wrong with them."""
    command = [cuobjdump, "-arch", f"sm_{arch}", "-sass", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loads = products = 0
    wrong = []
    for function in re.split(r"\n\s*Function : ", text)[1:]:
        name = function.split("\n", 1)[0]
        wide, narrow = len(re.findall(r"LDG\.E\.128", function)), len(re.findall(r"LDG\.E(?!\.128)", function))
        if re.search(r"\b(LDL|STL)\b", function):
            wrong.append(f"sm_{arch} {name} uses local memory")
        if not ATTENTION.search(name):
            continue
        loads += wide
        if match := re.search(r"attention_tensorI.*Li(\d+)ELi(\d)E", name):
            head, tiles = int(match[1]), int(match[2])
            mine = len(re.findall(r"\bHMMA\.", function))
            products += mine
            # A step of 32 keys: keys and values of D / 16 tiles each, four or two products a piece.
            if mine < head // 4 * tiles or wide < head // 4 or narrow > OTHER_LOADS:
                wrong.append(f"sm_{arch} {name}: {mine} products, {wide} loads of 16 bytes, {narrow} others")
        elif not wide:
            wrong.append(f"sm_{arch} {name}: no loads of 16 bytes")
    return loads, products, wrong


def loaded(library: Path, platform: str) -> list[str]:
    """A library must load where no GPU is, so that it can be asked what it is."""
    try:
        lib = ctypes.CDLL(str(library))
    except OSError as error:
        return [f"{library.name} doesn't load: {error}"]
    lib.octg_platform.restype = ctypes.c_char_p
    said = lib.octg_platform().decode()
    return [] if said == platform else [f"{library.name} says that it is for {said}"]


def amd(name: str, arch: str, command: list[str]) -> Found:
    """Assembly for one GPU: nothing kept in scratch memory, 16-byte loads in attention."""
    n, most, wrong = 0, 0, []
    for unit, (source, flags) in build_gpu.UNITS.items():
        out = BUILT / f"{name}-{unit}-{build_gpu.fingerprint(build_gpu.hip((arch,)), unit)}.s"
        if not out.exists():
            words = [*command, *flags, f"--offload-arch={arch}", "--cuda-device-only", "-S", "-o", str(out)]
            done = subprocess.run(
                [*words, str(build_gpu.SOURCES / source)],
                capture_output=True, text=True, check=False, env={"HIP_PLATFORM": "amd", "PATH": "/usr/bin:/bin"},
            )  # fmt: skip
            if done.returncode:
                wrong.append(f"{name} {unit}: {done.stderr[-1500:]}")
                continue
        text = out.read_text()
        kernels = re.findall(
            r"\.name:\s+(\S+)\n"
            r".*?\.private_segment_fixed_size: (\d+).*?\.vgpr_count:\s+(\d+)\s+\.vgpr_spill_count: (\d+)",
            text,
            re.DOTALL,
        )
        for kernel, scratch, registers, spilled in kernels:
            n, most = n + 1, max(most, int(registers))
            body = text.split(f"\n{kernel}:", 1)[1].split("\n.Lfunc_end", 1)[0]
            if int(scratch) or int(spilled):
                wrong.append(f"{name} {kernel}: {scratch} bytes of scratch memory")
            if ATTENTION.search(kernel) and "global_load_dwordx4" not in body:
                wrong.append(f"{name} {kernel}: no loads of 16 bytes")
    return f"{name}: {n} kernels for {arch}, none uses scratch memory, at most {most} vector registers", wrong


def rocm() -> list[Callable[[], Found]]:
    """gfx90a by hipcc, as a library too; gfx942 by a newer clang."""
    common = ["-x", "hip", "-std=c++17", "-O3", "-ffp-contract=off"]
    work: list[Callable[[], Found]] = []
    if build_gpu.find_compiler("hipcc"):
        work.append(lambda: amd("hipcc", "gfx90a", ["hipcc", *common]))
        work.append(
            lambda: ("hipcc: the library loads without a GPU", loaded(build_gpu.build(build_gpu.hip(), BUILT), "hip"))
        )
    else:
        work.append(lambda: ("hipcc: not checked, it is not on the PATH", []))
    clang = find_tool("clang++-22")
    if clang and (bitcode := [f for f in ROCM_BITCODE if f.exists()]):
        links = [w for f in bitcode for w in ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(f))]
        flags = ["--rocm-path=/usr", "-nogpulib", "-D__AMDGCN_WAVEFRONT_SIZE=64", *links]
        work.append(lambda: amd("clang", "gfx942", [clang, *common, *flags]))
    else:
        work.append(lambda: ("clang: not checked, no clang++-22 with AMD's device libraries is installed", []))
    return work


def virtual_memory() -> Found:
    return f"vmm.cpp: compiled against {', '.join(check_layouts()) or 'no headers, there are none here'}", []


def bench() -> Found:
    """Every stage of `octavo bench gpu` that needs no model, at tiny sizes on the CPU."""
    run = Bench("", dry=True)
    wrong, n = [], 0
    for name, _, work in run.stages():
        if name in ("greedy tokens", "transformers"):
            continue
        n += 1
        try:
            work()
        except Exception as error:  # whatever it is, it would have failed on a GPU too
            wrong.append(f"octavo bench gpu, {name}: {type(error).__name__}: {error}")
    return f"octavo bench gpu: {n} stages tried on the CPU", wrong


def main() -> int:
    wrong: list[str] = []
    for check in (grid, sanitizers, nvidia, *rocm(), compile_triton, virtual_memory, bench):
        began = time.monotonic()
        try:
            counted, found = check()
        except BuildError as error:
            counted, found = f"{getattr(check, '__name__', 'check')}: can't be built", [str(error)]
        wrong += found
        print(f"{counted} ({time.monotonic() - began:.0f} s)", flush=True)
    print("\n".join(f"WRONG  {w}" for w in wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
