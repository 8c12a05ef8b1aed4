"""Rules, dashboard and metrics against the real promtool and a real Prometheus that scrapes a loaded server."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.e2e.serving import Server, free_port, serving

ROOT = Path(__file__).parent.parent.parent
RULES = ROOT / "docker" / "prometheus"
DASHBOARD = ROOT / "docker" / "grafana" / "dashboards" / "octavo.json"


def promtool(*args: str) -> None:
    done = subprocess.run(["promtool", *args], cwd=RULES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_configuration_are_valid_and_alerts_fire_as_tested() -> None:
    promtool("check", "config", "prometheus.yaml")
    promtool("check", "rules", "rules.yaml")
    promtool("test", "rules", "rules_test.yaml")


def test_the_dashboard_is_what_its_source_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_dashboard", DASHBOARD.parent.parent / "make_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert DASHBOARD.read_text() == module.text()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--num-kv-blocks", "40", "--metrics-vllm-aliases") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of a Prometheus that scrapes the server each second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    config = (RULES / "prometheus.yaml").read_text()
    config = config.replace("octavo:8000", f"127.0.0.1:{server.port}").replace("interval: 5s", "interval: 1s")
    (folder / "prometheus.yaml").write_text(config.replace("rules.yaml", str(RULES / "rules.yaml")))
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def query(prometheus: str, expr: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expr}, timeout=10)
    if answer.status_code == 503:  # still starting
        return []
    assert answer.status_code == 200, f"{expr}: {answer.text}"
    return answer.json()["data"]["result"]


def until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "Prometheus has no data"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def loaded(server: Server, prometheus: str) -> str:
    """Prometheus after some seconds of requests, one of them refused."""
    until(lambda: query_up(prometheus), 60)
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for i in range(6):
        client.completions.create(model="smollm2", prompt=f"Story {i}:", max_tokens=20)
        time.sleep(0.5)
    httpx.post(f"{server.url}/v1/completions", json={"model": "smollm2", "prompt": "x", "temperature": -1})
    until(lambda: query(prometheus, "octavo_requests_refused_total > 0"), 30)
    time.sleep(2)
    return prometheus


def query_up(prometheus: str) -> bool:
    try:
        return bool(query(prometheus, 'up{job="octavo"} == 1'))
    except httpx.HTTPError:
        return False


def expressions() -> list[str]:
    targets = [t for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]]
    filled = [t["expr"].replace("$__rate_interval", "1m").replace("$model_name", ".*") for t in targets]
    return filled + re.findall(r"record: .*\n *expr: (.*)", (RULES / "rules.yaml").read_text())


@pytest.mark.parametrize("expr", expressions())
def test_every_query_of_the_dashboard_and_the_rules_returns_data(loaded: str, expr: str) -> None:
    assert query(loaded, expr), expr


def test_native_names_pass_promtool(loaded: str, server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    native = "".join(line + "\n" for line in text.splitlines() if "vllm:" not in line)
    done = subprocess.run(["promtool", "check", "metrics"], input=native, capture_output=True, text=True, check=False)
    problems = [line for line in done.stderr.splitlines() if line and "_perc" not in line]
    assert problems == []


def test_vllm_names_reach_prometheus_as_they_are(loaded: str) -> None:
    for name in ("num_requests_running", "kv_cache_usage_perc", "generation_tokens_total", "prompt_tokens_total"):
        assert query(loaded, f"vllm:{name}"), name
