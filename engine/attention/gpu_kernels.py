"""The GPU kernels of csrc/gpu through their C ABI, on torch tensors.

The same class drives the CUDA and HIP builds and the host emulator, whose tensors lie on the CPU.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.attention.sequences import Sequences
from engine.errors import ConfigError, EngineDead

ABI = 1
PART = 256  # keys that are reduced on their own; kernels.h, OCTG_PART
MAX_HEAD_SIZE = 256
AUTO, PLAIN, TENSOR = 0, 1, 2  # kernels.h, octg_path
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}


class _Attention(ctypes.Structure):
    _fields_ = [
        *[(n, c_void_p) for n in "out q key value k_scale v_scale tables q_start seq_lens workspace".split()],
        *[(n, c_int32) for n in "rows seqs max_q max_len heads kv_heads head_size block_size".split()],
        *[(n, c_int32) for n in "max_blocks window dtype kv_dtype path".split()],
        ("scale", c_float),
        ("softcap", c_float),
    ]


class _CacheWrite(ctypes.Structure):
    _fields_ = [
        *[(n, c_void_p) for n in "k v q key value k_scale v_scale slot_mapping positions cos_sin".split()],
        *[(n, c_int64) for n in "kv_stride q_stride".split()],
        *[(n, c_int32) for n in "rows heads kv_heads head_size block_size rotary_dim interleaved".split()],
        *[(n, c_int32) for n in "dtype kv_dtype".split()],
    ]


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's keys and values as the kernels read them (`paged.split_kv_cache`), and their scales.

    Scales: int8 [num_blocks, block_size, kv_heads]; fp8 one number each; else None. float32, beside the storage.
    """

    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def problem_with(block_size: int, head_size: int, kv_dtype: torch.dtype) -> str:
    """Why the native kernels can't have such a cache; "" when they can. The only place that decides."""
    x = 16 // kv_dtype.itemsize
    if block_size & (block_size - 1) or block_size < x:
        return f"block size {block_size} is no power of two of at least {x}"
    if head_size % x or head_size > MAX_HEAD_SIZE:
        return f"head size {head_size} is no multiple of {x} up to {MAX_HEAD_SIZE}"
    return ""


