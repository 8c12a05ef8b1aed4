"""Weights under their canonical names, one at a time, from safetensors or GGUF. numpy only, no torch.

A checkpoint is described by rules: canonical name <- stored tensor and what to take of it (rows of a fused
tensor, a transposition, the one that a (1 + w) norm leaves out). Rules come from `engine.model.names`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.model.config import read_config
from engine.model.gguf import TYPES, GGUFFile, dequantise
from engine.model.names import Rule, gguf_rules, is_ignored, safetensors_rules
from engine.model.quantised import QuantisedFiles
from engine.model.safetensors_files import SafetensorsFiles
from engine.model.spec import DecoderSpec

Dense = Literal["f32", "f16", "bf16"]
Quantization = Literal["auto", "none", "int8", "gguf"]
_PIECE = 1 << 17  # elements
_ROWS = 1024
BLOCK_TYPES = (2, 3, 8, 12)  # ggml types that the native kernels compute with: Q4_0, Q4_1, Q8_0, Q4_K


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight. Dense: `data` is [rows, cols] or [rows] of float32, float16, or bf16 as uint16.

    As blocks: `ggml_type` >= 0 and `data` is [rows, bytes a row] of uint8. `shape` is always in elements.
    """

    name: str
    data: npt.NDArray[Any]
    dtype: Dense | Literal["blocks"]
    shape: tuple[int, ...]
    ggml_type: int = -1

    def float32(self) -> npt.NDArray[np.float32]:
        """Values in float32, whatever they are stored as."""
        if self.dtype == "blocks":
            return dequantise(self.data, self.ggml_type).reshape(self.shape)
        return to_float32(self.data, self.dtype)

    def dense(self) -> Weight:
        """The same weight, dequantised to float32 if it is in blocks."""
        return self if self.dtype != "blocks" else Weight(self.name, self.float32(), "f32", self.shape)

    def rounded(self) -> Weight:
        """The same matrix in 16 bits, a few rows at a time: a float32 copy of a large one would be its peak."""
        if self.dtype == "f32":
            return Weight(self.name, to_bfloat16(self.data), "bf16", self.shape)
        if self.dtype != "blocks":
            return self
        values = np.empty(self.shape, np.uint16)
        for row in range(0, len(values), _ROWS):
            values[row : row + _ROWS] = to_bfloat16(dequantise(self.data[row : row + _ROWS], self.ggml_type))
        return Weight(self.name, values, "bf16", self.shape)


def to_float32(data: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """float32 of dense storage; bf16 comes as uint16."""
    if dtype == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32, copy=False)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bf16 as uint16, rounded to nearest even. NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).reshape(-1)
    rounded = np.empty(bits.shape, np.uint16)
    for start in range(0, len(bits), _PIECE):  # in pieces that stay in the cache: several times faster
        piece = bits[start : start + _PIECE]
        out = rounded[start : start + _PIECE]
        np.right_shift(piece + (((piece >> 16) & 1) + 0x7FFF), 16, out=out, casting="unsafe")
        nan = (piece & 0x7FFFFFFF) > 0x7F800000
        if nan.any():
            out[nan] = (piece[nan] >> 16) | 0x40
    return rounded.reshape(values.shape)


def iter_weights(spec: DecoderSpec, path: str | Path, *, keep_blocks: bool = False) -> Iterator[Weight]:
    """All weights of the model at `path`, in the order of `engine.model.names`.

    `keep_blocks` passes matrices on as GGUF blocks where they are stored so, or are quantised safetensors that fit
    such blocks exactly. Everything else comes dense.
    Memory: one weight at a time beyond the mapped file. Raises ConfigError naming the first tensor that is
    missing, left over or of a wrong shape.
    """
    path = Path(path)
    source, rules = _open(spec, path)
    for rule in _present(rules, source, path):
        weight = source.take(rule, keep_blocks)
        if weight.shape != rule.shape:
            raise ConfigError(f"{path}: tensor {rule.source} gives {weight.shape} for {rule.name}, not {rule.shape}")
        yield weight


def kept_types(spec: DecoderSpec, path: Path) -> dict[str, int]:
    """ggml type of every weight that `load_native` keeps in blocks, -1 for the others.

    Reads headers; of a quantised checkpoint also one layer, whose form stands for all.
    """
    source, rules = _open(spec, path)
    return {rule.name: source.kept_type(rule) for rule in _present(rules, source, path)}


