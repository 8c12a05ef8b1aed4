"""Function calling over HTTP: what reaches the prompt, what is enforced, what comes back, what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest

from engine.text.tokenizer import Tokenizer
from tests.server.conftest import Api, chat_body, serving
from tests.server.fake_client import FakeClient
from tests.server.scripted import matcher, obeys, writes

LIGHT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["hall", "attic"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "read_clock"}}
NAMED = {"type": "function", "function": {"name": "set_light"}}
LIGHT_CALL = '<tool_call>\n{"name": "set_light", "arguments": {"room": "hall", "on": true}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "read_clock", "arguments": {}}\n</tool_call>'


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {**tool["function"], "strict": True}}


def merged(chunks: list[Any]) -> tuple[str, list[dict[str, Any]], list[str]]:
    """Content, calls and finish reasons of a streamed choice, put together as clients do."""
    content, calls, finishes = "", [], []
    for chunk in chunks:
        for choice in chunk["choices"]:
            content += choice["delta"].get("content") or ""
            if choice["finish_reason"]:
                finishes.append(choice["finish_reason"])
            for delta in choice["delta"].get("tool_calls") or ():
                if delta["index"] == len(calls):
                    assert delta["id"]
                    assert delta["type"] == "function"
                    calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
                else:
                    assert not delta.get("id")
                calls[delta["index"]]["arguments"] += delta["function"].get("arguments") or ""
    return content, calls, finishes


def ask(tokenizer: Tokenizer, *texts: str, **fields: Any) -> Any:
    """One chat whose model writes `texts`."""

    async def work() -> Any:
        client = FakeClient(tokenizer, script=writes(tokenizer, *texts))
        async with serving(tokenizer, client) as api:
            return await api.chat("Switch on the light in the hall.", **{"max_tokens": 200, **fields})

    return asyncio.run(work())


def test_required_calls_come_as_tool_calls_without_content(tokenizer: Tokenizer) -> None:
    body = ask(tokenizer, f"{LIGHT_CALL}\n{CLOCK_CALL}", tools=[LIGHT, CLOCK], tool_choice="required")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [(c["type"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        ("function", "set_light", {"room": "hall", "on": True}),
        ("function", "read_clock", {}),
    ]
    assert len({c["id"] for c in calls}) == 2


@pytest.mark.parametrize("family", ["hermes", "json", "llama3_json", "mistral", "mistral_args", "pythonic"])
def test_a_model_that_only_obeys_its_grammar_makes_valid_calls_in_every_family(
    tokenizer: Tokenizer, family: str
) -> None:
    async def work() -> None:
        for seed in range(2):
            client = FakeClient(tokenizer, script=obeys(tokenizer, seed))
            async with serving(tokenizer, client, tool_parser=family) as api:
                fields = {"tools": [LIGHT, CLOCK], "tool_choice": "required", "max_tokens": 400}
                (choice,) = (await api.chat(**fields))["choices"]
                assert choice["message"]["content"] is None
                assert choice["finish_reason"] == "tool_calls"
                for call in choice["message"]["tool_calls"]:
                    arguments = json.loads(call["function"]["arguments"])
                    if call["function"]["name"] == "set_light":
                        jsonschema.validate(arguments, LIGHT["function"]["parameters"])
                    else:
                        assert arguments == {}
                _, calls, finishes = merged(await api.events("/v1/chat/completions", chat_body(**fields)))
                assert finishes == ["tool_calls"]
                assert [(c["name"], c["arguments"]) for c in calls] == [
                    (c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]
                ]

    asyncio.run(work())


def test_a_named_function_is_the_only_call_and_ends_with_stop(tokenizer: Tokenizer) -> None:
    body = ask(tokenizer, LIGHT_CALL, tools=[CLOCK, LIGHT], tool_choice=NAMED)
    (choice,) = body["choices"]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["set_light"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "allowed", "banned"),
    [
        ({"tool_choice": NAMED}, [LIGHT_CALL], [CLOCK_CALL, f"{LIGHT_CALL}\n{LIGHT_CALL}", "text"]),
        ({"tool_choice": "required"}, [LIGHT_CALL, f"{CLOCK_CALL}\n{LIGHT_CALL}"], ["text", "", f"a {LIGHT_CALL}"]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [LIGHT_CALL, CLOCK_CALL],
            [f"{CLOCK_CALL}\n{LIGHT_CALL}"],
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}},
            [LIGHT_CALL],
            [CLOCK_CALL],
        ),
    ],
)
def test_the_grammar_allows_what_the_choice_allows(
    tokenizer: Tokenizer, fields: dict[str, Any], allowed: list[str], banned: list[str]
) -> None:
    async def work() -> None:
        async with serving(tokenizer) as api:
            await api.chat(tools=[LIGHT, CLOCK], **fields)
            (request,) = api.client.submitted
        for text in allowed + banned:
            made = matcher(tokenizer, request)
            ids = tokenizer.encode(text, add_special_tokens=False)
            complete = made.try_consume_tokens(ids) == len(ids) and made.is_accepting()
            assert complete == (text in allowed), text

    asyncio.run(work())


def test_auto_leaves_the_model_free_and_finds_its_calls(tokenizer: Tokenizer) -> None:
    body = ask(tokenizer, f"Of course.\n{LIGHT_CALL}", tools=[LIGHT])
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "Of course."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "set_light"
    assert choice["finish_reason"] == "tool_calls"
    body = ask(tokenizer, "No, thanks.", tools=[LIGHT], tool_choice="auto")
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "No, thanks."
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("family", ["hermes", "json", "mistral", "mistral_args", "pythonic"])
def test_strict_tools_are_enforced_even_when_the_model_is_free_to_call(tokenizer: Tokenizer, family: str) -> None:
    async def work() -> None:
        async with serving(tokenizer, tool_parser=family) as api:
            await api.chat(tools=[strict(LIGHT)])
            (request,) = api.client.submitted
            syntax = api.http._transport.app.state.service.syntax.forced  # type: ignore[attr-defined]
        head = syntax.first + syntax.before + "set_light" + syntax.middle
        good = head + '{"room": "hall", "on": true}' + syntax.after + syntax.last
        texts = {"just text": True, good: True, head + '{"room": "cellar"': False}
        if syntax.trigger:
            texts["first text, then " + good] = True
        for text, fine in texts.items():
            made = matcher(tokenizer, request)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert (made.try_consume_tokens(ids) == len(ids) and made.is_accepting()) == fine, text

    asyncio.run(work())


def test_a_call_that_the_limit_cuts_ends_with_length(tokenizer: Tokenizer) -> None:
    body = ask(tokenizer, LIGHT_CALL, tools=[LIGHT], tool_choice="required", max_tokens=14)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    body = ask(tokenizer, LIGHT_CALL, tools=[LIGHT], tool_choice="required", max_tokens=3)
    assert body["choices"][0]["message"]["content"] in (None, "")
    assert "tool_calls" not in body["choices"][0]["message"]


def test_streamed_calls_add_up_to_the_whole_ones(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        text = f"One moment. {LIGHT_CALL} {CLOCK_CALL}"
        async with serving(tokenizer, FakeClient(tokenizer, script=writes(tokenizer, text))) as api:
            fields = {"tools": [LIGHT, CLOCK], "max_tokens": 200}
            (whole,) = (await api.chat(**fields))["choices"]
            content, calls, finishes = merged(await api.events("/v1/chat/completions", chat_body(**fields)))
        assert content == whole["message"]["content"] == "One moment."
        assert finishes == [whole["finish_reason"]] == ["tool_calls"]
        assert [(c["name"], c["arguments"]) for c in calls] == [
            (c["function"]["name"], c["function"]["arguments"]) for c in whole["message"]["tool_calls"]
        ]

    asyncio.run(work())


def test_each_choice_makes_its_own_calls(tokenizer: Tokenizer) -> None:
    body = ask(tokenizer, LIGHT_CALL, CLOCK_CALL, tools=[LIGHT, CLOCK], tool_choice="required", n=2, temperature=1)
    names = [choice["message"]["tool_calls"][0]["function"]["name"] for choice in body["choices"]]
    assert names == ["set_light", "read_clock"]


def test_tools_reach_the_prompt_unless_no_call_may_be_made(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        async with serving(tokenizer) as api:
            await api.chat()
            await api.chat(tools=[LIGHT], tool_choice="none")
            await api.chat(tools=[LIGHT])
            plain, none, auto = (api.client.submitted[i].prompt for i in range(3))
        assert plain == none
        text = tokenizer.decode(auto)
        assert "set_light" in text
        assert "Switch a light." in text
        assert '"attic"' in text

    asyncio.run(work())


def test_a_call_and_its_result_can_be_sent_back(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        client = FakeClient(tokenizer, script=writes(tokenizer, LIGHT_CALL))
        async with serving(tokenizer, client) as api:
            message = (await api.chat(tools=[LIGHT], tool_choice="required", max_tokens=100))["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "it is on"}
            messages = [{"role": "user", "content": "light!"}, message, result]
            await api.ok(
                "/v1/chat/completions", {"model": "m", "messages": messages, "tools": [LIGHT], "max_tokens": 2}
            )
        text = tokenizer.decode(client.submitted[-1].prompt)
        assert '"room": "hall"' in text
        assert "it is on" in text
        assert "None" not in text

    asyncio.run(work())


def test_custom_tools_take_text(tokenizer: Tokenizer) -> None:
    tool = {
        "type": "custom",
        "custom": {"name": "run", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9+ ]+"}},
    }
    call = '<tool_call>\n{"name": "run", "arguments": {"input": "1 + 2"}}\n</tool_call>'
    choice = {"type": "custom", "custom": {"name": "run"}}
    body = ask(tokenizer, call, tools=[tool, LIGHT], tool_choice=choice)
    (made,) = body["choices"][0]["message"]["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "run", "input": "1 + 2"})


def test_a_format_and_free_tools_give_calls_or_an_answer_in_that_format(tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    fields = {
        "tools": [LIGHT],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    assert ask(tokenizer, '{"ok": true}', **fields)["choices"][0]["message"]["content"] == '{"ok": true}'
    assert ask(tokenizer, LIGHT_CALL, **fields)["choices"][0]["finish_reason"] == "tool_calls"


def test_a_loose_schema_that_cannot_be_enforced_still_gives_an_object(tokenizer: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "tag", "parameters": parameters}}
    call = '<tool_call>\n{"name": "tag", "arguments": {"tags": ["a"]}}\n</tool_call>'
    assert ask(tokenizer, call, tools=[tool], tool_choice="required")["choices"][0]["message"]["tool_calls"]


def unusable(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tools"),
        ({"tools": [LIGHT], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [LIGHT], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [LIGHT], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [LIGHT], "tool_choice": {"type": "custom", "custom": {"name": "set_light"}}}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        (
            {
                "tools": [LIGHT],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "x"}]}},
            },
            "tool_choice",
        ),
        ({"tools": [LIGHT, LIGHT]}, "tools[1].function.name"),
        ({"tools": [{**CLOCK, "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
        (unusable(name="bad name"), "tools[0].function.name"),
        (unusable(name="x" * 65), "tools[0].function.name"),
        (unusable(name="f", parameters={"type": "array"}), "tools[0].function.parameters"),
        (
            unusable(name="f", strict=True, parameters={"properties": {"a": {"type": "banana"}}}),
            "tools[0].function.parameters",
        ),
        ({"tools": "set_light"}, "tools"),
        ({"tools": [{"type": "function"}]}, None),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "syntax": "lark"}}}]},
            None,
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_generation(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str | None
) -> None:
    async def work() -> None:
        async with serving(tokenizer) as api:
            for stream in (False, True):
                error = await api.refused("/v1/chat/completions", chat_body(stream=stream, **fields))
                assert param is None or error["param"] == param
            assert api.client.submitted == []

    asyncio.run(work())


def test_null_means_that_there_are_no_tools(tokenizer: Tokenizer) -> None:
    async def work(api: Api) -> None:
        await api.chat(tools=None, tool_choice=None, parallel_tool_calls=None)

    async def main() -> None:
        async with serving(tokenizer) as api:
            await work(api)

    asyncio.run(main())


def test_call_ids_fit_the_templates_that_are_strict_about_them(tokenizer: Tokenizer) -> None:
    async def work() -> None:
        text = '[TOOL_CALLS][{"name": "read_clock", "arguments": {}}]'
        client = FakeClient(tokenizer, script=writes(tokenizer, text))
        async with serving(tokenizer, client, tool_parser="mistral") as api:
            body = await api.chat(tools=[CLOCK], tool_choice="required", max_tokens=60)
        assert re.fullmatch("[A-Za-z0-9]{9}", body["choices"][0]["message"]["tool_calls"][0]["id"])

    asyncio.run(work())
