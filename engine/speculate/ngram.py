"""Prompt look-up: the guess is what followed the last tokens where they stood before, in prompt or output.

(Saxena, "Prompt Lookup Decoding", 2023.) No model, no memory to speak of; right where a text repeats itself or
its prompt: code edits, quotes, JSON, summaries. How often a guess was right is counted whether or not it was used,
so a sequence that doesn't repeat anything costs nothing, and one that begins to is noticed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from engine.core.proposer import Ask
from engine.speculate.worth import Worth

LONGEST = 16  # a longer match says no more
TRIES = 8  # earlier places of the last two tokens that are compared
CHANCE = 0.5  # of a guess after a match of a length that was never tried
WEIGHT_OVERALL, WEIGHT_OWN = 0.02, 0.1  # of one guess in the chances of all sequences, and in one's own


class NgramProposer:
    """A `Proposer`. A step costs O(new tokens)."""

    def __init__(self, most_drafts: int) -> None:
        self._worth = Worth(most_drafts)
        self._most = most_drafts
        self._matches: dict[int, Match] = {}
        self._chances = [CHANCE] * (LONGEST + 1)  # by length of the match, of all sequences

    def number(self, seq: int, tokens: Sequence[int], limit: int) -> int:
        """See `Proposer`."""
        match = self._matches.get(seq)
        if match is None:
            match = self._matches[seq] = Match(tokens, self._chances)
        for length, right in match.follow(tokens):
            self._chances[length] += WEIGHT_OVERALL * (right - self._chances[length])
        return self._worth.drafts(match.outlook(min(limit, self._most))) if match.length else 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """See `Proposer`."""
        return [self._matches[ask.seq].guess(ask.tokens, ask.number) for ask in asks]

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None:
        """See `Proposer`."""
        self._worth.saw_step(sequences, tokens, drafts, seconds)

    def forget(self, seq: int) -> None:
        """See `Proposer`."""
        self._matches.pop(seq, None)

    def close(self) -> None:
        """See `Proposer`."""


class Match:
    """Where the last tokens of one sequence stood before: `length` of them end before position `at`; 0 = nowhere.

    Every pair of adjacent tokens is indexed by where it stands; equal pairs are chained from the latest back.
    """

    __slots__ = ("_before", "_chances", "_latest", "at", "length")

    def __init__(self, tokens: Sequence[int], chances: Sequence[float]) -> None:
        self._latest: dict[int, int] = {}  # pair of tokens -> the position after it
        self._before = array("i", bytes(4))  # position -> the same of the equal pair before it, 0 = there is none
        self._chances = list(chances)
        self.at = self.length = 0
        for position in range(1, len(tokens) + 1):
            self._index(tokens, position)
        self._search(tokens, len(tokens))

    def follow(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Take notice of new tokens. For each that was guessed: the length of the match, and was it right?"""
        judged: list[tuple[int, bool]] = []
        for position in range(len(self._before), len(tokens) + 1):
            right = self.length > 0 and tokens[self.at] == tokens[position - 1]
            if self.length:
                length = min(self.length, LONGEST)
                judged.append((length, right))
                self._chances[length] += WEIGHT_OWN * (right - self._chances[length])
            self._index(tokens, position)
            if right:
                self.at += 1
                self.length += 1
            else:
                self._search(tokens, position)
        return judged

    def outlook(self, limit: int) -> list[float]:
        """The chance of each of the next `limit` guesses, if all before it are right."""
        return [self._chances[min(self.length + i, LONGEST)] for i in range(limit)]

    def guess(self, tokens: Sequence[int], number: int) -> list[int]:
        """The next `number` tokens. A text that repeats itself right away goes on with the guesses themselves."""
        period = len(tokens) - self.at
        return [tokens[self.at + i % period] for i in range(number)]

    def _index(self, tokens: Sequence[int], position: int) -> None:
        """The pair that ends before `position`."""
        if position < 2:
            self._before.append(0)
            return
        pair = tokens[position - 2] << 32 | tokens[position - 1]
        self._before.append(self._latest.get(pair, 0))
        self._latest[pair] = position

    def _search(self, tokens: Sequence[int], end: int) -> None:
        """The longest match of the tokens before `end`, the latest among equals."""
        self.at = self.length = 0
        place = self._before[end]
        for _ in range(TRIES):
            if not place:
                return
            length = 2
            while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > self.length:
                self.at, self.length = place, length
            if length == LONGEST:
                return
            place = self._before[place]
