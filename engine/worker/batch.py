"""From a plan to the arrays of one forward pass, and from drawn tokens back to a result."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.core.plan import LAST_SAMPLED, Plan, Row, RowResult, Sampled
from engine.errors import RequestFailed
from engine.sampling.reference import RowParams
from engine.worker.slots import Bias, Mask, Slots

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Seen = tuple[Int32, Int32]


@dataclass(slots=True)
class Draws:
    """The positions that get a token or a score, in the order of their logits. Lists are parallel to the arrays."""

    slot: Int32  # [n]
    position: npt.NDArray[np.uint32]  # [n], position of the token that is drawn
    n_top: Int32  # [n], alternatives wanted; -1 = no logprobs
    forced: Int32 | None  # [n], >= 0: report this token, don't draw; None = nothing is scored
    masks: list[Mask | None] | None  # None = no mask anywhere; the same holds for seen and bias
    seen: list[Seen | None] | None
    bias: list[Bias | None] | None
    choice: npt.NDArray[np.uint32]  # [n]


@dataclass(slots=True)
class Drawn:
    """What the sampler gives for each draw. top_* may be wider than what a draw asked for."""

    token: Int32  # [n]
    logprob: Float32  # [n], raw
    rank: Int32  # [n], 1 = the most likely
    top_ids: Int32  # [n, width]
    top_logprobs: Float32  # [n, width]


@dataclass(slots=True)
class Batch:
    """One forward pass. Sequence i has rows [q_start[i], q_start[i + 1]) at positions pos_start[i] ...

    Arrays of row indices refer to rows of `tokens`. Draws of a plan row: first its scores, then its samples.
    """

    tokens: Int32  # [rows]
    q_start: Int32  # [sequences + 1]
    pos_start: Int32  # [sequences]
    slots: Int32  # [sequences]
    logit_rows: Int32  # [draws]
    hidden_rows: Int32  # [rows whose hidden state is pooled]
    draws: Draws


def build_batch(plan: Plan, slots: Slots, *, settled: bool = True) -> Batch:
    """Update the slots' block tables and lay the plan's rows out. The only loop over rows before the kernels.

    settled: the step before is done. Else LAST_SAMPLED stays in the tokens, for the device to replace.
    """
    tokens: list[int] = []
    q_start, pos_start, lines = [0], [], []
    logit_rows: list[int] = []
    hidden_rows: list[int] = []
    draws = _DrawLists()
    for row in plan.rows:
        slot = row.slot
        if row.table:
            slots.set_table(slot, row.table_start, row.table)
        known = row.tokens
        if settled and LAST_SAMPLED in known:
            last = int(slots.last_sampled[slot])
            known = tuple(last if token == LAST_SAMPLED else token for token in known)
        first = len(tokens)
        tokens.extend(known)
        end = len(tokens)
        lines.append(slot)
        pos_start.append(row.start)
        q_start.append(end)
        if row.score >= 0:
            logit_rows.extend(range(first, first + len(row.targets)))
            draws.score(row)
        if row.sample:
            logit_rows.extend(range(end - 1 - row.drafts, end))
            logit_rows.extend([end - 1] * len(row.choices))
            draws.sample(row, known, slots)
        if row.pooling:
            hidden_rows.extend(range(end - 1 if row.pooling == "last" else first, end))
    _check(plan, tokens, slots, LAST_SAMPLED if not settled else 0)
    return Batch(
        np.array(tokens, np.int32),
        np.array(q_start, np.int32),
        np.array(pos_start, np.int32),
        np.array(lines, np.int32),
        np.array(logit_rows, np.int32),
        np.array(hidden_rows, np.int32),
        draws.arrays(slots),
    )


def row_params(draws: Draws, slots: Slots, i: int) -> RowParams:
    """How draw i is made, for the sampler of the host."""
    slot = int(draws.slot[i])
    return RowParams(
        temperature=float(slots.temperature[slot]),
        top_p=float(slots.top_p[slot]),
        top_k=int(slots.top_k[slot]),
        min_p=float(slots.min_p[slot]),
        repetition=float(slots.repetition[slot]),
        presence=float(slots.presence[slot]),
        frequency=float(slots.frequency[slot]),
        seed=int(slots.seed[slot]),
        choice=int(draws.choice[i]),
        position=int(draws.position[i]),
        seen=draws.seen[i] if draws.seen is not None else None,
        bias=draws.bias[i] if draws.bias is not None else None,
        mask=draws.masks[i] if draws.masks is not None else None,
    )


def split_by_adapter(batch: Batch, slots: Slots) -> list[tuple[str, Batch, Int32, Int32]]:
    """The batch as one batch an adapter, each with the places of its logits and of its hidden states in the whole."""
    names = [slots.adapter[slot] for slot in batch.slots.tolist()]
    lengths = np.diff(batch.q_start)
    sequence_of_row = np.repeat(np.arange(len(names)), lengths)
    parts = []
    for adapter in dict.fromkeys(names):
        mine = np.array([name == adapter for name in names])
        rows = mine[sequence_of_row]
        row_in_part = np.cumsum(rows, dtype=np.int32) - 1
        logits = np.flatnonzero(rows[batch.logit_rows]).astype(np.int32)
        hidden = np.flatnonzero(rows[batch.hidden_rows]).astype(np.int32)
        part = Batch(
            tokens=batch.tokens[rows],
            q_start=np.concatenate([[0], np.cumsum(lengths[mine])]).astype(np.int32),
            pos_start=batch.pos_start[mine],
            slots=batch.slots[mine],
            logit_rows=row_in_part[batch.logit_rows[logits]],
            hidden_rows=row_in_part[batch.hidden_rows[hidden]],
            draws=batch.draws,
        )
        parts.append((adapter, part, logits, hidden))
    return parts


def _check(plan: Plan, tokens: list[int], slots: Slots, lowest: int) -> None:
    """Kernels index without bounds: what would read or write outside is refused here."""
    if tokens and (min(tokens) < lowest or max(tokens) >= slots.vocab_size):
        raise RequestFailed(f"a token id is outside of the vocabulary of {slots.vocab_size}")
    room = slots.tables.shape[1] * slots.block_size
    for row in plan.rows:
        if not row.tokens or row.start < 0 or row.start + len(row.tokens) > room:
            raise RequestFailed(
                f"slot {row.slot}: {len(row.tokens)} tokens from position {row.start} don't fit its {room} positions"
            )


class _DrawLists:
    """Collects draws while the batch is laid out."""

    __slots__ = ("choice", "forced", "masks", "n_top", "position", "seen", "slot")

    def __init__(self) -> None:
        self.slot: list[int] = []
        self.position: list[int] = []
        self.n_top: list[int] = []
        self.forced: list[int] = []
        self.masks: dict[int, Mask] = {}
        self.seen: dict[int, Seen] = {}
        self.choice: dict[int, int] = {}  # of draws for another choice than the slot's

    def score(self, row: Row) -> None:
        n = len(row.targets)
        self.slot.extend([row.slot] * n)
        self.position.extend(range(row.start + 1, row.start + 1 + n))
        self.n_top.extend([row.score] * n)
        self.forced.extend(row.targets)

    def sample(self, row: Row, known: tuple[int, ...], slots: Slots) -> None:
        slot, n = row.slot, row.drafts + 1
        at = len(self.slot)
        position = row.start + len(known) - row.drafts
        self.slot.extend([slot] * n)
        self.position.extend(range(position, position + n))
        self.n_top.extend([max(int(slots.n_top[slot]), row.top)] * n)
        self.forced.extend([-1] * n)
        constraints = slots.constraints[slot]
        if constraints is not None:
            self._constrain(row, known, slots, at)
        elif row.masks:
            for i, mask in enumerate(row.masks):
                if mask is not None:
                    self.masks[at + i] = np.frombuffer(mask, np.uint32)
        for choice in row.choices:
            self._repeat(at, choice)

    def _repeat(self, draw: int, choice: int) -> None:
        """The same draw once more, for another choice."""
        at = len(self.slot)
        for values in (self.slot, self.position, self.n_top, self.forced):
            values.append(values[draw])
        if draw in self.masks:
            self.masks[at] = self.masks[draw]
        if draw in self.seen:
            self.seen[at] = self.seen[draw]
        self.choice[at] = choice

    def _constrain(self, row: Row, known: tuple[int, ...], slots: Slots, at: int) -> None:
        """Masks and seen tokens of a row's draws; each draft counts as seen for the draws after it."""
        constraints = slots.constraints[row.slot]
        assert constraints is not None
        settled = len(known) - row.drafts
        history = constraints.history
        for i in range(row.drafts + 1):
            if history is not None:
                if i == 0:
                    history.advance(row.start, known[:settled])
                else:
                    history.advance(row.start + settled + i - 1, known[settled + i - 1 : settled + i])
                ids, counts = history.seen()
                self.seen[at + i] = (ids.copy(), counts.copy()) if row.drafts else (ids, counts)
            mask = constraints.mask(row.start + settled + i, row.masks[i] if row.masks else None, slots.vocab_size)
            if mask is not None:
                self.masks[at + i] = mask

    def arrays(self, slots: Slots) -> Draws:
        n = len(self.slot)
        bias: list[Bias | None] | None = None
        if slots.n_biased:
            found = [None if (c := slots.constraints[slot]) is None else c.bias for slot in self.slot]
            bias = found if any(b is not None for b in found) else None
        forced = np.array(self.forced, np.int32)
        slot = np.array(self.slot, np.int32)
        choice = slots.choice[slot]
        for i, other in self.choice.items():
            choice[i] = other
        return Draws(
            slot=slot,
            position=np.array(self.position, np.uint32),
            n_top=np.array(self.n_top, np.int32),
            forced=forced if n and forced.max() >= 0 else None,
            masks=[self.masks.get(i) for i in range(n)] if self.masks else None,
            seen=[self.seen.get(i) for i in range(n)] if self.seen else None,
            bias=bias,
            choice=choice,
        )


