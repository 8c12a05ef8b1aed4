"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, in running text."""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.object_calls import ObjectCallsParser
from server.parsers.sink import Calls, Markers

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(ObjectCallsParser):
    """Text, and calls between tags. Blanks around calls belong to neither."""

    BEHIND = "closing"

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._markers = Markers([OPEN])
        self._closing = Markers([CLOSE])

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
            self._begin_call(char)
        else:
            self._give_back(char)

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
