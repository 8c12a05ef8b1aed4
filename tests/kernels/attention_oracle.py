"""Paged attention by its definition, in float64: norms, rotary, rounding of what is stored, masked softmax."""

from __future__ import annotations

import numpy as np

from tests.kernels.harness import BF16, F8E4M3, F8E5M2, F16, I8, QK_NORM_FULL, ROPE_INTERLEAVED, Attention


def round_bf16(x: np.ndarray) -> np.ndarray:
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + (u >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def _f8_values(mantissa: int, bias: int, codes: int) -> np.ndarray:
    """The finite non-negative values, in the order of their codes."""
    code = np.arange(codes)
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    normal = (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, fraction / 2**mantissa * 2.0 ** (1 - bias), normal)


def round_f8(x: np.ndarray, dtype: int) -> np.ndarray:
    values = _f8_values(3, 7, 127) if dtype == F8E4M3 else _f8_values(2, 15, 124)
    a = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, a), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    up = (a - low > high - a) | ((a - low == high - a) & (above % 2 == 0))
    return np.sign(x) * np.where(up, high, low)


def stored(x: np.ndarray, dtype: int) -> np.ndarray:
    """What the cache keeps of heads [..., head_size], as float64."""
    if dtype == BF16:
        return round_bf16(x)
    if dtype == F16:
        return x.astype(np.float32).astype(np.float16).astype(np.float64)
    if dtype in (F8E4M3, F8E5M2):
        return round_f8(x, dtype)
    if dtype == I8:
        x = x.astype(np.float32)
        top = np.abs(x).max(-1, keepdims=True)
        scale = (top / np.float32(127)).astype(np.float64)
        return np.rint(x * (np.float32(127) / np.maximum(top, np.float32(1e-30)))) * scale
    return x.astype(np.float32).astype(np.float64)


class Oracle:
    """The same calls as `Attention.step`, answered from the definition."""

    def __init__(self, kernel: Attention, *, dtype: int, compute: int) -> None:
        self.kernel, self.dtype, self.compute = kernel, dtype, compute
        self.keys: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}

    def step(self, rows: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
        return [self._attend(seq, qkv.astype(np.float64)) for seq, qkv in rows]

    def _attend(self, seq: int, qkv: np.ndarray) -> np.ndarray:
        m, n = self.kernel, len(qkv)
        q, k, v = np.split(qkv, [m.heads * m.head_size, (m.heads + m.kv_heads) * m.head_size], axis=1)
        start = len(self.keys.get(seq, ()))
        positions = np.arange(start, start + n)
        q, k = self._norm(q, 0), self._norm(k, 1)
        shape = (n, -1, m.head_size)
        q, k = self._rotate(q.reshape(shape), positions), self._rotate(k.reshape(shape), positions)
        if self.compute == BF16:
            q = round_bf16(q)
        new = stored(k, self.dtype), stored(v.reshape(shape), self.dtype)
        if start:
            new = np.concatenate([self.keys[seq], new[0]]), np.concatenate([self.values[seq], new[1]])
        self.keys[seq], self.values[seq] = new
        group = m.heads // m.kv_heads
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(new[0], group, 1), optimize=True) * m.spec.attn_scale
        if m.spec.attn_softcap:
            scores = m.spec.attn_softcap * np.tanh(scores / m.spec.attn_softcap)
        behind = positions[:, None] - np.arange(start + n)[None]
        window = m.window
        scores[:, (behind < 0) | ((behind >= window) if window else False)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, np.repeat(new[1], group, 1), optimize=True).reshape(n, -1)

    def _norm(self, x: np.ndarray, which: int) -> np.ndarray:
        m = self.kernel
        if m.norms is None:
            return x
        heads = x if m.spec.flags & QK_NORM_FULL else x.reshape(len(x), -1, m.head_size)
        heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + m.spec.norm_eps) * m.norms[which]
        return heads.reshape(x.shape)

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        m, half = self.kernel, self.kernel.rotary_dim // 2
        if not half:
            return x
        angle = (positions[:, None].astype(np.float32) * m.inv_freq).astype(np.float64)[:, None]
        cos, sin = np.cos(angle), np.sin(angle)
        out = x.copy()
        if m.spec.flags & ROPE_INTERLEAVED:
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = a * cos - b * sin, b * cos + a * sin
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
            out[..., :half], out[..., half : 2 * half] = a * cos - b * sin, b * cos + a * sin
        return out
