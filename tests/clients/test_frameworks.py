"""Libraries built on the clients: what they send differs in small ways from what the clients send by themselves."""

from __future__ import annotations

import json
from typing import Any

import instructor
import litellm
import openai
import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.conftest import Server
from tests.server.test_tools import LIGHT, LIGHT_CALL


class Person(pydantic.BaseModel):
    """Somebody."""

    name: str
    age: int


ADA = Person(name="Ada", age=36)
ADA_CALL = '<tool_call>\n{"name": "Person", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>'
ADA_JSON = '{"name": "Ada", "age": 36}'


def chain(server: Server, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url + "/v1", api_key="EMPTY", max_retries=0, **more)  # type: ignore[arg-type]


def test_langchain_chats_and_streams(server: Server):
    server.says("Hello there.")
    model = chain(server, max_tokens=50)
    whole = model.invoke("Hi")
    assert whole.content == "Hello there."
    assert whole.usage_metadata is not None
    assert "".join(str(part.content) for part in model.stream("Hi")) == "Hello there."


def test_langchain_calls_tools_and_sends_their_results(server: Server):
    server.says(LIGHT_CALL)
    model = chain(server, max_tokens=100).bind_tools([LIGHT], tool_choice="any")
    first = model.invoke("Light, please.")
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("set_light", {"room": "hall", "on": True})
    server.says("It is on.")
    history = [HumanMessage("Light, please."), first, ToolMessage("done", tool_call_id=call["id"])]
    assert chain(server, max_tokens=50).invoke(history).content == "It is on."


def test_langchain_gives_structured_output_in_each_of_its_ways(server: Server):
    for method, text in (("json_schema", ADA_JSON), ("function_calling", ADA_CALL), ("json_mode", ADA_JSON)):
        server.says(text)
        model = chain(server, max_tokens=80).with_structured_output(Person, method=method)
        assert model.invoke("Who? Answer in JSON.") == ADA


def test_langchain_embeds(server: Server):
    model = OpenAIEmbeddings(model="m", base_url=server.url + "/v1", api_key="EMPTY", check_embedding_ctx_length=False)  # type: ignore[arg-type]
    one, two = model.embed_documents(["boat", "ship"])
    assert len(one) == len(two) == len(model.embed_query("boat")) == 16


def test_instructor_returns_instances_by_tools_and_by_json(server: Server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="EMPTY", max_retries=0) as client:
        for mode, text in (
            (instructor.Mode.TOOLS, ADA_CALL),
            (instructor.Mode.JSON, ADA_JSON),
            (instructor.Mode.JSON_SCHEMA, ADA_JSON),
        ):
            server.says(text)
            patched = instructor.from_openai(client, mode=mode)
            messages: Any = [{"role": "user", "content": "Who?"}]
            got = patched.chat.completions.create(
                model="m", messages=messages, response_model=Person, max_tokens=80, max_retries=0
            )
            assert got.model_dump() == ADA.model_dump()


def test_litellm_completes_streams_and_calls_tools(server: Server):
    asked: Any = {
        "model": "openai/m",
        "api_base": server.url + "/v1",
        "api_key": "EMPTY",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 100,
    }
    server.says("Hello there.")
    assert litellm.completion(**asked).choices[0].message.content == "Hello there."
    parts = litellm.completion(stream=True, **asked)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello there."
    server.says(LIGHT_CALL)
    (call,) = litellm.completion(tools=[LIGHT], tool_choice="required", **asked).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"room": "hall", "on": True}


def test_litellm_embeds(server: Server):
    got = litellm.embedding(model="openai/m", api_base=server.url + "/v1", api_key="EMPTY", input=["boat"])
    assert len(got.data[0]["embedding"]) == 16
