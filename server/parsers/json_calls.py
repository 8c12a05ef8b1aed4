"""Llama 3 and models without a syntax of their own: the whole answer is one call in JSON, or several.

Several are separated by ";" or ",", or are a JSON list. `<|python_tag|>` may stand in front.
"""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.sink import CallObject, Calls, Markers, Sink, Walk

PYTHON_TAG = "<|python_tag|>"


class JsonCallsParser:
    """Calls from the first character on, or text."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._sink = Sink(calls)
        self._tag = Markers([PYTHON_TAG])
        self._state = "start"
        self._raw = ""
        self._walk: CallObject | None = None

    def push(self, text: str) -> list[OutputDelta]:
        for char in text:
            self._step(char)
        return self._sink.take()

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
            self._state, self._walk = "call", CallObject(self._sink, self._calls)
            self._in_call(char)
        elif char.isspace() or (char in ";,]" and self._state == "between") or (char == "[" and "[" not in self._raw):
            self._raw += char
        else:
            self._give_back(char)

    def _in_call(self, char: str) -> None:
        assert self._walk is not None
        outcome = self._walk.push(char)
        if outcome is Walk.FAILED:
            self._walk = None
            self._give_back(char)
            return
        self._raw = "" if self._walk.begun else self._raw + char
        if outcome is not Walk.MORE:
            self._walk, self._state = None, "between"
        if outcome is Walk.ENDED:
            self._step(char)

    def _give_back(self, char: str) -> None:
        """Not a call: this and all that follows is text."""
        self._state = "text"
        self._sink.content(self._raw + self._tag.flush() + char)
        self._raw = ""
