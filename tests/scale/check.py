"""The half of `make check-scale` that needs other programs: Ray Serve and vllm-router before real servers.

    python -m tests.scale.check [DIRECTORY OF THEIR VIRTUAL ENVIRONMENT]

Each part starts the programs as the documents say, kills a replica in the middle of streams, and looks at what clients
see. Prints what was checked and what can't run here. Status 1 when something is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.serving import ROOT, Server, free_port

SMALL = ("--num-kv-blocks", "256", "--threads", "1")
LONG = {"model": "smollm2", "max_tokens": 250, "stream": True, "logit_bias": {"2": -100, "0": -100}}
LONG |= {"stream_options": {"include_usage": True}}
READY_WITHIN_S = 300.0


class Missing(Exception):
    """What a part needs isn't here."""


@contextlib.contextmanager
def program(*command: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own session; nothing of it is left afterwards."""
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield running
    finally:
        running.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def until_ready(url: str, running: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end:
        assert running.poll() is None, f"{running.args} ended with {running.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(f"{running.args} was not ready within {READY_WITHIN_S:.0f} s")


def stream(url: str, prompt: str, started: Callable[[], None] = lambda: None) -> tuple[int, str]:
    """Tokens by its own count, and how the stream ended: done, error (an event says so), or cut."""
    count = tokens = 0
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "prompt": prompt}, timeout=120) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return tokens, "done"
                if line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return tokens, "error"
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
                    count += 1
                    if count == 20:
                        started()
    except httpx.HTTPError:
        pass
    return tokens, "cut"


def ask(url: str, prompt: str) -> int:
    """The status of a short request."""
    try:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code
    except httpx.HTTPError:
        return 0


def kill_amid_streams(url: str, kill: Callable[[], None], count: int = 4) -> list[tuple[int, str]]:
    """Streams of different beginnings; `kill` is called when all of them have begun."""
    left = [None] * count

    def one_started() -> None:
        left.pop()
        if not left:
            kill()

    with ThreadPoolExecutor(count) as threads:
        prompts = [f"{i} times upon a time, in a place number {i}," for i in range(count)]
        return list(threads.map(lambda prompt: stream(url, prompt, one_started), prompts))


def until_served(url: str, within_s: float = 60.0) -> tuple[int, float]:
    """Requests that failed after a death, and the seconds until five in a row were answered."""
    began, failed, good = time.monotonic(), 0, 0
    while good < 5:
        assert time.monotonic() - began < within_s, f"no five answers in a row within {within_s:.0f} s"
        good, failed = (good + 1, failed) if ask(url, f"Number {good}") == 200 else (0, failed + 1)
    return failed, time.monotonic() - began


def router(tools: Path) -> list[str]:
    """vllm-router before two servers."""
    command = tools / "bin" / "vllm-router"
    if not command.exists():
        raise Missing("vllm-router isn't installed")
    servers = [Server(*SMALL), Server(*SMALL)]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        for server in servers:
            server.wait_until_ready()
        flags = ("--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port))
        ports = ("--prometheus-port", str(free_port()))
        with program(str(command), "--worker-urls", *(s.url for s in servers), *flags, *ports) as running:
            until_ready(url, running)
            families = [f"Family {i} has a long common beginning. " * 6 for i in range(4)]
            for turn in range(3):
                statuses = [ask(url, family + str(turn)) for family in families]
                assert set(statuses) == {200}, f"turn {turn}: {statuses}"
            hits = [metric(server, "octavo_prefix_cache_hits_total") for server in servers]
            assert sum(hits) >= 4 * 2 * 48, f"prefixes found {hits} tokens"
            victim = servers[0]
            ends = kill_amid_streams(url, victim.process.kill)
            assert {end for _, end in ends} <= {"done", "cut", "error"}
            whole = [count for count, end in ends if end == "done"]
            assert all(count == LONG["max_tokens"] for count in whole), ends
            failed, seconds = until_served(url)
    finally:
        for server in servers:
            server.stop()
    return [
        f"prefixes: {sum(hits):.0f} tokens of 4 families found cached",
        f"a server killed amid 4 streams: {sorted(end for _, end in ends)}; all that ended with [DONE] were whole",
        f"after it {failed} requests failed, then five in a row were answered ({seconds:.1f} s)",
    ]


def metric(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))


def ray(tools: Path) -> list[str]:
    """The Ray Serve application with two engines."""
    python = tools / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import ray.serve"], capture_output=True).returncode:
        raise Missing("Ray Serve isn't installed")
    refused = subprocess.run(
        [python, "-c", "from server.ray_app import app; app({})"], cwd=ROOT, capture_output=True, text=True
    )
    assert "RAY_AUTH_MODE=token" in refused.stderr, refused.stderr
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    given = ("model=smollm2", "replicas=2", "cpus=0.5", f"port={port}", "num_kv_blocks=256", "threads=1")
    with program(str(python), "-m", "server.ray_app", *given) as running:
        until_ready(url, running)
        assert {ask(url, f"Hello {i}") for i in range(4)} == {200}
        engines = actors("Engine")
        assert len(engines) == 2, engines
        killed = 0.0

        def kill() -> None:
            nonlocal killed
            killed = time.monotonic()
            os.kill(engines[0], signal.SIGKILL)

        ends = kill_amid_streams(url, kill)
        kinds = [end for _, end in ends]
        assert set(kinds) == {"done", "error"}, f"the streams ended as {ends}"
        assert all(count == LONG["max_tokens"] for count, end in ends if end == "done"), ends
        failed, _ = until_served(url)
        while len(actors("Engine")) < 2:
            assert time.monotonic() - killed < 90, "the dead engine was not replaced"
            time.sleep(0.2)
        replaced = time.monotonic() - killed
    return [
        "without RAY_AUTH_MODE=token it refuses to run",
        f"an engine killed amid 4 streams: {kinds.count('error')} ended with an error event, the others were whole",
        f"after it {failed} requests failed; another engine was started within {replaced:.1f} s",
    ]


def actors(name: str) -> list[int]:
    """Processes of Ray that run a deployment of that name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(f"ray::ServeReplica:default:{name}".encode()):
                found.append(int(path.parent.name))
    return sorted(found)


PARTS = (router, ray)


def main(tools: Path) -> int:
    status = 0
    for part in PARTS:
        began = time.monotonic()
        try:
            for line in part(tools):
                print(f"ok       {part.__name__}: {line}")
            print(f"         {part.__name__}: {time.monotonic() - began:.0f} s")
        except Missing as missing:
            print(f"skipped  {part.__name__}: {missing}; `make check-scale` installs it in {tools}")
        except Exception:
            status = 1
            print(f"WRONG    {part.__name__}: {traceback.format_exc()}")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-scale")))
