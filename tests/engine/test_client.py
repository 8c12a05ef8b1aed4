"""The client over a real engine process (and over a thread): streams, limits, ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.admission import DrainRate
from engine.api import Abort, AddRequest, FinishReason
from engine.client import ProcessClient
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from tests.engine.fake import STEP_S
from tests.engine.streams_of import FACTORY, Read, local_client, process_client, read, read_all, request, take

ROOT = Path(__file__).parent.parent.parent


def gone(pid: int) -> bool:
    """The process has ended (a zombie whose parent is gone too counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary directory of this test alone, whatever runs beside it; its name is short, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="oct-") as own:
        monkeypatch.setenv("TMPDIR", own)
        monkeypatch.setattr(tempfile, "tempdir", own)
        yield


def directories() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("octavo-")}


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it didn't come true"
        await asyncio.sleep(0.02)


def test_a_thread_and_a_process_give_the_same_deltas_of_the_same_requests() -> None:
    async def run(opening) -> list[list[Read]]:
        async with opening as client:
            return await read_all(client, [request(f"r{i}", n=1 + i % 3, logprobs=i % 3) for i in range(12)])

    def both() -> tuple[list[list[Read]], list[list[Read]]]:
        return asyncio.run(run(local_client())), asyncio.run(run(process_client()))

    thread, process = both()
    assert thread == process
    assert all(r.firsts == 1 for choices in process for r in choices)
    assert {len(r.tokens) for choices in process for r in choices} == {60}


def test_closing_a_stream_early_frees_its_sequence() -> None:
    async def run() -> None:
        async with process_client() as client:
            stream = client.submit(request("long", max_tokens=3000))
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await until(lambda: client.stats.running == 0 and client.stats.blocks_free == client.stats.blocks_total)
            never_read = client.submit(request("unread", max_tokens=3000))
            await until(lambda: client.stats.running == 1)
            del never_read
            await until(lambda: client.stats.running == 0)
            assert await read(client, request("after"))

    asyncio.run(run())


def test_one_choice_is_aborted_and_the_others_go_on() -> None:
    async def run() -> list[Read]:
        async with process_client() as client:
            reads = [Read() for _ in range(3)]
            async for delta in client.submit(request("three", n=3)):
                take(reads[delta.choice], delta)
                if delta.choice == 1 and len(reads[1].tokens) >= 5:
                    client.abort("three", 1)
                    client.abort("three", 1)
            return reads

    reads = asyncio.run(run())
    assert [r.finish for r in reads] == [FinishReason.LENGTH, FinishReason.ABORT, FinishReason.LENGTH]
    assert len(reads[1].tokens) < 60


def test_a_slow_reader_gets_merged_deltas_and_loses_nothing() -> None:
    async def run() -> tuple[list[int], list[int], int, int]:
        async with process_client() as client:
            quick = await read(client, request("same", max_tokens=200, logprobs=1))
            stream, slow, deltas = client.submit(request("same", max_tokens=200, logprobs=1)), Read(), 0
            async for delta in stream:
                take(slow, delta)
                deltas += 1
                await asyncio.sleep(40 * STEP_S)
            assert slow == quick[0]
            return quick[0].tokens, slow.tokens, deltas, len(slow.logprobs)

    quick, slow, deltas, logprobs = asyncio.run(run())
    assert slow == quick
    assert logprobs == len(slow) == 200
    assert deltas < 100


def test_a_thousand_requests_at_once_all_end() -> None:
    async def run() -> list[list[Read]]:
        async with process_client(config={"max_waiting": 2000, "max_num_seqs": 256}) as client:
            return await read_all(client, [request(f"m{i}", max_tokens=3) for i in range(1000)])

    reads = asyncio.run(run())
    assert all(r.finish is FinishReason.LENGTH and len(r.tokens) == 3 for (r,) in reads)


def test_beyond_the_queue_limit_requests_are_refused_with_a_time_to_come_back() -> None:
    async def run() -> tuple[list[object], float]:
        async with process_client(config={"max_waiting": 4, "max_num_seqs": 2}) as client:
            results = await asyncio.gather(
                *(read(client, request(f"q{i}", max_tokens=30)) for i in range(20)), return_exceptions=True
            )
            refused = [r for r in results if isinstance(r, Overloaded)]
            assert await read(client, request("later"))
            return results, refused[0].retry_after_s

    results, retry = asyncio.run(run())
    assert sum(isinstance(r, Overloaded) for r in results) == 20 - 6
    assert sum(isinstance(r, list) for r in results) == 6
    assert retry >= 1


