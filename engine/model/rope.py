"""Rotary frequencies of every scaling kind, reduced to a `RopeSpec`.

What a token gets may not depend on the length of the sequence around it, so the kinds that change with the
length are fixed once, from the longest context that is served:
`dynamic` stays unscaled (it is, up to the trained length), `longrope` takes its long factors when the context
exceeds the trained length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import ConfigError
from engine.model.spec import RopeSpec

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def rope_spec(rotary_dim: int, theta: float, scaling: Mapping[str, Any], trained: int, context: int) -> RopeSpec:
    """Frequencies of `rotary_dim` / 2 pairs.

    `scaling` is `rope_scaling` of config.json, {} for none. `trained` = max_position_embeddings, `context` =
    the longest context that is served, both in tokens. Raises ConfigError for an unknown kind or a missing field.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    inv_freq = [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    try:
        match kind:
            case "default" | "dynamic":
                return RopeSpec(tuple(inv_freq))
            case "linear":
                factor = float(scaling["factor"])
                return RopeSpec(tuple(f / factor for f in inv_freq))
            case "llama3":
                return RopeSpec(tuple(_llama3(f, scaling) for f in inv_freq))
            case "yarn":
                return _yarn(inv_freq, rotary_dim, theta, scaling, trained)
            case "longrope" | "su":
                return _longrope(inv_freq, scaling, trained, context)
            case "divisors":  # llama3 as GGUF stores it: one divisor a pair
                return RopeSpec(_divide(inv_freq, scaling["divisors"]))
    except KeyError as error:
        raise ConfigError(f"rope scaling of kind {kind} misses the field {error}") from error
    raise ConfigError(f"rope scaling of kind {kind!r} is not supported (supported: {', '.join(KINDS)})")


def served_context(scaling: Mapping[str, Any], trained: int) -> int:
    """Tokens a model can take: the trained length, times the factor for the kinds that stretch it."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return int(trained * float(scaling.get("factor", 1.0)))
    if kind == "yarn":
        original = scaling.get("original_max_position_embeddings") or trained
        return max(trained, int(original * float(scaling.get("factor", 1.0))))
    return trained


def _divide(inv_freq: Sequence[float], divisors: Sequence[float]) -> tuple[float, ...]:
    if len(divisors) != len(inv_freq):
        raise ConfigError(f"rope scaling has {len(divisors)} factors; {len(inv_freq)} pairs are rotated")
    return tuple(f / float(d) for f, d in zip(inv_freq, divisors, strict=True))


def _llama3(freq: float, scaling: Mapping[str, Any]) -> float:
    """Llama 3.1: long wavelengths are slowed down by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / freq
    if wavelength > original / low:
        return freq / factor
    if wavelength < original / high:
        return freq
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * freq / factor + smooth * freq


def _yarn(inv_freq: Sequence[float], dim: int, theta: float, scaling: Mapping[str, Any], trained: int) -> RopeSpec:
    """YaRN (Peng et al., 2023): interpolation below, extrapolation above, a linear ramp between the two."""
    original = int(scaling.get("original_max_position_embeddings") or trained)
    factor = float(scaling["factor"])

    def mscale(scale: float, weight: float) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        weight, weight_all = scaling.get("mscale") or 0.0, scaling.get("mscale_all_dim") or 0.0
        both = weight and weight_all
        attention_factor = mscale(factor, weight) / mscale(factor, weight_all) if both else mscale(factor, 1.0)

    def pair_with(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(float(scaling.get("beta_fast") or 32.0))
    high = pair_with(float(scaling.get("beta_slow") or 1.0))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    scaled = []
    for i, freq in enumerate(inv_freq):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(freq / factor * interpolated + freq * (1 - interpolated))
    return RopeSpec(tuple(scaled), float(attention_factor))


def _longrope(inv_freq: Sequence[float], scaling: Mapping[str, Any], trained: int, context: int) -> RopeSpec:
    """LongRoPE (Ding et al., 2024), as Phi-3 publishes it."""
    original = int(scaling.get("original_max_position_embeddings") or trained)
    factor = trained / original if trained != original else float(scaling.get("factor") or 1.0)
    scale = scaling.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    factors = scaling["long_factor"] if context > original else scaling["short_factor"]
    return RopeSpec(_divide(inv_freq, factors), float(scale))
