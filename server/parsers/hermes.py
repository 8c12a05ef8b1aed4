"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, in running text."""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.sink import CallObject, Calls, Markers, Sink, Walk

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser:
    """Text, and calls between tags. Blanks around calls belong to neither."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._sink = Sink(calls)
        self._markers = Markers([OPEN])
        self._closing = Markers([CLOSE])
        self._state = "text"
        self._raw = ""  # of a call that may turn out to be none
        self._walk: CallObject | None = None

    def push(self, text: str) -> list[OutputDelta]:
        for char in text:
            self._step(char)
        return self._sink.take()

    def finish(self) -> list[OutputDelta]:
        if self._walk is not None:
            self._walk.cut()
        if self._state in ("opened", "call") and not self._forced_fragment():
            self._sink.text(self._raw + self._closing.flush())
        rest = self._markers.flush()
        if not self._calls.forced:
            self._sink.text(rest)
        self._sink.end_text()
        return self._sink.take()

    def _forced_fragment(self) -> bool:
        return self._calls.forced or (self._walk is not None and self._walk.begun)

    def _step(self, char: str) -> None:
        match self._state:
            case "text":
                free, marker = self._markers.push(char)
                self._sink.text(free)
                if marker:
                    self._state, self._raw = "opened", marker
            case "opened":
                self._opened(char)
            case "call":
                self._in_call(char)
            case _:
                self._closed(char)

    def _opened(self, char: str) -> None:
        if char.isspace():
            self._raw += char
        elif char == "{":
            self._walk = CallObject(self._sink, self._calls)
            self._state = "call"
            self._in_call(char)
        else:
            self._give_back(char)

    def _in_call(self, char: str) -> None:
        assert self._walk is not None
        outcome = self._walk.push(char)
        if outcome is Walk.FAILED:
            self._give_back(char)
            return
        self._raw = "" if self._walk.begun else self._raw + char
        if outcome is not Walk.MORE:
            self._walk, self._state = None, "closing"
        if outcome is Walk.ENDED:
            self._step(char)

    def _give_back(self, char: str) -> None:
        """No call after all: what was held is text, and `char` is looked at again as text."""
        self._walk, self._state = None, "text"
        raw, self._raw = self._raw, ""
        self._sink.text(raw)
        self._step(char)

    def _closed(self, char: str) -> None:
        """After a call: its closing tag, or one more object, or (the tag forgotten) anything else."""
        free, marker = self._closing.push(char)
        if marker:
            self._state = "text"
            return
        for each in free:
            if self._state != "closing":
                self._step(each)
            elif each == "{":
                self._state = "opened"
                self._opened(each)
            elif not each.isspace():
                self._state = "text"
                self._step(each)
