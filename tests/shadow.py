"""The shadow executor: its KV cache holds token ids, its model is a function of the history it reads back.

It runs a plan's operations, writes each row's tokens through the block table, gathers the whole history through
the table and compares it with the tokens that the slot really has. So every aliasing, eviction, swap, fork or
rollback mistake becomes a failed equality, without any tensor. Sampling is deterministic in (history, seed,
choice), honours masks, banned stop tokens and drafts, and sees only what plans say.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from engine.core.plan import LAST_SAMPLED, Copied, Geometry, KVOp, Plan, Result, Row, RowResult, Sampled, SlotParams
from engine.errors import RequestFailed

EMPTY = -7  # a KV entry that was never written
UNSEEN = -8  # a token behind the window, computed before the slot was taken
NEVER = lambda token: False  # noqa: E731


def next_token(
    history: Sequence[int], seed: int, choice: int, vocab: int, banned: Callable[[int], bool] = NEVER
) -> int:
    """What the model samples after `history`: always the same."""
    draw = zlib.crc32(struct.pack(f"<QI{len(history)}i", seed & (2**64 - 1), choice, *history))
    for shift in range(vocab):
        token = (draw + shift) % vocab
        if not banned(token):
            return token
    raise AssertionError("every token is banned")


def alternatives(history: Sequence[int], vocab: int) -> tuple[tuple[int, float], ...]:
    """Every continuation with its logprob, most likely first; no seed plays a part."""
    draw = zlib.crc32(struct.pack(f"<{len(history)}i", *history))
    return tuple(((draw + i) % vocab, -0.1 - 0.3 * i - (draw >> 8) % 7 / 10) for i in range(vocab))


def scored(history: Sequence[int], vocab: int, token: int, top: int) -> Sampled:
    """`token` after `history`, as the worker reports it."""
    every = alternatives(history, vocab)
    rank = next(n for n, (other, _) in enumerate(every, 1) if other == token)
    return Sampled(token, every[rank - 1][1], rank, every[:top])


class Slot:
    """What the worker knows of a slot: its parameters, its table, and the tokens that stand in it."""

    def __init__(self, params: SlotParams) -> None:
        self.params = params
        self.table: list[int] = []
        self.tokens: dict[int, int] = {}
        self.last = params.output[-1] if params.output else -1
        self.sum = 0


class ShadowExecutor:
    """An Executor over token ids. With `geometry.pages_per_slot` its device is address ranges, mapped page by page.

    With `geometry.window` its model is a function of the last tokens alone, and it reads nothing before them.
    """

    def __init__(self, geometry: Geometry, before: ShadowExecutor | None = None) -> None:
        """`before`: an executor that died; its disk is still there."""
        self.geometry = geometry
        self.size = geometry.block_size
        self.pages = geometry.pages_per_slot
        blocks = self.pages * geometry.max_num_seqs or geometry.num_blocks
        self.device = [[EMPTY] * self.size for _ in range(blocks)]
        self.mapped = [not self.pages] * blocks
        self.host = [[EMPTY] * self.size for _ in range(geometry.host_blocks)]
        self.disk = [[EMPTY] * self.size for _ in range(geometry.disk_blocks)] if before is None else before.disk
        self.disk_keys: dict[int, bytes] = {} if before is None else before.disk_keys
        self.slots: dict[int, Slot] = {}
        self.results: deque[Result | None] = deque()
        self.fail_next = 0  # so many steps raise, and do nothing of what they were asked
        self.refuse_next = False  # the next step isn't even taken
        self.may_write: Callable[[int], bool] = lambda block: True
        self.broken: AssertionError | None = None
        self.plans: list[Plan] = []
        self.keep_plans = False
        self.copy_s_per_block = 1e-6
        self.compute_s_per_token = 1e-4

    def start(self) -> Geometry:
        return self.geometry

    def submit(self, plan: Plan) -> None:
        if self.refuse_next:
            self.refuse_next = False
            raise RequestFailed("the shadow was told to refuse")
        try:
            self._submit(plan)
        except AssertionError as error:
            self.broken = error  # the engine takes it for a step that failed and goes on; a test must not
            raise

    def _submit(self, plan: Plan) -> None:
        assert len(self.results) < 2, "at most two steps in flight"
        assert plan.rows or plan.ops, "a plan without rows is no step"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "one row a slot"
        if self.keep_plans:
            self.plans.append(plan)
        if self.fail_next or None in self.results:
            self.fail_next = max(0, self.fail_next - 1)
            self.results.append(None)
            return
        for op in plan.ops:
            self._move(op)
        self.disk_keys.update(plan.disk_keys)
        for slot, params in plan.slots:
            self.slots[slot] = Slot(params)
        rows = tuple(self._row(row) for row in plan.rows)
        tokens = sum(len(row.tokens) for row in plan.rows)
        moved = Counter(op.kind for op in plan.ops if op.kind not in ("map", "unmap"))
        size = self.geometry.bytes_per_block
        self.results.append(
            Result(
                rows,
                compute_s=tokens * self.compute_s_per_token,
                copies=tuple(Copied(kind, n * size, n * self.copy_s_per_block) for kind, n in moved.items()),
            )
        )

    def collect(self) -> Result:
        result = self.results.popleft()
        if result is None:
            raise RequestFailed("the shadow was told to fail")
        return result

    def read_block(self, block: int) -> bytes:
        return struct.pack(f"<{self.size}i", *self.device[block]).ljust(self.geometry.bytes_per_block, b"\0")

    def write_block(self, block: int, data: bytes) -> None:
        self.device[block] = list(struct.unpack_from(f"<{self.size}i", data))

    def load_adapter(self, name: str, directory: str) -> None:
        """Its tokens are the base model's: the shadow computes nothing."""

    def unload_adapter(self, name: str) -> None: ...

    def close(self) -> None:
        self.results.clear()

    def _move(self, op: KVOp) -> None:
        match op.kind:
            case "copy":
                assert self.mapped[op.src], "a page that is copied has memory"
                assert self.mapped[op.dst], "a page that is copied to has memory"
                self.device[op.dst] = list(self.device[op.src])
            case "out":
                self.host[op.dst] = list(self.device[op.src])
            case "in":
                self.device[op.dst] = list(self.host[op.src])
            case "disk_out":
                self.disk[op.dst] = list(self.host[op.src])
                self.disk_keys.pop(op.dst, None)
            case "disk_in":
                self.host[op.dst] = list(self.disk[op.src])
            case "map" | "unmap":
                assert 0 <= op.dst < self.pages, "a page of another slot"
                page = op.src * self.pages + op.dst
                assert op.kind == "unmap" or not self.mapped[page], f"{op} of a page that has memory"
                self.mapped[page] = op.kind == "map"
                self.device[page] = [EMPTY] * self.size
                assert sum(self.mapped) <= self.geometry.num_blocks, "more pages are mapped than there are"

    def _row(self, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        if row.table:
            slot.table[row.table_start :] = row.table
        tokens = [slot.last if token == LAST_SAMPLED else token for token in row.tokens]
        assert tokens, "a row computes tokens"
        assert min(tokens) >= 0, "a token that nobody knows"
        end = row.start + len(tokens)
        assert end <= len(slot.table) * self.size, "the table covers the row"
        for position, token in enumerate(tokens, row.start):
            block = slot.table[position // self.size]
            assert self.mapped[block], "a page is written before it is mapped"
            assert self.may_write(block), f"block {block} is shared and written"
            self.device[block][position % self.size] = token
            slot.tokens[position] = token
        low = max(0, row.start - self.geometry.window) if self.geometry.window else 0
        history = [slot.tokens.get(p, UNSEEN) for p in range(low)]
        history += [self.device[slot.table[p // self.size]][p % self.size] for p in range(low, end)]
        assert EMPTY not in history, "KV that was never computed is read"
        for position, token in enumerate(history):  # a cached prefix, which the slot wasn't given, the oracle judges
            assert slot.tokens.get(position, token) == token, "the KV of another token is read"
        return self._result(slot, row, history)

    def _result(self, slot: Slot, row: Row, history: list[int]) -> RowResult:
        vocab = self.geometry.vocab_size
        scores = tuple(
            scored(self._seen(history[: row.start + i + 1]), vocab, target, row.score)
            for i, target in enumerate(row.targets)
        )
        hidden = b""
        if row.pooling == "mean":
            slot.sum += sum(history[row.start :])
            hidden = struct.pack("<f", float(slot.sum))
        elif row.pooling:
            hidden = last_hidden(self._seen(history))
        if not row.sample:
            return RowResult((), scores, hidden)
        masks = row.masks or (None,) * (row.drafts + 1)
        assert len(masks) == row.drafts + 1, "a mask for each sampled position"
        sampled = []
        for i, mask in enumerate(masks):
            sampled.append(self._draw(slot.params, row, history[: len(history) - row.drafts + i], mask))
        right = 0
        while right < row.drafts and sampled[right].token == row.tokens[len(row.tokens) - row.drafts + right]:
            right += 1
        slot.last = sampled[right].token
        assert not (row.drafts and row.choices), "other choices draw at the prompt's end, where nothing is guessed"
        for choice in row.choices:
            params = msgspec.structs.replace(slot.params, choice=choice)
            sampled.append(self._draw(params, row, history, masks[0]))
        return RowResult(tuple(sampled), scores, hidden)

    def _seen(self, history: list[int]) -> list[int]:
        return history[-self.geometry.window :]

    def _draw(self, params: SlotParams, row: Row, history: list[int], mask: bytes | None) -> Sampled:
        output = history[params.prompt_len :]
        known = list(params.output[: len(output)])
        differ = {(one, other) for one, other in zip(output, known, strict=False) if one not in (other, UNSEEN)}
        assert not differ, "the slot was told another output"
        early = len(output) < params.min_tokens

        def banned(token: int) -> bool:
            forbidden = mask is not None and not mask[token // 8] >> token % 8 & 1
            return forbidden or (early and token in params.stop_ids)

        history = self._seen(history)
        token = next_token(history, params.seed, params.choice, self.geometry.vocab_size, banned)
        wanted = row.top if row.top >= 0 else (params.logprobs or 0)
        return scored(history, self.geometry.vocab_size, token, wanted)


def last_hidden(history: Sequence[int]) -> bytes:
    """The hidden state of the last token: a function of all of them."""
    return struct.pack("<f", float(zlib.crc32(struct.pack(f"<{len(history)}i", *history)) % 65536))
