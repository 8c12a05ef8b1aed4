"""Reasoning models: what stands between the thinking tags is reasoning, the rest goes to the next parser."""

from __future__ import annotations

from server.output import OutputDelta, OutputParser
from server.parsers.sink import Calls, Markers, Sink


class ReasoningParser:
    """Splits off the reasoning at the beginning of an answer.

    `opened`: the prompt already ended with the opening tag, so the text begins as reasoning. Otherwise it is
    reasoning only when the tag is the first thing in it. Blanks around the tags belong to neither.
    """

    def __init__(self, inner: OutputParser, open_tag: str, close_tag: str, *, opened: bool) -> None:
        self._inner = inner
        self._sink = Sink(Calls(frozenset()))
        self._opening = Markers([open_tag])
        self._closing = Markers([close_tag])
        self._state = "opened" if opened else "start"
        self._blank = ""
        self._shown = False

    @property
    def reasoning(self) -> bool:
        """The text so far ends inside of the reasoning."""
        return self._state == "opened"

    def push(self, text: str) -> list[OutputDelta]:
        for i, char in enumerate(text):
            if self._state == "answer":
                return [*self._sink.take(), *self._held_answer(), *self._inner.push(text[i:])]
            self._step(char)
        return self._sink.take() + self._held_answer()

    def finish(self) -> list[OutputDelta]:
        if self._state == "opened":
            self._reason(self._closing.flush())
            return self._sink.take() + self._inner.finish()
        rest = self._blank + self._opening.flush() if self._state == "start" else ""
        self._state = "answer"
        return self._sink.take() + self._inner.push(rest) + self._inner.finish()

    def _held_answer(self) -> list[OutputDelta]:
        """Text that was held at the start and turned out to belong to the answer."""
        if self._state != "answer" or not self._blank:
            return []
        text, self._blank = self._blank, ""
        return self._inner.push(text)

    def _step(self, char: str) -> None:
        match self._state:
            case "start":
                free, marker = self._opening.push(char)
                self._blank += free
                if marker:
                    self._state, self._blank = "opened", ""
                elif self._blank.strip():
                    self._state = "answer"
                    self._blank += self._opening.flush()
            case "opened":
                free, marker = self._closing.push(char)
                self._reason(free)
                if marker:
                    self._state, self._blank = "closed", ""
            case "closed":
                if not char.isspace():
                    self._state, self._blank = "answer", char

    def _reason(self, text: str) -> None:
        for char in text:
            if char.isspace():
                self._blank += char
            else:
                self._sink.reasoning((self._blank if self._shown else "") + char)
                self._blank, self._shown = "", True
