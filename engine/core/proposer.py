"""What the scheduler needs of speculative decoding: guesses. Implemented by `engine.speculate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses the next tokens of a sequence. A wrong guess costs time, never a token."""

    def propose(self, seq: int, tokens: Sequence[int], limit: int) -> Sequence[int]:
        """At most `limit` guesses of what follows `tokens` (prompt and output); empty = none that is worth it."""

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None:
        """What a step cost: `tokens` of so many sequences, `drafts` of them guesses, took `seconds`."""

    def forget(self, seq: int) -> None:
        """The sequence has ended. Called once for each, also if nothing was ever proposed for it."""
