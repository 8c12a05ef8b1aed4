"""How model families write calls and reasoning, and who reads it back.

    syntax = OutputSyntax.of(tokenizer, template, tool_parser="", reasoning_parser="")   # once per server
    parser = syntax.parser(calls)                                                        # one per choice

`calls` says which tools may be called (`server.tools`). The family is chosen by its chat template, or by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from engine.errors import ConfigError
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.output import OutputParser, PlainParser
from server.parsers import hermes, mistral
from server.parsers.hermes import HermesParser
from server.parsers.json_calls import JsonCallsParser
from server.parsers.mistral import MistralParser
from server.parsers.pythonic import PythonicParser
from server.parsers.reasoning import ReasoningParser
from server.parsers.sink import Calls, long_id, short_id

T = TypeVar("T")


@dataclass(frozen=True)
class CallSyntax:
    """What a family writes around the name and the arguments of a call; `parser` reads it.

    The whole is `first` call (`between` call)* `last`, a call is `before` name `middle` arguments `after`.
    `trigger` begins calls in running text; without it an answer is either calls or text from its start.
    """

    name: str
    parser: Callable[[Calls], OutputParser]
    before: str
    middle: str
    after: str
    between: str
    first: str = ""
    last: str = ""
    trigger: str = ""
    new_id: Callable[[], str] = long_id


_HERMES = CallSyntax(
    "hermes",
    HermesParser,
    before=hermes.OPEN + '\n{"name": "',
    middle='", "arguments": ',
    after="}\n" + hermes.CLOSE,
    between="\n",
    trigger=hermes.OPEN,
)
_JSON = CallSyntax("json", JsonCallsParser, '{"name": "', '", "arguments": ', "}", between="; ")
_LLAMA3 = CallSyntax("llama3_json", JsonCallsParser, '{"name": "', '", "parameters": ', "}", between="; ")
_MISTRAL = CallSyntax(
    "mistral",
    MistralParser,
    before='{"name": "',
    middle='", "arguments": ',
    after="}",
    between=", ",
    first=mistral.MARK + "[",
    last="]",
    trigger=mistral.MARK,
    new_id=short_id,
)
_MISTRAL_ARGS = CallSyntax(
    "mistral_args",
    MistralParser,
    before=mistral.MARK,
    middle=mistral.ARGUMENTS,
    after="",
    between="",
    trigger=mistral.MARK,
    new_id=short_id,
)
_PYTHONIC = CallSyntax("pythonic", PythonicParser, _JSON.before, _JSON.middle, _JSON.after, _JSON.between)

CALL_SYNTAXES = {s.name: s for s in (_HERMES, _JSON, _LLAMA3, _MISTRAL, _MISTRAL_ARGS, _PYTHONIC)}

REASONING_TAGS = {
    "think": ("<think>", "</think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "none": None,
}


@dataclass(frozen=True)
class OutputSyntax:
    """The syntax of the served model. `special`: the markers that are control tokens of its vocabulary, with ids."""

    calls: CallSyntax
    reasoning: tuple[str, str] | None
    special: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, template: ChatTemplate, *, tool_parser: str = "", reasoning_parser: str = ""
    ) -> OutputSyntax:
        """Raises ConfigError for a name that isn't there."""
        source = "\n".join(tokenizer.chat_templates.values())
        calls = _named(CALL_SYNTAXES, tool_parser, "tool-call") or (
            _calls_of(source) if template.supports_tools else _HERMES  # what the plain rendering tells the model
        )
        tags = _named(REASONING_TAGS, reasoning_parser, "reasoning") if reasoning_parser else _reasoning_of(source)
        markers = [hermes.OPEN, hermes.CLOSE, mistral.MARK, mistral.ARGUMENTS, mistral.CALL_ID, *(tags or ())]
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in markers}
        return cls(calls, tags, {m: i for m, i in ids.items() if i is not None and tokenizer.is_special(i)})

    @property
    def forced(self) -> CallSyntax:
        """How calls are written under a grammar, which can't write Python from a JSON schema."""
        return _JSON if self.calls is _PYTHONIC else self.calls

    def parser(self, calls: Calls | None, *, opened: bool = False) -> OutputParser:
        """The parser of one choice. `calls` = None: no call may be made. `opened`: it begins inside of reasoning."""
        inner: OutputParser = PlainParser()
        if calls is not None:
            inner = (self.forced if calls.forced else self.calls).parser(calls)
        return inner if self.reasoning is None else ReasoningParser(inner, *self.reasoning, opened=opened)

    def opened(self, prompt_end: str) -> bool:
        """The prompt ends inside of a reasoning block, so the answer begins with reasoning."""
        return self.reasoning is not None and prompt_end.rstrip().endswith(self.reasoning[0])

    def needs_special_tokens(self, calls: bool) -> bool:
        """Control tokens must stay visible to the parser: some of the markers it looks for are such."""
        looked_for = (self.calls.trigger,) if calls else ()
        return any(marker in self.special for marker in (*looked_for, *(self.reasoning or ())))


def _named(table: dict[str, T], name: str, what: str) -> T | None:
    if not name:
        return None
    if name not in table:
        raise ConfigError(f"there is no {what} parser {name!r}; choose one of {', '.join(table)}")
    return table[name]


def _calls_of(template: str) -> CallSyntax:
    if mistral.MARK in template:
        return _MISTRAL_ARGS if mistral.ARGUMENTS in template else _MISTRAL
    if hermes.OPEN in template:
        return _HERMES
    if "<|python_tag|>" in template or '"parameters": ' in template:
        return _LLAMA3
    if "func_name1(" in template or "<|python_start|>" in template:
        return _PYTHONIC
    return _JSON


def _reasoning_of(template: str) -> tuple[str, str] | None:
    found = [tags for tags in REASONING_TAGS.values() if tags is not None and tags[1] in template]
    return found[0] if found else None
