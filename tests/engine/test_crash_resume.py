"""The engine dies and nobody loses a token: kills at random moments, requests that kill, engines that hang."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from engine.api import FinishReason
from engine.errors import EngineDead
from tests.engine.fake import FATAL_AT, HANG, KILL, RAISE, SEGFAULT, SLEEPY, SPIN
from tests.engine.streams_of import Read, local_client, process_client, read, read_all, request
from tests.engine.test_client import until

SMALL_POOL = {"num_kv_blocks": 160, "block_size": 4, "max_num_seqs": 16}


def many(count: int = 40) -> list[Any]:
    """Requests of all kinds that have something to remember: seeds, choices, logprobs, prompt logprobs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "logprobs": 2},
        {"n": 2},
        {"prompt_logprobs": 1, "logprobs": 0},
        {"max_tokens": 150, "min_tokens": 20, "ignore_eos": False},
    ]
    return [request(f"c{i}", **kinds[i % len(kinds)]) for i in range(count)]


def undisturbed(requests: list[Any], **config: Any) -> list[list[Read]]:
    async def run() -> list[list[Read]]:
        async with local_client(**config) as client:
            return await read_all(client, requests)

    return asyncio.run(run())


def disturbed(requests: list[Any], disturb: Any, **kwargs: Any) -> tuple[list[list[Read]], dict[str, Any]]:
    async def run() -> tuple[list[list[Read]], dict[str, Any]]:
        async with process_client(**kwargs) as client:
            reading = asyncio.ensure_future(read_all(client, requests))
            work: Coroutine[Any, Any, None] = disturb(client, reading)
            await work
            reads = await reading
            await until(lambda: client.stats.running == 0 and client.stats.waiting == 0)
            assert client.stats.blocks_free == client.stats.blocks_total
            return reads, client.health()

    return asyncio.run(run())


async def nothing(client: Any, reading: Any) -> None:
    pass


@pytest.mark.parametrize("config", [{}, SMALL_POOL], ids=["ample pool", "pool that preempts"])
def test_five_kills_at_random_moments_change_no_token_of_forty_streams(config: dict[str, Any]) -> None:
    moments = random.Random(11)

    async def kill_five_times(client: Any, reading: asyncio.Future[Any]) -> None:
        for _ in range(5):
            await until(lambda: client.health()["engine"]["state"] == "running")
            await asyncio.sleep(moments.uniform(0.02, 0.25))
            pid = client.health()["engine"]["pid"]
            if pid and not reading.done():
                os.kill(pid, signal.SIGKILL)
                await until(lambda pid=pid: client.health()["engine"]["pid"] != pid)

    want = undisturbed(many())
    got, health = disturbed(many(), kill_five_times, config={"max_waiting": 100, **config})
    for one, other, r in zip(want, got, many(), strict=True):
        assert one == other, r.id
    assert health["engine"]["restarts"] >= 3
    assert health["status"] == "ready"


@pytest.mark.parametrize("seed", [SEGFAULT, KILL], ids=["segfault", "kill"])
def test_only_the_request_that_kills_the_engine_fails_and_is_named(seed: int) -> None:
    requests = [*many(12), request("poison", seed=seed), *[request(f"x{i}") for i in range(3)]]
    want = undisturbed([r for r in requests if r.id != "poison"])
    got, health = disturbed(requests, nothing)
    bad = got.pop(12)
    assert got == want
    assert bad[0].finish is FinishReason.ERROR
    assert "poison" in bad[0].error
    assert len(bad[0].tokens) == FATAL_AT
    assert health["status"] == "ready"


def test_two_poisons_at_once_are_both_found() -> None:
    requests = [request("p1", seed=SEGFAULT), *many(6), request("p2", seed=SEGFAULT, prompt=(9, 8, 7))]
    want = undisturbed(many(6))
    got, _ = disturbed(requests, nothing)
    assert [got[0][0].finish, got[-1][0].finish] == [FinishReason.ERROR] * 2
    assert got[1:-1] == want


def test_an_engine_that_hangs_is_killed_and_the_hanging_request_given_up() -> None:
    requests = [*many(4), request("hangs", seed=HANG)]
    want = undisturbed(many(4))
    got, _ = disturbed(requests, nothing, watchdog_s=1.0)
    assert got.pop()[0].finish is FinishReason.ERROR
    assert got == want


def test_a_stopped_engine_is_replaced() -> None:
    async def stop(client: Any, reading: Any) -> None:
        await until(lambda: client.stats.running > 0)
        os.kill(client.health()["engine"]["pid"], signal.SIGSTOP)

    want = undisturbed(many(5))
    got, health = disturbed(many(5), stop, watchdog_s=1.0)
    assert got == want
    assert health["engine"]["restarts"] == 1


def test_a_step_that_spins_for_ever_is_ended_later_than_one_that_sleeps() -> None:
    got, _ = disturbed([request("spins", seed=SPIN), request("fine")], nothing, watchdog_s=0.3)
    assert [r[0].finish for r in got] == [FinishReason.ERROR, FinishReason.LENGTH]


def test_a_long_step_that_computes_is_left_alone() -> None:
    got, health = disturbed([request("sleepy", seed=SLEEPY)], nothing, watchdog_s=1.0)
    assert got[0][0].finish is FinishReason.LENGTH
    assert health["engine"]["restarts"] == 0


def test_a_step_that_raises_costs_its_requests_and_no_restart() -> None:
    async def run() -> None:
        async with process_client() as client:
            (bad,) = await read(client, request("raises", seed=RAISE))
            assert bad.finish is FinishReason.ERROR
            assert await read(client, request("fine"))
            assert client.health()["engine"]["restarts"] == 0

    asyncio.run(run())


def test_new_requests_during_a_restart_wait_for_the_next_engine() -> None:
    async def run() -> None:
        async with process_client() as client:
            os.kill(client.health()["engine"]["pid"], signal.SIGKILL)
            await until(lambda: client.health()["status"] == "degraded")
            assert (await read(client, request("meanwhile")))[0].finish is FinishReason.LENGTH
            assert client.health()["status"] == "ready"

    asyncio.run(run())


def test_a_stream_closed_during_a_restart_is_not_resumed() -> None:
    async def run() -> None:
        async with process_client() as client:
            stream = client.submit(request("leaver", max_tokens=3000))
            await anext(stream)
            os.kill(client.health()["engine"]["pid"], signal.SIGKILL)
            await until(lambda: client.health()["status"] == "degraded")
            await stream.aclose()
            assert await read(client, request("other"))
            assert client.stats.generation_tokens <= 61

    asyncio.run(run())


def test_too_many_restarts_that_get_nowhere_end_every_stream_and_tell_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_TEST_MARK", str(tmp_path / "mark"))
    reasons: list[str] = []

    async def run() -> None:
        unstable = "tests.engine.fake:build_unstable"
        async with process_client(unstable, max_restarts=2, on_dead=reasons.append) as client:
            stream = client.submit(request("waiting", max_tokens=3000))
            await anext(stream)
            os.kill(client.health()["engine"]["pid"], signal.SIGKILL)
            with pytest.raises(EngineDead, match="the engine is gone"):
                async for _ in stream:
                    pass
            assert client.health()["status"] == "dead"
            assert client.health()["engine"]["restarts"] == 2
            with pytest.raises(EngineDead, match="the engine is gone"):
                client.submit(request("late"))

    asyncio.run(run())
    assert len(reasons) == 1
    assert "3 times in a row" in reasons[0]
