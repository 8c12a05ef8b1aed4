"""What parsers have in common: a sink that merges deltas, a matcher of markers, and a walker over one call in JSON.

Every parser is an automaton over characters: what it gives out depends on the characters alone, never on how
they were cut into pushes. Text that turns out to be no call is given out as content, exactly as it came.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from server.output import OutputDelta

_ALNUM = string.ascii_letters + string.digits


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


def short_id() -> str:
    """Nine letters and digits: what the templates of Mistral's models insist on."""
    return "".join(secrets.choice(_ALNUM) for _ in range(9))


class Calls:
    """Which calls may be made: the names, which of them take plain text (custom tools), and how many.

    `forced`: the output is nothing but calls, so a fragment that was cut before it had a name is not shown.
    """

    def __init__(
        self,
        functions: frozenset[str],
        *,
        custom: frozenset[str] = frozenset(),
        most: int = 1_000,
        forced: bool = False,
        new_id: Callable[[], str] = long_id,
    ) -> None:
        self.functions = functions
        self.custom = custom
        self.most = most
        self.forced = forced
        self.new_id = new_id

    def knows(self, name: str) -> bool:
        return name in self.functions or name in self.custom


class Sink:
    """Collects what a push gives; neighbours of one kind are merged."""

    def __init__(self, calls: Calls) -> None:
        self._allowed = calls
        self._out: list[OutputDelta] = []
        self._text: list[str] = []
        self._field = ""
        self._index = -1
        self._kind = "function"
        self._custom: list[str] | None = None  # the JSON arguments of a custom call, until they are whole
        self._dropped = False
        self._blank = ""  # white space that is shown only if text follows
        self.started = 0

    def take(self) -> list[OutputDelta]:
        self._flush()
        out, self._out = self._out, []
        return out

    def content(self, text: str) -> None:
        self._add("content", text)

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def text(self, text: str) -> None:
        """Content without the blanks around calls."""
        for char in text:
            if char.isspace():
                self._blank += char
            else:
                self.content(self._blank + char)
                self._blank = ""

    def end_text(self) -> None:
        """No more text: blanks at the end are shown when there was no call."""
        if not self.started:
            self.content(self._blank)
        self._blank = ""

    def begin_call(self, name: str) -> None:
        """A call to a known name; beyond the limit it is dropped."""
        self._flush()
        self._blank = ""
        self.started += 1
        self._dropped = self.started > self._allowed.most
        if self._dropped:
            return
        self._index += 1
        self._kind = "custom" if name in self._allowed.custom else "function"
        self._custom = [] if self._kind == "custom" else None
        self._out.append(
            OutputDelta(call_index=self._index, call_id=self._allowed.new_id(), call_name=name, call_kind=self._kind)
        )

    def arguments(self, text: str) -> None:
        if self._dropped:
            return
        if self._custom is not None:
            self._custom.append(text)
        else:
            self._add("arguments", text)

    def end_call(self) -> None:
        """The arguments are whole, or will not become so."""
        if self._custom:
            self._add("arguments", _custom_input("".join(self._custom)))
        self._custom = None
        self._flush()
        self._dropped = False

    def _add(self, field: str, text: str) -> None:
        if not text:
            return
        if field != self._field:
            self._flush()
            self._field = field
        self._text.append(text)

    def _flush(self) -> None:
        text = "".join(self._text)
        if text:
            match self._field:
                case "content":
                    self._out.append(OutputDelta(content=text))
                case "reasoning":
                    self._out.append(OutputDelta(reasoning=text))
                case _:
                    self._out.append(OutputDelta(call_index=self._index, call_kind=self._kind, arguments=text))
        self._text.clear()
        self._field = ""


def _custom_input(raw: str) -> str:
    """The text of a custom call, which the model writes as {"input": "..."}."""
    for ending in ("", "}", '"}'):  # the token limit may have cut it
        try:
            value: Any = json.loads(raw + ending)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("input"), str):
            text: str = value["input"]
            return text
    return raw


class Markers:
    """Finds the first of several markers in a text that comes by characters."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self.held = ""

    def push(self, char: str) -> tuple[str, str]:
        """(text that belongs to no marker, the marker that is complete now or "")."""
        self.held += char
        free = ""
        while self.held:
            if self.held in self._markers:
                marker, self.held = self.held, ""
                return free, marker
            if any(marker.startswith(self.held) for marker in self._markers):
                break
            free += self.held[0]
            self.held = self.held[1:]
        return free, ""

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


class Walk(Enum):
    """Where a walk over a call stands after a character."""

    MORE = 0
    DONE = 1  # the call ends with this character
    ENDED = 2  # the call ended before this character, which doesn't belong to it
    FAILED = 3  # this is no call; nothing was given out


class JsonText:
    """Finds the end of one JSON value, by strings and brackets alone: a model's JSON need not be valid."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False

    def push(self, char: str) -> bool:
        """True when the value ends with this character. Numbers and words end before the next delimiter instead."""
        self.text.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return not self._closers
            return False
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            if self._closers:
                self._closers.pop()
            return not self._closers
        return False


