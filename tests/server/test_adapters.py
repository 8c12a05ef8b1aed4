"""LoRA adapters over HTTP: who is a model, what may be loaded, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from server.settings import ApiKey
from tests.server.conftest import Api, chat_body, complete_body, error_of, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A directory of adapters, and one beside it that is nobody's business."""
    for name in ("shelf/tales", "shelf/deep/poems", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "shelf" / "way-out").symlink_to(tmp_path / "secret")
    return tmp_path / "shelf"


def load(name: str = "tales", path: str = "tales", **more: Any) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": path, **more}


async def ids(api: Api) -> list[str]:
    return [model["id"] for model in (await api.http.get("/v1/models")).json()["data"]]


async def test_an_adapter_is_a_model_from_when_it_is_loaded_to_when_it_is_unloaded(
    tokenizer: Tokenizer, shelf: Path
) -> None:
    async with serving(tokenizer, lora_dir=str(shelf)) as api:
        await api.refused("/v1/chat/completions", chat_body(model="tales"), 404)
        await api.ok("/v1/load_lora_adapter", load())
        await api.ok("/v1/load_lora_adapter", load("a/poems", str(shelf / "deep" / "poems")))
        assert await ids(api) == ["m", "alias", "tales", "a/poems"]
        card = (await api.http.get("/v1/models/a/poems")).json()
        assert card["parent"] == "m"
        assert card["root"] == str(shelf / "deep" / "poems")
        assert (await api.http.get("/v1/models/m")).json()["parent"] is None

        for path, body in (
            ("/v1/chat/completions", chat_body(model="tales")),
            ("/v1/completions", complete_body(model="tales")),
            ("/v1/messages", {**chat_body(model="tales"), "max_tokens": 3}),
            ("/v1/responses", {"model": "tales", "input": "Say hello.", "max_output_tokens": 16}),
            ("/v1/embeddings", {"model": "tales", "input": "a boat"}),
        ):
            answer = await api.ok(path, body)
            assert answer["model"] == "tales"
            assert api.client.submitted[-1].adapter == "tales", path
        await api.chat()
        assert api.client.submitted[-1].adapter == ""
        await api.ok("/tokenize", {"model": "tales", "prompt": "Hello"})

        await api.ok("/v1/unload_lora_adapter", {"lora_name": "tales"})
        assert await ids(api) == ["m", "alias", "a/poems"]
        await api.refused("/v1/completions", complete_body(model="tales"), 404)
        await api.refused("/v1/unload_lora_adapter", {"lora_name": "tales"}, 404)


async def test_a_name_is_taken_once(tokenizer: Tokenizer, shelf: Path) -> None:
    async with serving(tokenizer, lora_dir=str(shelf)) as api:
        await api.ok("/v1/load_lora_adapter", load())
        assert "load_inplace" in (await api.refused("/v1/load_lora_adapter", load()))["message"]
        await api.ok("/v1/load_lora_adapter", load(path="deep/poems", load_inplace=True))
        assert api.client.adapters == {"tales": str(shelf / "deep" / "poems")}
        for name in ("m", "alias", "", "a b", "x" * 129, "new\nline"):
            assert (await api.refused("/v1/load_lora_adapter", load(name)))["param"] == "lora_name"
        for body in ({}, {"lora_name": "x"}, load(1), load(path=["tales"])):  # type: ignore[arg-type]
            await api.refused("/v1/load_lora_adapter", body)


@pytest.mark.parametrize(
    "path", ["", "../secret", "/etc", "way-out", "tales/../../secret", "nowhere", "\0", "x" * 5000, "~"]
)
async def test_only_what_lies_in_the_directory_of_adapters_is_loaded(
    tokenizer: Tokenizer, shelf: Path, path: str
) -> None:
    async with serving(tokenizer, lora_dir=str(shelf)) as api:
        assert (await api.refused("/v1/load_lora_adapter", load(path=path)))["param"] == "lora_path"
        assert not api.client.adapters


async def test_without_a_directory_nothing_is_loaded_over_http(api: Api, shelf: Path) -> None:
    api.client.adapters["configured"] = "/somewhere"
    for path, body in (
        ("/v1/load_lora_adapter", load(path=str(shelf / "tales"))),
        ("/v1/unload_lora_adapter", {"lora_name": "configured"}),
    ):
        assert "--lora-dir" in (await api.refused(path, body, 403))["message"]
    assert await ids(api) == ["m", "alias", "configured"]
    assert (await api.complete(model="configured"))["model"] == "configured"


async def test_adapters_are_changed_with_a_key_only(tokenizer: Tokenizer, shelf: Path) -> None:
    async with serving(tokenizer, lora_dir=str(shelf), api_keys=(ApiKey.of("sesame"),)) as api:
        error_of(await api.post("/v1/load_lora_adapter", load()), 401)
        assert not api.client.adapters
        headers = {"authorization": "Bearer sesame"}
        assert (await api.post("/v1/load_lora_adapter", load(), headers=headers)).status_code == 200
        error_of(await api.post("/v1/unload_lora_adapter", {"lora_name": "tales"}), 401)
        assert api.client.adapters