def test_a_key_that_fills_the_queue_does_not_shut_out_another() -> None:
    def of(key: str, id: str) -> AddRequest:
        return msgspec.structs.replace(request(id, max_tokens=30), key=key)

    async def run() -> None:
        async with process_client(config={"max_waiting": 6, "max_num_seqs": 1}) as client:
            many = [asyncio.ensure_future(read(client, of("greedy", f"g{i}"))) for i in range(20)]
            await asyncio.sleep(0)
            others = [asyncio.ensure_future(read(client, of("other", f"o{i}"))) for i in range(5)]
            done = await asyncio.gather(*many, *others, return_exceptions=True)
            assert [isinstance(r, Overloaded) for r in done[:20]] == [False] * 7 + [True] * 13
            assert [isinstance(r, Overloaded) for r in done[20:]] == [False] * 3 + [True] * 2  # half of the queue

    asyncio.run(run())


def test_the_time_to_come_back_follows_the_measured_rate() -> None:
    now = [0.0]
    rate = DrainRate(lambda: now[0])
    assert rate.retry_after_s(100) == 1.0
    for _ in range(20):
        now[0] += 0.5
        rate.add(1)
    assert rate.retry_after_s(40) == pytest.approx(40 / 2 / 2, rel=0.1)
    assert rate.retry_after_s(10_000) == 60.0
    now[0] += 3600
    assert rate.retry_after_s(40) == 1.0


def test_what_can_never_fit_is_refused_at_once() -> None:
    async def run() -> None:
        async with process_client(config={"num_kv_blocks": 4, "block_size": 8}) as client:
            with pytest.raises(InvalidRequest, match="the KV pool holds") as error:
                client.submit(request("big", prompt=tuple(range(5, 40))))
            assert error.value.code == "context_length_exceeded"
            client.submit(request("twice"))
            with pytest.raises(InvalidRequest, match="in use"):
                client.submit(request("twice"))

    asyncio.run(run())


def test_questions_are_answered_and_unknown_commands_refused() -> None:
    async def run() -> None:
        async with process_client() as client:
            stream = client.submit(request("seen", max_tokens=2000))
            await anext(stream)
            kv = await client.inspect("kv")
            assert kv["total"] == 4096
            assert any(h["request"] == "seen" for b in kv["blocks"] for h in b["holders"])
            assert (await client.inspect("request", "seen"))["id"] == "seen"
            with pytest.raises(InvalidRequest, match="fly"):
                await client.control("fly", {})
            with pytest.raises(InvalidRequest, match="needs a name"):
                await client.control("unload_adapter", {})
            await client.control("reset_prefix_cache", {})

    asyncio.run(run())


def test_bytes_that_are_no_message_are_dropped_and_the_engine_goes_on() -> None:
    async def run() -> None:
        async with process_client() as client:
            pid = client.health()["engine"]["pid"]
            noise = random.Random(7)
            for _ in range(300):
                client._handle._out.send(noise.randbytes(noise.randrange(200)))
            for frame in (b"\x81\xa4type\xa3add", b"\xdf\xff\xff\xff\xff", b"\x91" * 5000, b"\x81\xa4type\xa5abort"):
                client._handle._out.send(frame)
            client._handle.send(Abort("nobody", 3))
            assert await read(client, request("fine"))
            engine = client.health()["engine"]
            assert (engine["pid"], engine["restarts"]) == (pid, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("model", "says"),
    [("broken", "the model is broken: mend it"), ("bug", "ZeroDivisionError: oh"), ("dies", "killed by SIGKILL")],
)
def test_an_engine_that_cannot_start_says_why(model: str, says: str) -> None:
    async def run() -> None:
        client = ProcessClient(EngineConfig.of(model), factory=FACTORY)
        before = directories()
        try:
            with pytest.raises(ConfigError, match=says):
                await client.start()
            assert client.health()["status"] == "dead"
        finally:
            await client.close()
        assert directories() <= before

    asyncio.run(run())


