"""The load client: sends one workload to one server and times what comes back.

Times as the client sees them. TTFT: request written to first chunk with text. TPOT, per choice: (last text
chunk - first) / (tokens - 1). ITL: gap between text chunks of a choice. E2E: request written to end of stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from server.bench.workload import LoadRequest, Workload


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds."""

    kind: str
    ok: bool = False
    error: str = ""
    ttft: float | None = None
    e2e: float = 0.0
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class HTTPStatus(Exception):
    """An answer other than 2xx."""


class Target:
    """A server under load, spoken to over plain asyncio streams: a fifth of httpx's CPU time a chunk, which
    counts where client and server share cores. http only, since it measures servers on this machine."""

    def __init__(self, base_url: str, *, model: str = "", api_key: str = "", timeout_s: float = 600) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        self.label = base_url
        self.model = model
        self._host, self._port = url.hostname or "127.0.0.1", url.port or 80
        self._path = url.path.rstrip("/").removesuffix("/v1")
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._timeout_s = timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def get_json(self, path: str) -> Any:
        return json.loads(b"".join([part async for part in self._exchange("GET", path, b"")]))

    async def find_model(self) -> str:
        if not self.model:
            self.model = (await self.get_json("/v1/models"))["data"][0]["id"]
        return self.model

    async def send(self, request: LoadRequest, *, ignore_eos: bool = True, abort_after: int | None = None) -> Outcome:
        """Send, read to the end (or leave after `abort_after` chunks), and time it. Never raises."""
        body = json.dumps(request.body(self.model, ignore_eos=ignore_eos)).encode()
        timing = _Timing(request.kind)
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                contextlib.aclosing(self._exchange("POST", "/v1/chat/completions", body)) as parts,
            ):
                async for part in parts:
                    timing.feed(part)
                    if abort_after is not None and timing.chunks >= abort_after:
                        break
        except TimeoutError:
            timing.error = f"no end after {self._timeout_s:.0f} s"
        except (OSError, EOFError, HTTPStatus, ValueError) as error:
            timing.error = f"{type(error).__name__}: {error}"[:300]
        return timing.outcome(left=abort_after is not None)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return await asyncio.open_connection(self._host, self._port, limit=1 << 22)

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the body's parts as they come; raise HTTPStatus for anything but 2xx."""
        reader, writer = await self._connect()
        whole = False
        try:
            writer.write(
                f"{method} {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{self._key}"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            status = int(head[0].split()[1])
            headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
            parts = _chunked(reader) if "chunked" in headers.get("transfer-encoding", "") else _sized(reader, headers)
            if not 200 <= status < 300:
                text = b"".join([part async for part in parts])
                raise HTTPStatus(f"{status} {text[:200].decode(errors='replace')}")
            async for part in parts:
                yield part
            whole = headers.get("connection") != "close"
        finally:
            if whole:
                self._idle.append((reader, writer))
            else:
                writer.close()

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _chunked(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while True:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        data = await reader.readexactly(size + 2)
        if size == 0:
            return
        yield data[:-2]


async def _sized(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    yield await reader.readexactly(int(headers.get("content-length", 0)))


class _Timing:
    """Reads one SSE stream and keeps the times."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.error = ""
        self.chunks = 0
        self._start = time.perf_counter()
        self._rest = b""
        self._done = False
        self._usage: dict[str, Any] = {}
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._itl: list[float] = []

    def feed(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._done = True
                continue
            event = json.loads(payload)
            if "error" in event:
                raise ValueError(f"error in the stream: {event['error']}")
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                if delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
                    self._text(choice.get("index", 0), now)

    def _text(self, index: int, now: float) -> None:
        self.chunks += 1
        if index in self._last:
            self._itl.append(now - self._last[index])
        else:
            self._first[index] = now
        self._last[index] = now

    def outcome(self, *, left: bool) -> Outcome:
        out = Outcome(self.kind, error=self.error, e2e=time.perf_counter() - self._start, itl=self._itl)
        if self._first:
            out.ttft = min(self._first.values()) - self._start
        out.prompt_tokens = self._usage.get("prompt_tokens") or 0
        out.cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        out.output_tokens = self._usage.get("completion_tokens") or self.chunks
        per_choice = out.output_tokens / max(1, len(self._first))
        if per_choice > 1:
            out.tpot = [(self._last[i] - self._first[i]) / (per_choice - 1) for i in self._first]
        if not out.error and not left:
            if not self._done:
                out.error = "the stream ended without [DONE]"
            elif not self._first and not self._usage:
                out.error = "no output"
        out.ok = not out.error
        return out


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Closed loop with `concurrency` requests in flight, or open loop with Poisson arrivals at `rate` a second."""

    concurrency: int = 1
    rate: float | None = None
    requests: int = 8
    abort_fraction: float = 0.0


async def run_load(
    target: Target, workload: Workload, arrivals: Arrivals, *, seed: int = 0, ignore_eos: bool = True
) -> tuple[list[Outcome], float]:
    """All outcomes and the wall time in seconds."""
    rng = random.Random(f"arrivals/{seed}")
    outcomes: list[Outcome] = []
    begin = time.perf_counter()

    async def one() -> None:
        leave = rng.randint(2, 8) if rng.random() < arrivals.abort_fraction else None
        outcomes.append(await target.send(workload.next(), ignore_eos=ignore_eos, abort_after=leave))

    if arrivals.rate is None:
        left = iter(range(arrivals.requests))

        async def worker() -> None:
            for _ in left:
                await one()

        await asyncio.gather(*(worker() for _ in range(arrivals.concurrency)))
    else:
        due, tasks = begin, []
        for _ in range(arrivals.requests):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one()))
            due += rng.expovariate(arrivals.rate)
        await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - begin
