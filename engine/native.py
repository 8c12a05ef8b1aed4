"""The CPU kernels through ctypes: finding or building the library, and its C structs (csrc/cpu/kernels.h).

Knows arrays and pointers, no request and no plan. A call releases the GIL for as long as the kernels run.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError, RequestFailed
from engine.model.spec import DecoderSpec

log = logging.getLogger("octavo.native")

PACKAGED = Path(__file__).resolve().parent / "_kernels.so"

F32, BF16, F16, I8, F8E4M3, F8E5M2 = range(6)
DTYPES = {"float32": F32, "bfloat16": BF16, "float16": F16, "int8": I8, "fp8_e4m3": F8E4M3, "fp8_e5m2": F8E5M2}
W_F32, W_BF16, W_Q8, W_Q4 = range(4)
PHASES = ("embedding", "norms", "qkv", "rope", "attention", "o", "gate_up", "down", "head", "waiting")  # oct_phase

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_LAYER_NORM, _NORM_POST, _NORM_SANDWICH, _PARALLEL, _GATED = 1, 2, 4, 8, 16
_QK_NORM_HEAD, _QK_NORM_FULL, _ROPE_INTERLEAVED, _TIED, _NORM_TOPK, _NO_FINAL_NORM = 32, 64, 128, 256, 512, 1024


# ---------------------------------------------------------------- C structs
class SpecStruct(ctypes.Structure):
    """oct_spec."""

    _fields_ = (
        *((name, c_int32) for name in "vocab hidden layers heads kv_heads head_size inter max_position".split()),
        *((name, c_int32) for name in "act flags rotary_dim n_rope learned_positions".split()),
        *((name, c_int32) for name in "experts experts_per_token moe_inter".split()),
        *((name, c_float) for name in "norm_eps attn_scale attn_softcap final_softcap".split()),
        *((name, c_float) for name in "embedding_scale residual_scale logit_scale".split()),
        *((name, c_void_p) for name in "inv_freq rope_scale layer_window layer_rope layer_moe".split()),
        ("compute", c_int32),
    )


class KV(ctypes.Structure):
    """oct_kv: the cache's memory, from `alloc`."""

    _fields_ = (("data", c_void_p), ("num_blocks", c_int64), ("block_size", c_int32), ("dtype", c_int32))


class Batch(ctypes.Structure):
    """oct_batch: the caller keeps the arrays alive."""

    _fields_ = (
        ("n_rows", c_int32),
        ("n_seqs", c_int32),
        ("tokens", c_void_p),
        ("q_start", c_void_p),
        ("pos_start", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("table_line", c_void_p),
        ("n_logits", c_int32),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("n_hidden", c_int32),
        ("hidden_rows", c_void_p),
        ("hidden", c_void_p),
        ("adapter", c_void_p),
    )


class Sampling(ctypes.Structure):
    """oct_sampling: the caller keeps the arrays alive."""

    _fields_ = (
        ("n", c_int32),
        ("vocab", c_int32),
        *((name, c_void_p) for name in "logits temperature top_p min_p top_k seed choice position".split()),
        *((name, c_void_p) for name in "repetition presence frequency seen_ids seen_counts n_seen".split()),
        *((name, c_void_p) for name in "bias_ids bias_values n_bias masks n_top".split()),
        ("top_stride", c_int32),
        *((name, c_void_p) for name in "token logprob rank top_ids top_logprobs forced".split()),
    )


def pointer(array: npt.NDArray[Any] | None) -> int | None:
    """Address of an array's data; the array must outlive its use."""
    return None if array is None else array.ctypes.data


# ---------------------------------------------------------------- library
class Kernels:
    """The loaded library, after oct_init."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.c = library

    @property
    def isa(self) -> str:
        return str(self.c.oct_isa().decode())

    @property
    def isas(self) -> list[str]:
        """What this build holds and this machine runs, the slowest first."""
        return str(self.c.oct_isas().decode()).split(",")

    @property
    def threads(self) -> int:
        return int(self.c.oct_threads())

    def error(self) -> str:
        """What went wrong in the last failed call of this thread."""
        return str(self.c.oct_last_error().decode())

    def alloc(self, size: int) -> int:
        """Address of `size` zeroed bytes on huge pages, 2 MiB aligned. Raises ConfigError."""
        address = self.c.oct_alloc(size)
        if not address:
            raise ConfigError(self.error())
        return int(address)

    def free(self, address: int, size: int) -> None:
        self.c.oct_free(address, size)

    def kv_block_bytes(self, spec: DecoderSpec, block_size: int, dtype: int) -> int:
        """Bytes of one block over all layers."""
        struct, _kept = spec_struct(spec)
        size = int(self.c.oct_kv_block_bytes(byref(struct), block_size, dtype))
        if size < 0:
            raise ConfigError(self.error())
        return size

    def measure(self, what: int) -> float:
        """A ceiling of this machine per second, measured now: 0 bytes of memory read; 1, 2, 3 operations of float32,
        bf16 and int8 products."""
        return float(self.c.oct_measure(what))

    def phases(self) -> dict[str, float]:
        """Seconds that steps spent in each of PHASES since the last call.

        "waiting" (for the other threads, at the end of a phase) is a part of the others.
        """
        seconds = (c_double * len(PHASES))()
        self.c.oct_phases(seconds)
        return dict(zip(PHASES, seconds, strict=True))

    def sample(self, sampling: Sampling) -> None:
        """Raises RequestFailed with the first row at fault."""
        if self.c.oct_sample(byref(sampling)) < 0:
            raise RequestFailed(self.error())


def load(isa: str = "", threads: int = 0) -> Kernels:
    """The kernels with this instruction set ("" = the best) and number of threads (0 = one a core).

    Raises ConfigError when there is neither a library nor a compiler, or the machine lacks the set.
    """
    kernels = Kernels(library())
    if kernels.c.oct_init(isa.encode() or None, threads) < 0:
        raise ConfigError(kernels.error())
    return kernels


def isa() -> str:
    """The instruction set in use, "" before `load`."""
    return str(library().oct_isa().decode())


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library, its functions declared. Raises ConfigError when there is none and none can be built."""
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"the CPU kernels at {path} can't be loaded ({error}); delete that file to have it rebuilt"
        ) from error
    _declare(library)
    return library


