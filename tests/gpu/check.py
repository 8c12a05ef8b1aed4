"""The slow half of `make check-gpu`: compile for every target that a compiler is here for, and look at the result.

Prints what was checked and what could not be. Status 1 when something is wrong.
"""

from __future__ import annotations

import re
import sys

from csrc import build_gpu
from csrc.build import BuildError
from tests.gpu.harness import BUILT, driver, run_driver

KERNELS = ("plain", "plain_fp8", "tensor", "cache_write", "rms_norm", "sample")
# Decode on tensor cores at the head sizes that models have: no register may go to memory.
NO_SPILLS = re.compile(r"attention_tensor.*Li(64|96|128)ELi1E|attention_plain|merge_parts")
MOST_REGISTERS = 168


def resource_problems(said: str) -> tuple[int, list[str]]:
    """Kernels that ptxas reported on, and which of them break a limit."""
    entries = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        said,
        re.DOTALL,
    )
    problems = []
    for name, arch, stores, loads, registers in entries:
        if NO_SPILLS.search(name) and (int(stores) or int(loads) or int(registers) > MOST_REGISTERS):
            problems.append(f"{arch} {name}: {registers} registers, {stores} bytes spilled")
    return len(entries), problems


def main() -> int:
    problems, counted = [], []
    sanitized = driver("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    for kernel in KERNELS:
        done = run_driver(sanitized, kernel)
        if done.returncode:
            problems.append(f"{kernel} under AddressSanitizer: {(done.stdout + done.stderr)[:2000]}")
    counted.append(f"{len(KERNELS)} kernels under AddressSanitizer and UBSan")
    targets = {
        "nvcc": build_gpu.cuda(build_gpu.CUDA_ARCHS, "-Xptxas=-v"),
        "hipcc": build_gpu.hip(),
    }
    for compiler, target in targets.items():
        if not build_gpu.find_compiler(compiler):
            counted.append(f"{target.name}: not checked, {compiler} is not on the PATH")
            continue
        kernels = 0
        for unit in build_gpu.UNITS:
            try:
                n, found = resource_problems(build_gpu.build_object(target, unit, BUILT)[1])
            except BuildError as error:
                problems.append(f"{target.name} {unit}: {error}")
                continue
            kernels += n
            problems += found
        counted.append(f"{target.name}: {len(build_gpu.UNITS)} units, resources of {kernels} kernels")
    print("\n".join([*counted, *(f"WRONG  {p}" for p in problems)]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
