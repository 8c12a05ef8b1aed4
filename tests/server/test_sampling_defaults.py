"""Requests that name no sampling parameter get those that the model's publisher advises."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from engine.api import SamplingParams
from engine.errors import ConfigError
from engine.model.pull import pull
from engine.text.generation import advised, sampling_defaults
from engine.text.tokenizer import Tokenizer
from tests.server.conftest import chat_body, complete_body, serving

pytestmark = pytest.mark.anyio

ADVISED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
ROUTES = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.fixture
def advising(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer of a model whose generation_config.json has defaults."""
    other = copy.copy(tokenizer)
    other.generation_config = {**ADVISED, "max_new_tokens": 7, "do_sample": True, "eos_token_id": [2]}
    return other


def body_of(path: str) -> dict[str, Any]:
    asked = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    }
    return {"model": "m", **asked[path]}


def seen(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ADVISED}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_request_without_parameters_gets_the_models(advising: Tokenizer, path: str):
    async with serving(advising) as api:
        await api.ok(path, body_of(path))
        assert seen(api.client.submitted[-1].params) == ADVISED
        await api.ok(path, body_of(path) | {"temperature": 0})
        assert seen(api.client.submitted[-1].params) == ADVISED | {"temperature": 0}


async def test_the_requests_own_value_wins_also_when_it_turns_something_off(advising: Tokenizer):
    async with serving(advising) as api:
        own = {"temperature": 1.5, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        await api.ok("/v1/completions", body_of("/v1/completions") | own)
        assert seen(api.client.submitted[-1].params) == own
        await api.ok("/v1/completions", body_of("/v1/completions") | dict.fromkeys(own))
        assert seen(api.client.submitted[-1].params) == ADVISED


async def test_a_chat_without_a_limit_gets_the_models_as_far_as_there_is_room(advising: Tokenizer):
    async with serving(advising, max_tokens_policy="refuse") as api:
        await api.ok("/v1/chat/completions", chat_body(max_tokens=...))
        assert api.client.submitted[-1].params.max_tokens == 7
        await api.ok("/v1/chat/completions", chat_body(max_tokens=3))
        assert api.client.submitted[-1].params.max_tokens == 3
    advising.generation_config["max_new_tokens"] = 10**6
    async with serving(advising, max_tokens_policy="refuse") as api:
        await api.ok("/v1/chat/completions", chat_body(max_tokens=...))
        assert api.client.submitted[-1].params.max_tokens < 512


async def test_a_beam_search_takes_none_of_them(advising: Tokenizer):
    async with serving(advising) as api:
        await api.ok("/v1/completions", complete_body(use_beam_search=True, n=1, beam_width=1, temperature=...))
        assert api.client.submitted[-1].params.repetition_penalty == 1


async def test_they_are_shown_and_can_be_turned_off(advising: Tokenizer):
    async with serving(advising) as api:
        assert (await api.http.get("/v1/models/m")).json()["sampling_defaults"] == {**ADVISED, "max_tokens": 7}
        assert (await api.ok("/v1/responses", body_of("/v1/responses")))["temperature"] == 0.6
    async with serving(advising, generation_config=False) as api:
        assert (await api.http.get("/v1/models/m")).json()["sampling_defaults"] == {}
        await api.ok("/v1/completions", body_of("/v1/completions"))
        assert seen(api.client.submitted[-1].params) == seen(SamplingParams())


def test_the_default_model_advises_nothing(tokenizer: Tokenizer):
    assert advised(sampling_defaults(tokenizer.generation_config)) == {}
    gguf = Tokenizer.load(next(pull("smollm2").glob("*.gguf")))
    assert advised(sampling_defaults(gguf.generation_config)) == {}


@pytest.mark.parametrize(
    "value", [{"temperature": None}, {"top_k": None}, {"top_k": True}, {"temperature": "0.6"}, {"num_beams": 4}, {}]
)
def test_what_is_no_number_changes_no_default(value: dict[str, Any]):
    assert sampling_defaults(value) == SamplingParams(seed=None)


@pytest.mark.parametrize("value", [{"temperature": -1}, {"top_p": 1.5}, {"repetition_penalty": 0}, {"top_k": -5}])
def test_a_default_that_no_request_could_have_is_an_error_with_a_way_out(value: dict[str, Any]):
    with pytest.raises(ConfigError, match=rf"{next(iter(value))}.*--generation-config none"):
        sampling_defaults(value)


def test_a_model_directory_brings_its_own(tmp_path: Path):
    for file in pull("smollm2").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": [2, 0]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert advised(sampling_defaults(tokenizer.generation_config)) == {"temperature": 0.3}
    assert set(tokenizer.eos_token_ids) >= {0, 2}
