"""Quantised checkpoints in safetensors form, presented as dense tensors under their usual names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from engine.errors import ConfigError
from engine.model.safetensors_files import SafetensorsFiles


class QuantisedFiles:
    """The tensors of a directory by name."""

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files

    @classmethod
    def wrap(cls, files: SafetensorsFiles, config: Mapping[str, Any]) -> QuantisedFiles:
        """Raises ConfigError for a quantisation method that can't be read."""
        method = (config.get("quantization_config") or {}).get("quant_method")
        if method is not None:
            raise ConfigError(f"checkpoints quantised by {method!r} are not supported")
        return cls(files)

    def names(self) -> set[str]:
        return {*self._files.tensors}

    def read(self, name: str) -> tuple[npt.NDArray[Any], str]:
        """The tensor [as stored, dense] and the name of its dtype."""
        return self._files.read(name)
