"""The engine is killed again and again under forty streams, with a poison among them: nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

import httpx
import pytest

from tests.e2e.chats import bodies, ended, samples, stream
from tests.e2e.poisoned import POISON
from tests.e2e.serving import Server, serving

STREAMS = 40
KILLS = 5


async def ready(http: httpx.AsyncClient) -> int:
    """The pid of the engine, once it takes work."""
    while True:
        health = (await http.get("/health")).json()
        if health["status"] in ("ready", "degraded") and health["engine"]["state"] == "running":
            return int(health["engine"]["pid"])
        await asyncio.sleep(0.02)


async def kill(http: httpx.AsyncClient, moments: random.Random) -> None:
    pid = await ready(http)
    await asyncio.sleep(moments.uniform(0.05, 0.5))
    with contextlib.suppress(ProcessLookupError):  # the poison was quicker
        os.kill(pid, signal.SIGKILL)
    while (await http.get("/health")).json()["engine"]["pid"] == pid:
        await asyncio.sleep(0.02)


async def undisturbed_and_disturbed(url: str) -> None:
    moments = random.Random(5)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as http:
        want = await asyncio.gather(*(stream(http, body) for body in bodies(STREAMS)))
        before = await ended(http)
        assert sum(before.values()) == STREAMS
        streams = asyncio.gather(*(stream(http, body) for body in bodies(STREAMS)))
        poison: asyncio.Task[httpx.Response] | None = None
        for turn in range(KILLS):
            await kill(http, moments)
            assert not streams.done()
            if turn == KILLS // 2:
                body = {**bodies(1)[0], "seed": POISON, "stream": False}
                poison = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        got = await streams
        assert got == want
        assert poison
        await its_end(await poison)
        await books(http, before)


async def its_end(response: httpx.Response) -> None:
    assert response.status_code == 500
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == "request_failed"
    assert "was given up" in error["message"]


async def books(http: httpx.AsyncClient, before: dict[str, int]) -> None:
    """Everyone has ended once, one of them by an error; every block is back."""
    after = await ended(http)
    assert {reason: after[reason] - before[reason] for reason in after} == {**before, "error": 1}
    assert list((await samples(http, "octavo_requests_in_flight")).values()) == [0]
    assert sum((await samples(http, "octavo_requests_refused_total")).values()) == 0
    assert sum((await samples(http, "octavo_requests_received_total")).values()) == 2 * STREAMS + 1
    assert max((await samples(http, "octavo_engine_restarts_total")).values()) > KILLS
    kv = (await http.get("/debug/kv")).json()
    assert kv["free"] == kv["total"]


@pytest.mark.timeout(240)
def test_forty_streams_over_five_kills_and_a_poison_are_those_of_an_undisturbed_run() -> None:
    with serving(module="tests.e2e.poisoned") as server:
        asyncio.run(undisturbed_and_disturbed(server.url))
        assert_alive(server)


def assert_alive(server: Server) -> None:
    assert server.health()["status"] == "ready"
    assert server.process.poll() is None
