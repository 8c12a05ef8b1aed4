"""/v1/responses: the same text as chat in other words, events without gaps, the bounded store, the background."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from engine.errors import NotFound
from engine.text.tokenizer import Tokenizer
from server import responses_store
from server.responses_store import ResponseStore, Stored
from tests.server.conftest import Api, error_of, serving, strict_json
from tests.server.fake_client import FakeClient
from tests.server.scripted import writes
from tests.server.test_tools import CLOCK_CALL, LIGHT, LIGHT_CALL

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
FLAT_LIGHT = {"type": "function", **LIGHT["function"]}
FLAT_CLOCK = {"type": "function", "name": "read_clock"}


def body(given: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": given, "temperature": 0, "max_output_tokens": 12, **fields}


def text_of(doc: dict[str, Any]) -> str:
    return "".join(p["text"] for o in doc["output"] if o["type"] == "message" for p in o["content"])


def parsed(response: httpx.Response) -> list[dict[str, Any]]:
    """Events, each of which carries its name twice and the next number."""
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(strict_json(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


async def events(api: Api, **fields: Any) -> list[dict[str, Any]]:
    return parsed(await api.post(PATH, body(stream=True, **fields)))


async def test_a_response_has_every_field_of_the_contract(api: Api):
    doc = await api.ok(PATH, body(metadata={"a": "b"}, user="u"))
    assert doc["object"] == "response"
    assert doc["id"].startswith("resp_")
    assert (doc["status"], doc["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (doc["error"], doc["metadata"], doc["store"], doc["truncation"]) == (None, {"a": "b"}, True, "disabled")
    assert (doc["temperature"], doc["top_p"], doc["tools"], doc["tool_choice"]) == (0, 1, [], "auto")
    assert doc["text"] == {"format": {"type": "text"}}
    (message,) = doc["output"]
    assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "incomplete")
    assert message["content"][0]["annotations"] == []
    usage = doc["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"] == {"cached_tokens": 4}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


async def test_the_text_is_that_of_chat(api: Api):
    chat = (await api.chat())["choices"][0]["message"]["content"]
    assert text_of(await api.ok(PATH, body())) == chat
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Say hello."}]}]
    assert text_of(await api.ok(PATH, body(parts))) == chat


async def test_instructions_are_the_system_message_and_are_not_inherited(api: Api):
    first = await api.ok(PATH, body("Hi", instructions="Be brief."))
    await api.ok(PATH, body("And?", previous_response_id=first["id"]))
    one, two = (api.client.tokenizer.decode(r.prompt) for r in api.client.submitted)
    assert "Be brief." in one
    assert "Be brief." not in two
    assert "Hi" in two
    assert text_of(first) in two


async def test_events_come_in_the_documented_order(api: Api):
    got = await events(api)
    types = [e["type"].removeprefix("response.") for e in got]
    assert types[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(types[4:-4]) == {"output_text.delta"}
    assert types[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    joined = "".join(e["delta"] for e in got if e["type"] == "response.output_text.delta")
    final = got[-1]["response"]
    assert joined == got[-4]["text"] == text_of(final) == text_of(await api.ok(PATH, body()))
    assert len({e["item_id"] for e in got if "item_id" in e}) == 1
    assert got[0]["response"]["output"] == []
    assert got[-1]["response"]["usage"]["output_tokens"] == 12


async def test_calls_are_items_of_their_own(tokenizer: Tokenizer):
    client = FakeClient(tokenizer, script=writes(tokenizer, f"Well. {LIGHT_CALL}{CLOCK_CALL}"))
    async with serving(tokenizer, client) as api:
        fields = {"tools": [FLAT_LIGHT, FLAT_CLOCK], "max_output_tokens": 200}
        doc = await api.ok(PATH, body(**fields))
        assert [o["type"] for o in doc["output"]] == ["message", "function_call", "function_call"]
        light, clock = doc["output"][1:]
        assert (light["name"], json.loads(light["arguments"])) == ("set_light", {"room": "hall", "on": True})
        assert (clock["arguments"], clock["status"], doc["status"]) == ("{}", "completed", "completed")
        got = await events(api, **fields)
        deltas = [e for e in got if e["type"] == "response.function_call_arguments.delta"]
        assert "".join(e["delta"] for e in deltas if e["output_index"] == 1) == light["arguments"]
        done = [e for e in got if e["type"] == "response.function_call_arguments.done"]
        assert [(e["name"], e["arguments"]) for e in done] == [(c["name"], c["arguments"]) for c in (light, clock)]
        kinds = [(e["item"]["type"], e["output_index"]) for e in got if e["type"] == "response.output_item.done"]
        assert kinds == [("message", 0), ("function_call", 1), ("function_call", 2)]


async def test_calls_and_their_results_go_back_into_the_prompt(tokenizer: Tokenizer):
    client = FakeClient(tokenizer, script=writes(tokenizer, LIGHT_CALL))
    async with serving(tokenizer, client) as api:
        choice = {"type": "function", "name": "set_light"}
        fields = {"tools": [FLAT_LIGHT], "tool_choice": choice, "max_output_tokens": 100}
        first = await api.ok(PATH, body(**fields))
        (call,) = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "it shines"}
        client.script = writes(tokenizer, "Done.")
        await api.ok(PATH, body([result], previous_response_id=first["id"], tools=[FLAT_LIGHT]))
        await api.ok(PATH, body([{"role": "user", "content": "Say hello."}, call, result], tools=[FLAT_LIGHT]))
        await api.ok(
            PATH,
            body([{"role": "user", "content": "Say hello."}, {"type": "item_reference", "id": call["id"]}, result]),
        )
        by_id, by_items = (tokenizer.decode(r.prompt) for r in client.submitted[1:3])
        assert "it shines" in by_id
        assert '"room": "hall"' in by_id
        assert by_id == by_items


async def test_custom_tools_have_their_own_items(tokenizer: Tokenizer):
    call = '<tool_call>\n{"name": "run", "arguments": {"input": "1 + 1"}}\n</tool_call>'
    async with serving(tokenizer, FakeClient(tokenizer, script=writes(tokenizer, call))) as api:
        got = await events(api, tools=[{"type": "custom", "name": "run"}], tool_choice="required", max_output_tokens=99)
        (item,) = got[-1]["response"]["output"]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", "1 + 1")
        assert [e["input"] for e in got if e["type"] == "response.custom_tool_call_input.done"] == ["1 + 1"]


async def test_reasoning_is_an_item_before_the_message(tokenizer: Tokenizer):
    script = writes(tokenizer, "<think>2 and 2 is 4</think>Four.")
    async with serving(tokenizer, FakeClient(tokenizer, script=script), reasoning_parser="think") as api:
        got = await events(api, max_output_tokens=60)
        doc = got[-1]["response"]
        assert [o["type"] for o in doc["output"]] == ["reasoning", "message"]
        assert doc["output"][0]["content"][0]["text"] == "2 and 2 is 4"
        assert text_of(doc) == "Four."
        assert 0 < doc["usage"]["output_tokens_details"]["reasoning_tokens"] < doc["usage"]["output_tokens"]
        assert any(e["type"] == "response.reasoning_text.done" for e in got)


async def test_a_text_format_is_enforced(tokenizer: Tokenizer):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    async with serving(tokenizer, FakeClient(tokenizer, script=writes(tokenizer, '{"ok": false}'))) as api:
        doc = await api.ok(PATH, body(text={"format": format}))
        assert text_of(doc) == '{"ok": false}'
        assert doc["text"]["format"] == format
        await api.refused(PATH, body(text={"format": {**format, "schema": {"type": "banana"}}}))


async def test_logprobs_come_when_they_are_included(api: Api):
    doc = await api.ok(PATH, body(include=["message.output_text.logprobs"], top_logprobs=2))
    part = doc["output"][0]["content"][0]
    assert "".join(e["token"] for e in part["logprobs"]) == part["text"]
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


async def test_stored_responses_can_be_read_listed_and_deleted(api: Api):
    doc = await api.ok(PATH, body([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]))
    path = f"{PATH}/{doc['id']}"
    assert (await api.http.get(path)).json() == doc
    listed = (await api.http.get(f"{path}/input_items?order=asc&limit=1")).json()
    assert listed["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert listed["has_more"] is True
    rest = (await api.http.get(f"{path}/input_items?order=asc&after={listed['last_id']}")).json()
    assert [i["content"][0]["text"] for i in rest["data"]] == ["b"]
    assert (await api.http.delete(path)).json()["deleted"] is True
    for gone in (await api.http.get(path), await api.http.delete(path), await api.http.get(f"{path}/input_items")):
        error_of(gone, 404)


async def test_a_response_that_is_not_to_be_stored_is_not(api: Api):
    doc = await api.ok(PATH, body(store=False))
    error_of(await api.http.get(f"{PATH}/{doc['id']}"), 404)
    error = await api.refused(PATH, body(previous_response_id=doc["id"]), 404)
    assert error["param"] == "previous_response_id"


async def finished(api: Api, id: str) -> dict[str, Any]:
    for _ in range(500):
        doc: dict[str, Any] = (await api.http.get(f"{PATH}/{id}")).json()
        if doc["status"] not in ("queued", "in_progress"):
            return doc
        await asyncio.sleep(0.01)
    raise AssertionError("it never ended")


async def test_a_background_response_goes_on_without_its_client(tokenizer: Tokenizer):
    async with serving(tokenizer, FakeClient(tokenizer, delay_s=0.01)) as api:
        doc = await api.ok(PATH, body(background=True))
        assert doc["status"] in ("queued", "in_progress")
        followed = parsed(await api.http.get(f"{PATH}/{doc['id']}?stream=true"))
        done = await finished(api, doc["id"])
        assert text_of(done) == text_of(followed[-1]["response"]) == text_of(await api.ok(PATH, body()))
        later = (await api.http.get(f"{PATH}/{doc['id']}?stream=true&starting_after={len(followed) - 2}")).text
        assert later.count("event: ") == 1
        assert parsed(await api.post(PATH, body(background=True, stream=True)))[-1]["response"]["background"] is True


async def test_a_background_response_can_be_cancelled(tokenizer: Tokenizer):
    async with serving(tokenizer, FakeClient(tokenizer, delay_s=0.02)) as api:
        doc = await api.ok(PATH, body(background=True, max_output_tokens=400))
        response = await api.post(f"{PATH}/{doc['id']}/cancel", {})
        assert response.json()["status"] == "cancelled"
        assert api.client.live == {}
        assert parsed(await api.http.get(f"{PATH}/{doc['id']}?stream=true"))[-1]["type"] == "response.failed"


async def test_a_failure_on_the_way_is_an_event_or_a_status(tokenizer: Tokenizer):
    client = FakeClient(tokenizer)
    async with serving(tokenizer, client) as api:
        client.dies_after = 3
        got = await events(api)
        assert got[-1]["type"] == "response.failed"
        assert got[-1]["response"]["error"]["code"] == "engine_unavailable"
        await api.refused(PATH, body(), 503)
        doc = await finished(api, (await api.ok(PATH, body(background=True)))["id"])
        assert doc["status"] == "failed"
        assert doc["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": None},
        {"input": 5},
        {"input": []},
        {"input": ""},
        {"input": [{"role": "wizard", "content": "x"}]},
        {"input": [{"type": "image_generation_call"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": [{"type": "item_reference", "id": "msg_none"}]},
        {"temperature": 5},
        {"max_output_tokens": 0},
        {"top_logprobs": 21},
        {"tools": [{"type": "web_search"}]},
        {"tools": [FLAT_LIGHT], "tool_choice": {"type": "function", "name": "nobody"}},
        {"tool_choice": "required"},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"background": True, "store": False},
        {"stream_options": {}},
        {"metadata": {str(i): "" for i in range(17)}},
        {"truncation": "some"},
        {"input": "word " * 900},
        {"include": ["nonsense"]},
        {"text": {"format": {"type": "yaml"}}},
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "banana"}}}},
    ],
)
async def test_what_cannot_be_served_is_refused(api: Api, fields: dict[str, Any]):
    error = await api.refused(PATH, {**body(), **fields})
    assert error["param"].partition("[")[0].partition(".")[0] in fields, error
    assert api.client.submitted == []


async def test_what_has_no_effect_is_listed_by_its_place(api: Api):
    fields = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "max_tool_calls": 3,
    }
    response = await api.post(PATH, {**body(), **fields})
    assert set(response.headers["x-octavo-ignored-fields"].split(", ")) == {
        "include.reasoning.encrypted_content",
        "max_tool_calls",
        "reasoning.effort",  # the template has no such switch
        "reasoning.summary",
        "text.verbosity",
    }


async def test_a_background_response_that_is_refused_has_a_status(api: Api):
    await api.refused(PATH, body(background=True, model="nobody"), 404)


def test_the_store_keeps_to_its_bounds_and_to_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_store, "MAX_RESPONSES", 3)
    store = ResponseStore()
    for i in range(5):
        store.put(Stored({"id": f"resp_{i}", "output": []}, [], [], "alice"))
    for gone in ("resp_0", "resp_1"):
        with pytest.raises(NotFound):
            store.get(gone, "alice")
    assert store.get("resp_4", "alice").body["id"] == "resp_4"
    with pytest.raises(NotFound):
        store.get("resp_4", "bob")
    monkeypatch.setattr(responses_store, "MAX_BYTES", 1000)
    store.put(Stored({"id": "resp_big", "output": ["x" * 980]}, [], [], "alice"))
    with pytest.raises(NotFound):
        store.get("resp_4", "alice")