def _open(spec: DecoderSpec, path: Path) -> tuple[_Source, list[Rule]]:
    if path.is_file():
        file = GGUFFile(path)
        return _GGUFSource(file), gguf_rules(spec, file.metadata["general.architecture"])
    stored = QuantisedFiles.wrap(SafetensorsFiles(path), read_config(path))
    return _DenseSource(stored), safetensors_rules(spec, stored.names())


class _Source(Protocol):
    def names(self) -> set[str]: ...
    def take(self, rule: Rule, keep_blocks: bool) -> Weight: ...
    def kept_type(self, rule: Rule) -> int: ...


def _present(rules: list[Rule], source: _Source, path: Path) -> list[Rule]:
    """The rules whose tensor is there, after checking that nothing needed is missing and nothing is left over."""
    names = source.names()
    present = [rule for rule in rules if rule.source in names]
    missing = next((rule for rule in rules if rule.source not in names and not rule.optional), None)
    if missing is not None:
        raise ConfigError(
            f"{path} has no tensor {missing.source} (the {missing.name} of this {len(rules)}-weight model)"
        )
    used = {rule.source for rule in rules}
    surplus = next((name for name in sorted(names) if name not in used and not is_ignored(name)), None)
    if surplus is not None:
        raise ConfigError(f"{path} has a tensor {surplus}, which this architecture does not use")
    _check_biases(present, path)
    return present


def _check_biases(present: list[Rule], path: Path) -> None:
    """A bias that one layer has, all layers have: else the file is incomplete."""
    layers: dict[str, set[str]] = {}
    for rule in present:
        _, is_layer, rest = rule.name.partition("layers.")
        if is_layer:
            layer, _, role = rest.partition(".")
            layers.setdefault(role, set()).add(layer)
    for role, having in layers.items():
        if role.endswith(".bias") and len(having) != len(layers.get(role.removesuffix(".bias"), having)):
            raise ConfigError(f"{path} has {role} in {len(having)} layers only; the checkpoint is incomplete")


