"""Llama 4 and others: a Python list of calls, [name(key=value, ...), ...], and nothing else."""

from __future__ import annotations

import ast
import json
from typing import Any

from server.output import OutputDelta
from server.parsers.sink import Calls, Sink

_MAX_CALL = 64 * 1024  # a longer one is text
_WORDS = {"true": True, "false": False, "null": None}  # JSON's words, which models mix in


class PythonicParser:
    """Gives a call out when its closing parenthesis has come."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._sink = Sink(calls)
        self._state = "start"
        self._raw = ""
        self._call = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def push(self, text: str) -> list[OutputDelta]:
        for char in text:
            self._step(char)
        return self._sink.take()

    def finish(self) -> list[OutputDelta]:
        held = self._raw + self._call
        if self._state != "text" and not self._calls.forced and (held.strip(" ,]\n") or not self._sink.started):
            self._sink.content(held)
        return self._sink.take()

    def _step(self, char: str) -> None:
        match self._state:
            case "text":
                self._sink.content(char)
            case "start":
                self._raw += char
                if char == "[":
                    self._state = "between"
                elif not char.isspace():
                    self._give_up()
            case "between":
                if char.isspace() or char == ",":
                    self._raw += char
                elif char == "]":
                    self._raw += char
                    self._state = "done"
                else:
                    self._state = "call"
                    self._in_call(char)
            case "done":
                self._raw += char
                if not char.isspace():
                    self._raw = self._raw if not self._sink.started else char
                    self._give_up()
            case _:
                self._in_call(char)

    def _in_call(self, char: str) -> None:
        self._call += char
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
            return
        if char in "'\"":
            self._quote = char
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            self._depth -= 1
            if self._depth <= 0:
                self._end_call()
                return
        if (self._depth == 0 and not (char.isalnum() or char in "_-.")) or len(self._call) > _MAX_CALL:
            self._give_up()

    def _end_call(self) -> None:
        parsed = _parse_call(self._call)
        if parsed is None or not self._calls.knows(parsed[0]):
            self._give_up()
            return
        name, arguments = parsed
        self._sink.begin_call(name)
        self._sink.arguments(json.dumps(arguments, ensure_ascii=False))
        self._sink.end_call()
        self._raw = self._call = ""
        self._depth, self._state = 0, "between"

    def _give_up(self) -> None:
        self._sink.content(self._raw + self._call)
        self._raw = self._call = ""
        self._state = "text"


def _parse_call(text: str) -> tuple[str, dict[str, Any]] | None:
    """name(key=literal, ...), or None."""
    name, bracket, rest = text.partition("(")
    try:
        call = ast.parse(f"f({rest}", mode="eval").body if bracket else None
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
        json.dumps(values)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    if None in values or not isinstance(call.func, ast.Name):
        return None
    return name.strip(), {str(key): value for key, value in values.items()}


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {ast.literal_eval(k): _literal(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case _:
            return ast.literal_eval(node)
