"""Chats of every kind whose state a restart must carry over, and a client that keeps all that it is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.7, "presence_penalty": 0.8, "logit_bias": {"2": -100}},
    {"temperature": 0, "max_tokens": 40, "response_format": FORMAT},
    {"temperature": 1.0, "max_tokens": 160, "min_tokens": 100},
]


def bodies(count: int) -> list[dict[str, Any]]:
    """Streamed chats, each of another kind than the one before."""
    base: dict[str, Any] = {"model": "smollm2", "stream": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 32}
    return [
        {**base, "seed": i, "messages": [{"role": "user", "content": f"Tell me about the number {i}."}]}
        | KINDS[i % len(KINDS)]
        for i in range(count)
    ]


async def stream(http: httpx.AsyncClient, body: dict[str, Any], pause_s: float = 0) -> dict[int, list[Any]]:
    """Per choice: its text, its finish reason and every logprob, bit for bit. `pause_s`: between two lines."""
    out: dict[int, list[Any]] = {i: ["", None, []] for i in range(body.get("n", 1))}
    done = False
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data:"):
                chunk = json.loads(line[5:])
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    one = out[choice["index"]]
                    one[0] += choice["delta"].get("content") or ""
                    one[1] = choice["finish_reason"] or one[1]
                    one[2] += (choice["logprobs"] or {}).get("content", [])
            if pause_s:
                await asyncio.sleep(pause_s)
    assert done, "a stream without [DONE]"
    return out


async def samples(http: httpx.AsyncClient, name: str) -> dict[str, float]:
    """The values of a metric by its labels."""
    lines = (await http.get("/metrics")).text.splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith((name + "{", name + " "))]
    return {labels: float(value) for labels, _, value in found}


async def ended(http: httpx.AsyncClient) -> dict[str, int]:
    """How many requests ended, by reason."""
    found = await samples(http, "octavo_request_success_total")
    return {labels.split('finished_reason="')[1].split('"')[0]: int(value) for labels, value in found.items()}
