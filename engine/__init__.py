"""Octavo's engine: continuous batching over a paged KV pool. Start reading at `engine.api` and `engine.core.engine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.api import SamplingParams
    from engine.config import EngineConfig
    from engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams"]

_HOME = {"LLM": "engine.llm", "EngineConfig": "engine.config", "SamplingParams": "engine.api"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `import engine.core` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
