"""Beam search: which continuations of the live beams go on, and which have ended. Pure; the scheduler forks.

Score of an ended beam: sum of raw logprobs / (output tokens, stop token included) ** length_penalty. The search
ends when no live beam can still beat the worst of the `width` ended ones, so that the answer is the same as if
it had gone on to the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import FinishReason, SamplingParams, TokenLogprobs
from engine.core.request import Sequence


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An ended beam."""

    score: float
    tokens: tuple[int, ...]
    trail: tuple[TokenLogprobs, ...]
    finish: FinishReason
    stop_token: int | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A live beam of the next step: `parent` and one more token."""

    parent: Sequence
    token: int
    cumulative: float
    trail: tuple[TokenLogprobs, ...]


class BeamSearch:
    """The ended beams of one request."""

    def __init__(self, params: SamplingParams, prompt_len: int, end: int, stops: frozenset[int]) -> None:
        self.width = max(params.beam_width, params.n)
        self._params = params
        self._prompt_len = prompt_len
        self._end = end
        self._stops = stops
        self._ended: list[Hypothesis] = []

    @property
    def alternatives(self) -> int:
        """Continuations wanted of each beam: enough that others are left where some end it or may not yet."""
        return 2 * self.width + (len(self._stops) if self._params.min_tokens else 0)

    def advance(self, live: list[Sequence]) -> list[Continuation]:
        """The beams of the next step, best first; [] when the search is over. Every live beam has its `top`."""
        length = len(live[0].tokens) - self._prompt_len + 1
        candidates = [
            (seq.cumulative + logprob, -order, -rank, seq, token, logprob)
            for order, seq in enumerate(live)
            for rank, (token, logprob) in enumerate(seq.top or ())
            if length > self._params.min_tokens or token not in self._stops
        ]
        candidates.sort(key=lambda c: c[:3], reverse=True)
        going: list[Continuation] = []
        for place, (cumulative, _, rank, seq, token, logprob) in enumerate(candidates[: 2 * self.width]):
            trail = (*seq.trail, self._entry(seq, logprob, 1 - rank)) if self._params.logprobs is not None else ()
            if token in self._stops:
                if place < self.width:
                    self._end_one(seq, token, cumulative, length, trail, FinishReason.STOP)
            elif len(going) < self.width:
                if self._prompt_len + length >= self._end:
                    self._end_one(seq, token, cumulative, length, trail, FinishReason.LENGTH)
                else:
                    going.append(Continuation(seq, token, cumulative, trail))
        return [] if going and self._settled(going[0].cumulative, length) else going

    def best(self, n: int) -> list[Hypothesis]:
        """The answer, best first."""
        return self._ended[:n]

    def _entry(self, seq: Sequence, logprob: float, rank: int) -> TokenLogprobs:
        top = seq.top or ()
        return TokenLogprobs(logprob, rank, top[: self._params.logprobs])

    def _end_one(
        self,
        seq: Sequence,
        token: int,
        cumulative: float,
        length: int,
        trail: tuple[TokenLogprobs, ...],
        finish: FinishReason,
    ) -> None:
        score = cumulative / length**self._params.length_penalty
        stop = token if finish is FinishReason.STOP else None
        self._ended.append(Hypothesis(score, (*seq.output, token), trail, finish, stop))
        self._ended.sort(key=lambda h: -h.score)  # stable: of equals the earlier one
        del self._ended[self.width :]

    def _settled(self, best_live: float, length: int) -> bool:
        """Logprobs are never positive: a live beam's score is highest at the length that divides least or most."""
        if len(self._ended) < self.width:
            return False
        penalty = self._params.length_penalty
        reach = self._end - self._prompt_len if penalty > 0 else length + 1
        return bool(best_live / reach**penalty <= self._ended[-1].score)
