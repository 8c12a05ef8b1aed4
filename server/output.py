"""What a chat answer is made of, as it streams: text, reasoning and tool calls.

`server.parsers` splits the visible text of one choice into these; the chat, responses and messages routes put
them on their wires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from engine.api import Grammar


class OutputDelta(msgspec.Struct, frozen=True):
    """What a stretch of text turned out to be; empty fields say nothing.

    A tool call starts with `call_name` (and `call_id`); pieces of its arguments follow under the same index.
    """

    content: str = ""
    reasoning: str = ""
    call_index: int = -1  # >= 0: this delta belongs to that call
    call_id: str = ""
    call_name: str = ""
    call_kind: str = "function"  # or "custom"
    arguments: str = ""


class OutputParser(Protocol):
    """State of one choice. The deltas are the same however the text is cut into pushes, save for their borders."""

    def push(self, text: str) -> list[OutputDelta]:
        """Take text that became visible."""

    def finish(self) -> list[OutputDelta]:
        """The text is over: give out what was held back."""


class PlainParser:
    """Everything is content."""

    def push(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(content=text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []


@dataclass(frozen=True)
class OutputPlan:
    """What tools, tool_choice and the reasoning family make of a chat: the prompt's tools, a constraint, a parser."""

    tools: list[dict[str, Any]] | None = None  # for the chat template, in OpenAI's form
    grammar: Grammar | None = None  # enforces required and named calls
    grammar_field: str = "tools"  # the field of the request that asks for it
    parser: Callable[[], OutputParser] = PlainParser  # a new one for each choice
    special_tokens: bool = False  # the parser must see control tokens: some of the markers it looks for are such
    named: bool = False  # one function was asked for by name: the answer then ends with "stop", as the hosted API's
