"""The whole server with the real model: signals, the ways a start can fail, and what the commands say."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from engine.model.pull import pull
from tests.e2e.serving import ROOT, Server, serving


def engine_of(server: Server) -> int:
    return int(server.health()["engine"]["pid"])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


LONG = {"model": "smollm2", "prompt": "Once", "stream": True, "logit_bias": {"2": -100, "0": -100}}


def test_sigterm_lets_a_stream_end_refuses_new_requests_and_exits_with_zero() -> None:
    with serving("--shutdown-timeout", "60") as server:
        engine = engine_of(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 150}, timeout=120) as r:
            lines = r.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            late = httpx.post(f"{server.url}/v1/completions", json={**LONG, "stream": False})
            assert late.status_code == 503
            assert "retry-after" in late.headers
            assert server.health()["status"] == "draining"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(30) == 0
        assert not alive(engine)


def test_a_second_signal_ends_at_once() -> None:
    with serving("--shutdown-timeout", "600") as server:
        engine = engine_of(server)
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 4000}, timeout=60) as r:
            lines = r.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            next(lines)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(15) == 0
        assert not alive(engine)


def test_an_engine_that_cannot_be_kept_alive_ends_the_server_with_an_error() -> None:
    with serving("--max-restarts", "0") as server:
        os.kill(engine_of(server), signal.SIGKILL)
        assert server.process.wait(30) == 1


def test_the_engine_dies_with_a_killed_server() -> None:
    with serving() as server:
        engine = engine_of(server)
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 15
        while alive(engine):
            assert time.monotonic() < end
            time.sleep(0.05)


def octavo(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, **env})


def test_what_keeps_a_server_from_starting_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 64)
    t5 = tmp_path / "t5"
    t5.mkdir()
    (t5 / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}')
    (t5 / "tokenizer.json").symlink_to(pull("smollm2") / "tokenizer.json")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases = {
            ("--port", str(taken.getsockname()[1])): "in use",
            ("/no/such/model",): "/no/such/model",
            (str(tmp_path),): "",
            (str(tmp_path / "broken.gguf"),): "broken.gguf",
            (str(t5),): "T5ForConditionalGeneration",
            ("--prot", "1"): "did you mean --port?",
            ("--kv-memory", "9TiB"): "9TiB",
            ("--max-model-len", "999999"): "999999",
            ("--host", "0.0.0.0"): "key",
        }
        for flags, says in cases.items():
            done = octavo("serve", *(("--port", "0") if "--port" not in flags else ()), *flags)
            assert done.returncode == 2, (flags, done)
            lines = [line for line in done.stderr.splitlines() if line.startswith("octavo: ")]
            assert len(lines) == 1, (flags, done.stderr)
            assert says in lines[0], (flags, lines)
            assert "Traceback" not in done.stderr, flags


def test_the_commands_that_tell_something(tmp_path: Path) -> None:
    assert octavo("--version").stdout.startswith("octavo ")
    doctor = json.loads(octavo("doctor", "--json").stdout)
    assert {"processor", "memory", "kernels", "model", "compute", "KV pool"} <= doctor.keys()
    where = octavo("pull").stdout.strip()
    assert (Path(where) / "tokenizer.json").exists()
    for shell in ("bash", "zsh", "fish"):
        script = octavo("completion", shell).stdout
        assert "max-model-len" in script
        assert "doctor" in script
    bash = tmp_path / "octavo.bash"
    bash.write_text(octavo("completion", "bash").stdout)
    ask = f"source {bash}; COMP_WORDS=(octavo serve --max-n); COMP_CWORD=2; _octavo; echo ${{COMPREPLY[*]}}"
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--max-num-seqs", "--max-num-batched-tokens"]


def test_help_fits_a_screen() -> None:
    for command in ((), ("serve",), ("chat",), ("doctor",), ("bench",)):
        done = octavo(*command, "--help", COLUMNS="100")
        assert done.returncode == 0
        assert len(done.stdout.splitlines()) <= 50, command


def test_a_terminal_chat_with_a_server(server: Server) -> None:
    command = [sys.executable, "-m", "server", "chat", "--url", server.url, "--temperature", "0"]
    said = "What is the capital of France?\n/new\nWhat is 1+1?\n/quit\n"
    done = subprocess.run(command, cwd=ROOT, input=said, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Paris" in done.stdout


@pytest.mark.parametrize("line", ["sesame team-a requests_per_minute=2", "# nothing\nsesame"])
def test_keys_of_a_file(tmp_path: Path, line: str) -> None:
    from server.serve import api_keys

    path = tmp_path / "keys"
    path.write_text(line + "\n")
    (key,) = api_keys((), str(path))
    assert key.requests_per_minute == (2 if "=" in line else 0)
    assert "sesame" not in repr(key)