class GpuKernels:
    """A loaded library. Every call queues work on the current stream of its tensors' device."""

    def __init__(self, library: Path) -> None:
        try:
            lib = ctypes.CDLL(str(library))
        except OSError as error:
            raise ConfigError(f"the GPU kernels {library} can't be loaded: {error}") from error
        if lib.octg_abi() != ABI:
            raise ConfigError(f"the GPU kernels {library} have ABI {lib.octg_abi()}, this version wants {ABI}; rebuild")
        lib.octg_platform.restype = lib.octg_last_error.restype = c_char_p
        lib.octg_workspace.restype = c_int64
        lib.octg_copy_blocks.argtypes = [c_void_p, c_void_p, c_int, c_int64, c_int64, c_void_p]
        lib.octg_swap_blocks.argtypes = [c_void_p, c_void_p, c_void_p, c_int, c_int64, c_void_p]
        lib.octg_rms_norm.argtypes = [c_void_p] * 4 + [c_int, c_int, c_float, c_int, c_void_p]
        lib.octg_silu_mul.argtypes = [c_void_p] * 2 + [c_int, c_int, c_int, c_void_p]
        lib.octg_sample.argtypes = [c_void_p] * 6 + [c_int, c_int, c_void_p]
        self._lib = lib
        self.platform = str(lib.octg_platform().decode())

    def attention(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        pages: Pages,
        seqs: Sequences,
        scale: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
        path: int = AUTO,
    ) -> None:
        """Paged attention of q [rows, heads, head_size] into out; causal, over all tokens or the last `window`."""
        rows, heads, head_size = q.shape
        _, kv_heads, _, block_size = pages.value.shape
        args = _Attention(
            out=out.data_ptr(), q=q.data_ptr(), key=pages.key.data_ptr(), value=pages.value.data_ptr(),
            k_scale=_pointer(pages.k_scale), v_scale=_pointer(pages.v_scale), tables=seqs.tables.data_ptr(),
            q_start=seqs.q_start.data_ptr(), seq_lens=seqs.seq_lens.data_ptr(), rows=rows,
            seqs=seqs.seq_lens.shape[0], max_q=seqs.max_q, max_len=seqs.max_len, heads=heads, kv_heads=kv_heads,
            head_size=head_size, block_size=block_size, max_blocks=seqs.tables.shape[1], window=window,
            dtype=DTYPES[q.dtype], kv_dtype=DTYPES[pages.key.dtype], path=path, scale=scale, softcap=softcap,
        )  # fmt: skip
        floats = self._lib.octg_workspace(byref(args))
        workspace = torch.empty(floats, dtype=torch.float32, device=q.device)
        args.workspace = workspace.data_ptr() if floats else None
        self._check(self._lib.octg_paged_attention(byref(args), _stream(q)))

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        pages: Pages,
        slot_mapping: torch.Tensor,
        *,
        q: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        """Scatter k, v [rows, kv_heads, head_size] to slots [rows] (int64, negative = padding).

        With cos_sin [positions, rotary_dim] float32, k is rotated on the way and q [rows, heads, head_size] in place.
        """
        rows, kv_heads, head_size = k.shape
        args = _CacheWrite(
            k=k.data_ptr(), v=v.data_ptr(), q=_pointer(q), key=pages.key.data_ptr(), value=pages.value.data_ptr(),
            k_scale=_pointer(pages.k_scale), v_scale=_pointer(pages.v_scale), slot_mapping=slot_mapping.data_ptr(),
            positions=_pointer(positions), cos_sin=_pointer(cos_sin), kv_stride=k.stride(0),
            q_stride=0 if q is None else q.stride(0), rows=rows, heads=0 if q is None else q.shape[1],
            kv_heads=kv_heads, head_size=head_size, block_size=pages.value.shape[3],
            rotary_dim=0 if cos_sin is None else cos_sin.shape[1], interleaved=interleaved,
            dtype=DTYPES[k.dtype], kv_dtype=DTYPES[pages.key.dtype],
        )  # fmt: skip
        self._check(self._lib.octg_reshape_and_cache(byref(args), _stream(k)))

    def copy_blocks(self, storage: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copy blocks within storage (2, num_blocks, ...); pairs [n, 2] int64 (source, destination) beside it."""
        block_bytes = storage[0, 0].numel() * storage.element_size()
        self._check(
            self._lib.octg_copy_blocks(
                storage.data_ptr(), pairs.data_ptr(), pairs.shape[0], storage.shape[1], block_bytes, _stream(storage)
            )
        )

    def swap_blocks(self, dst: torch.Tensor, src: torch.Tensor, pairs: torch.Tensor) -> None:
        """Copy blocks src[a] -> dst[b] for pairs [n, 2] int64 on the host; one side may be pinned host memory."""
        block_bytes = src[0].numel() * src.element_size()
        device = dst if dst.device.type != "cpu" else src
        self._check(
            self._lib.octg_swap_blocks(
                dst.data_ptr(), src.data_ptr(), pairs.data_ptr(), pairs.shape[0], block_bytes, _stream(device)
            )
        )

    def rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> None:
        """out = norm(x) * weight (float32); residual += x first, if given, and its sum is what is normed."""
        rows, n = x.shape
        self._check(
            self._lib.octg_rms_norm(
                out.data_ptr(), x.data_ptr(), _pointer(residual), weight.data_ptr(), rows, n, eps, DTYPES[x.dtype],
                _stream(x),
            )
        )  # fmt: skip

    def silu_mul(self, out: torch.Tensor, gate_up: torch.Tensor) -> None:
        """out [rows, n] = silu(gate) * up of gate_up [rows, 2 n]."""
        rows, n = out.shape
        self._check(
            self._lib.octg_silu_mul(out.data_ptr(), gate_up.data_ptr(), rows, n, DTYPES[out.dtype], _stream(out))
        )

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        choice: torch.Tensor,
        position: torch.Tensor,
    ) -> torch.Tensor:
        """One token a row of float32 logits [rows, vocab]: int32 [rows]. seed has 64 bits, choice and position 32."""
        rows, vocab = logits.shape
        token = torch.empty(rows, dtype=torch.int32, device=logits.device)
        inputs = [t.data_ptr() for t in (token, logits, temperature, seed, choice, position)]
        self._check(self._lib.octg_sample(*inputs, rows, vocab, _stream(logits)))
        return token

    def loads(self) -> int:
        """16-byte loads so far (emulator only)."""
        self._lib.octg_emulated_loads.restype = c_int64
        return int(self._lib.octg_emulated_loads())

    def _check(self, status: int) -> None:
        if status:
            raise EngineDead(f"GPU kernel: {self._lib.octg_last_error().decode()}")


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _stream(tensor: torch.Tensor) -> int | None:
    if tensor.device.type == "cpu":
        return None
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)
