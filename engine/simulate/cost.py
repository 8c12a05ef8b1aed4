"""How long a step takes: fitted to measured steps, or a stated roofline of a named device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from engine.core.plan import Geometry, Plan
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """Published peaks: dense bf16 FLOP/s, memory bytes/s, memory bytes, host link bytes/s."""

    flops: float
    bandwidth: float
    memory: float
    link: float


DEVICES = {
    "A100": Device(312e12, 2.04e12, 80e9, 25e9),
    "H100": Device(989e12, 3.35e12, 80e9, 50e9),
    "H200": Device(989e12, 4.8e12, 141e9, 50e9),
    "B200": Device(2250e12, 8.0e12, 180e9, 50e9),
    "L40S": Device(362e12, 0.864e12, 48e9, 25e9),
    "MI300X": Device(1307e12, 5.3e12, 192e9, 50e9),
}
MFU, MBU, STEP_OVERHEAD_S = 0.45, 0.75, 0.003  # shares of the peaks that serving engines reach, and launch overhead


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model the cost of a step depends on."""

    parameters: float
    weight_bytes: float
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step."""

    tokens: int  # computed
    sampled: int  # rows that got logits
    kv_tokens: int  # keys read, summed over the sequences
    seconds: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """seconds = max(floor, overhead + per_token x tokens + per_sample x rows sampled) + per_key x keys read."""

    floor: float  # the weights' way through memory
    overhead: float
    per_token: float
    per_sample: float
    per_key: float
    copy_bytes_per_s: float
    origin: str
    error: float = 0.0  # mean relative error on the samples it was fitted to

    def step_s(self, tokens: int, sampled: int, kv_tokens: int) -> float:
        compute = self.overhead + self.per_token * tokens + self.per_sample * sampled
        return max(self.floor, compute) + self.per_key * kv_tokens

    def plan_s(self, plan: Plan) -> float:
        tokens = sum(len(row.tokens) for row in plan.rows)
        keys = sum(row.start + len(row.tokens) for row in plan.rows)
        return self.step_s(tokens, sum(row.sample for row in plan.rows), keys)


def roofline(name: str, model: ModelSize) -> CostModel:
    """Not measured: the device's published peaks times MFU and MBU."""
    if name not in DEVICES:
        raise ConfigError(f"--device {name}: known are {', '.join(DEVICES)}")
    device = DEVICES[name]
    return CostModel(
        floor=model.weight_bytes / (device.bandwidth * MBU) + STEP_OVERHEAD_S,
        overhead=STEP_OVERHEAD_S,
        per_token=2 * model.parameters / (device.flops * MFU),
        per_sample=0.0,
        per_key=model.kv_bytes_per_token / (device.bandwidth * MBU),
        copy_bytes_per_s=device.link,
        origin=f"roofline of {name} ({MFU:.0%} of its FLOP/s, {MBU:.0%} of its bandwidth), not measured",
    )


def load_fit(path: Path) -> tuple[CostModel, ModelSize, Geometry]:
    """From the JSON that `octavo bench steps --json` writes: the fitted cost model, the model and the pool."""
    try:
        data = json.loads(path.read_text())
        samples = [StepSample(**s) for s in data["steps"]]
        size, geometry = ModelSize(**data["model"]), msgspec.convert(data["geometry"], Geometry)
        copy_rate, machine = float(data["copy_bytes_per_s"]), str(data["machine"])
    except OSError as error:
        raise ConfigError(f"--fit {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--fit {path}: not written by `octavo bench steps --json` ({error!r})") from error
    return fit(samples, copy_rate, f"fitted to {len(samples)} steps measured on {machine}"), size, geometry


def fit(samples: Sequence[StepSample], copy_bytes_per_s: float, origin: str) -> CostModel:
    """Least squares over relative errors; no coefficient below zero. Needs steps of many and of few tokens."""
    if len(samples) < 5:
        raise ConfigError(f"{origin}: {len(samples)} measured steps are too few to fit a cost model (need 5)")
    data = np.array([(1.0, s.tokens, s.sampled, s.kv_tokens) for s in samples])
    seconds = np.array([s.seconds for s in samples])
    best: CostModel | None = None
    # The knee between memory-bound and compute-bound steps isn't known: try each, keep the best.
    tried = np.quantile(seconds, np.linspace(0, 1, 21))
    for floor in sorted({0.0, *(float(s) * share for s in tried for share in (0.7, 0.8, 0.9, 0.95, 1.0))}):
        above = np.ones(len(samples), bool)
        for _ in range(4):
            weights = _non_negative(data[above] / seconds[above, None])
            compute = data[:, :3] @ weights[:3]
            above = compute >= floor
            if above.sum() < 4:
                break
        predicted = np.maximum(floor, data[:, :3] @ weights[:3]) + data[:, 3] * weights[3]
        error = float(np.mean(np.abs(predicted / seconds - 1)))
        if best is None or error < best.error:
            overhead, token, sample, key = (float(w) for w in weights)
            best = CostModel(floor, overhead, token, sample, key, copy_bytes_per_s, origin, error)
    assert best is not None
    return best


def _non_negative(scaled: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """argmin |scaled @ w - 1| with w >= 0, by dropping the most negative coefficient until none is."""
    keep = list(range(scaled.shape[1]))
    while True:
        weights = np.linalg.lstsq(scaled[:, keep], np.ones(len(scaled)), rcond=None)[0]
        if weights.min() >= 0 or len(keep) == 1:
            out = np.zeros(scaled.shape[1])
            out[keep] = np.maximum(weights, 0)
            return out
        keep.pop(int(weights.argmin()))