def results(plan: Plan, drawn: Drawn, hidden: Float32, batch: Batch, slots: Slots) -> tuple[RowResult, ...]:
    """One RowResult a plan row; remembers each slot's last token. hidden [hidden_rows, hidden_size]."""
    token, logprob, rank = drawn.token.tolist(), drawn.logprob.tolist(), drawn.rank.tolist()
    n_top = batch.draws.n_top.tolist()
    out: list[RowResult] = []
    at = pooled = 0

    def take(n: int) -> tuple[Sampled, ...]:
        nonlocal at
        entries = []
        for i in range(at, at + n):
            if n_top[i] < 0:
                entries.append(Sampled(token[i]))
                continue
            k = n_top[i]
            top = tuple(zip(drawn.top_ids[i, :k].tolist(), drawn.top_logprobs[i, :k].tolist(), strict=True))
            entries.append(Sampled(token[i], logprob[i], rank[i], top))
        at += n
        return tuple(entries)

    for row in plan.rows:
        scores = take(len(row.targets)) if row.score >= 0 else ()
        sampled: tuple[Sampled, ...] = ()
        if row.sample:
            sampled = take(row.drafts + 1 + len(row.choices))
            slots.last_sampled[row.slot] = sampled[row.drafts].token
        state = b""
        if row.pooling:
            n = 1 if row.pooling == "last" else len(row.tokens)
            state = _pool(row, hidden[pooled : pooled + n], slots)
            pooled += n
        out.append(RowResult(sampled, scores, state))
    return tuple(out)


def _pool(row: Row, states: Float32, slots: Slots) -> bytes:
    """The last token's state, or the running sum over the sequence, added token by token in float64 so that
    where its prompt was cut changes no bit. [tokens, hidden_size] -> float32 bytes."""
    if row.pooling == "last":
        return bytes(states[-1].astype("<f4").tobytes())
    total = slots.hidden_sum.get(row.slot)
    if total is None or row.start == 0:
        total = np.zeros(states.shape[1], np.float64)
    for state in states:
        total = total + state
    slots.hidden_sum[row.slot] = total
    return bytes(total.astype("<f4").tobytes())
