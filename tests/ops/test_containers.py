"""The Dockerfiles and the compose file against their linters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


def run_tool(name: str, *args: str) -> None:
    done = subprocess.run([BIN / name, *args], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "docker/cuda.Dockerfile", "docker/rocm.Dockerfile"])
def test_hadolint_finds_nothing(name: str) -> None:
    run_tool("hadolint", name)


def test_the_compose_file_is_valid() -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml")


def test_what_the_compose_file_mounts_exists() -> None:
    for path in ("prometheus/prometheus.yaml", "grafana/provisioning/datasources/prometheus.yaml"):
        assert (ROOT / "docker" / path).is_file()
    assert (ROOT / "docker/grafana/dashboards/octavo.json").is_file()


def test_the_compose_file_of_two_replicas_is_valid() -> None:
    run_tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.scale.yaml")
    subprocess.run(["promtool", "check", "config", "docker/prometheus/scale.yaml"], cwd=ROOT, check=True)


def test_the_kubernetes_manifests_are_valid() -> None:
    run_tool("kubernetes-validate", "--strict", "docker/k8s/deployment.yaml", "docker/k8s/service.yaml")


def test_without_torch_what_needs_it_is_refused_with_what_to_install() -> None:
    # The image has none: `None` among the modules stands for one that isn't installed.
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from engine.build import build; from engine.config import EngineConfig\n"
        "from engine.errors import ConfigError\n"
        "try: build(EngineConfig.of('smollm2', attention_backend='reference'))\n"
        "except ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "computed by torch, which isn't installed: pip install torch transformers" in done.stdout
