"""Tools of a chat: checked, shown to the model, and turned into a constraint and a parser of its answer.

    plan = await plan_output(syntax, tools, tool_choice, ...)   # refuses what can't be done; plan.tools are shown
    plan = plan_for_prompt(syntax, plan, end)                    # the prompt may end inside of reasoning

`required` and named calls are written under a grammar in the model's own call syntax, so their arguments always
parse and obey their schemas. With `auto` the same holds for tools that are `strict`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from engine.api import Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import close_objects, json_term, verdict
from server.output import OutputPlan
from server.parsers import CallSyntax, OutputSyntax
from server.parsers.sink import Calls
from server.protocol import FunctionTool, Tool
from server.sampling import Constraint
from server.structured import ANY_TEXT, after_reasoning, answer_rule, checked, literal, until

MAX_TOOLS = 128
MOST_FORCED_CALLS = 16  # of one answer under a grammar: a weak model would go on for ever
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class _Function:
    """One tool, custom ones as functions of one string."""

    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool
    custom: bool
    where: str  # its place in the request, for messages

    def rendered(self) -> dict[str, Any]:
        """For the chat template, in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.parameters}}


@dataclass(frozen=True)
class ToolChoice:
    """What may be called: `names` of the request's tools, and whether it must be."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...]
    named: bool = False


async def plan_output(
    syntax: OutputSyntax,
    tools: list[Tool] | None,
    tool_choice: str | dict[str, Any] | None,
    parallel: bool | None,
    answer: Constraint | None,
) -> OutputPlan:
    """What tools, tool_choice and the constraint `answer` (of response_format and its like) make of a chat."""
    functions = _check_tools(tools)
    choice = check_tool_choice(tool_choice, [f.name for f in functions], [f.name for f in functions if f.custom])
    if answer is not None:
        await checked(answer.grammar, answer.field)
    if choice.mode == "none" or not functions:
        plan = OutputPlan(parser=_Parsers(syntax, None))
        return plan if answer is None else replace(plan, grammar=answer.grammar, grammar_field=answer.field)
    callable_ = [f for f in functions if f.name in choice.names]
    forced = choice.mode == "required"
    most = 1 if choice.named or parallel is False else MOST_FORCED_CALLS if forced else MAX_TOOLS
    grammar = None
    if forced:
        terms = await asyncio.to_thread(_argument_terms, callable_)
        grammar = await checked(_forced_grammar(syntax, terms, most), "tools")
    elif answer is not None or any(f.strict for f in callable_):
        terms = await asyncio.to_thread(_argument_terms, callable_)
        grammar = await checked(_auto_grammar(syntax, terms, most, answer), "tools")
    calls = Calls(
        frozenset(f.name for f in callable_ if not f.custom),
        custom=frozenset(f.name for f in callable_ if f.custom),
        most=most,
        forced=forced,
        new_id=syntax.calls.new_id,
    )
    return OutputPlan(
        tools=[f.rendered() for f in functions],
        grammar=grammar,
        parser=_Parsers(syntax, calls),
        named=choice.named,
        special_tokens=syntax.needs_special_tokens(calls=True),
    )


def plan_for_prompt(syntax: OutputSyntax, plan: OutputPlan, prompt_end: str) -> OutputPlan:
    """`plan` for a prompt that ends with `prompt_end`: if that opens the reasoning, the constraint comes behind it."""
    if syntax.reasoning is None or not syntax.opened(prompt_end):
        return plan
    grammar = plan.grammar
    if grammar is not None:
        grammar = after_reasoning(grammar, syntax.reasoning[1], syntax.special, plan.grammar_field)
    parser = plan.parser
    assert isinstance(parser, _Parsers)
    return replace(plan, grammar=grammar, parser=replace(parser, opened=True))


@dataclass(frozen=True)
class _Parsers:
    """Makes the parser of each choice."""

    syntax: OutputSyntax
    calls: Calls | None
    opened: bool = False

    def __call__(self) -> Any:
        return self.syntax.parser(self.calls, opened=self.opened)


# ---------------------------------------------------------------- checks


def _check_tools(tools: list[Tool] | None) -> list[_Function]:
    if tools is None:
        return []
    if not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest(f"tools must have 1 to {MAX_TOOLS} entries, got {len(tools)}", param="tools")
    functions: list[_Function] = []
    for i, tool in enumerate(tools):
        function = _function(tool, f"tools[{i}]")
        if not _NAME.fullmatch(function.name):
            raise InvalidRequest(
                f"{function.where}.name must have 1 to 64 of the characters A-Z a-z 0-9 _ -, "
                f"got {function.name[:80]!r}",
                param=f"{function.where}.name",
            )
        if any(other.name == function.name for other in functions):
            raise InvalidRequest(f"tools has two functions named {function.name!r}", param=f"{function.where}.name")
        functions.append(function)
    return functions


def _function(tool: Tool, where: str) -> _Function:
    if isinstance(tool, FunctionTool):
        wire = tool.function
        parameters = _parameters(wire.parameters, f"{where}.function.parameters")
        return _Function(wire.name, wire.description, parameters, wire.strict is True, False, f"{where}.function")
    custom = tool.custom
    text = {"type": "string"} | _custom_format(custom.format, f"{where}.custom.format")
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return _Function(custom.name, custom.description, parameters, "pattern" in text, True, f"{where}.custom")


def _parameters(wire: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """The schema of the arguments: an object. No parameters at all means that "{}" is the only argument."""
    if not wire or (wire.keys() <= {"type", "properties"} and not wire.get("properties")):
        wire = _NO_PARAMETERS | (wire or {})
    if wire.get("type", "object") != "object":
        raise InvalidRequest(
            f"{where}.type must be 'object', got {str(wire['type'])[:80]!r}: arguments are named", param=where
        )
    return {"type": "object", **wire}


def _custom_format(wire: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """The constraint on the input of a custom tool, as keywords of a string schema."""
    if wire is None or wire.get("type") == "text":
        return {}
    grammar = wire.get("grammar", wire)
    if wire.get("type") == "grammar" and isinstance(grammar, dict):
        if grammar.get("syntax") == "regex" and isinstance(grammar.get("definition"), str):
            return {"pattern": f"^(?:{grammar['definition']})$"}
        if grammar.get("syntax") == "lark":
            raise InvalidRequest(
                f"{where}: a lark grammar can't be enforced for a tool; use syntax 'regex'", param=where
            )
    raise InvalidRequest(f"{where} must be of type 'text', or 'grammar' with syntax and definition", param=where)


def check_tool_choice(
    choice: str | dict[str, Any] | None, names: Sequence[str], custom: Sequence[str] = ()
) -> ToolChoice:
    """Raises InvalidRequest for a choice that isn't one, or that asks for a tool that isn't there."""
    every = tuple(names)
    match choice:
        case None:
            return ToolChoice("auto" if names else "none", every)
        case "none" | "auto":
            return ToolChoice(choice, every)
        case "required":
            _need_tools(names, "required")
            return ToolChoice("required", every)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice("required", (_known(name, [n for n in names if n not in custom]),), named=True)
        case {"type": "custom", "custom": {"name": str(name)}}:
            return ToolChoice("required", (_known(name, custom),), named=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(listed)}}:
            _need_tools(names, "allowed_tools")
            allowed = tuple(dict.fromkeys(_known(_name_of(tool), names) for tool in listed))
            if not allowed:
                raise InvalidRequest("tool_choice.allowed_tools.tools is empty", param="tool_choice")
            return ToolChoice(mode, allowed)
    raise InvalidRequest(
        "tool_choice must be 'none', 'auto', 'required', a function, a custom tool or allowed_tools, "
        f"got {msgspec.json.encode(choice).decode()[:100]}",
        param="tool_choice",
    )


def _need_tools(names: Sequence[str], what: str) -> None:
    if not names:
        raise InvalidRequest(f"tool_choice {what!r} needs tools", param="tool_choice")


def _name_of(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return name
    raise InvalidRequest("tool_choice.allowed_tools.tools must list tools by type and name", param="tool_choice")


def _known(name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise InvalidRequest(f"tool_choice names {name[:80]!r}, which is not among the tools", param="tool_choice")
    return name


# ---------------------------------------------------------------- grammars


def _argument_terms(functions: Sequence[_Function]) -> dict[str, str]:
    """The lark term of each function's arguments. Raises InvalidRequest for a strict one that can't be enforced."""
    terms = {}
    for function in functions:
        schema = close_objects(function.parameters)
        reason = verdict(Grammar("json_schema", msgspec.json.encode(schema).decode()))
        if reason and function.strict:
            raise InvalidRequest(f"{function.where} is strict, but {reason}", param=f"{function.where}.parameters")
        # The schema of a tool that isn't strict is a description: where it says more than can be enforced, the
        # arguments are still one JSON object.
        terms[function.name] = json_term(_ANY_OBJECT if reason else schema)
    return terms


def _call_rules(calls: CallSyntax, terms: dict[str, str], special: dict[str, int], *, cut: str = "") -> str:
    """`call`, with one rule for each function; `cut` is what has been written of it already."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(terms)))]
    for i, (name, term) in enumerate(terms.items()):
        head = (calls.before + name + calls.middle).removeprefix(cut)
        rules.append(f"call_{i}: {literal(head, special)} {term} {literal(calls.after, special)}")
    return "\n".join(rules) + "\n"


