"""Reads whole streams and says what they must be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.api import AddRequest, Delta, FinishReason, SamplingParams, TokenLogprobs
from engine.client import EngineClient, LocalClient, ProcessClient
from engine.config import EngineConfig

FACTORY = "tests.engine.fake:build"


@dataclass
class Read:
    """All that a reader got of one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""
    firsts: int = 0  # deltas that told the facts of a first one


def request(id: str, *, prompt: tuple[int, ...] | None = None, **params: Any) -> AddRequest:
    values: dict[str, Any] = {"seed": sum(id.encode()), "max_tokens": 60, "ignore_eos": True, **params}
    prompt = prompt or tuple(5 + (b * 7 + i) % 900 for i, b in enumerate(id.encode() * 3))
    return AddRequest(id=id, prompt=prompt, params=SamplingParams(**values), arrival=time.time())


async def read(client: EngineClient, request: AddRequest, pause_s: float = 0.0) -> list[Read]:
    """Every choice of a request, read to its end. A second end of a choice is a failure."""
    reads = [Read() for _ in range(request.params.n)]
    async for delta in client.submit(request):
        take(reads[delta.choice], delta)
        if pause_s:
            await asyncio.sleep(pause_s)
    assert all(r.finish is not None for r in reads)
    return reads


def take(one: Read, delta: Delta) -> None:
    assert one.finish is None, "a delta after the end"
    one.tokens += delta.tokens
    one.logprobs += delta.logprobs
    one.finish = delta.finish
    one.error = delta.error
    one.firsts += delta.cached_tokens >= 0


async def read_all(client: EngineClient, requests: list[AddRequest]) -> list[list[Read]]:
    return await asyncio.gather(*(read(client, r) for r in requests))


@asynccontextmanager
async def process_client(
    factory: str = FACTORY, config: dict[str, Any] | None = None, **kwargs: Any
) -> AsyncIterator[Any]:
    client = ProcessClient(EngineConfig.of("shadow", **(config or {})), factory=factory, **kwargs)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def local_client(**config: Any) -> AsyncIterator[LocalClient]:
    client = LocalClient(EngineConfig.of("shadow", **config), factory=FACTORY)
    try:
        await client.start()
        yield client
    finally:
        await client.close()