def test_close_leaves_no_process_and_no_file_and_ends_every_stream() -> None:
    async def run() -> None:
        before = directories()
        async with process_client() as client:
            pid = client.health()["engine"]["pid"]
            assert directories() <= before, "the sockets have no name any more once the engine is ready"
            stream = client.submit(request("open", max_tokens=3000))
            await anext(stream)
            await client.close()
            deltas = [delta async for delta in stream]
            assert deltas[-1].finish is FinishReason.ABORT
            assert gone(pid)
            with pytest.raises(EngineDead):
                client.submit(request("late"))
        assert directories() <= before

    asyncio.run(run())


def test_close_while_the_engine_is_starting_leaves_nothing() -> None:
    async def run() -> None:
        before = directories()
        client = ProcessClient(EngineConfig.of("shadow"), factory=FACTORY)
        starting = asyncio.ensure_future(client.start())
        await asyncio.sleep(0.05)
        assert client.health()["status"] == "loading"
        with pytest.raises(EngineDead, match="loaded"):
            client.submit(request("early"))
        await client.close()
        with pytest.raises(EngineDead):
            await starting
        assert directories() <= before

    asyncio.run(run())


def test_draining_lets_streams_end_and_takes_no_new_ones() -> None:
    async def run() -> None:
        async with process_client() as client:
            running = asyncio.ensure_future(read(client, request("running", max_tokens=40)))
            await until(lambda: client.stats.running == 1)
            draining = asyncio.ensure_future(client.drain(30))
            await asyncio.sleep(0)
            assert client.health()["status"] == "draining"
            with pytest.raises(EngineDead, match="shutting down"):
                client.submit(request("new"))
            await draining
            assert (await running)[0].finish is FinishReason.LENGTH

    asyncio.run(run())


def test_a_drain_that_takes_too_long_aborts_what_is_left() -> None:
    async def run() -> None:
        async with process_client() as client:
            running = asyncio.ensure_future(read(client, request("endless", max_tokens=4000)))
            await until(lambda: client.stats.running == 1)
            await client.drain(0.05)
            assert (await running)[0].finish is FinishReason.ABORT

    asyncio.run(run())


def test_signals_of_the_terminal_do_not_end_the_engine() -> None:
    async def run() -> None:
        async with process_client() as client:
            pid = client.health()["engine"]["pid"]
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            assert await read(client, request("fine"))
            assert client.health()["engine"]["restarts"] == 0

    asyncio.run(run())


PARENT = """
import asyncio, sys
from tests.engine.streams_of import process_client, request, read
async def main():
    async with process_client() as client:
        stream = client.submit(request("r", max_tokens=4000))
        await anext(stream)
        print(client.health()["engine"]["pid"], flush=True)
        await read(client, request("endless", max_tokens=4000))
asyncio.run(main())
"""


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_engine_ends_with_its_parent_whatever_ends_the_parent(killer: signal.Signals) -> None:
    before = directories()
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.send_signal(killer)
    parent.wait()
    asyncio.run(until(lambda: gone(pid)))
    assert directories() <= before


LOADING = """
import asyncio, sys
from engine.client import ProcessClient
from engine.config import EngineConfig
async def main():
    client = ProcessClient(EngineConfig.of("shadow"), factory="tests.engine.fake:build")
    starting = asyncio.ensure_future(client.start())
    while not client.health()["engine"]["pid"]:
        await asyncio.sleep(0.001)
    print(client.health()["engine"]["pid"], flush=True)
    await starting
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_an_engine_whose_parent_dies_while_it_loads_removes_the_sockets() -> None:
    before = directories()
    parent = subprocess.Popen([sys.executable, "-c", LOADING], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    asyncio.run(until(lambda: gone(pid)))
    assert directories() <= before


def test_the_engine_keeps_the_priority_that_the_client_was_made_with() -> None:
    async def run() -> None:
        client = ProcessClient(EngineConfig.of("shadow"), factory=FACTORY)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, mine + 3)
            await client.start()
            pid = client.health()["engine"]["pid"]
            assert os.getpriority(os.PRIO_PROCESS, pid) == mine
            os.kill(pid, signal.SIGKILL)
            await until(lambda: client.health()["engine"]["restarts"] == 1 and client.health()["status"] == "ready")
            assert os.getpriority(os.PRIO_PROCESS, client.health()["engine"]["pid"]) == mine
        finally:
            await client.close()

    import threading

    # Priorities belong to threads, and can't be raised again by everyone: a thread of its own goes down.
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
