"""The parsers of calls and reasoning: what the families write, what broken output becomes, and any cut of any text."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.output import OutputDelta, OutputParser
from server.parsers import CALL_SYNTAXES, OutputSyntax
from server.parsers.sink import Calls

FUNCTIONS = frozenset({"set_light", "read_clock"})
LIGHT = '{"name": "set_light", "arguments": {"room": "hall", "on": true}}'
CLOCK = '{"name": "read_clock", "arguments": {}}'


@dataclass
class Answer:
    """What a client puts together from the deltas."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)


def joined(deltas: list[OutputDelta]) -> Answer:
    answer = Answer()
    ids = set()
    for delta in deltas:
        answer.content += delta.content
        answer.reasoning += delta.reasoning
        if delta.call_name:
            assert delta.call_index == len(answer.calls), "calls are numbered as they come"
            assert delta.call_id
            ids.add(delta.call_id)
            answer.calls.append((delta.call_kind, delta.call_name, ""))
        if delta.arguments:
            assert delta.call_index == len(answer.calls) - 1
            kind, name, arguments = answer.calls[-1]
            answer.calls[-1] = (kind, name, arguments + delta.arguments)
    assert len(ids) == len(answer.calls)
    return answer


def calls(**changes: object) -> Calls:
    return Calls(FUNCTIONS, **{"custom": frozenset({"run_code"}), **changes})  # type: ignore[arg-type]


def parser(family: str, reasoning: bool = False, *, opened: bool = False, **changes: object) -> OutputParser:
    tags = ("<think>", "</think>") if reasoning else None
    return OutputSyntax(CALL_SYNTAXES[family], tags).parser(calls(**changes), opened=opened)


def parsed(family: str, text: str, cuts: tuple[int, ...] = (), **options: object) -> Answer:
    made = parser(family, **options)  # type: ignore[arg-type]
    deltas: list[OutputDelta] = []
    borders = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    for start, end in itertools.pairwise(borders):
        deltas += made.push(text[start:end])
    return joined(deltas + made.finish())


def functions(answer: Answer) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for _, name, arguments in answer.calls]


BOTH = [("set_light", {"room": "hall", "on": True}), ("read_clock", {})]

