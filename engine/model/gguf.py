"""GGUF files: header, metadata, and tensors as memory-mapped blocks. numpy only.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. Nothing of a file is trusted: every length is
checked against the file before it is used, and whatever is wrong becomes one ConfigError.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError

MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class BlockType:
    """A ggml storage type: `elements` consecutive elements of a row in `size` bytes."""

    name: str
    elements: int
    size: int


TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """`shape` is row major (outermost first), the reverse of what the file writes. `offset`, `size` in bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    size: int


class GGUFFile:
    """Header of one file; tensor data is mapped when it is read and let go with the array."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            data: npt.NDArray[np.uint8] = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path} can't be read: {error}") from error
        try:
            reader = _Reader(data.data)
            self.metadata, self.tensors = _read_header(reader)
        except (_Malformed, struct.error, OverflowError, MemoryError, RecursionError) as error:
            raise ConfigError(f"{self.path} is no usable GGUF file: {error}") from error

    def blocks(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored: [rows, bytes a row], rows over all dimensions but the innermost."""
        raw = np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=(tensor.size,))
        kind = TYPES[tensor.type]
        row_bytes = tensor.shape[-1] // kind.elements * kind.size
        return raw.reshape(-1, row_bytes)


def dequantise(blocks: npt.NDArray[np.uint8], ggml_type: int) -> npt.NDArray[np.float32]:
    """float32 values of stored rows [rows, bytes a row] -> [rows, columns]."""
    if ggml_type == 0:
        return np.ascontiguousarray(blocks).view(np.float32)
    if ggml_type == 1:
        return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)
    if ggml_type == 30:
        return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    import gguf.quants  # only the rarer path pays for this import

    kind = TYPES[ggml_type]
    columns = blocks.shape[1] // kind.size * kind.elements
    values = np.empty((blocks.shape[0], columns), np.float32)
    step = max(1, _PIECE // columns)
    for row in range(0, len(blocks), step):  # in pieces that stay in the cache: several times faster
        piece = np.ascontiguousarray(blocks[row : row + step])
        values[row : row + step] = gguf.quants.dequantize(piece, gguf.GGMLQuantizationType(ggml_type))
    return values


_PIECE = 1 << 17  # elements


class _Malformed(Exception):
    pass


_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMENSIONS = 4


class _Reader:
    """A cursor over the file that never leaves it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self._data):
            raise _Malformed(f"it ends at byte {len(self._data)}, before a field of {size} bytes")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return bytes(self.take(self.scalar("Q"))).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise _Malformed(f"unknown metadata type {kind}")
        value = self.scalar(_SCALARS[kind])
        return float(str(np.float32(value))) if kind == _FLOAT32 else value  # 1e-05, not 9.99999974e-06

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            data = self.take(count * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", data))
        if count > len(self._data):  # each element takes at least a byte
            raise _Malformed(f"an array of {count} elements does not fit the file")
        return [self.value(kind) for _ in range(count)]

    def size(self) -> int:
        return len(self._data)


def _read_header(reader: _Reader) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    if bytes(reader.take(4)) != MAGIC:
        raise _Malformed("it does not start with 'GGUF'")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise _Malformed(f"version {version} is not supported (2 and 3 are, little-endian)")
    n_tensors, n_metadata = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(n_metadata):
        key = reader.text()
        metadata[key] = reader.value(reader.scalar("I"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Malformed(f"general.alignment is {alignment!r}, no power of two")
    found = [_read_tensor_info(reader) for _ in range(n_tensors)]
    start = -(-reader.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for tensor in found:
        placed = GGUFTensor(tensor.name, tensor.type, tensor.shape, start + tensor.offset, tensor.size)
        if placed.offset + placed.size > reader.size():
            raise _Malformed(
                f"tensor {tensor.name[:80]!r} needs bytes {placed.offset} to {placed.offset + placed.size}; "
                f"the file has {reader.size()} (an unfinished download?)"
            )
        tensors[tensor.name] = placed
    return metadata, tensors


def _read_tensor_info(reader: _Reader) -> GGUFTensor:
    name = reader.text()
    n_dimensions = reader.scalar("I")
    if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
        raise _Malformed(f"tensor {name[:80]!r} has {n_dimensions} dimensions")
    shape = tuple(reader.scalar("Q") for _ in range(n_dimensions))[::-1]
    kind, offset = reader.scalar("I"), reader.scalar("Q")
    if kind not in TYPES:
        raise _Malformed(f"tensor {name[:80]!r} is of the unsupported type {kind}")
    block = TYPES[kind]
    if shape[-1] % block.elements or 0 in shape:
        raise _Malformed(f"tensor {name[:80]!r} of type {block.name} has the shape {shape}")
    elements = 1
    for extent in shape:
        elements *= extent
    return GGUFTensor(name, kind, shape, offset, elements // block.elements * block.size)
