"""The attention and sampling kernels of one instruction set, driven alone (tests/kernels/harness.cpp).

One small library a set, compiled on first use into the temporary folder and kept under the hash of its sources.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from csrc import build
from engine.native import KV, Batch

F32, BF16, F16, I8, F8E4M3, F8E5M2 = range(6)
QK_NORM_HEAD, QK_NORM_FULL, ROPE_INTERLEAVED = 32, 64, 128
HERE = Path(__file__).resolve().parent
_FEATURES = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512bf16": {"avx512_bf16", "avx512_vnni"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
}


class Spec(ctypes.Structure):
    _fields_ = [
        *[(n, c_int32) for n in "vocab hidden layers heads kv_heads head_size inter max_position".split()],
        *[(n, c_int32) for n in "act flags rotary_dim n_rope learned_positions".split()],
        *[(n, c_int32) for n in "experts experts_per_token moe_inter".split()],
        *[(n, c_float) for n in "norm_eps attn_scale attn_softcap final_softcap".split()],
        *[(n, c_float) for n in "embedding_scale residual_scale logit_scale".split()],
        ("inv_freq", c_void_p),
        ("rope_scale", c_void_p),
        ("layer_window", c_void_p),
        ("layer_rope", c_void_p),
        ("layer_moe", c_void_p),
        ("compute", c_int32),
    ]


_PARAMETERS = {
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
    "top_k": np.int32,
    "seed": np.uint64,
    "choice": np.uint32,
    "position": np.uint32,
    "repetition": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
}


class SamplingArguments(ctypes.Structure):
    _fields_ = [
        ("n", c_int32),
        ("vocab", c_int32),
        ("logits", c_void_p),
        *[(n, c_void_p) for n in _PARAMETERS],
        *[(n, c_void_p) for n in "seen_ids seen_counts n_seen bias_ids bias_values n_bias masks n_top".split()],
        ("top_stride", c_int32),
        *[(n, c_void_p) for n in "token logprob rank top_ids top_logprobs forced".split()],
    ]


def instruction_sets() -> list[str]:
    """The sets that this build has and this machine runs."""
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        line = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "")
        flags = set(line.split())
    return [name for name in build.instruction_sets() if _FEATURES.get(name, set()) <= flags]


@cache
def _sources() -> list[Path]:
    """harness.cpp, threads.cpp and the headers they include."""
    found = [HERE / "harness.cpp", build.SOURCES / "threads.cpp"]
    for path in found:  # grows as it goes
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            if build.SOURCES / name not in found:
                found.append(build.SOURCES / name)
    return found


def _built(isa: str) -> Path:
    """The library of a set, compiled when its sources have changed."""
    sources = _sources()
    flags = [*build.FLAGS, *build.instruction_sets()[isa], f"-DOCT_ISA={isa}", f"-I{build.SOURCES}"]
    digest = hashlib.sha256(repr(flags).encode())
    for source in sources:
        digest.update(source.read_bytes())
    out = Path(tempfile.gettempdir()) / f"octavo-harness-{os.getuid()}" / f"{isa}-{digest.hexdigest()[:16]}.so"
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}")
        command = [build.compiler(), *flags, "-shared", str(sources[0]), str(sources[1]), "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        part.replace(out)
    return out


@cache
def _all_built() -> dict[str, Path]:
    sets = instruction_sets()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(sets, pool.map(_built, sets), strict=True))


@cache
def library(isa: str) -> Any:
    out = _all_built()[isa]
    lib = ctypes.CDLL(str(out))
    lib.oct_alloc.restype, lib.oct_alloc.argtypes = c_void_p, [c_int64]
    lib.oct_free.argtypes = [c_void_p, c_int64]
    lib.h_error.restype = c_char_p
    lib.h_block_bytes.restype, lib.h_block_bytes.argtypes = c_int64, [POINTER(Spec), c_int32, c_int32]
    lib.h_attention.argtypes = [
        *[POINTER(Spec), POINTER(KV), POINTER(Batch), c_int32],
        *[c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int32), POINTER(c_double)],
    ]
    lib.h_sample.argtypes = [POINTER(SamplingArguments)]
    lib.h_threads(1)
    return lib


def address(a: np.ndarray | None) -> int | None:
    return None if a is None else a.ctypes.data


class Attention:
    """One model's attention over one KV pool: call `step` as a worker would, sequence by sequence or mixed."""

    def __init__(
        self,
        isa: str,
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 64,
        layers: int = 1,
        block_size: int = 16,
        dtype: int = BF16,
        compute: int = BF16,
        num_blocks: int = 64,
        window: int = 0,
        softcap: float = 0.0,
        rotary_dim: int | None = None,
        flags: int = 0,
        norms: tuple[np.ndarray, np.ndarray] | None = None,
        seed: int = 0,
    ) -> None:
        self.lib, self.block_size, self.num_blocks = library(isa), block_size, num_blocks
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.rotary_dim = head_size if rotary_dim is None else rotary_dim
        half = self.rotary_dim // 2
        self.inv_freq = (10000.0 ** (-np.arange(half) / max(half, 1))).astype(np.float32)
        self._keep = [
            np.ones(1, np.float32),
            np.full(layers, window, np.int32),
            np.full(layers, 0 if half else -1, np.int32),
        ]
        self.norms, self.window = norms, window
        self.spec = Spec(
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            rotary_dim=self.rotary_dim,
            n_rope=1,
            flags=flags,
            norm_eps=1e-6,
            attn_scale=head_size**-0.5,
            attn_softcap=softcap,
            compute=compute,
            inv_freq=address(self.inv_freq),
            rope_scale=address(self._keep[0]),
            layer_window=address(self._keep[1]),
            layer_rope=address(self._keep[2]),
        )
        self.block_bytes = self.lib.h_block_bytes(ctypes.byref(self.spec), block_size, dtype)
        assert self.block_bytes > 0, self.lib.h_error()
        self.bytes = self.block_bytes * num_blocks
        self.data = self.lib.oct_alloc(self.bytes)
        self.kv = KV(data=self.data, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.seconds = (c_double * 2)()
        self._free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def close(self) -> None:
        self.lib.oct_free(self.data, self.bytes)

    def fill(self, byte: int) -> None:
        """What a reused pool may hold."""
        ctypes.memset(self.data, byte, self.bytes)

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_size

    def step(
        self, rows: Sequence[tuple[int, np.ndarray]], *, layer: int = 0, repeats: tuple[int, int] = (1, 1)
    ) -> list[np.ndarray]:
        """rows: (sequence, qkv of its next tokens [n, width] float32). Their attention [n, heads * head_size]."""
        for seq, qkv in rows:
            table = self.tables.setdefault(seq, [])
            end = self.lengths.get(seq, 0) + len(qkv)
            while len(table) * self.block_size < end:
                table.append(int(self._free.pop()))
        lines = np.full((len(rows), max(len(self.tables[s]) for s, _ in rows)), -1, np.int32)
        for i, (seq, _) in enumerate(rows):
            lines[i, : len(self.tables[seq])] = self.tables[seq]
        counts = [len(qkv) for _, qkv in rows]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        positions = np.array([self.lengths.get(seq, 0) for seq, _ in rows], np.int32)
        line = np.arange(len(rows), dtype=np.int32)
        batch = Batch(
            n_rows=int(starts[-1]),
            n_seqs=len(rows),
            q_start=address(starts),
            pos_start=address(positions),
            tables=address(lines),
            table_stride=lines.shape[1],
            table_line=address(line),
        )
        qkv = np.ascontiguousarray(np.concatenate([x for _, x in rows]), np.float32)
        out = np.empty((len(qkv), self.heads * self.head_size), np.float32)
        q_norm, k_norm = self.norms or (None, None)
        status = self.lib.h_attention(
            *[ctypes.byref(self.spec), ctypes.byref(self.kv), ctypes.byref(batch), layer],
            *[address(qkv), address(q_norm), address(k_norm), address(out), (c_int32 * 2)(*repeats), self.seconds],
        )
        assert status == 0, self.lib.h_error()
        for (seq, _), n in zip(rows, counts, strict=True):
            self.lengths[seq] = self.lengths.get(seq, 0) + n
        return np.split(out, starts[1:-1])


class Sampled:
    """Parallel arrays of what oct_sample wrote."""

    def __init__(self, n: int, stride: int) -> None:
        self.token = np.full(n, -7, np.int32)
        self.logprob = np.zeros(n, np.float32)
        self.rank = np.zeros(n, np.int32)
        self.top_ids = np.zeros((n, max(stride, 1)), np.int32)
        self.top_logprobs = np.zeros((n, max(stride, 1)), np.float32)


def sample(
    isa: str,
    logits: np.ndarray,
    *,
    seen: Sequence[dict[int, int]] | None = None,
    bias: Sequence[dict[int, float]] | None = None,
    masks: Sequence[np.ndarray | None] | None = None,
    n_top: int | Sequence[int] = -1,
    forced: Sequence[int] | None = None,
    **parameters: Any,
) -> Sampled:
    """oct_sample on float32 logits [n, vocab]; a parameter is one value for all rows or one a row.

    seen: token -> times in the output (0: prompt only). masks: bool [vocab]. Raises ValueError with the kernel's words.
    """
    lib, logits = library(isa), np.array(logits, np.float32, order="C", copy=True)
    n, vocab = logits.shape
    off = {"top_p": 1, "repetition": 1, "temperature": 1}
    arrays = {
        name: np.ascontiguousarray(np.broadcast_to(np.asarray(parameters.pop(name, off.get(name, 0)), kind), (n,)))
        for name, kind in _PARAMETERS.items()
    }
    assert not parameters, parameters
    top = np.ascontiguousarray(np.broadcast_to(np.asarray(n_top, np.int32), (n,)))
    keep: list[Any] = []

    def pointers(rows: Sequence[np.ndarray | None]) -> int:
        keep.extend(rows)
        keep.append(np.array([0 if r is None else r.ctypes.data for r in rows], np.uint64))
        return int(keep[-1].ctypes.data)

    def array(values: Any, kind: Any) -> int:
        keep.append(np.array(values, kind))
        return int(keep[-1].ctypes.data)

    out = Sampled(n, max(int(top.max()), 0))
    a = SamplingArguments(
        n=n, vocab=vocab, logits=address(logits), n_top=address(top), top_stride=max(int(top.max()), 0)
    )
    for name, values in arrays.items():
        setattr(a, name, address(values))
    for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
        setattr(a, name, address(getattr(out, name)))
    if seen is not None:
        a.seen_ids = pointers([np.array(list(s), np.int32) for s in seen])
        a.seen_counts = pointers([np.array(list(s.values()), np.int32) for s in seen])
        a.n_seen = array([len(s) for s in seen], np.int32)
    if bias is not None:
        a.bias_ids = pointers([np.array(list(b), np.int32) for b in bias])
        a.bias_values = pointers([np.array(list(b.values()), np.float32) for b in bias])
        a.n_bias = array([len(b) for b in bias], np.int32)
    if masks is not None:
        padded = -(-vocab // 32) * 32
        words = [
            None if m is None else np.packbits(np.pad(m, (0, padded - vocab)), bitorder="little").view(np.uint32).copy()
            for m in masks
        ]
        a.masks = pointers(words)
    if forced is not None:
        a.forced = array(forced, np.int32)
    if lib.h_sample(ctypes.byref(a)):
        raise ValueError(lib.h_error().decode())
    return out
