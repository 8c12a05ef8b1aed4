"""The Dockerfiles and the compose file against their linters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("name", ["Dockerfile", "docker/cuda.Dockerfile", "docker/rocm.Dockerfile"])
def test_hadolint_finds_nothing(name: str) -> None:
    done = subprocess.run([BIN / "hadolint", name], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_compose_file_is_valid() -> None:
    done = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_compose_file_mounts_exists() -> None:
    for path in ("prometheus/prometheus.yaml", "grafana/provisioning/datasources/prometheus.yaml"):
        assert (ROOT / "docker" / path).is_file()
    assert (ROOT / "docker/grafana/dashboards/octavo.json").is_file()
