"""The base of the parsers whose calls are JSON objects: a state, what is held back, and the walk over one object."""

from __future__ import annotations

from server.output import OutputDelta
from server.parsers.sink import CallObject, Calls, Sink, Walk


class ObjectCallsParser:
    """An automaton over characters. `_step` looks at one; in the state "call" it hands it to `_in_call`."""

    BEHIND = ""  # the state after a call

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._sink = Sink(calls)
        self._state = "text"
        self._raw = ""  # of a call that may turn out to be none
        self._walk: CallObject | None = None

    def push(self, text: str) -> list[OutputDelta]:
        for char in text:
            self._step(char)
        return self._sink.take()

    def _step(self, char: str) -> None:
        raise NotImplementedError

    def _begin_call(self, char: str) -> None:
        """`char` opens an object."""
        self._state, self._walk = "call", CallObject(self._sink, self._calls)
        self._in_call(char)

    def _in_call(self, char: str) -> None:
        assert self._walk is not None
        outcome = self._walk.push(char)
        if outcome is Walk.FAILED:
            self._give_back(char)
            return
        self._raw = "" if self._walk.begun else self._raw + char
        if outcome is not Walk.MORE:
            self._walk, self._state = None, self.BEHIND
        if outcome is Walk.ENDED:
            self._step(char)

    def _give_back(self, char: str) -> None:
        """No call after all: what was held is text, and `char` ("" = none) is looked at again as text."""
        self._walk, self._state = None, "text"
        raw, self._raw = self._raw, ""
        self._sink.text(raw)
        if char:
            self._step(char)
