"""Sampling by its definition: one row in plain Python and float64."""

from __future__ import annotations

import numpy as np


def edit(
    logits: np.ndarray,
    *,
    mask: np.ndarray | None = None,
    bias: dict[int, float] | None = None,
    seen: dict[int, int] | None = None,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> np.ndarray:
    """The logits after mask, bias and penalties. Float32 in the kernel's order, so that ties stay ties."""
    x = logits.astype(np.float32)
    if mask is not None:
        x[~mask] = -np.inf
    for token, value in (bias or {}).items():
        x[token] += np.float32(value)
    for token, count in (seen or {}).items():
        x[token] = x[token] / np.float32(repetition) if x[token] > 0 else x[token] * np.float32(repetition)
        x[token] -= np.float32(frequency) * np.float32(count)
        if count:
            x[token] -= np.float32(presence)
    return x


def ranking(x: np.ndarray) -> np.ndarray:
    """Tokens by logit, larger first, lower id first among equals."""
    return np.lexsort((np.arange(len(x)), -x.astype(np.float64)))


def kept(
    x: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that may be drawn, in the order of the ranking, and their probabilities."""
    order = ranking(x)
    order = order[x[order] > -np.inf]
    weight = np.exp((x[order].astype(np.float64) - float(x.max())) / temperature)
    keep = weight >= min_p
    if top_k > 0:
        keep &= np.arange(len(order)) < top_k
    order, weight = order[keep], weight[keep]
    if top_p < 1:
        before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
        keep = before < top_p * weight.sum()
        keep[0] = True
        order, weight = order[keep], weight[keep]
    return order, weight / weight.sum()


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    top = x.max()
    return x - (top + np.log(np.exp(x - top).sum()))


def philox(seed: int, choice: int, position: int) -> float:
    """Philox4x32-10 at counter (choice, position, 0, 0) under key seed: its first 53 bits as [0, 1)."""
    word = 0xFFFFFFFF
    c = [choice, position, 0, 0]
    k0, k1 = seed & word, seed >> 32
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & word, (a >> 32) ^ c[3] ^ k1, a & word]
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return float((c[0] << 32 | c[1]) >> 11) * 2.0**-53


def draw(x: np.ndarray, u: float, **parameters: float) -> tuple[int, float]:
    """The token at `u` of the cumulative sum in id order, and how far u is from the nearest border."""
    order, probability = kept(x, **parameters)  # type: ignore[arg-type]
    by_id = np.argsort(order)
    edges = np.cumsum(probability[by_id])
    return int(order[by_id][min(np.searchsorted(edges, u, "right"), len(edges) - 1)]), float(np.abs(edges - u).min())
