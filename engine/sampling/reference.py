"""The oracle of sampling: one row of logits and its parameters to one token, in plain numpy.

Order of edits: allowed-token mask, bias, repetition, frequency and presence penalty, temperature, then min-p, top-k
and top-p, then the draw. Everything goes by one ranking: larger logit first, lower id first among equals; each filter
keeps a prefix of it. Log-probability, rank and alternatives are of the logits as they came in. The native sampler
(csrc/cpu/sampler.h) does the same in float32; edits are exact in both, sums here are float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]

GREEDY_BELOW = 1e-5  # a smaller temperature is greedy
LOWEST_LOGPROB = -9999.0  # reported instead of -inf, which JSON doesn't have
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """How one token is drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    seen: tuple[Int32, Int32] | None = None  # distinct tokens of prompt and output, how often each is in the output
    bias: tuple[Int32, Float32] | None = None
    mask: npt.NDArray[np.uint32] | None = None  # allowed tokens, one bit each


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that only the arguments decide: 53 bits of Philox4x32-10 (Salmon et al. 2011)."""
    c = [choice & _WORD, position & _WORD, 0, 0]
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & _WORD, (a >> 32) ^ c[3] ^ k1, a & _WORD]
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return float((c[0] << 32 | c[1]) >> 11) * 2.0**-53


def edit(logits: Float32, params: RowParams) -> Float32:
    """The logits [vocab] after mask, bias and penalties; the input stays as it is."""
    x = logits.astype(np.float32, copy=True)
    if params.mask is not None:
        bits = np.unpackbits(params.mask.view(np.uint8), bitorder="little")[: len(x)]
        x[bits == 0] = -np.inf
    if params.bias is not None:
        ids, values = params.bias
        x[ids] += values
    if params.seen is not None:
        ids, counts = params.seen
        v = x[ids]
        v = np.where(v > 0, v / np.float32(params.repetition), v * np.float32(params.repetition))
        v -= np.float32(params.frequency) * counts.astype(np.float32)
        x[ids] = np.where(counts > 0, v - np.float32(params.presence), v)
    return x


def weights(x: Float32, params: RowParams) -> Float64:
    """Unnormalised probabilities [vocab] of edited logits after temperature and filters; greedy keeps one token."""
    if params.temperature < GREEDY_BELOW:
        p = np.zeros(len(x))
        p[int(np.argmax(x))] = 1.0
        return p
    p = np.exp((x.astype(np.float64) - float(x.max())) / params.temperature)
    order = np.lexsort((np.arange(len(x)), -x))
    ranked = p[order]
    kept = ranked > 0
    if params.min_p > 0:
        kept &= ranked >= params.min_p
    if 0 < params.top_k < len(x):
        kept[params.top_k :] = False
    if params.top_p < 1:
        mass = np.cumsum(np.where(kept, ranked, 0.0))
        kept[1:] &= mass[:-1] < params.top_p * mass[-1]
    p[order[~kept]] = 0.0
    return p


def draw(p: Float64, u: float) -> int:
    """The inverse of the cumulative sum at u, in order of ids; never a token of weight 0."""
    mass = np.cumsum(p)
    at = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return min(at, int(np.flatnonzero(p)[-1]))


def sample(logits: Float32, params: RowParams) -> int:
    """One token from a row of raw logits [vocab]. Raises ValueError when nothing can be drawn."""
    if not logits.max() < np.inf or logits.max() == -np.inf:
        raise ValueError("the logits hold NaN or +inf, or no finite value")
    x = edit(logits, params)
    if not np.isfinite(x.max()):
        raise ValueError("no token is allowed, or a bias is not finite")
    return draw(weights(x, params), uniform(params.seed, params.choice, params.position))


def score(logits: Float32, token: int, n_top: int) -> tuple[float, int, Int32, Float32]:
    """Raw log-probability and rank (from 1) of a token, and the n_top most likely tokens with theirs."""
    x = logits.astype(np.float64)
    logprobs = np.maximum(x - x.max() - np.log(np.exp(x - x.max()).sum()), LOWEST_LOGPROB)
    rank = 1 + int((logits > logits[token]).sum()) + int((logits[:token] == logits[token]).sum())
    top = np.lexsort((np.arange(len(x)), -logits))[:n_top].astype(np.int32)
    return float(logprobs[token]), rank, top, logprobs[top].astype(np.float32)