def library_path() -> Path:
    """The packaged library, else one in the user's cache, compiled now if need be.

    A packaged library older than the sources is still used, with a warning: who edits kernels builds them.
    """
    from csrc import build

    printed = build.fingerprint()
    fingerprint = build.fingerprint_file(PACKAGED)
    if PACKAGED.exists():
        if not fingerprint.exists() or fingerprint.read_text() != printed:
            log.warning("%s is older than csrc/cpu: `python -m csrc.build` brings it up to date", PACKAGED.name)
        return PACKAGED
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo" / "kernels"
    try:
        version = build.compiler_version()
        name = f"{printed}-{hashlib.sha256(version.encode()).hexdigest()[:8]}.so"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not (folder / name).exists():
                build.build(folder / name)
    except build.BuildError as error:
        raise ConfigError(
            f"the CPU kernels are not built: {error}; install g++ (apt install g++) and start again"
        ) from error
    return folder / name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _declare(c: ctypes.CDLL) -> None:
    def function(name: str, result: Any, *arguments: Any) -> None:
        try:
            entry = getattr(c, name)
        except AttributeError:
            raise ConfigError(
                f"the CPU kernels at {c._name} lack {name}: bring them up to date by `python -m csrc.build`"
            ) from None
        entry.restype, entry.argtypes = result, arguments

    model = c_void_p
    function("oct_init", c_int, c_char_p, c_int)
    for name in ("oct_isa", "oct_isas", "oct_last_error"):
        function(name, c_char_p)
    function("oct_threads", c_int)
    function("oct_alloc", c_void_p, c_int64)
    function("oct_free", None, c_void_p, c_int64)
    function("oct_measure", c_double, c_int)
    function("oct_model_new", model, POINTER(SpecStruct))
    function("oct_model_set", c_int, model, c_char_p, c_void_p, c_int, c_int64, c_int64, c_int)
    function("oct_model_set_gguf", c_int, model, c_char_p, c_void_p, c_int, c_int64, c_int64)
    function("oct_model_finish", c_int, model)
    function("oct_model_save", c_int, model, c_char_p, c_char_p)
    function("oct_model_load", c_int, model, c_char_p, c_char_p)
    function("oct_model_bytes", c_int64, model)
    function("oct_model_free", None, model)
    function("oct_kv_block_bytes", c_int64, POINTER(SpecStruct), c_int32, c_int32)
    function("oct_step", c_int, model, POINTER(KV), POINTER(Batch))
    function("oct_phases", None, POINTER(c_double))
    function("oct_sample", c_int, POINTER(Sampling))


