"""Outcome: what a step's result means for its sequences: tokens, ends, forks, beams."""

from __future__ import annotations

import array
import sys
from collections.abc import Callable
from typing import NamedTuple

from engine.api import FinishReason, TokenLogprobs
from engine.core.beam import Continuation
from engine.core.ledger import Ledger
from engine.core.life import Life
from engine.core.plan import RowResult, Sampled
from engine.core.request import Request, Sequence, Status
from engine.kv import KVManager


class Item(NamedTuple):
    """A row of a submitted plan: void when the sequence's epoch has moved on."""

    seq: Sequence
    epoch: int
    start: int
    end: int  # KV of [start, end) comes with the result, the drafts' included
    drafts: tuple[int, ...]
    followers: tuple[Sequence, ...] = ()  # choices that drew their first token from this row


class Outcome:
    """Applies results. Sequences begin and end through `Life`."""

    def __init__(self, kv: KVManager, ledger: Ledger, life: Life, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._ledger = ledger
        self._life = life
        self._clock = clock

    def apply(self, items: list[Item], results: tuple[RowResult, ...]) -> None:
        """The results of one step, in the order of its rows. One of the three loops over all sequences."""
        commit = self._kv.commit
        beams: dict[Request, None] = {}
        for item, got in zip(items, results, strict=True):
            seq = item.seq
            if seq.epoch != item.epoch:
                continue  # preempted or ended meanwhile
            end = item.end - len(item.drafts)
            seq.confirmed = end
            commit(seq.id, seq.tokens, end)
            request = seq.request
            if item.start < request.prompt_len:
                self._prompt_progress(seq, item, got)
            if got.sampled:
                seq.pending -= 1
                if request.beam is None:
                    self._accept(seq, got.sampled, item.drafts)
                else:
                    seq.top = got.sampled[0].top
                    beams[request] = None
        for request in beams:
            if request.finished is None and all(seq.top is not None for seq in request.sequences):
                self._advance_beams(request)

    def _prompt_progress(self, seq: Sequence, item: Item, got: RowResult) -> None:
        """Scores, followers, and the end of what samples nothing."""
        request = seq.request
        for at, score in enumerate(got.scores, item.start + 1):
            if at == len(request.scores):
                request.scores.append(_logprobs(score))
        if item.end < request.prompt_len:
            return
        for follower, sample in zip(item.followers, got.sampled[len(item.drafts) + 1 :], strict=True):
            if follower.status is Status.FOLLOWING:
                self._accept(follower, (sample,), ())
        for follower in [s for s in request.sequences if s.status is Status.FOLLOWING]:
            # Who has no token yet computes the prompt's last one again, for a first sample of its own.
            self._life.fork(seq, follower, min(request.prompt_len, len(follower.tokens) - 1))
        if not seq.samples and item.end >= len(seq.tokens):
            if request.add.pooling:
                embedding = _mean(got.hidden, request.prompt_len) if request.add.pooling == "mean" else got.hidden
                self._life.end(seq, FinishReason.STOP, embedding=embedding)
            else:
                self._life.end(seq, FinishReason.LENGTH)

    def _accept(self, seq: Sequence, sampled: tuple[Sampled, ...], drafts: tuple[int, ...]) -> None:
        """Append what was sampled as far as the drafts were right, and see whether the sequence ends."""
        request, tokens = seq.request, seq.tokens
        first = len(tokens)
        finish: FinishReason | None = None
        for i, sample in enumerate(sampled):
            tokens.append(sample.token)
            finish = _finish(seq, sample.token)
            if finish is not None or i == len(drafts) or drafts[i] != sample.token:
                break
        n = len(tokens) - first
        counters = self._ledger.counters
        counters.generation_tokens += n
        if drafts:
            counters.spec_proposed += len(drafts)
            counters.spec_accepted += n - 1
            seq.computed = seq.confirmed = len(tokens) - 1
            self._kv.commit(seq.id, tokens, seq.confirmed)
        if request.first_token is None:
            request.first_token = self._clock()
            request.note(request.first_token, "first token")
        new = (tokens[-1],) if n == 1 else tuple(tokens[first:])
        logprobs = () if request.add.params.logprobs is None else tuple(_logprobs(s) for s in sampled[:n])
        if finish is None:
            self._ledger.tell(request, seq.choice, new, logprobs, preemptions=seq.preemptions)
        elif finish is FinishReason.ERROR:
            error = f"the grammar doesn't allow token {tokens[-1]}"
            self._life.end(seq, finish, new, logprobs, error=error, kind="failed")
        else:
            stop = tokens[-1] if finish is FinishReason.STOP and tokens[-1] in seq.stops else None
            self._life.end(seq, finish, new, logprobs, stop_token=stop)

    def _advance_beams(self, request: Request) -> None:
        """All live beams know their continuations: fork, keep or drop each."""
        assert request.beam is not None
        live = request.sequences
        going = request.beam.advance(live)
        if not going:
            self._finish_beams(request)
            return
        parents = {beam.parent for beam in going}
        for seq in [seq for seq in live if seq not in parents]:
            self._life.drop(seq)
        request.sequences = self._grow_beams(parents, going)

    def _grow_beams(self, parents: set[Sequence], going: list[Continuation]) -> list[Sequence]:
        """The first child of a parent is the parent itself, extended when all its other children have forked."""
        beams: list[Sequence] = []
        for beam in going:
            if beam.parent in parents:
                parents.remove(beam.parent)
                beams.append(beam.parent)
            else:
                beams.append(self._life.fork_beam(beam.parent))
        for seq, beam in zip(beams, going, strict=True):
            seq.tokens.append(beam.token)
            seq.cumulative, seq.trail, seq.top = beam.cumulative, beam.trail, None
            if seq.status is not Status.RUNNING:
                self._life.wait(seq)
        return beams

    def _finish_beams(self, request: Request) -> None:
        assert request.beam is not None
        preemptions = max(seq.preemptions for seq in request.sequences)
        for seq in list(request.sequences):
            self._life.drop(seq)
        now = self._clock()
        request.first_token = now
        for choice, best in enumerate(request.beam.best(request.add.params.n)):
            self._ledger.counters.generation_tokens += len(best.tokens)
            if choice in request.open:
                self._ledger.close(
                    request,
                    choice,
                    now,
                    best.finish,
                    best.tokens,
                    best.trail,
                    stop_token=best.stop_token,
                    preemptions=preemptions,
                )


def _finish(seq: Sequence, token: int) -> FinishReason | None:
    """Does the token just appended end the sequence, and why?"""
    if token in seq.stops:
        return FinishReason.STOP
    if seq.constraint is not None:
        if not seq.constraint.advance(token):
            return FinishReason.ERROR
        if seq.constraint.stopped():
            return FinishReason.STOP
    return FinishReason.LENGTH if len(seq.tokens) >= seq.end else None


def _logprobs(sample: Sampled) -> TokenLogprobs:
    return TokenLogprobs(sample.logprob, sample.rank, sample.top)


def _mean(hidden: bytes, count: int) -> bytes:
    """The worker's running sum over all positions, divided by their number; float32 little-endian."""
    values = array.array("f", hidden)
    if sys.byteorder == "big":
        values.byteswap()
    values = array.array("f", (value / count for value in values))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
