"""A router that hears KV events knows what an engine has cached: it foretells every hit."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from engine.api import AddRequest, SamplingParams
from engine.client import LocalClient
from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.engine.streams_of import FACTORY

BLOCK = 4


class HearingRouter:
    """Knows an engine by its events alone: plain lists, as any program would decode them."""

    def __init__(self, replay: str) -> None:
        self._context = zmq.Context()
        self._ask = self._context.socket(zmq.DEALER)  # a REQ may read one answer only
        self._ask.connect(replay)
        self.next = 0
        self.batches: list[bytes] = []
        self._children: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self._names: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.kinds: set[str] = set()

    def hear(self) -> None:
        """All that was published until now."""
        self._ask.send_multipart((b"", self.next.to_bytes(8, "big")))
        while (answer := self._ask.recv_multipart())[1] != b"\xff" * 8:
            _, number, payload = answer
            assert int.from_bytes(number, "big") == self.next
            self.next += 1
            self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self.batches.append(payload)
        seconds, events, rank = msgspec.msgpack.decode(payload)
        assert seconds > 1.7e9
        assert rank == 0
        for kind, *fields in events:
            self.kinds.add(kind)
            if kind == "AllBlocksCleared":
                self._children.clear()
                self._names.clear()
            elif kind == "BlockStored":
                self._stored(*fields)
            else:
                for name in fields[0]:
                    del self._children[self._names.pop(name)]

    def _stored(self, names: Any, parent: Any, tokens: Any, size: int, lora: Any, medium: str, adapter: Any) -> None:
        assert (size, lora, medium, adapter) == (BLOCK, None, "GPU", None)
        assert len(tokens) == size * len(names)
        for i, name in enumerate(names):
            at = (parent, tuple(tokens[i * size : (i + 1) * size]))
            self._children[at] = name
            self._names[name] = at
            parent = name

    def foretell(self, prompt: tuple[int, ...]) -> int:
        parent, length = None, 0
        while length + BLOCK < len(prompt):
            found = self._children.get((parent, prompt[length : length + BLOCK]))
            if found is None:
                break
            parent, length = found, length + BLOCK
        return length

    def close(self) -> None:
        self._ask.close(0)
        self._context.term()


def prompts() -> list[tuple[int, ...]]:
    """Families of prompts, more than the pool holds, in an order that hits and evicts."""
    draw = random.Random(3)
    heads = [tuple(draw.randrange(5, 900) for _ in range(draw.randrange(8, 60))) for _ in range(6)]
    return [(*draw.choice(heads), *(draw.randrange(5, 900) for _ in range(draw.randrange(1, 9)))) for _ in range(60)]


async def serve(config: EngineConfig, router: HearingRouter) -> list[tuple[int, int]]:
    """(hit foretold, hit) of each request."""
    client = LocalClient(config, factory=FACTORY)
    await client.start()
    found = []
    try:
        for i, prompt in enumerate(prompts()):
            router.hear()
            foretold = router.foretell(prompt)
            params = SamplingParams(max_tokens=3, seed=i, ignore_eos=True)
            deltas = [d async for d in client.submit(AddRequest(id=str(i), prompt=prompt, params=params, arrival=0.0))]
            found.append((foretold, deltas[0].cached_tokens))
        await client.control("reset_prefix_cache", {})
        router.hear()
    finally:
        await client.close()
    return found


def test_a_router_foretells_every_hit_through_evictions_and_a_reset(tmp_path: Path) -> None:
    out, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = EngineConfig.of(
        "shadow",
        num_kv_blocks=48,
        block_size=BLOCK,
        swap_space="0",  # only the device's tier is told of
        kv_events=out,
        kv_events_replay=replay,
        kv_events_topic="kv@a@m",
    )
    router = HearingRouter(replay)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(out)
    subscriber.subscribe("kv@")
    try:
        found = asyncio.run(serve(config, router))
        assert all(foretold == hit for foretold, hit in found)
        assert sum(hit for _, hit in found) > 200
        assert router.kinds == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
        assert not any(router.foretell(prompt) for prompt in prompts())
        heard = []
        while subscriber.poll(200):
            topic, number, payload = subscriber.recv_multipart()
            assert topic == b"kv@a@m"
            heard.append((int.from_bytes(number, "big"), payload))
        # Whoever subscribes late asks for what came before.
        assert heard
        assert [payload for _, payload in heard] == router.batches[heard[0][0] :]
    finally:
        router.close()
        subscriber.close(0)
        context.term()


def test_an_endpoint_that_cannot_be_bound_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    config = EngineConfig.of("shadow", kv_events=f"ipc://{tmp_path}/no/such/directory/socket")

    async def run() -> None:
        client = LocalClient(config, factory=FACTORY)
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises(ConfigError, match="--kv-events ipc"):
        asyncio.run(run())
    with pytest.raises(ConfigError, match="must be tcp"):
        EngineConfig.of("shadow", kv_events="5557")
