"""LoRA adapters (Hu et al. 2021) in PEFT's form, merged into a copy of the base model's matrices.

W' = W + scale * B A, scale = alpha / r (alpha / sqrt(r) for rsLoRA). A merged copy costs memory for each adapter and
none of the speed: its rows run through the very kernels of the base, whatever the family and the storage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.model.gguf import dequantise
from engine.model.names import Rule, safetensors_rules
from engine.model.safetensors_files import SafetensorsFiles
from engine.model.spec import DecoderSpec
from engine.model.weights import NativeModel, Weight, iter_weights, to_float32

Float32 = npt.NDArray[np.float32]
_F32, _W_Q8 = 0, 2
_DENSE = {0: "f32", 1: "bf16", 2: "f16"}
_UNUSABLE = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")
MAX_RANK, MAX_ALPHA = 1 << 16, 1e6
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class _Factors:
    a: Float32  # [r, in]
    b: Float32  # [out, r]
    scale: float
    rule: Rule

    def delta(self) -> Float32:
        """What is added to the canonical weight, [out, in]."""
        whole = (self.b @ self.a) * np.float32(self.scale)
        return whole if self.rule.rows is None else whole[self.rule.rows]


class LoraAdapter:
    """The changes of one adapter, by canonical weight name."""

    def __init__(self, directory: str | Path, spec: DecoderSpec) -> None:
        """Read an adapter's directory. Raises ConfigError in one line for what can't be merged."""
        self.directory = Path(directory)
        config = self._config()
        rank, alpha = config["r"], config.get("lora_alpha", config["r"])
        scale = alpha / rank**0.5 if config.get("use_rslora") else alpha / rank
        stored = self._tensors()
        self._factors: dict[str, _Factors] = {}
        used: set[str] = set()
        for rule in safetensors_rules(spec, {name + ".weight" for name in stored}):
            module = rule.source.removesuffix(".weight")
            if module not in stored or not rule.source.endswith(".weight"):
                continue
            factors = _Factors(*stored[module], scale, rule)
            a, b = factors.a.shape, factors.b.shape
            if len(a) != 2 or len(b) != 2 or not a[0] == b[1] == rank:
                raise ConfigError(f"adapter {self.directory}: {module} has factors {b} and {a}, its rank is {rank}")
            if factors.delta().shape != rule.shape:
                raise ConfigError(
                    f"adapter {self.directory}: {module} changes {factors.delta().shape}, not {rule.shape}"
                )
            self._factors[rule.name] = factors
            used.add(module)
        if left := sorted(set(stored) - used):
            raise ConfigError(f"adapter {self.directory} changes {left[0]}, which the served model doesn't have")

    def delta(self, name: str) -> Float32 | None:
        """What is added to a weight, None if the adapter leaves it alone."""
        factors = self._factors.get(name)
        return None if factors is None else factors.delta()

    def touches_mlp_input(self, name: str) -> bool:
        """Is this a gate or up matrix whose pair the adapter changes? The two are kept in the same form."""
        stem, _, role = name.rpartition(".")
        return role in ("gate", "up") and (f"{stem}.gate" in self._factors or f"{stem}.up" in self._factors)

    def _config(self) -> dict[str, Any]:
        try:
            config = json.loads((self.directory / "adapter_config.json").read_bytes())
            kind, rank = config.get("peft_type"), config["r"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{self.directory} is no LoRA adapter: its adapter_config.json can't be used") from error
        unusable = next((key for key in _UNUSABLE if config.get(key)), "")
        if kind != "LORA" or unusable or config.get("bias", "none") != "none":
            what = unusable or (f"bias {config['bias']!r}" if kind == "LORA" else f"peft_type {kind!r}")
            raise ConfigError(f"adapter {self.directory} uses {what[:100]}, which can't be served")
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise ConfigError(f"adapter {self.directory}: r must be a whole number from 1 to {MAX_RANK}")
        alpha = config.get("lora_alpha", rank)
        if type(alpha) not in (int, float) or not abs(alpha) <= MAX_ALPHA:
            raise ConfigError(f"adapter {self.directory}: lora_alpha must be a number up to {MAX_ALPHA:g}")
        return dict(config)

    def _tensors(self) -> dict[str, tuple[Float32, Float32]]:
        """A and B by the name of the module that they change."""
        files = SafetensorsFiles(self.directory)
        found: dict[str, dict[str, Float32]] = {}
        for name in files.tensors:
            module, side, _ = name.removeprefix(_PREFIX).rsplit(".", 2) if name.count(".") > 1 else (name, "", "")
            if side not in ("lora_A", "lora_B"):
                raise ConfigError(f"adapter {self.directory} holds {name}, which is no lora_A or lora_B matrix")
            found.setdefault(module, {})[side] = to_float32(*files.read(name))
        half = next((module for module, sides in found.items() if len(sides) < 2), "")
        if half or not found:
            raise ConfigError(f"adapter {self.directory} holds {'half of ' + half if half else 'no matrix at all'}")
        return {module: (sides["lora_A"], sides["lora_B"]) for module, sides in found.items()}


def merged_weights(spec: DecoderSpec, path: str | Path, adapter: LoraAdapter) -> Iterator[Weight]:
    """All weights of the base with the adapter's changes, those in float32."""
    for weight in iter_weights(spec, path):
        delta = adapter.delta(weight.name)
        yield weight if delta is None else Weight(weight.name, weight.float32() + delta, "f32", weight.shape)


class MergingModel:
    """A `NativeModel` that adds an adapter's changes to the weights on their way into another.

    A matrix in GGUF blocks that changes is kept as int8 with one scale per 32 inputs: its own blocks can't hold it.
    """

    def __init__(self, model: NativeModel, adapter: LoraAdapter) -> None:
        self._model = model
        self._adapter = adapter

    def set(self, name: str, data: npt.NDArray[Any], dtype: int, rows: int, cols: int, quant: int) -> None:
        delta = self._adapter.delta(name)
        if delta is not None:
            data, dtype = to_float32(data, _DENSE[dtype]) + delta, _F32
        self._model.set(name, data, dtype, rows, cols, quant)

    def set_gguf(self, name: str, blocks: npt.NDArray[np.uint8], ggml_type: int, rows: int, cols: int) -> None:
        delta = self._adapter.delta(name)
        if delta is None and not self._adapter.touches_mlp_input(name):
            self._model.set_gguf(name, blocks, ggml_type, rows, cols)
            return
        values = dequantise(blocks, ggml_type).reshape(rows, cols)
        self._model.set(name, values if delta is None else values + delta, _F32, rows, cols, _W_Q8)
