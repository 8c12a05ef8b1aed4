"""response_format, structured_outputs, guided_*: what reaches the engine, what is refused, reasoning in front."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import AddRequest, Grammar, SamplingParams
from engine.text.tokenizer import Tokenizer
from server.parsers import CALL_SYNTAXES, OutputSyntax
from server.protocol import FunctionDefinition, FunctionTool
from server.structured import after_reasoning
from server.tools import plan_for_prompt, plan_output
from tests.server.conftest import Api, chat_body, complete_body, serving
from tests.server.fake_client import FakeClient
from tests.server.scripted import matcher, obeys
from tests.server.test_tools import LIGHT, LIGHT_CALL

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def fmt(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


FORMS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "json_schema": ({"response_format": fmt(SCHEMA, strict=True)}, {'{"ok": true}', '{"ok": false}'}),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, {'{"ok": true}', '{"ok": false}'}),
    "guided_json, as text": ({"guided_json": json.dumps(SCHEMA)}, {'{"ok": true}', '{"ok": false}'}),
    "choice": ({"structured_outputs": {"choice": ["up & down", "日本"]}}, {"up & down", "日本"}),
    "guided_choice": ({"guided_choice": ["a", "b"]}, {"a", "b"}),
    "regex": ({"structured_outputs": {"regex": "(ab|c)d"}}, {"abd", "cd"}),
    "guided_regex": ({"guided_regex": "[xy]"}, {"x", "y"}),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" | "bc"'}}, {"a", "bc"}),
    "grammar in GBNF": ({"guided_grammar": 'root ::= "a" | "bc"'}, {"a", "bc"}),
}


@pytest.mark.parametrize("name", FORMS)
async def test_every_form_constrains_chat_and_completions(tokenizer: Tokenizer, name: str):
    fields, possible = FORMS[name]
    async with serving(tokenizer, FakeClient(tokenizer, script=obeys(tokenizer))) as api:
        chat = await api.chat(n=4, temperature=1, max_tokens=40, **fields)
        assert {c["message"]["content"] for c in chat["choices"]} <= possible
        assert {c["finish_reason"] for c in chat["choices"]} == {"stop"}
        text = await api.complete(n=4, temperature=1, max_tokens=40, **fields)
        assert {c["text"] for c in text["choices"]} <= possible


async def test_json_mode_asks_for_an_object(api: Api):
    await api.chat(response_format={"type": "json_object"})
    await api.chat(response_format={"type": "text"})
    with_format, plain = api.client.submitted
    assert with_format.params.grammar is not None
    assert with_format.params.grammar.kind == "json_object"
    assert plain.params.grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "yaml"}},
        {"response_format": {}},
        {"response_format": "json"},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        {"response_format": fmt("not a schema")},
        {"response_format": fmt({"type": "banana"})},
        {"response_format": fmt({"$ref": "#/$defs/missing"})},
        {"response_format": fmt({"type": "string", "pattern": "(unclosed["})},
        {"response_format": fmt({"type": "integer", "minimum": 9, "maximum": 3})},
        {"response_format": fmt({"enum": []})},
        {"response_format": fmt({"type": "array", "uniqueItems": True})},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "nonsense"}},
        {"structured_outputs": {"choice": ["a"], "structural_tag": "{}"}},
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}},
        {"guided_grammar": "nonsense"},
        {"guided_regex": "("},
        {"guided_json": "{"},
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_generation(api: Api, fields: dict[str, Any]):
    for path, body in ((CHAT, chat_body(**fields)), ("/v1/completions", complete_body(**fields))):
        error = await api.refused(path, body)
        assert error["param"].partition(".")[0] in fields, error
        assert await api.refused(path, {**body, "stream": True}) == error
    assert api.client.submitted == []


THINKING = OutputSyntax(CALL_SYNTAXES["hermes"], ("<think>", "</think>"))
CONSTRAINTS = {
    "json_object": (Grammar("json_object", "{}"), '{"a": 1}', "[1]"),
    "json_schema": (Grammar("json_schema", json.dumps(SCHEMA)), '{"ok": true}', '{"ok": 1}'),
    "choice": (Grammar("choice", '["yes", "no"]'), "no", "perhaps"),
    "lark": (Grammar("lark", 'start: one+\none: "a" | /[0-9]/'), "a7a", "b"),
}


def accepts(tokenizer: Tokenizer, grammar: Grammar, text: str) -> bool:
    request = AddRequest(id="x", prompt=(1,), params=SamplingParams(grammar=grammar), arrival=0.0)
    made = matcher(tokenizer, request)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(made.try_consume_tokens(ids) == len(ids) and made.is_accepting())


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_constraint_waits_until_the_reasoning_is_closed(tokenizer: Tokenizer, kind: str):
    grammar, good, bad = CONSTRAINTS[kind]
    behind = after_reasoning(grammar, "</think>", {})
    for thought in ("", "Hmm, {1} < 2.\n\n"):
        assert accepts(tokenizer, behind, f"{thought}</think>\n\n{good}")
        assert accepts(tokenizer, behind, f"{thought}</think>{good}")
        assert not accepts(tokenizer, behind, f"{thought}</think>\n\n{bad}")
    assert not accepts(tokenizer, behind, good)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_wait_for_the_end_of_reasoning_too(tokenizer: Tokenizer, choice: str, strict: bool):
    function = LIGHT["function"]
    tools: list[Any] = [FunctionTool(FunctionDefinition(function["name"], None, function["parameters"], strict))]
    plan = await plan_output(THINKING, tools, choice, None, None)
    opened = plan_for_prompt(THINKING, plan, "<|im_start|>assistant\n<think>\n")
    assert plan_for_prompt(THINKING, plan, "<|im_start|>assistant\n") is plan
    text = f"First the light.</think>\n\n{LIGHT_CALL}"
    if opened.grammar is None:
        assert (choice, strict) == ("auto", False)
    else:
        assert accepts(tokenizer, opened.grammar, text)
        assert not accepts(tokenizer, opened.grammar, text.replace("hall", "cellar"))
    parser = opened.parser()
    deltas = parser.push(text) + parser.finish()
    assert "".join(d.reasoning for d in deltas) == "First the light."
    assert [d.call_name for d in deltas if d.call_name] == ["set_light"]
