"""Several engines behind one client: a death moves requests, prefixes find their replica, and all add up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.api import FinishReason
from engine.config import EngineConfig
from engine.errors import EngineDead, InvalidRequest
from engine.replicas import Replicas
from engine.routing import Router
from tests.engine.fake import KILL
from tests.engine.streams_of import FACTORY, read, read_all, request
from tests.engine.test_client import until
from tests.engine.test_crash_resume import many, undisturbed


@asynccontextmanager
async def replicas(count: int = 2, **config: Any) -> AsyncIterator[Replicas]:
    client = Replicas(EngineConfig.of("shadow", replicas=count, **config), factory=FACTORY)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def pids(client: Replicas) -> list[int]:
    return [one["engine"]["pid"] for one in client.health()["replicas"]]


def running(client: Replicas) -> list[int]:
    return [len(one.live) for one in client.replicas]  # type: ignore[attr-defined]


def test_a_killed_replica_loses_repeats_and_changes_no_token_of_any_stream() -> None:
    want = undisturbed(many())

    async def run() -> Any:
        async with replicas() as client:
            reading = asyncio.ensure_future(read_all(client, many()))
            await until(lambda: min(running(client)) > 5 and client.stats.generation_tokens > 100)
            os.kill(pids(client)[0], signal.SIGKILL)
            await until(lambda: not running(client)[0])  # they went on elsewhere, not when it came back
            assert client.health()["status"] == "ready"
            got = await reading
            await until(lambda: client.health()["replicas"][0]["status"] == "ready")
            assert client.health()["engine"]["restarts"] == 1
            later = await read(client, request("later"))
            return got, later

    got, later = asyncio.run(run())
    for one, other, r in zip(want, got, many(), strict=True):
        assert one == other, r.id
    assert later == undisturbed([request("later")])[0]


def test_a_request_that_kills_engines_is_given_up_and_harms_no_other() -> None:
    requests = [request(f"i{i}", max_tokens=80) for i in range(12)]
    want = undisturbed(requests)

    async def run() -> Any:
        async with replicas(3) as client:
            return await asyncio.gather(read(client, request("killer", seed=KILL)), read_all(client, requests))

    (killer,), got = asyncio.run(run())
    assert killer.finish is FinishReason.ERROR
    assert got == want


def test_a_request_is_aborted_wherever_it_has_moved_to() -> None:
    async def run() -> None:
        async with replicas() as client:
            stream = client.submit(request("long", max_tokens=3000))
            await anext(stream)
            where = running(client).index(1)
            os.kill(pids(client)[where], signal.SIGKILL)
            await until(lambda: running(client)[1 - where] == 1)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            assert running(client) == [0, 0]
            await until(lambda: client.stats.running == 0 and client.stats.blocks_free == client.stats.blocks_total)

    asyncio.run(run())


def test_the_same_prefix_goes_to_the_same_replica_and_new_ones_to_the_other() -> None:
    async def run() -> None:
        async with replicas() as client:
            for turn in range(3):
                for family in range(2):
                    prefix = tuple(range(100 * family + 5, 100 * family + 85))
                    await read(client, request(f"f{family}-{turn}", prompt=(*prefix, 900 + turn)))
            hits = [one.stats.prefix_hits for one in client.replicas]
            assert hits == [160, 160]  # two of three turns of one family, 80 tokens each
            assert client.stats.prefix_hits == 320

    asyncio.run(run())


def test_an_overlong_or_twice_used_request_is_refused_as_by_one_engine() -> None:
    async def run() -> None:
        async with replicas(num_kv_blocks=8, block_size=4) as client:
            with pytest.raises(InvalidRequest, match="the KV pool holds"):
                client.submit(request("big", prompt=tuple(range(5, 45))))
            stream = client.submit(request("same", prompt=(5, 6)))
            with pytest.raises(InvalidRequest, match="in use"):
                client.submit(request("same"))
            await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_what_is_looked_at_adds_up_over_the_replicas() -> None:
    async def run() -> None:
        async with replicas(num_kv_blocks=64) as client:
            streams = [client.submit(request(f"s{i}", max_tokens=400)) for i in range(2)]
            for stream in streams:
                await anext(stream)
            live = await client.inspect("live")
            assert live["total"] == 128 == len(live["states"])
            assert {one["replica"] for one in live["alive"]} == {0, 1}
            assert live["stats"]["running"] == 2
            tables = {one["replica"]: one["table"] for one in live["sequences"]}
            assert max(tables[0]) < 64 <= min(tables[1])
            blocks = (await client.inspect("kv"))["blocks"]
            assert [one["id"] for one in blocks] == list(range(128))
            shown = await client.inspect("block", str(tables[1][0]))
            assert shown["id"] == tables[1][0]
            assert shown["holders"]
            assert (await client.inspect("request", "s1"))["replica"] in (0, 1)
            assert await client.inspect("request", "nobody") is None
            for stream in streams:
                await stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())


def test_adapters_are_loaded_into_all_replicas_or_none() -> None:
    async def run() -> None:
        async with replicas() as client:
            await client.control("load_adapter", {"name": "a", "path": "/a"})
            assert all(one.adapters == {"a": "/a"} for one in client.replicas)
            os.kill(pids(client)[1], signal.SIGKILL)
            await until(lambda: client.health()["replicas"][1]["status"] == "degraded")
            with pytest.raises(EngineDead, match="started again"):
                await client.control("load_adapter", {"name": "b", "path": "/b"})
            await until(lambda: client.health()["replicas"][1]["status"] == "ready")
            await read(client, request("with", max_tokens=3))
            await client.control("unload_adapter", {"name": "a"})
            assert all(not one.adapters for one in client.replicas)

    asyncio.run(run())


def test_replicas_that_die_for_good_end_the_server_only_together() -> None:
    reasons: list[str] = []

    async def run() -> None:
        config = EngineConfig.of("shadow", replicas=2)
        client = Replicas(config, factory=FACTORY, max_restarts=0, on_dead=reasons.append)
        try:
            await client.start()
            os.kill(pids(client)[0], signal.SIGKILL)
            await until(lambda: client.health()["replicas"][0]["status"] == "dead")
            assert not reasons
            await read(client, request("still", max_tokens=5))
            os.kill(client.health()["replicas"][1]["engine"]["pid"], signal.SIGKILL)
            await until(lambda: reasons)
            with pytest.raises(EngineDead):
                client.submit(request("late"))
        finally:
            await client.close()

    asyncio.run(run())


def test_the_router_weighs_what_is_cached_against_what_waits() -> None:
    router = Router([8, 8], 16)
    prompt = tuple(range(64))
    router.sent(0, prompt, "")
    assert router.order(prompt, "", [0, 0])[0] == 0
    assert router.order(prompt, "", [63, 0])[0] == 0
    assert router.order(prompt, "", [65, 0])[0] == 1
    assert router.order(prompt, "another tenant", [1, 0])[0] == 1
    for other in range(8):  # 8 blocks is all the pool holds: what was there is gone
        router.sent(0, tuple(range(1000 + 16 * other, 1016 + 16 * other)), "")
    assert router.order(prompt, "", [1, 0])[0] == 1
    assert {router.order((), "", [0, 0])[0] for _ in range(2)} == {0, 1}