# ---------------------------------------------------------------- model
def spec_struct(spec: DecoderSpec, compute: int = BF16) -> tuple[SpecStruct, list[npt.NDArray[Any]]]:
    """oct_spec and the arrays it points into, which must outlive its use."""
    norm_flags = {"pre": 0, "post": _NORM_POST, "sandwich": _NORM_SANDWICH}
    qk_flags = {"": 0, "head": _QK_NORM_HEAD, "full": _QK_NORM_FULL}
    flags = norm_flags[spec.norm_placement] | qk_flags[spec.qk_norm]
    for claim, flag in (
        (spec.norm == "layer", _LAYER_NORM),
        (spec.parallel_residual, _PARALLEL),
        (spec.gated, _GATED),
        (spec.rope_interleaved, _ROPE_INTERLEAVED),
        (spec.tie_embeddings, _TIED),
        (spec.norm_topk_prob, _NORM_TOPK),
        (not spec.final_norm, _NO_FINAL_NORM),
    ):
        flags |= flag if claim else 0
    inv_freq = np.array([rope.inv_freq for rope in spec.rope], np.float32)
    rope_scale = np.array([rope.scale for rope in spec.rope], np.float32)
    window = np.array([layer.window for layer in spec.layers], np.int32)
    rope = np.array([layer.rope if spec.rotary_dim else -1 for layer in spec.layers], np.int32)
    moe = np.array([layer.moe for layer in spec.layers], np.int32)
    if not spec.layers:
        window, moe = np.zeros(spec.num_layers, np.int32), np.zeros(spec.num_layers, np.int32)
        rope = np.full(spec.num_layers, 0 if spec.rotary_dim else -1, np.int32)
    struct = SpecStruct(
        vocab=spec.vocab_size,
        hidden=spec.hidden_size,
        layers=spec.num_layers,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        inter=spec.intermediate_size,
        max_position=spec.max_position,
        act=_ACTIVATIONS[spec.activation],
        flags=flags,
        rotary_dim=spec.rotary_dim,
        n_rope=len(spec.rope),
        learned_positions=spec.learned_positions,
        experts=spec.num_experts,
        experts_per_token=spec.experts_per_token,
        moe_inter=spec.moe_intermediate_size,
        norm_eps=spec.norm_eps,
        attn_scale=spec.attn_scale,
        attn_softcap=spec.attn_softcap,
        final_softcap=spec.final_softcap,
        embedding_scale=spec.embedding_scale,
        residual_scale=spec.residual_scale,
        logit_scale=spec.logit_scale,
        inv_freq=pointer(inv_freq),
        rope_scale=pointer(rope_scale),
        layer_window=pointer(window),
        layer_rope=pointer(rope),
        layer_moe=pointer(moe),
        compute=compute,
    )
    return struct, [inv_freq, rope_scale, window, rope, moe]


class Model:
    """A packed model. Give weights with `set` and `set_gguf`, then `finish`; or `load_image` instead."""

    def __init__(self, kernels: Kernels, spec: DecoderSpec, dtype: Literal["float32", "bfloat16"] = "bfloat16") -> None:
        self._c = kernels.c
        self._kernels = kernels
        struct, _kept = spec_struct(spec, DTYPES[dtype])
        self._model = self._c.oct_model_new(byref(struct))
        if not self._model:
            raise ConfigError(kernels.error())

    def set(self, name: str, data: npt.NDArray[Any], dtype: int, rows: int, cols: int, quant: int) -> None:
        """A dense weight under its canonical name; `data` [rows][cols] of `dtype`, kept as `quant` (a W_*)."""
        data = np.ascontiguousarray(data)
        self._check(self._c.oct_model_set(self._model, name.encode(), pointer(data), dtype, rows, cols, quant))

    def set_gguf(self, name: str, blocks: npt.NDArray[np.uint8], ggml_type: int, rows: int, cols: int) -> None:
        """GGUF blocks of Q4_0 (2), Q4_1 (3), Q8_0 (8) or Q4_K (12), used without requantisation."""
        blocks = np.ascontiguousarray(blocks)
        self._check(self._c.oct_model_set_gguf(self._model, name.encode(), pointer(blocks), ggml_type, rows, cols))

    def finish(self) -> None:
        """Raises ConfigError that names a missing weight."""
        self._check(self._c.oct_model_finish(self._model))

    def save_image(self, path: Path, key: str) -> None:
        """Write the packed weights; `key` says what they belong to (at most 183 bytes)."""
        self._check(self._c.oct_model_save(self._model, os.fsencode(path), key.encode()))

    def load_image(self, path: Path, key: str) -> None:
        """Take the packed weights of `path`. Raises ConfigError when it isn't whole or has another key."""
        self._check(self._c.oct_model_load(self._model, os.fsencode(path), key.encode()))

    @property
    def size_bytes(self) -> int:
        return int(self._c.oct_model_bytes(self._model))

    def step(self, kv: KV, batch: Batch) -> None:
        """All layers over the rows of `batch`. Raises RequestFailed."""
        if self._c.oct_step(self._model, byref(kv), byref(batch)) < 0:
            raise RequestFailed(self._kernels.error())

    def close(self) -> None:
        """Free the weights; idempotent."""
        if self._model:
            self._c.oct_model_free(self._model)
            self._model = None

    def __del__(self) -> None:
        self.close()

    def _check(self, status: int) -> None:
        if status < 0:
            raise ConfigError(self._kernels.error())
