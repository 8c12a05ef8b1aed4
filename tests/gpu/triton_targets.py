"""The Triton kernels compiled ahead of time for GPUs that are not here."""

from __future__ import annotations

import os
import re
from typing import Any

TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64))
HEAD, BLOCK = 128, 544
KINDS = {"bf16": 0, "i8": 1, "u8": 2}  # pointer type of keys: how they are kept


def signatures(kv: str) -> dict[str, dict[str, str]]:
    """Types of the arguments that are no constants, by kernel."""
    scales = {"k_scale": "*fp32", "v_scale": "*fp32"}
    cache = {"keys": f"*{kv}", "values": f"*{kv}", **scales}
    where = {"q_start": "*i32", "seq_lens": "*i32", "sums": "*fp32", "states": "*fp32", "parts": "i32"}
    return {
        "cache_write": {"k": "*bf16", "v": "*bf16", **cache, "slot_mapping": "*i64"},
        "attention": {
            "out": "*bf16", "q": "*bf16", **cache, "tables": "*i32", **where, "max_blocks": "i32", "scale": "fp32",
            "softcap": "fp32", "window": "i32",
        },
        "merge_parts": {"out": "*bf16", **where, "window": "i32"},
    }  # fmt: skip


def constants(kernel: str, kind: int, split: bool) -> dict[str, Any]:
    """The arguments that decide what is compiled."""
    shape = {"HEAD": HEAD, "WIDE": HEAD}
    if kernel == "cache_write":
        return {**shape, "KV_HEADS": 8, "KIND": kind}
    if kernel == "merge_parts":
        return {**shape, "HEADS": 32, "WINDOW": False}
    flags = {"SOFTCAP": False, "WINDOW": False, "SPLIT": split, "EXACT": "ieee", "WIDE_DOT": False}
    return {**shape, **flags, "HEADS": 32, "KV_HEADS": 8, "BLOCK": BLOCK, "KIND": kind}


def problems_of(target: str, kernel: str, text: str) -> list[str]:
    """Attention must read keys and values in wide pieces and multiply on tensor (matrix) cores."""
    if kernel != "attention":
        return []
    wide = r"ld\.global[\w.]*\.v4|ld\.global[\w.]*\.v2\.b64" if target == "cuda" else r"(global|buffer)_load_dwordx4"
    product = r"mma\.sync|wgmma" if target == "cuda" else "v_mfma"
    wanted = {"loads of 16 bytes": wide, "matrix products": product}
    return [f"no {what}" for what, pattern in wanted.items() if not re.search(pattern, text)]


def compile_triton() -> tuple[str, list[str]]:
    """What was compiled, and what is wrong with it."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "0"  # sums are fused where the kernels say so
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from engine.attention import triton_kernels

    n, wrong = 0, []
    for backend, arch, warp in TARGETS:
        for kv, kind in KINDS.items():
            for kernel, types in signatures(kv).items():
                for split in (False, True) if kernel == "attention" else (False,):
                    fixed = constants(kernel, kind, split)
                    names = getattr(triton_kernels, kernel).arg_names
                    signature = {a: types.get(a, "constexpr") for a in names}
                    divisible = {(names.index(a),): [["tt.divisibility", 16]] for a in types if types[a][0] == "*"}
                    source = ASTSource(getattr(triton_kernels, kernel), signature, fixed, divisible)
                    try:
                        built = triton.compile(source, target=GPUTarget(backend, arch, warp))
                    except Exception as error:  # the compiler's own, of many kinds
                        wrong.append(f"Triton {kernel}, {kv} on {arch}: {error}")
                        continue
                    n += 1
                    text = built.asm["ptx" if backend == "cuda" else "amdgcn"]
                    wrong += [f"Triton {kernel}, {kv} on {arch}: {p}" for p in problems_of(backend, kernel, text)]
    return f"Triton: {n} kernels compiled for {', '.join(str(a) for _, a, _ in TARGETS)}", wrong
