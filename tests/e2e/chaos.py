"""Chaos at length, by hand: `python -m tests.e2e.chaos --minutes 10`.

A real server under `--connections` clients. Each client sends, one after another: chats whose text must be that of
the undisturbed run, the same read slowly, chats that it leaves in the middle, and bodies that no server can take.
Meanwhile the engine is killed every `--kill-every` seconds. What is lost, changed or kept is printed and decides the
exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.chats import bodies, ended, samples, stream
from tests.e2e.serving import serving

BROKEN: list[tuple[str, bytes, dict[str, str]]] = [
    ("/v1/chat/completions", b"{", {}),
    ("/v1/chat/completions", b"\xff\xfe", {}),
    ("/v1/chat/completions", b'{"model": "smollm2"}', {}),
    ("/v1/chat/completions", b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', {}),
    ("/v1/chat/completions", b'{"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "n": 0}', {}),
    ("/v1/completions", b'{"model": "smollm2", "prompt": "x", "temperature": 1e999}', {}),
    ("/v1/completions", b'{"model": "smollm2", "prompt": "x", "regex": "("}', {}),
    ("/v1/completions", b'{"model": "smollm2", "prompt": [-1]}', {}),
    ("/v1/embeddings", b"[" * 5000, {}),
    ("/v1/responses", b'{"model": "smollm2", "input": 5}', {}),
    ("/v1/messages", b"null", {}),
    ("/v1/completions", b"prompt=x", {"content-type": "text/plain"}),
    ("/v1/nothing", b"{}", {}),
]


class Chaos:
    """The clients, and the books that they keep."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.bodies = bodies(60)
        self.want: list[dict[int, list[Any]]] = []
        self.did: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    async def client(self, http: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            (kind,) = self.random.choices(("whole", "slow", "left", "broken"), (50, 10, 20, 20))
            index = self.random.randrange(len(self.bodies))
            try:
                await getattr(self, kind)(http, index)
                self.did[kind] += 1
            except (httpx.HTTPError, AssertionError, ValueError) as error:
                self.faults.append(f"{kind} {index}: {type(error).__name__} {str(error)[:200]}")

    async def whole(self, http: httpx.AsyncClient, index: int) -> None:
        if await stream(http, self.bodies[index]) != self.want[index]:
            self.faults.append(f"whole {index}: another answer")

    async def slow(self, http: httpx.AsyncClient, index: int) -> None:
        if await stream(http, self.bodies[index], pause_s=0.05) != self.want[index]:
            self.faults.append(f"slow {index}: another answer")

    async def left(self, http: httpx.AsyncClient, index: int) -> None:
        streamed = self.random.random() < 0.7
        body = {**self.bodies[index], "stream": streamed, "max_tokens": 400, "min_tokens": 300}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.random.uniform(0.0, 1.0)):
                async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        pass

    async def broken(self, http: httpx.AsyncClient, index: int) -> None:
        path, content, headers = BROKEN[index % len(BROKEN)]
        response = await http.post(path, content=content, headers={"content-type": "application/json"} | headers)
        self.statuses[response.status_code] += 1
        assert 400 <= response.status_code < 500, response.text
        assert "error" in response.json()

    async def killer(self, http: httpx.AsyncClient, every_s: float, end: float) -> None:
        while time.monotonic() + every_s < end:
            await asyncio.sleep(every_s)
            pid = (await http.get("/health")).json()["engine"]["pid"]
            if pid:
                os.kill(pid, signal.SIGKILL)
                self.did["kill"] += 1


def resident(pid: int) -> int:
    """MiB of a process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.split("VmRSS:")[1].split()[0]) >> 10


async def memory(http: httpx.AsyncClient, pid: int) -> dict[str, int]:
    engine = (await http.get("/health")).json()["engine"]["pid"]
    return {"server": resident(pid), "engine": resident(engine or 0), "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


async def at_rest(http: httpx.AsyncClient) -> dict[str, Any]:
    """Wait until nothing runs; what is left then."""
    for _ in range(300):
        kv = (await http.get("/debug/kv")).json()
        flight = max((await samples(http, "octavo_requests_in_flight")).values())
        if not flight and kv.get("free") == kv.get("total"):
            break
        await asyncio.sleep(0.1)
    return {"in_flight": flight, "blocks_in_use": kv["total"] - kv["free"], "blocks": kv["total"]}


async def run(url: str, pid: int, args: argparse.Namespace) -> int:
    chaos = Chaos(url, args.seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=240, limits=limits) as http:
        chaos.want = await asyncio.gather(*(stream(http, body) for body in chaos.bodies))
        print("begin", await memory(http, pid), flush=True)
        begin = time.monotonic()
        end = begin + 60 * args.minutes
        tasks = [asyncio.ensure_future(chaos.client(http, end)) for _ in range(args.connections)]
        if args.kill_every:
            tasks.append(asyncio.ensure_future(chaos.killer(http, args.kill_every, end)))
        gathering = asyncio.gather(*tasks)
        while not gathering.done():
            await asyncio.wait([gathering], timeout=60)
            print(f"{time.monotonic() - begin:.0f} s", dict(chaos.did), await memory(http, pid), flush=True)
        await gathering
        rest = await at_rest(http)
        books = await ended(http)
        refused = await samples(http, "octavo_requests_refused_total")
        codes = await samples(http, "octavo_http_requests_total")
        health = (await http.get("/health")).json()
        print("end  ", await memory(http, pid))
    bad = [labels for labels in codes if 'code="5' in labels and "/health" not in labels]
    sent = len(chaos.want) + sum(chaos.did[kind] for kind in ("whole", "slow", "left", "broken"))
    booked = sum(books.values()) + int(sum(refused.values()))
    print(json.dumps({
        "did": chaos.did, "broken answered": chaos.statuses, "ended": books, "refused": refused, "rest": rest,
        "restarts": health["engine"]["restarts"], "status": health["status"], "5xx": bad,
        "sent": sent, "booked": booked, "faults": len(chaos.faults),
    }, indent=1))  # fmt: skip
    print(*chaos.faults[:20], sep="\n")
    # A client that leaves before its request was read whole isn't booked, so of those some may be missing.
    whole = sent - chaos.did["left"] <= booked <= sent
    return 0 if whole and not chaos.faults and not bad and not rest["in_flight"] and not rest["blocks_in_use"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--kill-every", type=float, default=20, help="seconds; 0 = never")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with serving() as server:
        return asyncio.run(run(server.url, server.process.pid, args))


if __name__ == "__main__":
    sys.exit(main())
