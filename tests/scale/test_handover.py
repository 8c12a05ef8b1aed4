"""Prefixes of one engine in another: the same tokens, hits where there were none, and no byte that isn't right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.api import AddRequest, SamplingParams
from engine.client import LocalClient
from engine.config import EngineConfig
from engine.errors import InvalidRequest
from engine.model.pull import pull
from tests.engine.streams_of import FACTORY

FAMILY = tuple(range(100, 180))


def request(id: str, prompt: tuple[int, ...], **fields: Any) -> AddRequest:
    params = SamplingParams(max_tokens=8, seed=5, temperature=0.8, ignore_eos=True)
    return AddRequest(id=id, prompt=prompt, params=params, arrival=0.0, **fields)


async def ask(client: LocalClient, id: str, prompt: tuple[int, ...], **fields: Any) -> tuple[list[int], int]:
    """Tokens, and how many of the prompt's were cached."""
    deltas = [delta async for delta in client.submit(request(id, prompt, **fields))]
    return [token for delta in deltas for token in delta.tokens], deltas[0].cached_tokens


async def with_client(work: Any, factory: str = FACTORY, model: str = "shadow", **config: Any) -> Any:
    client = LocalClient(EngineConfig.of(model, **config), factory=factory)
    await client.start()
    try:
        return await work(client)
    finally:
        await client.close()


def exported(path: Path, **config: Any) -> tuple[list[int], dict[str, Any]]:
    """Serve three prompts, one of them a tenant's, and export."""

    async def work(client: LocalClient) -> Any:
        tokens, _ = await ask(client, "a", (*FAMILY, 7))
        await ask(client, "b", (*FAMILY, 8, 9, 10, 11, 12))
        await ask(client, "c", (*FAMILY[:40], 1), cache_salt="tenant")
        return tokens, await client.control("export_kv", {"path": str(path)})

    return asyncio.run(with_client(work, **config))


def test_an_engine_goes_on_with_the_prefixes_of_another(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    tokens, told = exported(path)
    assert told["tokens"] >= 80 + 32
    assert path.stat().st_size == told["bytes"]
    assert path.stat().st_mode & 0o777 == 0o600

    async def work(client: LocalClient) -> None:
        taken = await client.control("import_kv", {"path": str(path)})
        assert taken["tokens"] == told["tokens"]
        assert await ask(client, "a", (*FAMILY, 7)) == (tokens, 80)
        assert (await ask(client, "t", (*FAMILY[:40], 1), cache_salt="tenant"))[1] == 32
        assert (await ask(client, "u", (*FAMILY[:40], 1), cache_salt="other"))[1] == 0
        again = await client.control("import_kv", {"path": str(path)})
        assert (again["tokens"], again["known_tokens"]) == (0, told["tokens"])

    asyncio.run(with_client(work))


def test_a_pool_that_is_too_small_takes_what_has_room_and_evicts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    _, told = exported(path, block_size=4)

    async def work(client: LocalClient) -> None:
        await ask(client, "own", tuple(range(500, 541)))
        taken = await client.control("import_kv", {"path": str(path)})
        assert 0 < taken["tokens"] < told["tokens"] == taken["tokens"] + taken["left_tokens"]
        assert (await ask(client, "own again", tuple(range(500, 541))))[1] == 40
        for i in range(20):  # what came in is evicted like anything else
            await ask(client, f"more {i}", tuple(range(300 + i, 340 + i)))
        assert client.stats.blocks_free == client.stats.blocks_total

    asyncio.run(with_client(work, block_size=4, num_kv_blocks=24))


def test_a_file_that_is_damaged_anywhere_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    exported(path)
    whole = path.read_bytes()
    damages = [whole[:n] for n in (0, 5, 12, 40, len(whole) // 2, len(whole) - 1)] + [whole + b"x"]
    for at in range(0, len(whole), 211):
        damages.append(whole[:at] + bytes((whole[at] ^ 4,)) + whole[at + 1 :])

    async def work(client: LocalClient) -> None:
        for damaged in damages:
            path.write_bytes(damaged)
            with pytest.raises(InvalidRequest, match="warm"):
                await client.control("import_kv", {"path": str(path)})
        assert (await client.inspect("kv"))["cached"] == 0

    asyncio.run(with_client(work))


def test_what_another_layout_or_nothing_wrote_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "warm"
    exported(path)

    async def work(client: LocalClient) -> None:
        with pytest.raises(InvalidRequest, match=r"its block bytes is|another size"):
            await client.control("import_kv", {"path": str(path)})
        with pytest.raises(InvalidRequest, match="can't be read"):
            await client.control("import_kv", {"path": str(tmp_path / "nothing")})
        with pytest.raises(InvalidRequest, match="can't be written"):
            await client.control("export_kv", {"path": str(tmp_path / "no" / "where")})

    asyncio.run(with_client(work, block_size=8))


def test_the_real_model_gives_the_same_tokens_from_imported_blocks(tmp_path: Path) -> None:
    real = {"factory": "engine.build:build", "model": str(pull("smollm2")), "num_kv_blocks": 64}
    prompt = tuple(range(1000, 1072))

    async def give(client: LocalClient) -> Any:
        first = await ask(client, "a", prompt)
        await client.control("export_kv", {"path": str(tmp_path / "warm")})
        return first

    async def take(client: LocalClient) -> Any:
        await client.control("import_kv", {"path": str(tmp_path / "warm")})
        return await ask(client, "a", prompt)

    async def refuse(client: LocalClient) -> None:
        with pytest.raises(InvalidRequest, match="its KV dtype is bfloat16, that of this engine float32"):
            await client.control("import_kv", {"path": str(tmp_path / "warm")})

    tokens, cached = asyncio.run(with_client(give, **real))
    assert cached == 0
    assert asyncio.run(with_client(take, **real)) == (tokens, 64)
    asyncio.run(with_client(refuse, **real, kv_cache_dtype="float32"))
