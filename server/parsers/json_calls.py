"""Llama 3 and models without a syntax of their own: the whole answer is one call in JSON, or several.

Several are separated by ";" or ",", or are a JSON list. `<|python_tag|>` may stand in front.
"""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.object_calls import ObjectCallsParser
from server.parsers.sink import Calls, Markers

PYTHON_TAG = "<|python_tag|>"


class JsonCallsParser(ObjectCallsParser):
    """Calls from the first character on, or text."""

    BEHIND = "between"

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._tag = Markers([PYTHON_TAG])
        self._state = "start"

    def finish(self) -> list[OutputDelta]:
        if self._walk is not None:
            self._walk.cut()
        begun = self._walk is not None and self._walk.begun
        if self._state != "text" and not begun and not self._calls.forced and not (self._between and self._started):
            self._sink.content(self._raw + self._tag.flush())
        return self._sink.take()

    @property
    def _started(self) -> bool:
        return self._sink.started > 0

    @property
    def _between(self) -> bool:
        return self._state == "between"

    def _step(self, char: str) -> None:
        match self._state:
            case "text":
                self._sink.content(char)
            case "call":
                self._in_call(char)
            case _:
                self._outside(char)

    def _outside(self, char: str) -> None:
        """Before the first call, or between two."""
        if self._state == "start" and (self._tag.held or char == PYTHON_TAG[0]):
            free, marker = self._tag.push(char)
            self._raw += free + marker
            if free:
                self._give_back("")
        elif char == "{":
            self._begin_call(char)
        elif char.isspace() or (char in ";,]" and self._state == "between") or (char == "[" and "[" not in self._raw):
            self._raw += char
        else:
            self._give_back(char)

    def _give_back(self, char: str) -> None:
        """Not a call: this and all that follows is text."""
        self._walk, self._state = None, "text"
        self._sink.content(self._raw + self._tag.flush() + char)
        self._raw = ""
