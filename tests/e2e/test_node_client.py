"""The official client for Node against the default model: `node check.mjs`, with the package as npm packs it."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

from engine.model.pull import cache_directory
from tests.e2e.serving import ROOT, Server

SOURCES = ROOT / "tests" / "clients" / "node"
SHA512 = "wPYKJkLPFEdNJ2tThSg4jE1Ptsv4X3u8g8LIvu0Qz/UIhsKeCzl73rl48PtQsDVrJL/ku0liXOsbyd2TsRsPJw=="


def packed(directory: Path) -> Path:
    """The pinned package, fetched once. It has no dependencies, so that unpacking it is all of an installation."""
    version = json.loads((SOURCES / "package.json").read_text())["dependencies"]["openai"]
    package = directory / f"openai-{version}.tgz"
    if not package.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", f"openai@{version}", "--pack-destination", str(directory), "--loglevel=error"]
        subprocess.run(command, check=True, timeout=240, cwd=directory, stdin=subprocess.DEVNULL)
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    assert found == SHA512, f"{package} is not the pinned one: {found}"
    return package


def test_the_node_client_works(server: Server, tmp_path: Path):
    modules = tmp_path / "node_modules"
    with tarfile.open(packed(cache_directory().parent / "npm")) as archive:
        archive.extractall(modules, filter="data")
    (modules / "package").rename(modules / "openai")
    for name in ("check.mjs", "package.json"):
        shutil.copy(SOURCES / name, tmp_path)
    done = subprocess.run(
        ["node", "check.mjs", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok   ") == 8
