"""What decides the bytes of packed weights and of KV blocks, as a short text for file names and keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from engine.model.spec import DecoderSpec
from engine.worker.settings import ExecutorSettings

PARTS, PART_BYTES = 16, 64 << 10  # of a file that `identity` reads
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def weight_files(model: Path) -> list[Path]:
    """The files that hold a model's weights: a GGUF file itself, or those of a directory, by name."""
    if model.is_file():
        return [model]
    return sorted(path for path in model.iterdir() if path.suffix in WEIGHT_SUFFIXES)


def fingerprint(model: Path, spec: DecoderSpec, *choices: str | int) -> str:
    """32 hex digits that change with the model's files (name, size, time of change), its shape and these choices."""
    digest = hashlib.sha256(msgspec.msgpack.encode(spec))
    for path in weight_files(model):
        status = path.stat()
        digest.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns};".encode())
    digest.update(repr(choices).encode())
    return digest.hexdigest()[:32]


def identity(model: Path, spec: DecoderSpec, settings: ExecutorSettings, backend: str) -> dict[str, str]:
    """What decides the bytes of a KV block, the same on every machine: other than `fingerprint` it reads the weights,

    PARTS evenly spaced parts of each file. A model that was trained further differs in every part.
    """
    digest = hashlib.sha256()
    for path in weight_files(model):
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            for i in range(PARTS):
                file.seek(max(0, size - PART_BYTES) * i // (PARTS - 1))
                digest.update(file.read(PART_BYTES))
    return {
        "model": digest.hexdigest()[:16],
        "shape": hashlib.sha256(msgspec.msgpack.encode(spec)).hexdigest()[:16],
        "backend": backend,
        "dtype": settings.dtype,
        "KV dtype": settings.kv_dtype,
        "quantization": settings.quantization,
        "block size": str(settings.block_size),
    }
