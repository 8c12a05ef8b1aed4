"""Models from a hub, through huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "additional_chat_templates/*"]


def fetch_from_hub(model_id: str, revision: str | None) -> Path:
    """Download (or find in its cache) all files of one revision; no code, no pickles. Raises ConfigError."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(model_id, revision=revision, allow_patterns=_WANTED))
    except Exception as error:  # network, authorisation, no such model or revision: each has its own classes
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{model_id} is no local path and can't be fetched from the hub: {reason}") from error
