"""The shadow executor: its KV cache holds token ids, its model is a function of the history it reads back.

It runs a plan's operations, writes each row's tokens through the block table, gathers the whole history through
the table and compares it with the tokens that the slot really has. So every aliasing, eviction, swap, fork or
rollback mistake becomes a failed equality, without any tensor. Sampling is deterministic in (history, seed,
choice), honours masks, banned stop tokens and drafts, and sees only what plans say.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence

from engine.core.plan import (
    LAST_SAMPLED,
    Geometry,
    KVOp,
    Plan,
    Result,
    Row,
    RowResult,
    Sampled,
    SlotParams,
)
from engine.errors import RequestFailed

EMPTY = -7  # a KV entry that was never written


def next_token(history: Sequence[int], seed: int, choice: int, vocab: int, banned: Callable[[int], bool]) -> int:
    """What the model samples after `history`: greedy in nothing, the same for ever."""
    draw = zlib.crc32(struct.pack(f"<QI{len(history)}i", seed & (2**64 - 1), choice, *history))
    for shift in range(vocab):
        token = (draw + shift) % vocab
        if not banned(token):
            return token
    raise AssertionError("every token is banned")


def alternatives(history: Sequence[int], vocab: int, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely continuations with logprobs that never rise; no seed plays a part."""
    draw = zlib.crc32(struct.pack(f"<{len(history)}i", *history))
    first = draw % vocab
    return tuple(((first + i) % vocab, -0.1 - 0.3 * i - (draw >> 8) % 7 / 10) for i in range(min(count, vocab)))


class Slot:
    """What the worker knows of a slot: its parameters, its table, and the tokens that stand in it."""

    def __init__(self, params: SlotParams) -> None:
        self.params = params
        self.table: list[int] = []
        self.tokens: dict[int, int] = {}
        self.last = params.output[-1] if params.output else -1
        self.sum = 0


