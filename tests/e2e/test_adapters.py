"""Adapters beside the real model over HTTP: mixed in one batch, loaded and unloaded while it serves, and resumed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.model.config import load_spec
from engine.model.pull import pull
from tests.e2e.serving import Server, serving

pytestmark = pytest.mark.anyio
PROMPTS = ("Once upon a time", "The capital of France is", "def add(a, b):")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def lora(directory: Path, seed: int) -> Path:
    """An adapter of random matrices for q and v of every layer, in PEFT's form."""
    spec = load_spec(pull("smollm2"))
    rng = np.random.default_rng(seed)
    outputs = {"q_proj": spec.num_heads * spec.head_size, "v_proj": spec.num_kv_heads * spec.head_size}
    tensors = {}
    for layer in range(spec.num_layers):
        for name, rows in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = rng.normal(size=(4, spec.hidden_size)).astype(np.float32) * 0.05
            tensors[f"{at}.lora_B.weight"] = rng.normal(size=(rows, 4)).astype(np.float32) * 0.2
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(outputs)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    shelf = tmp_path_factory.mktemp("adapters")
    lora(shelf / "one", 1)
    lora(shelf / "two", 2)
    with serving(
        *("--lora", f"one={shelf / 'one'}", "--lora-dir", str(shelf), "--max-model-len", "512", "--kv-memory", "64MiB")
    ) as server:
        yield server


async def complete(http: httpx.AsyncClient, model: str, prompt: str, tokens: int = 12) -> dict[str, Any]:
    """A drawn continuation with its logprobs."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.7, "seed": 5, "logprobs": 1}
    response = await http.post("/v1/completions", json=body | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["model"] == model
    choice: dict[str, Any] = answer["choices"][0]
    return {name: choice[name] for name in ("text", "logprobs", "finish_reason")}


async def until_alive(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(60):
        while len((await http.get("/debug/requests")).json()["alive"]) < count:
            await asyncio.sleep(0.02)


async def test_two_adapters_and_the_base_at_once_get_what_each_gets_alone(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        assert (await http.post("/v1/completions", json={"model": "two", "prompt": "x"})).status_code == 404
        loaded = await http.post("/v1/load_lora_adapter", json={"lora_name": "two", "lora_path": "two"})
        assert loaded.status_code == 200, loaded.text
        models = (await http.get("/v1/models")).json()["data"]
        assert [(m["id"], m["parent"]) for m in models] == [("smollm2", None), ("one", "smollm2"), ("two", "smollm2")]

        asked = [(model, prompt) for prompt in PROMPTS for model in ("one", "smollm2", "two")]
        alone = [await complete(http, *pair) for pair in asked]
        assert await asyncio.gather(*(complete(http, *pair) for pair in asked)) == alone
        for i in range(0, len(asked), 3):
            assert len({answer["text"] for answer in alone[i : i + 3]}) == 3


async def test_a_crash_loses_neither_an_adapter_nor_a_token_of_it(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        load = {"lora_name": "late", "lora_path": "two"}
        assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200
        asked = [(model, PROMPTS[0], 60) for model in ("late", "one", "smollm2")]
        want = [await complete(http, *one) for one in asked]
        running = [asyncio.ensure_future(complete(http, *one)) for one in asked]
        await until_alive(http, 3)
        os.kill(server.health()["engine"]["pid"], signal.SIGKILL)
        assert await asyncio.gather(*running) == want
        assert server.health()["engine"]["restarts"] == 1

        gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "late"})
        assert gone.status_code == 200, gone.text
        assert (await http.post("/v1/completions", json={"model": "late", "prompt": "x"})).status_code == 404
        assert await complete(http, *asked[1]) == want[1]


async def test_what_is_in_use_stays_and_what_is_no_adapter_is_refused(server: Server) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        running = asyncio.ensure_future(complete(http, "one", PROMPTS[1], 100))
        await until_alive(http, 1)
        for path, body in (
            ("/v1/unload_lora_adapter", {"lora_name": "one"}),
            ("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "two", "load_inplace": True}),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == 400
            assert "in use" in refused.json()["error"]["message"]
        refused = await http.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": "."})
        assert refused.status_code == 400
        assert "no LoRA adapter" in refused.json()["error"]["message"]
        await running
