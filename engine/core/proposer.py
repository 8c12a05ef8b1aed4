"""What the scheduler needs of speculative decoding: guesses. Implemented by `engine.speculate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from engine.core.plan import SlotParams


class Ask(NamedTuple):
    """A sequence whose next tokens are to be guessed."""

    seq: int
    tokens: Sequence[int]  # prompt and output
    number: int  # guesses wanted, at least 1
    salt: str  # what was computed for it may serve only sequences of the same salt
    params: Callable[[], SlotParams]  # how it samples


class Proposer(Protocol):
    """Guesses the next tokens of sequences. A wrong guess costs time, never a token."""

    def number(self, seq: int, tokens: Sequence[int], limit: int) -> int:
        """How many guesses of what follows `tokens` pay now, at most `limit`; 0 = none.

        Asked before each step, also when none can be made; so it costs next to nothing.
        """

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """For each of them at most so many guesses. No step is in flight."""

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None:
        """What a step cost: `tokens` of so many sequences, `drafts` of them guesses, took `seconds`."""

    def forget(self, seq: int) -> None:
        """The sequence has ended. Called once for each, also if nothing was ever proposed for it."""

    def close(self) -> None:
        """Free everything; idempotent."""
