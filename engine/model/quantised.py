"""Quantised checkpoints in safetensors form (GPTQ, AWQ, compressed-tensors, fp8), under their dense names.

Every scheme is read into the same form: integers with a scale and a zero point per group of inputs. From there a
weight is either dequantised or, where nothing is lost by it, repacked into the GGUF blocks of the native kernels.
Quantised activations are not computed with: a weight meets the activations as they are, which is the more exact.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError
from engine.model.safetensors_files import SafetensorsFiles

Array = npt.NDArray[Any]
_Q4_0, _Q8_0 = 2, 8  # ggml types
_BLOCK = 32
_GPTQ_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column, within eight, of each nibble of an int32 from the lowest on
# What a tensor of another shape or type, or a field that is not there, comes to.
_UNREADABLE = (KeyError, ValueError, TypeError, IndexError, AttributeError, ZeroDivisionError)
_SIDE_TENSORS = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("input_scale", "input_zero_point", "k_scale", "v_scale", "output_scale"),
)


@dataclass(frozen=True, slots=True)
class Grouped:
    """weight[o, i] = (values[o, i] - zeros[o, g]) * scales[o, g], g = group_of[i].

    values [out, in] int16, scales [out, groups] float32, zeros [out, groups] int16. Groups lie one after another,
    `group_of` [in] is set only where they don't.
    """

    values: npt.NDArray[np.int16]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.int16]
    bits: int
    group_of: Array | None = None

    def dense(self) -> npt.NDArray[np.float32]:
        """float32 [out, in]."""
        rows, columns = self.values.shape
        if self.group_of is not None:
            shifted = self.values - self.zeros[:, self.group_of]
            return shifted.astype(np.float32) * self.scales[:, self.group_of]
        grouped = self.values.reshape(rows, self.scales.shape[1], -1) - self.zeros[..., None]
        return (grouped.astype(np.float32) * self.scales[..., None]).reshape(rows, columns)

    def blocks(self) -> tuple[npt.NDArray[np.uint8], int] | None:
        """The same values as Q4_0 or Q8_0 blocks [out, bytes a row] and their ggml type; None if they'd change."""
        rows, columns = self.values.shape
        size = columns // self.scales.shape[1]
        zero = {4: 8, 8: 0}.get(self.bits)
        halves = self.scales.astype(np.float16)
        exact = np.isfinite(halves).all() and (halves.astype(np.float32) == self.scales).all()
        if self.group_of is not None or zero is None or size % _BLOCK or not exact or (self.zeros != zero).any():
            return None
        values = self.values.reshape(rows, -1, _BLOCK)
        scales = np.repeat(halves, size // _BLOCK, axis=1)[..., None].view(np.uint8)
        if self.bits == 8:
            return np.concatenate((scales, values.astype(np.int8).view(np.uint8)), axis=-1).reshape(rows, -1), _Q8_0
        low, high = values[..., : _BLOCK // 2], values[..., _BLOCK // 2 :]
        return np.concatenate((scales, (low | high << 4).astype(np.uint8)), axis=-1).reshape(rows, -1), _Q4_0


class QuantisedFiles:
    """The tensors of a directory, those that are quantised under the name "….weight" of the dense form."""

    def __init__(self, files: SafetensorsFiles, method: str, options: Mapping[str, Any]) -> None:
        self._files = files
        self._method = method
        self._options = options
        self._quantised: set[str] = set()
        for name in files.tensors if method else ():
            stem, _, last = name.rpartition(".")
            if last in ("qweight", "weight_packed", "weight_scale", "weight_scale_inv"):
                self._quantised.add(f"{stem}.weight")

    @classmethod
    def wrap(cls, files: SafetensorsFiles, config: Mapping[str, Any]) -> QuantisedFiles:
        """Raises ConfigError for a quantisation method that can't be read."""
        options = config.get("quantization_config") or {}
        if not isinstance(options, dict):
            raise ConfigError("quantization_config of config.json is not a JSON object")
        method = str(options.get("quant_method") or "")
        if method not in ("", *_READERS):
            raise ConfigError(f"checkpoints quantised by {method!r} are not supported ({', '.join(_READERS)} are)")
        return cls(files, method, options)

    def names(self) -> set[str]:
        """Names in the dense form."""
        if not self._method:
            return self._files.names()
        stored = {name for name in self._files.tensors if name.rpartition(".")[2] not in _SIDE_TENSORS}
        return stored | self._quantised

    def read(self, name: str) -> tuple[Array, str]:
        """The tensor, dense, and the name of its dtype."""
        if name not in self._quantised:
            return self._files.read(name)
        try:
            read = self._grouped(name)
            return (read.dense() if isinstance(read, Grouped) else read), "f32"
        except _UNREADABLE as error:
            raise self._error(name, error) from error

    def blocks(self, name: str) -> tuple[npt.NDArray[np.uint8], int] | None:
        """The tensor as GGUF blocks [out, bytes a row] and their ggml type, if that changes no value."""
        if name not in self._quantised:
            return None
        try:
            read = self._grouped(name)
            return read.blocks() if isinstance(read, Grouped) else None
        except _UNREADABLE as error:
            raise self._error(name, error) from error

    def is_quantised(self, name: str) -> bool:
        return name in self._quantised

    @functools.cached_property
    def block_type(self) -> int:
        """ggml type that the first quantised tensor fits, standing for all; -1 = they are dequantised."""
        found = self.blocks(min(self._quantised)) if self._quantised else None
        return found[1] if found else -1

    def _grouped(self, name: str) -> Grouped | npt.NDArray[np.float32]:
        return _READERS[self._method](_Stem(self._files, name.removesuffix(".weight")), self._options)

    def _error(self, name: str, error: Exception) -> ConfigError:
        return ConfigError(f"the {self._method} weight {name.removesuffix('.weight')} can't be read: {error}")


@dataclass(frozen=True, slots=True)
class _Stem:
    """The tensors of one quantised layer."""

    files: SafetensorsFiles
    name: str

    def has(self, part: str) -> bool:
        return f"{self.name}.{part}" in self.files.tensors

    def __getitem__(self, part: str) -> Array:
        return self.files.read(f"{self.name}.{part}")[0]

    def floats(self, part: str) -> npt.NDArray[np.float32]:
        data, dtype = self.files.read(f"{self.name}.{part}")
        if dtype == "bf16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32)


def _unpack(packed: Array, bits: int, axis: int) -> npt.NDArray[np.int16]:
    """Fields of `bits` bits in int32, from the lowest on, spread along `axis`."""
    words = np.moveaxis(packed.view(np.uint32), axis, -1)
    fields = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & ((1 << bits) - 1)
    return np.moveaxis(fields.reshape(*words.shape[:-1], -1).astype(np.int16), -1, axis)


def _gptq(stem: _Stem, options: Mapping[str, Any]) -> Grouped:
    """GPTQ (Frantar et al., 2022): qweight [in / n, out], qzeros [groups, out / n], scales [groups, out]."""
    bits = options["bits"]
    if bits not in _GPTQ_BITS:
        raise ValueError(f"{bits} bits (supported: {_GPTQ_BITS})")
    values = _unpack(stem["qweight"], bits, 0)
    zeros = _unpack(stem["qzeros"], bits, 1)
    if options.get("checkpoint_format", "gptq") == "gptq":  # the older form stores zero points less one
        zeros = (zeros + 1) & ((1 << bits) - 1)
    scales = stem.floats("scales").T
    group_of = stem["g_idx"] if stem.has("g_idx") else None
    if group_of is not None:
        in_order = np.arange(len(group_of)) // -(-len(group_of) // scales.shape[1])
        group_of = None if np.array_equal(group_of, in_order) else group_of
    if bits == 8:  # around zero, as Q8_0 is
        return Grouped(values.T - np.int16(128), scales, zeros.T - np.int16(128), bits, group_of)
    return Grouped(values.T, scales, zeros.T, bits, group_of)


def _awq(stem: _Stem, options: Mapping[str, Any]) -> Grouped:
    """AWQ (Lin et al., 2023), version gemm: qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    version = str(options.get("version", "gemm")).lower()
    if options.get("bits", 4) != 4 or version != "gemm":
        raise ValueError(f"{options.get('bits')} bits in the version {version} (supported: 4 in gemm)")
    place = np.argsort(_AWQ_ORDER)

    def columns(packed: Array) -> npt.NDArray[np.int16]:
        fields = _unpack(packed, 4, 1)
        return fields.reshape(len(fields), -1, 8)[..., place].reshape(fields.shape)

    return Grouped(columns(stem["qweight"]).T, stem.floats("scales").T, columns(stem["qzeros"]).T, 4)


def _compressed_tensors(stem: _Stem, options: Mapping[str, Any]) -> Grouped | npt.NDArray[np.float32]:
    """compressed-tensors: packed integers, int8, or fp8, with scales by tensor, channel, group or block."""
    if stem.has("weight_packed"):
        return _packed_integers(stem, options)
    if stem.files.tensors[f"{stem.name}.weight"].dtype != "I8":
        return _fp8(stem, options)
    values = stem["weight"].astype(np.int16)
    scales = _rows(stem.floats("weight_scale"), len(values))
    zeros = np.zeros(scales.shape, np.int16)
    if stem.has("weight_zero_point"):
        zeros = _rows(stem["weight_zero_point"].astype(np.int16), len(values))
    return Grouped(values, scales, zeros, 8)


def _packed_integers(stem: _Stem, options: Mapping[str, Any]) -> Grouped:
    """weight_packed [out, in / n] int32, fields around 2 ** (bits - 1); weight_zero_point [out / n, groups]."""
    bits = _weight_options(options).get("num_bits", 4)
    if bits not in (4, 8):
        raise ValueError(f"{bits} bits (supported: 4 and 8)")
    rows, columns = (int(extent) for extent in stem["weight_shape"].tolist())
    middle = 1 << (bits - 1)
    values = _unpack(stem["weight_packed"], bits, 1)[:rows, :columns]
    scales = _rows(stem.floats("weight_scale"), rows)
    zeros = np.full(scales.shape, middle, np.int16)
    if stem.has("weight_zero_point"):
        zeros = _unpack(stem["weight_zero_point"], bits, 0)[:rows]
    group_of = stem["weight_g_idx"] if stem.has("weight_g_idx") and (stem["weight_g_idx"] >= 0).all() else None
    shift = np.int16(0 if bits == 4 else middle)
    return Grouped(values - shift, scales, zeros - shift, bits, group_of)


def _weight_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = options.get("config_groups") or {}
    for group in groups.values():
        weights: Mapping[str, Any] = group.get("weights") or {}
        return weights
    return {}


def _rows(scales: Array, rows: int) -> Array:
    """Scales [out, groups] from one of a tensor, one a channel, or several a channel."""
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    return np.broadcast_to(scales, (rows, scales.shape[1])) if len(scales) == 1 else scales


def _fp8(stem: _Stem, options: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """fp8 weights with a scale by tensor, channel [out, 1] or block [out / b, in / b]."""
    data, dtype = stem.files.read(f"{stem.name}.weight")
    if dtype not in ("f8e4m3", "f8e5m2"):
        raise ValueError(f"stored as {dtype}, not as fp8")
    weight = (_E4M3 if dtype == "f8e4m3" else _E5M2)[data]
    scales = stem.floats("weight_scale_inv" if stem.has("weight_scale_inv") else "weight_scale")
    rows, columns = weight.shape
    if scales.ndim == 2 and scales.shape[1] > 1:
        block = options.get("weight_block_size") or _weight_options(options).get("block_structure") or (128, 128)
        spread = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)
        scales = spread[:rows, :columns]
    scaled: npt.NDArray[np.float32] = weight * _rows(scales, rows)
    return scaled


def _fp8_table(exponent_bits: int, mantissa_bits: int, bias: int) -> npt.NDArray[np.float32]:
    """Value of each of the 256 codes (OCP 8-bit floating point)."""
    codes = np.arange(256)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if exponent_bits == 4:  # e4m3fn has no infinities and one NaN
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        values[(exponent == 31) & (mantissa == 0)] = np.inf
        values[(exponent == 31) & (mantissa > 0)] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


_E4M3, _E5M2 = _fp8_table(4, 3, 7), _fp8_table(5, 2, 15)

_READERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
