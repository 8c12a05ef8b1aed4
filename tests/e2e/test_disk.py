"""Cached prefixes outlive the server: what was in memory when it ended is a hit for the next one, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.e2e.serving import Server, serving
from tests.texts import english

FLAGS = ("--num-kv-blocks", "200", "--max-num-seqs", "4", "--kv-disk-size", "200MiB", "--swap-space", "64MiB")


def ask(server: Server) -> tuple[dict[str, Any], int]:
    """(the choice, cached prompt tokens) of one completion."""
    body = {"model": "smollm2", "prompt": english(3000), "max_tokens": 12, "logprobs": 3, "temperature": 0.9, "seed": 5}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=100).raise_for_status().json()
    return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_of_before_the_restart_is_a_hit_after_it_even_when_the_file_is_damaged(tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-disk", str(tmp_path))
    with serving(*flags) as server:
        first, cached = ask(server)
        assert cached == 0
        assert server.stop() == 0
    with serving(*flags) as server:
        again, cached = ask(server)
        assert again == first
        assert cached > 500
        assert server.stop() == 0

    (file,) = tmp_path.glob("*.blocks")
    data = bytearray(file.read_bytes())
    used = len(data.rstrip(b"\0"))
    for at in range(used // 4, used, 100_000):  # several in each block
        data[at] ^= 1
    file.write_bytes(data)
    with serving(*flags) as server:
        again, _ = ask(server)
        assert again == first
        assert server.health()["engine"]["restarts"] == 1
        assert "its checksum doesn't match" in server.said()
