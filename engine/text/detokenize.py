"""Tokens to text as they come: never half a character, never text that may become a stop string.

Both classes give the same text however their input is cut into calls.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from engine.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental text of one choice. O(1) a token, whatever has come before.

    Tokens are taken as the continuation of a prompt: a SentencePiece token keeps its leading space.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = _utf8_decoder("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Text that became complete with these tokens; bytes of an unfinished character are held back."""
        data = b"".join([self._token_bytes(i) for i in ids if i not in self._hidden])
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is held back, at the end of the choice: U+FFFD if a character was left unfinished, else ""."""
        return self._decoder.decode(b"", final=True)


class StopChecker:
    """Cuts text at the first stop string to be completed.

    Of the strings that end at the same character the longest one counts. `matched` names it, then nothing
    more is shown. Knuth, Morris and Pratt (1977): per stop string one state, the length of its longest prefix
    that the text ends with, so a character costs O(1) amortised and only that many characters are held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._fallback = tuple(_borders(stop) for stop in self._stops)
        self._state = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that can be shown now. After a match: what stands before the stop string, then always ""."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for position, char in enumerate(text):
            completed = self._advance(char)
            if completed:
                self.matched = completed
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen if self._include_stop else seen[: len(seen) - len(completed)]
        seen = self._held + text
        shown = len(seen) - max(self._state)
        self._held = seen[shown:]
        return seen[:shown]

    def flush(self) -> str:
        """What is held back, at the end of the choice."""
        held, self._held = self._held, ""
        self._state = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str:
        """Take one character; the longest stop string that it completes, or ""."""
        completed = ""
        for i, stop in enumerate(self._stops):
            length = self._state[i]
            while length and stop[length] != char:
                length = self._fallback[i][length]
            length += stop[length] == char
            self._state[i] = length
            if length == len(stop) > len(completed):
                completed = stop
        return completed


def _borders(pattern: str) -> list[int]:
    """borders[n] = length of the longest proper prefix of pattern[:n] that is also its suffix."""
    borders = [0, 0]
    for n in range(1, len(pattern)):
        length = borders[n]
        while length and pattern[length] != pattern[n]:
            length = borders[length]
        borders.append(length + (pattern[length] == pattern[n]))
    return borders