class ShadowExecutor:
    """An Executor over token ids. `fail_at`: steps that raise. `shared`: which device blocks may not be written."""

    def __init__(self, geometry: Geometry, *, rows: int = 0, pages_per_row: int = 0) -> None:
        self.geometry = geometry
        self.size = geometry.block_size
        virtual = rows * pages_per_row
        self.device = [[EMPTY] * self.size for _ in range(virtual or geometry.num_blocks)]
        self.mapped = [not virtual] * len(self.device)
        self.pages_per_row = pages_per_row
        self.host = [[EMPTY] * self.size for _ in range(geometry.host_blocks)]
        self.disk = [[EMPTY] * self.size for _ in range(geometry.disk_blocks)]
        self.slots: dict[int, Slot] = {}
        self.results: deque[Result | None] = deque()
        self.fail_at: set[int] = set()
        self.may_write: Callable[[int], bool] = lambda block: True
        self.plans: list[Plan] = []
        self.keep_plans = False
        self.copy_s_per_block = 1e-6
        self.compute_s_per_token = 1e-4
        self.peak_mapped = 0

    def start(self) -> Geometry:
        return self.geometry

    def submit(self, plan: Plan) -> None:
        assert len(self.results) < 2, "at most two steps in flight"
        assert plan.rows, "a plan without rows is no step"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "one row a slot"
        if self.keep_plans:
            self.plans.append(plan)
        if plan.step in self.fail_at:
            self.results.append(None)  # a step that raises may have done nothing of what it was asked
            return
        for op in plan.ops:
            self._move(op)
        for slot, params in plan.slots:
            self.slots[slot] = Slot(params)
        rows = tuple(self._row(row) for row in plan.rows)
        tokens = sum(len(row.tokens) for row in plan.rows)
        moved = sum(op.kind not in ("map", "unmap") for op in plan.ops)
        self.results.append(
            Result(
                rows,
                compute_s=tokens * self.compute_s_per_token,
                copy_s=moved * self.copy_s_per_block,
                copy_bytes=moved * self.geometry.bytes_per_block,
            )
        )

    def collect(self) -> Result:
        result = self.results.popleft()
        if result is None:
            raise RequestFailed("the shadow was told to fail")
        return result

    def close(self) -> None:
        self.results.clear()

    def _move(self, op: KVOp) -> None:
        match op.kind:
            case "copy":
                assert self.mapped[op.src] and self.mapped[op.dst], "both pages of a copy are mapped"
                self.device[op.dst] = list(self.device[op.src])
            case "out":
                self.host[op.dst] = list(self.device[op.src])
            case "in":
                self.device[op.dst] = list(self.host[op.src])
            case "disk_out":
                self.disk[op.dst] = list(self.host[op.src])
            case "disk_in":
                self.host[op.dst] = list(self.disk[op.src])
            case "map" | "unmap":
                page = op.src * self.pages_per_row + op.dst
                assert self.mapped[page] == (op.kind == "unmap"), f"{op} of a page that is so already"
                self.mapped[page] = op.kind == "map"
                self.device[page] = [EMPTY] * self.size
                self.peak_mapped = max(self.peak_mapped, sum(self.mapped))
                assert sum(self.mapped) <= self.geometry.num_blocks, "more pages are mapped than there are"

    def _row(self, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        params = slot.params
        if row.table:
            slot.table[row.table_start :] = row.table
        tokens = [slot.last if token == LAST_SAMPLED else token for token in row.tokens]
        assert tokens and min(tokens) >= 0, "a row computes tokens"
        known = len(slot.table) * self.size
        assert row.start + len(tokens) <= known, "the table covers the row"
        for position, token in enumerate(tokens, row.start):
            block = slot.table[position // self.size]
            assert self.mapped[block], "a page is written before it is mapped"
            assert self.may_write(block), f"block {block} is shared and written"
            self.device[block][position % self.size] = token
            slot.tokens[position] = token
        end = row.start + len(tokens)
        history = [self.device[slot.table[p // self.size]][p % self.size] for p in range(end)]
        for position in range(end):  # what this slot was given itself; a cached prefix is judged by the result
            assert slot.tokens.get(position, history[position]) == history[position], "the KV of another token"
        assert EMPTY not in history, "KV that was never computed is read"
        return self._sample(slot, params, row, history)

    def _sample(self, slot: Slot, params: SlotParams, row: Row, history: list[int]) -> RowResult:
        vocab = self.geometry.vocab_size
        scores: list[Sampled] = []
        for i, target in enumerate(row.targets):
            top = alternatives(history[: row.start + i + 1], vocab, vocab)
            rank = next(n for n, (token, _) in enumerate(top, 1) if token == target)
            scores.append(Sampled(target, top[rank - 1][1], rank, top[: row.score]))
        hidden = b""
        if row.pooling == "mean":
            slot.sum += sum(history[row.start :]) if row.start else sum(history)
            hidden = struct.pack("<f", float(slot.sum))
        elif row.pooling:
            hidden = struct.pack("<f", float(zlib.crc32(struct.pack(f"<{len(history)}i", *history)) % 65536))
        if not row.sample:
            return RowResult((), tuple(scores), hidden)
        sampled: list[Sampled] = []
        masks = row.masks or (None,) * (row.drafts + 1)
        assert len(masks) == row.drafts + 1, "a mask for each sampled position"
        for i in range(row.drafts + 1):
            seen = history[: len(history) - row.drafts + i]
            if len(seen) > params.prompt_len:
                assert (
                    seen[params.prompt_len :][: len(params.output)]
                    == list(params.output)[: len(seen) - params.prompt_len]
                ), "the slot's output is not the sequence's"
            generated = len(seen) - params.prompt_len
            top = alternatives(seen, vocab, vocab)
            token = next_token(seen, params.seed, params.choice, vocab, self._banned(params, generated, masks[i]))
            rank = next(n for n, (other, _) in enumerate(top, 1) if other == token)
            wanted = row.top if row.top >= 0 else (params.logprobs or 0)
            sampled.append(Sampled(token, top[rank - 1][1], rank, top[:wanted]))
        right = 0
        while right < row.drafts and sampled[right].token == row.tokens[len(row.tokens) - row.drafts + right]:
            right += 1
        slot.last = sampled[right].token
        return RowResult(tuple(sampled), tuple(scores), hidden)

    def _banned(self, params: SlotParams, generated: int, mask: bytes | None) -> Callable[[int], bool]:
        early = generated < params.min_tokens

        def banned(token: int) -> bool:
            if early and token in params.stop_ids:
                return True
            return mask is not None and not mask[token // 8] >> token % 8 & 1

        return banned
