"""The safetensors files of a model directory: one or several shards, memory-mapped. numpy only.

Nothing of a header is trusted: offsets are checked against the file, and whatever is wrong becomes one ConfigError.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError

# safetensors dtype -> (our name, numpy type of the stored element)
DTYPES: dict[str, tuple[str, npt.DTypeLike]] = {
    "F64": ("f64", np.float64),
    "F32": ("f32", np.float32),
    "F16": ("f16", np.float16),
    "BF16": ("bf16", np.uint16),
    "F8_E4M3": ("f8e4m3", np.uint8),
    "F8_E5M2": ("f8e5m2", np.uint8),
    "I64": ("i64", np.int64),
    "I32": ("i32", np.int32),
    "I16": ("i16", np.int16),
    "I8": ("i8", np.int8),
    "U8": ("u8", np.uint8),
    "BOOL": ("bool", np.uint8),
}
_MAX_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `start` and `size` in bytes of `file`."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


class SafetensorsFiles:
    """All tensors of a directory by name; data is mapped when it is read and let go with the array."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.tensors: dict[str, StoredTensor] = {}
        for file in self._files():
            for name, tensor in _read_header(file).items():
                self.tensors[name] = tensor

    def names(self) -> set[str]:
        return {*self.tensors}

    def read(self, name: str) -> tuple[npt.NDArray[Any], str]:
        """The tensor as stored and the name of its dtype ("f32", "bf16" as uint16, ...)."""
        tensor = self.tensors[name]
        dtype, element = DTYPES[tensor.dtype]
        if tensor.size == 0:
            return np.zeros(tensor.shape, element), dtype
        raw = np.memmap(tensor.file, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.size,))
        return raw.view(element).reshape(tensor.shape), dtype

    def _files(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{index} can't be used: {error}") from error
            missing = [shard for shard in shards if not (self.directory / str(shard)).is_file()]
            if missing:
                raise ConfigError(f"{self.directory} misses {missing[0]}, which its index names")
            return [self.directory / str(shard) for shard in shards]
        found = sorted(self.directory.glob("*.safetensors"))
        if not found:
            hint = " (pytorch_model.bin is not read: it is pickled code)" if _has_pickles(self.directory) else ""
            raise ConfigError(f"{self.directory} has no *.safetensors{hint}")
        return found


def _has_pickles(directory: Path) -> bool:
    return any(directory.glob("*.bin")) or any(directory.glob("*.pt"))


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_size,) = struct.unpack("<Q", stream.read(8))
            if header_size > min(_MAX_HEADER, size - 8):
                raise ConfigError(f"{file} is no usable safetensors file: its header claims {header_size} bytes")
            header = json.loads(stream.read(header_size))
    except (OSError, ValueError, struct.error, RecursionError) as error:
        raise ConfigError(f"{file} is no usable safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{file} is no usable safetensors file: its header is no JSON object")
    header.pop("__metadata__", None)
    data_start = 8 + header_size
    return {name: _stored(file, name, entry, data_start, size) for name, entry in header.items()}


def _stored(file: Path, name: str, entry: Any, data_start: int, file_size: int) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        element = np.dtype(DTYPES[dtype][1]).itemsize
        count = 1
        for extent in shape:
            if not isinstance(extent, int) or extent < 0:
                raise ValueError(f"extent {extent!r}")
            count *= extent
        if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end):
            raise ValueError(f"offsets {begin!r} to {end!r}")
        if end - begin != count * element:
            raise ValueError(f"{end - begin} bytes for {count} elements of {dtype}")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: tensor {name[:80]!r} has an unusable entry: {error}") from error
    if data_start + end > file_size:
        raise ConfigError(f"{file} ends before tensor {name[:80]!r} (an unfinished download?)")
    return StoredTensor(file, dtype, shape, data_start + begin, end - begin)