def _forced_grammar(syntax: OutputSyntax, terms: dict[str, str], most: int) -> Grammar:
    """One call or more, and nothing else."""
    calls = syntax.forced
    more = f" ({literal(calls.between, syntax.special)} call){{0,{most - 1}}}" if most > 1 else ""
    start = f"start: {literal(calls.first, syntax.special)} call{more} {literal(calls.last, syntax.special)}\n"
    return Grammar("lark", start + _call_rules(calls, terms, syntax.special))


def _auto_grammar(syntax: OutputSyntax, terms: dict[str, str], most: int, answer: Constraint | None) -> Grammar:
    """Text with calls in it, or without; where there is a constraint `answer`, calls or an answer that obeys it."""
    calls, special = syntax.forced, syntax.special
    more = f" ({literal(calls.between, special)} call){{0,{most - 1}}}" if most > 1 else ""
    whole = f"{literal(calls.first, special)} call{more} {literal(calls.last, special)}"
    if answer is not None:
        rules = _call_rules(calls, terms, special) + answer_rule(answer.grammar, answer.field)
        return Grammar("lark", f"start: {whole} | answer\n{rules}")
    if not calls.trigger:
        plain = "PLAIN: /([^{\\[\\s](.|\\n)*)?/\n"
        return Grammar("lark", f"start: {whole} | PLAIN\n{plain}{_call_rules(calls, terms, special)}")
    opening = (calls.first + calls.before).partition(calls.trigger)[0] + calls.trigger
    rest = calls.first.removeprefix(opening) if calls.first else ""
    text = f"TEXT: {ANY_TEXT}\n"
    if calls.first:  # one trigger, then the whole list
        start = f"start: TEXT | opening {literal(rest, special)} call{more} {literal(calls.last, special)}\n{text}"
        return Grammar("lark", start + until(calls.trigger, special, "opening") + _call_rules(calls, terms, special))
    rules = _call_rules(calls, terms, special, cut=opening)
    start = f"start: (opening call){{0,{most}}} TEXT\n{text}"
    return Grammar("lark", start + until(calls.trigger, special, "opening") + rules)
