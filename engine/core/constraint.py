"""What the scheduler needs of a grammar: a mask for the next token, and to be told what came.

Implemented by `engine.sampling.grammar` (llguidance); the scheduler sees only this.
"""

from __future__ import annotations

from typing import Protocol

from engine.api import Grammar


class Constraint(Protocol):
    """State of one choice's grammar. Not shared between choices: fork it."""

    def ready(self) -> bool:
        """Is the grammar compiled? While False the request waits without holding others up."""

    def failed(self) -> str:
        """Why it can't be compiled, or ""; such a request ends with an error of kind "invalid"."""

    def mask(self) -> bytes | None:
        """Allowed tokens at the next position as little-endian 32-bit words; None = every token."""

    def advance(self, token: int) -> bool:
        """Consume a token; False when the grammar doesn't allow it (the request then ends with an error)."""

    def rollback(self, tokens: int) -> None:
        """Take the last tokens back (rejected drafts)."""

    def stopped(self) -> bool:
        """The grammar is complete and only the end token may follow."""

    def fork(self) -> Constraint:
        """An independent copy in the same state."""


class ConstraintFactory(Protocol):
    """Starts compiling on a worker thread and returns at once."""

    def __call__(self, grammar: Grammar) -> Constraint: ...
