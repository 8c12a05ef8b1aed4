"""Mistral: text, then [TOOL_CALLS] and a JSON list of calls; newer models write [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.object_calls import ObjectCallsParser
from server.parsers.sink import Calls, JsonText, Markers

MARK = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class MistralParser(ObjectCallsParser):
    """Text up to the marker, calls behind it."""

    BEHIND = "between"

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._markers = Markers([MARK])
        self._name = ""
        self._arguments = JsonText()

    def finish(self) -> list[OutputDelta]:
        begun = self._state == "arguments" or (self._walk is not None and self._walk.begun)
        if begun:
            self._sink.end_call()
        elif self._state in ("marked", "name", "call") and not self._calls.forced:
            self._sink.text(self._raw)
        rest = self._markers.flush()
        if not self._calls.forced:
            self._sink.text(rest)
        self._sink.end_text()
        return self._sink.take()

    def _step(self, char: str) -> None:
        match self._state:
            case "text":
                free, marker = self._markers.push(char)
                self._sink.text(free)
                if marker:
                    self._state, self._raw, self._name = "marked", marker, ""
            case "marked":
                self._marked(char)
            case "call":
                self._in_call(char)
            case "name":
                self._in_name(char)
            case "arguments":
                self._sink.arguments(char)
                if self._arguments.push(char):
                    self._sink.end_call()
                    self._state, self._raw = "text", ""
            case _:
                self._between(char)

    def _marked(self, char: str) -> None:
        if char.isspace() or (char == "[" and "[" not in self._raw.removeprefix(MARK)):
            self._raw += char
        elif char == "{":
            self._begin_call(char)
        else:
            self._state = "name"
            self._in_name(char)

    def _in_name(self, char: str) -> None:
        if char != "{":
            self._raw += char
            self._name += char
            if len(self._name) > 256:
                self._give_back("")
            return
        name = self._name.partition(ARGUMENTS)[0].partition(CALL_ID)[0].strip()
        if not self._calls.knows(name):
            self._give_back(char)
            return
        self._sink.begin_call(name)
        self._sink.arguments(char)
        self._arguments = JsonText()
        self._arguments.push(char)
        self._state, self._raw = "arguments", ""

    def _between(self, char: str) -> None:
        """After a call in a list: the next one, or the end of the list."""
        if char == "{":
            self._raw = ""
            self._begin_call(char)
        elif not (char.isspace() or char in ",;"):
            self._state = "text"
            if char != "]":
                self._step(char)