class _DenseSource:
    def __init__(self, files: QuantisedFiles) -> None:
        self._files = files

    def names(self) -> set[str]:
        return self._files.names()

    def take(self, rule: Rule, keep_blocks: bool) -> Weight:
        packed = self._files.blocks(rule.source) if keep_blocks and not rule.transpose else None
        if packed is not None:
            blocks, ggml_type = packed
            kind = TYPES[ggml_type]
            if rule.rows is not None:
                blocks = blocks[rule.rows]
            shape = (len(blocks), blocks.shape[1] // kind.size * kind.elements)
            return Weight(rule.name, np.ascontiguousarray(blocks), "blocks", shape, ggml_type)
        data, dtype = self._files.read(rule.source)
        if dtype not in ("f32", "f16", "bf16"):
            if dtype != "f64":
                raise ConfigError(f"tensor {rule.source} is stored as {dtype}, which is no weight of a float type")
            data, dtype = data.astype(np.float32), "f32"
        return _dense(rule, data, dtype)

    def kept_type(self, rule: Rule) -> int:
        return self._files.block_type if self._files.is_quantised(rule.source) else -1


def _dense(rule: Rule, data: npt.NDArray[Any], dtype: str) -> Weight:
    """Apply a rule to dense storage."""
    if rule.expert >= 0:
        data = data[rule.expert]
    if rule.transpose:
        data = data.T
    if rule.rows is not None:
        if data.shape[0] < rule.source_rows:
            raise ConfigError(f"tensor {rule.source} has {data.shape[0]} rows; {rule.source_rows} are expected")
        data = data[rule.rows]
    if rule.add_one:
        data, dtype = to_float32(data, dtype) + 1, "f32"
    return Weight(rule.name, np.ascontiguousarray(data), dtype, data.shape)  # type: ignore[arg-type]


class _GGUFSource:
    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def names(self) -> set[str]:
        return {*self._file.tensors}

    def take(self, rule: Rule, keep_blocks: bool) -> Weight:
        tensor = self._file.tensors[rule.source]
        blocks = self._file.blocks(tensor)
        shape = tensor.shape
        if rule.expert >= 0:
            if len(shape) != 3 or rule.expert >= shape[0]:
                raise ConfigError(f"tensor {rule.source} has the shape {shape}, no place for expert {rule.expert}")
            blocks = blocks[rule.expert * shape[1] : (rule.expert + 1) * shape[1]]
            shape = shape[1:]
        name = TYPES[tensor.type].name
        if len(shape) == 1 or name in ("F32", "F16", "BF16"):
            return _dense(rule.without_expert(), *_floats(blocks, tensor.type, shape))
        if rule.rows is not None:
            if shape[0] < rule.source_rows:
                raise ConfigError(f"tensor {rule.source} has {shape[0]} rows; {rule.source_rows} are expected")
            blocks = blocks[rule.rows]
            shape = (blocks.shape[0], *shape[1:])
        if keep_blocks:
            return Weight(rule.name, np.ascontiguousarray(blocks), "blocks", shape, tensor.type)
        return Weight(rule.name, dequantise(blocks, tensor.type).reshape(shape), "f32", shape)

    def kept_type(self, rule: Rule) -> int:
        kind = self._file.tensors[rule.source].type
        return kind if kind in BLOCK_TYPES and len(rule.shape) == 2 else -1


def _floats(blocks: npt.NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> tuple[npt.NDArray[Any], Dense]:
    stored = np.ascontiguousarray(blocks)
    if ggml_type == 1:
        return stored.view(np.float16).reshape(shape), "f16"
    if ggml_type == 30:
        return stored.view(np.uint16).reshape(shape), "bf16"
    return dequantise(stored, ggml_type).reshape(shape), "f32"


# ---------------------------------------------------------------- into the native model

_OCT_DTYPE = {"f32": 0, "bf16": 1, "f16": 2}
_W_F32, _W_BF16, _W_Q8 = 0, 1, 2


class NativeModel(Protocol):
    """What `engine.native` offers of oct_model_set and oct_model_set_gguf (csrc/cpu/kernels.h)."""

    def set(self, name: str, data: npt.NDArray[Any], dtype: int, rows: int, cols: int, quant: int) -> None: ...
    def set_gguf(self, name: str, blocks: npt.NDArray[np.uint8], ggml_type: int, rows: int, cols: int) -> None: ...


def load_native(
    spec: DecoderSpec,
    path: str | Path,
    native: NativeModel,
    *,
    quantization: Quantization = "auto",
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> None:
    """Give every weight at `path` to the native model; the caller finishes it.

    quantization: "none" keeps matrices in `dtype`; "int8" as 8 bits with one scale per 32 inputs; "auto" keeps 4 and
    8 bit blocks as the files hold them, and what is dense in `dtype` (float32 computes exactly: then everything is
    dequantised); "gguf" is the same for the GGUF file beside the safetensors, where there is one.
    """
    path = Path(path)
    if quantization == "gguf":
        path = gguf_of(path)
    keep_blocks = quantization == "gguf" or (quantization == "auto" and dtype == "bfloat16")
    kept = _W_Q8 if quantization == "int8" else _W_F32 if dtype == "float32" else _W_BF16
    for weight, alike in _with_partner(iter_weights(spec, path, keep_blocks=True)):
        if len(weight.shape) == 1:
            native.set(weight.name, weight.data, _OCT_DTYPE[weight.dtype], 1, weight.shape[0], _W_F32)
            continue
        rows, cols = weight.shape
        if keep_blocks and alike and weight.ggml_type in BLOCK_TYPES:
            native.set_gguf(weight.name, weight.data, weight.ggml_type, rows, cols)
            continue
        # Tables (embed, positions) are kept as they are given, matrices as `kept`.
        table = weight.name in ("embed", "positions")
        dense = weight.rounded() if dtype == "bfloat16" and (table or kept == _W_BF16) else weight.dense()
        native.set(weight.name, dense.data, _OCT_DTYPE[dense.dtype], rows, cols, kept)


def _with_partner(weights: Iterator[Weight]) -> Iterator[tuple[Weight, bool]]:
    """Each weight, and whether its blocks may be kept: gate and up of one MLP are packed into one matrix, so that
    both must be stored alike."""
    gate: Weight | None = None
    for weight in weights:
        if weight.name.endswith(".gate"):
            gate = weight
        elif gate is not None and weight.name.endswith(".up"):
            alike = gate.ggml_type == weight.ggml_type
            yield gate, alike
            yield weight, alike
            gate = None
        else:
            yield weight, True


def gguf_of(path: Path) -> Path:
    """The GGUF file at `path`, or the one beside the safetensors. Raises ConfigError when there is none."""
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(f"quantization gguf needs one GGUF file in {path}; it has {len(found)}")
    return found[0]