WRITTEN = {
    "hermes": f"<tool_call>\n{LIGHT}\n</tool_call>\n<tool_call>\n{CLOCK}\n</tool_call>",
    "hermes, two in one tag": f"<tool_call>{LIGHT}\n{CLOCK}</tool_call>",
    "hermes, closing tags forgotten": f"<tool_call>{LIGHT}<tool_call>{CLOCK}",
    "hermes, arguments first": '<tool_call>{"arguments": {"room": "hall", "on": true}, "name": "set_light"}'
    "</tool_call>"
    f"<tool_call>{CLOCK}</tool_call>",
    "hermes, arguments as a string": '<tool_call>{"name": "set_light", '
    '"arguments": "{\\"room\\": \\"hall\\", \\"on\\": true}"}'
    '</tool_call><tool_call>{"name": "read_clock", "arguments": null}</tool_call>',
    "hermes, no arguments": f'<tool_call>{LIGHT}</tool_call><tool_call>{{"name": "read_clock"}}</tool_call>',
    "json": f"{LIGHT}; {CLOCK}",
    "json, a list": f"[{LIGHT}, {CLOCK}]",
    "llama3_json": f"<|python_tag|>{LIGHT}; {CLOCK}".replace("arguments", "parameters"),
    "mistral": f"[TOOL_CALLS][{LIGHT}, {CLOCK}]",
    "mistral, blanks": f"[TOOL_CALLS] [{LIGHT},\n {CLOCK}]\n",
    "mistral_args": '[TOOL_CALLS]set_light[ARGS]{"room": "hall", "on": true}[TOOL_CALLS]read_clock[ARGS]{}',
    "mistral_args, with an id": '[TOOL_CALLS]set_light[CALL_ID]abc[ARGS]{"room": "hall", "on": true}'
    "[TOOL_CALLS]read_clock{}",
    "pythonic": "[set_light(room='hall', on=True), read_clock()]",
    "pythonic, with words of JSON": '[set_light(room="hall", on=true),read_clock()]',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_in_the_syntax_of_a_family_are_found(name: str) -> None:
    answer = parsed(name.split(",")[0], WRITTEN[name])
    assert functions(answer) == BOTH
    assert answer.content == ""


@pytest.mark.parametrize("family", ["hermes", "mistral", "mistral_args"])
def test_text_around_calls_is_content_without_the_blanks_between(family: str) -> None:
    answer = parsed(family, f"One moment.\n\n{WRITTEN[family]}\n")
    assert answer.content == "One moment."
    assert functions(answer) == BOTH


def test_a_call_shows_its_id_and_name_before_its_arguments_are_complete() -> None:
    made = parser("hermes")
    deltas = made.push('<tool_call>\n{"name": "set_light", "arguments": {"ro')
    assert [d.call_name for d in deltas] == ["set_light", ""]
    assert deltas[1].arguments == '{"ro'
    assert made.push('om": 1') == [OutputDelta(call_index=0, arguments='om": 1')]


ODD = {
    "hermes": [
        "just text",
        "a < b and <tool and <tool_cal",
        "<tool_call>",
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": "unknown_function", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        '<tool_call>{"nam',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        "<tool_call><tool_call>{}",
        " leading and trailing ",
    ],
    "json": [
        '{"answer": 42}', "[1, 2, 3]", '{"name": "Ada", "age": 36}', "{", "[", "plain", " ", '"set_light"', "<|py",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]what?", "[TOOL_C", "[TOOL_CALLS][1]", "[TOOL_CALLS]nobody[ARGS]{}",
                "see [1]"],
    "pythonic": ["[1, 2]", "[a]", "[unknown(a=1)]", "[set_light(1)]", "[set_light(room=hall())]", "f(x)", "[",
                  "[{'a': 1}]"],
}  # fmt: skip


@pytest.mark.parametrize(("family", "text"), [(family, text) for family, texts in ODD.items() for text in texts])
def test_what_is_no_call_comes_out_as_content_unchanged(family: str, text: str) -> None:
    answer = parsed(family, text)
    assert answer.content == text
    assert answer.calls == []


def test_a_call_that_was_cut_keeps_what_came_of_its_arguments() -> None:
    answer = parsed("hermes", '<tool_call>{"name": "set_light", "arguments": {"room": "ha')
    assert answer.calls == [("function", "set_light", '{"room": "ha')]
    assert answer.content == ""


def test_a_fragment_of_a_forced_call_is_not_shown_as_text() -> None:
    assert parsed("hermes", '<tool_call>\n{"na', forced=True) == Answer()
    assert parsed("json", '{"na', forced=True) == Answer()


def test_calls_beyond_the_limit_are_dropped() -> None:
    for family in ("hermes", "json", "mistral", "pythonic"):
        answer = parsed(family, WRITTEN[family], most=1)
        assert functions(answer) == BOTH[:1]
        assert answer.content == ""


def test_the_input_of_a_custom_tool_is_unwrapped() -> None:
    call = '<tool_call>{"name": "run_code", "arguments": {"input": "print(\\"hi\\")\\n"}}</tool_call>'
    assert parsed("hermes", call).calls == [("custom", "run_code", 'print("hi")\n')]
    assert parsed("hermes", call[: call.index("hi") - 2]).calls == [("custom", "run_code", "print(")]


def test_reasoning_is_split_from_text_and_calls() -> None:
    text = f"<think>\nHmm, 2 < 3.\n</think>\n\nWell.\n<tool_call>{CLOCK}</tool_call>"
    answer = parsed("hermes", text, reasoning=True)
    assert (answer.reasoning, answer.content) == ("Hmm, 2 < 3.", "Well.")
    assert functions(answer) == [("read_clock", {})]


def test_reasoning_that_the_prompt_opened_needs_no_opening_tag() -> None:
    assert parsed("hermes", "so far</think>done", reasoning=True, opened=True) == Answer("done", "so far")
    assert parsed("hermes", "cut in the mid</thi", reasoning=True, opened=True) == Answer("", "cut in the mid</thi")


def test_text_without_reasoning_is_untouched_by_its_parser() -> None:
    for text in ("  plain <think> text", "<thin", "", " ", "<"):
        assert parsed("hermes", text, reasoning=True) == Answer(text)


def test_calls_are_not_looked_for_inside_of_reasoning() -> None:
    inside = f"<think>maybe <tool_call>{CLOCK}</tool_call>?</think>No."
    assert parsed("hermes", inside, reasoning=True).calls == []


PIECES = [
    "<tool_call>", "</tool_call>", "<tool_call", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>",
    LIGHT, CLOCK, '{"name": "', "set_light", "read_clock", '", "arguments": ', "{", "}", "[", "]", '"', "\\", ",", ";",
    "set_light(room='a')", "(", ")", "=", "'", "\n", " ", "text", "é🦊", "1", "null", ":",
]  # fmt: skip
SOUP = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=14).map("".join)


@settings(max_examples=400)
@given(
    SOUP,
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from(sorted(CALL_SYNTAXES)),
    st.booleans(),
    st.booleans(),
)
def test_any_cut_of_any_text_gives_the_same_answer(
    text: str, cuts: list[int], family: str, reasoning: bool, opened: bool
) -> None:
    whole = parsed(family, text, reasoning=reasoning, opened=opened)
    assert parsed(family, text, tuple(cuts), reasoning=reasoning, opened=opened) == whole
    assert parsed(family, text, tuple(range(len(text))), reasoning=reasoning, opened=opened) == whole
    if not whole.calls and not reasoning:
        assert whole.content == text
    if reasoning and opened and not whole.calls and "</think>" not in text:
        assert whole.reasoning == text.strip()


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.lists(st.integers(0, 400), max_size=6),
    st.sampled_from(["hermes", "json", "llama3_json", "mistral", "mistral_args"]),
)
def test_arguments_of_any_kind_arrive_as_they_were_written(value: object, cuts: list[int], family: str) -> None:
    syntax = CALL_SYNTAXES[family]
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    text = syntax.first + syntax.before + "set_light" + syntax.middle + arguments + syntax.after + syntax.last
    answer = parsed(family, text, tuple(cuts))
    assert answer.calls == [("function", "set_light", arguments)]
    assert answer.content == ""
