"""Mistral: text, then [TOOL_CALLS] and a JSON list of calls; newer models write [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.sink import CallObject, Calls, JsonText, Markers, Sink, Walk

MARK = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class MistralParser:
    """Text up to the marker, calls behind it."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._sink = Sink(calls)
        self._markers = Markers([MARK])
        self._state = "text"
        self._raw = ""
        self._name = ""
        self._walk: CallObject | None = None
        self._arguments = JsonText()

    def push(self, text: str) -> list[OutputDelta]:
        for char in text:
            self._step(char)
        return self._sink.take()

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
            self._state, self._walk = "call", CallObject(self._sink, self._calls)
            self._in_call(char)
        else:
            self._state = "name"
            self._in_name(char)

    def _in_call(self, char: str) -> None:
        assert self._walk is not None
        outcome = self._walk.push(char)
        if outcome is Walk.FAILED:
            self._give_back(char)
            return
        self._raw = "" if self._walk.begun else self._raw + char
        if outcome is not Walk.MORE:
            self._walk, self._state = None, "between"
        if outcome is Walk.ENDED:
            self._step(char)

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
            self._state, self._raw, self._walk = "call", "", CallObject(self._sink, self._calls)
            self._in_call(char)
        elif not (char.isspace() or char in ",;"):
            self._state = "text"
            if char != "]":
                self._step(char)

    def _give_back(self, char: str) -> None:
        self._walk, self._state = None, "text"
        raw, self._raw = self._raw, ""
        self._sink.text(raw)
        if char:
            self._step(char)
