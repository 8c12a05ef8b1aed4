"""What decides the bytes of packed weights and of KV blocks, as a short text for file names and keys."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from engine.model.spec import DecoderSpec

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
