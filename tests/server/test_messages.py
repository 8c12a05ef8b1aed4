"""/v1/messages: a chat in Anthropic's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from tests.server.conftest import Api, serving, strict_json
from tests.server.fake_client import FakeClient
from tests.server.scripted import writes
from tests.server.test_tools import CLOCK_CALL, LIGHT, LIGHT_CALL

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
TOOL = {
    "name": "set_light",
    "description": "Switch a light.",
    "input_schema": LIGHT["function"]["parameters"],
}


def body(content: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0, **fields}


async def refused(api: Api, fields: dict[str, Any], status: int = 400, kind: str = "invalid_request_error") -> None:
    response = await api.post(PATH, {**body(), **fields})
    assert response.status_code == status, response.text
    doc = strict_json(response.text)
    assert doc["type"] == "error"
    assert doc["error"]["type"] == kind
    assert doc["error"]["message"]


async def events(api: Api, **fields: Any) -> list[dict[str, Any]]:
    response = await api.post(PATH, body(stream=True, **fields))
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(strict_json(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_a_message_has_the_text_of_chat_and_the_shape_of_the_contract(api: Api):
    doc = await api.ok(PATH, body())
    assert doc["content"] == [{"type": "text", "text": (await api.chat())["choices"][0]["message"]["content"]}]
    assert (doc["type"], doc["role"], doc["model"]) == ("message", "assistant", "m")
    assert (doc["stop_reason"], doc["stop_sequence"]) == ("max_tokens", None)
    assert doc["id"].startswith("msg_")
    usage = doc["usage"]
    assert usage["output_tokens"] == 12
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(api.client.submitted[0].prompt)


async def test_system_text_and_blocks_make_the_prompt_of_a_chat(api: Api):
    blocks = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    system = [{"type": "text", "text": "Be brief."}]
    await api.ok(PATH, body(blocks, system=system))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    await api.ok("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 2})
    assert api.client.submitted[0].prompt == api.client.submitted[1].prompt


async def test_the_stream_adds_up_to_the_whole_message(api: Api):
    got = await events(api)
    assert [e["type"] for e in got[:2]] == ["message_start", "content_block_start"]
    assert [e["type"] for e in got[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(e["delta"]["text"] for e in got if e["type"] == "content_block_delta")
    whole = await api.ok(PATH, body())
    assert text == whole["content"][0]["text"]
    assert got[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert got[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert got[0]["message"]["content"] == []


async def test_calls_are_blocks(tokenizer: Tokenizer):
    script = writes(tokenizer, f"Well. {LIGHT_CALL}{CLOCK_CALL}")
    async with serving(tokenizer, FakeClient(tokenizer, script=script)) as api:
        fields = {"tools": [TOOL, {"name": "read_clock"}], "max_tokens": 200}
        doc = await api.ok(PATH, body(**fields))
        assert [b["type"] for b in doc["content"]] == ["text", "tool_use", "tool_use"]
        assert [b["input"] for b in doc["content"][1:]] == [{"room": "hall", "on": True}, {}]
        assert doc["stop_reason"] == "tool_use"
        got = await events(api, **fields)
        starts = [(e["index"], e["content_block"]["type"]) for e in got if e["type"] == "content_block_start"]
        assert starts == [(0, "text"), (1, "tool_use"), (2, "tool_use")]
        deltas = [e for e in got if e["type"] == "content_block_delta" and e["index"] == 1]
        assert json.loads("".join(e["delta"]["partial_json"] for e in deltas)) == {"room": "hall", "on": True}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "set_light"}])
async def test_calls_can_be_demanded(tokenizer: Tokenizer, choice: dict[str, Any]):
    async with serving(tokenizer, FakeClient(tokenizer, script=writes(tokenizer, LIGHT_CALL))) as api:
        doc = await api.ok(PATH, body(tools=[TOOL], tool_choice=choice, max_tokens=100))
        assert [b["name"] for b in doc["content"]] == ["set_light"]
        assert doc["stop_reason"] == "tool_use"
        assert api.client.submitted[0].params.grammar is not None


async def test_calls_and_results_go_back_into_the_prompt(api: Api):
    call = {"type": "tool_use", "id": "t1", "name": "set_light", "input": {"room": "hall", "on": True}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "no bulb"}],
        "is_error": True,
    }
    messages = [
        {"role": "user", "content": "light!"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    await api.ok(PATH, {**body(), "messages": messages, "tools": [TOOL]})
    text = api.client.tokenizer.decode(api.client.submitted[0].prompt)
    assert text.index('"room": "hall"') < text.index("Error: no bulb") < text.index("And now?")
    assert "None" not in text


async def test_a_stop_sequence_is_named(api: Api):
    text = (await api.ok(PATH, body()))["content"][0]["text"]
    stop = text.split()[2]
    doc = await api.ok(PATH, body(stop_sequences=[stop]))
    assert (doc["stop_reason"], doc["stop_sequence"]) == ("stop_sequence", stop)
    assert doc["content"][0]["text"] == text[: text.index(stop)]


async def test_thinking_is_a_block_of_its_own(tokenizer: Tokenizer):
    script = writes(tokenizer, "<think>hm</think>Yes.")
    async with serving(tokenizer, FakeClient(tokenizer, script=script), reasoning_parser="think") as api:
        doc = await api.ok(PATH, body(max_tokens=50))
        assert [b["type"] for b in doc["content"]] == ["thinking", "text"]
        assert doc["content"][0]["thinking"] == "hm"


async def test_counted_tokens_are_those_of_the_prompt(api: Api):
    fields = {"system": "Be brief.", "tools": [TOOL]}
    counted = await api.ok(
        f"{PATH}/count_tokens", {k: v for k, v in body(**fields).items() if k in ("model", "messages", *fields)}
    )
    await api.ok(PATH, body(**fields))
    assert counted == {"input_tokens": len(api.client.submitted[0].prompt)}


async def test_thinking_that_the_model_has_not_is_reported_as_ignored(api: Api):
    response = await api.post(PATH, body(thinking={"type": "enabled", "budget_tokens": 1024}, sampling="odd"))
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "sampling, thinking"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
        {"system": 5},
        {"temperature": 9},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool"}},
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "nobody"}},
    ],
)
async def test_what_cannot_be_served_is_refused_in_the_form_of_this_route(api: Api, fields: dict[str, Any]):
    await refused(api, fields)
    await refused(api, {**fields, "stream": True})
    assert api.client.submitted == []


async def test_errors_name_the_fields_of_this_route(api: Api):
    response = await api.post(PATH, {**body(), "stop_sequences": [""]})
    assert "stop_sequences has an empty string" in strict_json(response.text)["error"]["message"]


async def test_other_refusals_have_their_own_types(tokenizer: Tokenizer, api: Api):
    await refused(api, {"model": "nobody"}, 404, "not_found_error")
    api.client.state = "loading"
    await refused(api, {}, 503, "overloaded_error")


async def test_an_error_on_the_way_is_the_last_event(api: Api):
    api.client.dies_after = 3
    got = await events(api)
    assert got[-1]["type"] == "error"
    assert got[-1]["error"]["type"] == "overloaded_error"
