"""What the worker keeps of each sequence slot between steps: numpy arrays changed in place, O(changes)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.core.plan import SlotParams
from engine.errors import RequestFailed
from engine.worker.history import History
from engine.worker.settings import ExecutorSettings

Mask = npt.NDArray[np.uint32]  # allowed tokens, one bit each, (vocab + 31) // 32 words
Bias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


@dataclass(slots=True)
class Constraints:
    """What a slot's sampling forbids or shifts beyond its numbers. Most slots have none."""

    prompt_len: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    allowed: Mask | None
    bias: Bias | None
    history: History | None

    def mask(self, position: int, grammar: bytes | None, vocab_size: int) -> Mask | None:
        """Tokens allowed at `position`: grammar, allowed ids, min_tokens and bad words together; None = all.

        The history must stand right before the position. Never empty, for the other sequences of the step would
        fail with this one: where nothing is left, allowed ids give way to the grammar, and bans to both.
        """
        banned = list(self.stop_ids) if position - self.prompt_len < self.min_tokens else []
        if self.history is not None:
            banned.extend(word[-1] for word in self.bad_words if self.history.ends_with(word[:-1]))
        mask = self.allowed
        if grammar is not None:
            words = np.frombuffer(grammar, np.uint32)
            both = words if mask is None else mask & words
            mask = both if both.any() else words
        if not banned:
            return mask
        left = np.full((vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32) if mask is None else mask.copy()
        for token in banned:
            left[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        return left if left.any() else mask


class Slots:
    """Per-slot state. Line i of every array belongs to slot i; a slot is set when a sequence takes it."""

    def __init__(self, settings: ExecutorSettings, vocab_size: int, num_blocks: int) -> None:
        n = settings.max_num_seqs
        self._num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.block_size = settings.block_size
        self.tables = np.zeros((n, -(-settings.max_model_len // settings.block_size)), np.int32)
        self.last_sampled = np.zeros(n, np.int32)
        self.temperature = np.zeros(n, np.float32)
        self.top_p = np.ones(n, np.float32)
        self.min_p = np.zeros(n, np.float32)
        self.top_k = np.zeros(n, np.int32)
        self.seed = np.zeros(n, np.uint64)
        self.choice = np.zeros(n, np.uint32)
        self.repetition = np.ones(n, np.float32)
        self.presence = np.zeros(n, np.float32)
        self.frequency = np.zeros(n, np.float32)
        self.n_top = np.full(n, -1, np.int32)
        self.constraints: list[Constraints | None] = [None] * n
        self.n_biased = 0  # slots with a logit bias
        self.adapters: set[str] = set()  # the loaded ones
        self.adapter: list[str] = [""] * n  # "" = the base model
        self.hidden_sum: dict[int, npt.NDArray[np.float64]] = {}  # running sums of mean pooling

    def take(self, slot: int, params: SlotParams) -> None:
        """A sequence takes the slot; nothing of the one before it remains but its block table, which rows replace."""
        if params.adapter and params.adapter not in self.adapters:
            raise RequestFailed(f"adapter {params.adapter!r} is not loaded")
        self.adapter[slot] = params.adapter
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.top_k[slot] = params.top_k
        self.seed[slot] = np.uint64(params.seed & 0xFFFFFFFFFFFFFFFF)
        self.choice[slot] = params.choice
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.n_top[slot] = -1 if params.logprobs is None else params.logprobs
        self.hidden_sum.pop(slot, None)
        self.n_biased -= self._is_biased(slot)
        self.constraints[slot] = self._constraints(params)
        self.n_biased += self._is_biased(slot)
        if params.output:
            self.last_sampled[slot] = params.output[-1]

    def set_table(self, slot: int, start: int, blocks: tuple[int, ...]) -> None:
        """Logical blocks start, start + 1, ... of a slot are now these physical ones."""
        end = start + len(blocks)
        if start < 0 or end > self.tables.shape[1] or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise RequestFailed(
                f"slot {slot}: block table [{start}, {end}) = {blocks} is outside of {self.tables.shape[1]} entries "
                f"or names a block outside of {self._num_blocks}"
            )
        self.tables[slot, start:end] = blocks

    def _is_biased(self, slot: int) -> bool:
        constraints = self.constraints[slot]
        return constraints is not None and constraints.bias is not None

    def _constraints(self, params: SlotParams) -> Constraints | None:
        penalties = (params.repetition_penalty - 1.0, params.presence_penalty, params.frequency_penalty)
        wants_history = any(penalties) or bool(params.bad_words)
        shifts = params.logit_bias or params.allowed_token_ids or (params.min_tokens and params.stop_ids)
        if not (wants_history or shifts):
            return None
        bias = None
        if params.logit_bias:
            ids = np.fromiter(params.logit_bias.keys(), np.int32)
            bias = (ids, np.fromiter(params.logit_bias.values(), np.float32))
        return Constraints(
            prompt_len=params.prompt_len,
            min_tokens=params.min_tokens,
            stop_ids=params.stop_ids,
            bad_words=params.bad_words,
            allowed=mask_of(params.allowed_token_ids, self.vocab_size) if params.allowed_token_ids else None,
            bias=bias,
            history=History(params.prompt, params.output) if wants_history else None,
        )


def mask_of(ids: Iterable[int], vocab_size: int) -> Mask:
    """A bitmask that allows just these ids."""
    mask = np.zeros((vocab_size + 31) // 32, np.uint32)
    for token in ids:
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    return mask
