"""The tokens of one slot, for penalties and bad words: kept only for sequences that ask for either."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class History:
    """Tokens by position, and which of them were seen how often, as sparse arrays changed in place.

    ids[:n] are the distinct tokens seen in prompt or output, counts[:n] how often each stands in the output
    (0 = in the prompt only). Appending and truncating cost O(tokens changed).
    """

    __slots__ = ("_all", "_at", "_counts", "_ids", "_prompt_len", "tokens")

    def __init__(self, prompt: tuple[int, ...], output: tuple[int, ...]) -> None:
        self.tokens: list[int] = []
        self._prompt_len = len(prompt)
        self._at: dict[int, int] = {}  # token -> index in ids
        self._all: list[int] = []  # occurrences in prompt and output, parallel to ids
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)
        self.advance(0, prompt)
        self.advance(self._prompt_len, output)

    def advance(self, start: int, tokens: tuple[int, ...] | list[int]) -> None:
        """Tokens now stand at positions start, start + 1, ...; what stood there or later is forgotten."""
        while len(self.tokens) > start:
            self._forget(self.tokens.pop(), output=len(self.tokens) >= self._prompt_len)
        for token in tokens:
            self._see(token, output=len(self.tokens) >= self._prompt_len)
            self.tokens.append(token)

    def seen(self) -> tuple[Int32, Int32]:
        """Views of ids and counts, valid until the next `advance`."""
        n = len(self._at)
        return self._ids[:n], self._counts[:n]

    def ends_with(self, tokens: tuple[int, ...]) -> bool:
        """Do these tokens stand at the very end? True for none."""
        n = len(tokens)
        return n <= len(self.tokens) and tuple(self.tokens[len(self.tokens) - n :]) == tokens

    def _see(self, token: int, *, output: bool) -> None:
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = len(self._all)
            self._all.append(0)
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[at] = token
            self._counts[at] = 0
        self._all[at] += 1
        self._counts[at] += output

    def _forget(self, token: int, *, output: bool) -> None:
        at = self._at[token]
        self._all[at] -= 1
        self._counts[at] -= output
        if self._all[at] == 0:
            last = len(self._all) - 1  # the last entry moves into the hole
            moved = int(self._ids[last])
            self._ids[at], self._counts[at], self._all[at] = moved, self._counts[last], self._all[last]
            self._at[moved] = at
            del self._at[token]
            self._all.pop()
