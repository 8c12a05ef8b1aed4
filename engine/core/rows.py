"""Rows: a sequence's share of a step, as the worker is told."""

from __future__ import annotations

from engine.core.plan import LAST_SAMPLED, Row
from engine.core.request import Sequence, Status


def row_of(
    seq: Sequence, n: int, table_start: int, table: tuple[int, ...], followers: tuple[Sequence, ...], now: float
) -> Row:
    """The row that computes the next `n` tokens of `seq`, drafts included."""
    start = seq.computed
    if seq.pending:
        tokens: tuple[int, ...] = (LAST_SAMPLED,)
    elif n == 1:
        tokens = (seq.tokens[start],)
    else:
        tokens = (*seq.tokens[start : start + n], *seq.drafts)
    sample = seq.samples and start + n >= len(seq.tokens) + seq.pending
    if seq.lockstep or not seq.samples or start < seq.request.prompt_len:
        return _special(seq, Row(seq.slot, start, tokens, table_start, table, sample, len(seq.drafts)), followers, now)
    return Row(seq.slot, start, tokens, table_start, table, sample, len(seq.drafts))


def _special(seq: Sequence, row: Row, followers: tuple[Sequence, ...], now: float) -> Row:
    """A row of prefill, of a grammar, of beam search or of an embedding."""
    request, params = seq.request, seq.request.add.params
    n = len(row.tokens)
    score = -1
    targets: tuple[int, ...] = ()
    if params.prompt_logprobs is not None and len(request.scores) < request.prompt_len:
        score = params.prompt_logprobs
        targets = tuple(seq.tokens[row.start + 1 : min(row.start + n + 1, request.prompt_len)])
    if n > 1 and not row.drafts:
        request.note(now, "prefill", choice=seq.choice, start=row.start, tokens=n)
    return Row(
        row.slot,
        row.start,
        row.tokens,
        row.table_start,
        row.table,
        row.sample,
        row.drafts,
        tuple(follower.choice for follower in followers),
        masks_of(seq) if row.sample and seq.constraint is not None else (),
        request.beam.alternatives if request.beam is not None and row.sample else -1,
        score,
        targets,
        request.add.pooling,
    )


def followers_of(seq: Sequence, n: int) -> tuple[Sequence, ...]:
    """The choices that can draw their first token together with `seq`, whose next n tokens end the prompt."""
    request = seq.request
    if not (seq.samples and seq.computed + n == request.prompt_len == len(seq.tokens)) or seq.drafts:
        return ()
    return tuple(s for s in request.sequences if s.status is Status.FOLLOWING and not s.output)


def masks_of(seq: Sequence) -> tuple[bytes | None, ...]:
    """A mask for each sampled position: after the known tokens, and after each draft."""
    constraint = seq.constraint
    assert constraint is not None
    masks = [constraint.mask()]
    for token in seq.drafts:
        constraint.advance(token)
        masks.append(constraint.mask())
    constraint.rollback(len(seq.drafts))
    return tuple(masks)


def allowed_drafts(seq: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts up to the first one that the grammar forbids or that would end the sequence."""
    constraint = seq.constraint
    assert constraint is not None
    n = 0
    for token in drafts:
        if token in seq.stops or not constraint.advance(token):
            break
        n += 1
    constraint.rollback(n)
    return drafts[:n]