_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = (*_NAMES, *_ARGUMENTS, "type", "id")


def _unwrapped(text: str) -> str:
    """Arguments that were written as a string of JSON become that JSON."""
    if text.startswith('"'):
        try:
            inner = json.loads(text)
            if isinstance(json.loads(inner), dict):
                return str(inner)
        except ValueError:
            pass
    return text


class CallObject:
    """Walks over {"name": ..., "arguments": {...}} and gives the call to a sink as soon as it is one.

    "parameters" is taken for "arguments" and "function" for "name", as some families write them. The arguments
    stream as they were written once the name is known; an object of another kind fails at its first strange key.
    """

    def __init__(self, sink: Sink, calls: Calls) -> None:
        self._sink = sink
        self._calls = calls
        self._state = "start"
        self._key = ""
        self._value = JsonText()
        self._name = ""
        self._arguments: str | None = None  # whole, but waiting for the name
        self.begun = False
        self._given = False  # the arguments went out, or are going out
        self._streaming = False

    def push(self, char: str) -> Walk:
        match self._state:
            case "start":
                return self._to("key") if char == "{" else Walk.FAILED
            case "key":
                return self._at_key(char)
            case "in key":
                return self._in_key(char)
            case "colon":
                return Walk.MORE if char.isspace() else self._to("value") if char == ":" else self._broken()
            case "value":
                return Walk.MORE if char.isspace() else self._begin_value(char)
            case "in value":
                return self._in_value(char)
            case "word":
                return self._after(char) if char in ",}" else self._to("after") if char.isspace() else Walk.MORE
            case _:
                return self._after(char)

    def cut(self) -> None:
        """The text ended inside of the object."""
        if self.begun:
            self._sink.end_call()

    def _to(self, state: str) -> Walk:
        self._state = state
        return Walk.MORE

    def _broken(self) -> Walk:
        """Not JSON. A call that was begun ends here; its arguments are what came."""
        if not self.begun:
            return Walk.FAILED
        self._end()
        return Walk.ENDED

    def _at_key(self, char: str) -> Walk:
        if char.isspace():
            return Walk.MORE
        if char == '"':
            self._value = JsonText()
            self._value.push(char)
            return self._to("in key")
        return self._finish() if char == "}" else self._broken()

    def _in_key(self, char: str) -> Walk:
        if not self._value.push(char):
            return Walk.MORE
        self._key = "".join(self._value.text)[1:-1]
        if self._key not in _KEYS:
            return self._broken()
        return self._to("colon")

    def _begin_value(self, char: str) -> Walk:
        self._value = JsonText()
        if char in '"{[':
            if self._key in _NAMES and char != '"':
                return self._broken()
            self._streaming = self.begun and not self._given and char == "{" and self._key in _ARGUMENTS
            self._given |= self._streaming
            self._state = "in value"
            return self._in_value(char)
        if char in ",}]":
            return self._broken()
        return self._to("word")

    def _in_value(self, char: str) -> Walk:
        ended = self._value.push(char)
        if self._streaming:
            self._sink.arguments(char)
        if not ended:
            return Walk.MORE
        if self._key in _NAMES:
            if not self._named("".join(self._value.text)):
                return Walk.FAILED
        elif self._key in _ARGUMENTS and not self._given and self._arguments is None:
            self._arguments = _unwrapped("".join(self._value.text))
            if self.begun:
                self._give()
        return self._to("after")

    def _named(self, literal: str) -> bool:
        try:
            name = json.loads(literal)
        except ValueError:
            return False
        if self.begun:
            return True  # a second name says nothing
        if not self._calls.knows(name):
            return False
        self._name = name
        self._sink.begin_call(name)
        self.begun = True
        if self._arguments is not None:
            self._give()
        return True

    def _give(self) -> None:
        self._sink.arguments(self._arguments or "{}")
        self._given = True

    def _after(self, char: str) -> Walk:
        if char.isspace():
            return Walk.MORE
        if char == ",":
            return self._to("key")
        return self._finish() if char == "}" else self._broken()

    def _finish(self) -> Walk:
        if not self.begun:
            return Walk.FAILED
        self._end()
        return Walk.DONE

    def _end(self) -> None:
        if not self._given:
            self._give()
        self._sink.end_call()
