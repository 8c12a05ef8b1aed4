"""The official Python client of the OpenAI API."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from tests.clients.conftest import Server
from tests.server.test_tools import CLOCK, CLOCK_CALL, LIGHT, LIGHT_CALL

MESSAGES: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def oai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0, timeout=30) as client:
        yield client


class Answer(pydantic.BaseModel):
    ok: bool
    size: int = pydantic.Field(ge=0, le=9)


def test_a_chat_is_the_same_whole_and_streamed(oai: openai.OpenAI):
    asked: Any = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = oai.chat.completions.create(**asked)
    parts = list(oai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage


def test_legacy_completions_have_logprobs(oai: openai.OpenAI):
    got = oai.completions.create(model="m", prompt="Hello", max_tokens=4, temperature=0, logprobs=2, echo=True)
    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.token_logprobs[0] is None  # type: ignore[index]


def test_parse_returns_an_instance(server: Server, oai: openai.OpenAI):
    server.says('{"ok": true, "size": 4}')
    got = oai.chat.completions.parse(model="m", messages=MESSAGES, response_format=Answer, max_tokens=60)
    assert got.choices[0].message.parsed == Answer(ok=True, size=4)
    assert server.client.submitted[-1].params.grammar is not None


def test_tool_calls_arrive_whole_and_through_the_stream_helper(server: Server, oai: openai.OpenAI):
    server.says(f"Well. {LIGHT_CALL}{CLOCK_CALL}")
    asked: Any = {"model": "m", "messages": MESSAGES, "tools": [LIGHT, CLOCK], "max_tokens": 200}
    whole = oai.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    calls: Any = whole.message.tool_calls
    assert json.loads(calls[0].function.arguments) == {"room": "hall", "on": True}
    with oai.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0].message
    assert [(c.function.name, c.function.arguments) for c in final.tool_calls or ()] == [
        (c.function.name, c.function.arguments) for c in calls
    ]


def test_a_response_is_the_same_whole_and_streamed(oai: openai.OpenAI):
    asked: Any = {"model": "m", "input": "Say hello.", "temperature": 0, "max_output_tokens": 8}
    whole = oai.responses.create(**asked)
    events = list(oai.responses.create(stream=True, **asked))
    assert whole.output_text
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]
    assert oai.responses.retrieve(whole.id).output_text == whole.output_text
    more = oai.responses.create(previous_response_id=whole.id, **asked)
    assert more.usage.input_tokens > whole.usage.input_tokens  # type: ignore[union-attr]
    assert oai.responses.input_items.list(whole.id).data[0].type == "message"
    oai.responses.delete(whole.id)


def test_responses_parse_and_call_functions(server: Server, oai: openai.OpenAI):
    server.says('{"ok": false, "size": 0}')
    got = oai.responses.parse(model="m", input="x", text_format=Answer, max_output_tokens=60)
    assert got.output_parsed == Answer(ok=False, size=0)
    server.says(LIGHT_CALL)
    tool: Any = {"type": "function", **LIGHT["function"]}
    with oai.responses.stream(model="m", input="x", tools=[tool], tool_choice="required") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [(o.type, o.name) for o in final.output if o.type == "function_call"] == [("function_call", "set_light")]


def test_a_background_response_is_polled(oai: openai.OpenAI):
    got = oai.responses.create(model="m", input="x", background=True, max_output_tokens=8)
    for _ in range(200):
        if got.status not in ("queued", "in_progress"):
            break
        time.sleep(0.01)
        got = oai.responses.retrieve(got.id)
    assert got.output_text


def test_embeddings_have_their_full_width_in_both_encodings(oai: openai.OpenAI):
    default = oai.embeddings.create(model="m", input="boat").data[0].embedding
    plain = oai.embeddings.create(model="m", input="boat", encoding_format="float").data[0].embedding
    assert default == pytest.approx(plain)


def test_a_batch_from_upload_to_output(oai: openai.OpenAI):
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = oai.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = oai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    for _ in range(500):
        if batch.status in ("completed", "failed"):
            break
        time.sleep(0.01)
        batch = oai.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    answer = json.loads(oai.files.content(batch.output_file_id).text)
    assert answer["response"]["body"]["object"] == "chat.completion"
    assert batch.id in [b.id for b in oai.batches.list()]
    assert oai.files.delete(file.id).deleted


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"stream": True, "temperature": 9}, openai.BadRequestError),
    ],
)
def test_errors_are_of_the_clients_classes(oai: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIError]):
    with pytest.raises(kind) as refused:
        oai.chat.completions.create(**{"model": "m", "messages": MESSAGES, **change})
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"]


def test_the_async_client_is_served_concurrently(server: Server):
    async def work() -> set[str | None]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="EMPTY", timeout=30) as client:
            asked: Any = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
            got = await asyncio.gather(*[client.chat.completions.create(**asked) for _ in range(10)])
        return {g.choices[0].message.content for g in got}

    assert len(asyncio.run(work())) == 1
