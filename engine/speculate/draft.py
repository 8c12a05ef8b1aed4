"""Draft-model speculation: a small model of the same vocabulary runs ahead, the served one checks its tokens at once.

(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023.) The draft samples by the
sequence's own parameters and with its very draws, keyed by (seed, choice, position): where both models agree on the
distribution they agree on the token, also when it is sampled. It has an executor, slots and a KV pool of its own,
whose blocks it shares by prefix like the served model does; whoever was asked for longest ago gives way.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from engine.core.plan import Executor, Geometry, Plan, Row, SlotParams
from engine.core.proposer import Ask
from engine.errors import RequestFailed
from engine.kv.costs import Costs
from engine.kv.paged import PagedKV
from engine.speculate.worth import Worth

CHANCE = 0.7  # that a guess is right, before any was seen
WEIGHT_OVERALL, WEIGHT_OWN = 0.02, 0.1  # of one guess in the chances of all sequences, and in one's own
ROUNDS_KEPT = 9  # whose time is remembered
FEW_TOKENS = 4  # that a sequence has more than the draft knows, in a step that is no catching up
CATCH_UP_STEPS = 64  # over so many steps of guessing it must pay to compute what the draft doesn't know of a text
DRAFT_TOKEN_S = 1e-3  # of a token of a prompt, before any was seen
WARM_TOKENS, WARM_STEPS = 64, 4
WARM_SEQUENCE = -1  # no sequence of a scheduler
TRY_SHARE = 0.01  # of the time goes into trying anew where guessing doesn't pay
TRY_DRAFTS = 2


class DraftProposer:
    """A `Proposer`. All sequences of a step are guessed together, a token of each at a time."""

    def __init__(
        self, executor: Executor, geometry: Geometry, *, most_drafts: int, max_batched_tokens: int, vocab_size: int
    ) -> None:
        """`executor` has been started and gave `geometry`; `vocab_size` is that of the served model."""
        self._executor = executor
        self._vocab_size = vocab_size
        self._max_batched_tokens = max_batched_tokens
        self._kv = PagedKV(
            geometry.num_blocks, geometry.block_size, Costs(geometry.bytes_per_block, geometry.block_size)
        )
        self.max_tokens = min(geometry.max_model_len, self._kv.max_tokens)  # of a sequence with its guesses
        self._draft_vocab_size = geometry.vocab_size
        self._slots = list(range(geometry.max_num_seqs))
        self._lines: dict[int, _Line] = {}
        self._seated: OrderedDict[int, _Line] = OrderedDict()  # those with a slot and KV, the next victim first
        self._worth = Worth(most_drafts)
        self._chance = CHANCE  # of all sequences: that a guess is right, if all before it were
        self._rounds: deque[float] = deque(maxlen=ROUNDS_KEPT)
        self._round_s = 0.0  # of a guess for all sequences: the median of those kept
        self._token_s = DRAFT_TOKEN_S  # of a token new to the draft: the least so far, for the first ones are cold
        self._since_try_s = 0.0
        self._steps = 0

    def warm_up(self) -> None:
        """Guess a few times, so that what is measured of the first requests isn't the cold memory."""
        length, chance = min(WARM_TOKENS, self.max_tokens // 2), self._chance
        for tokens in ([0] * n for n in range(length, length + WARM_STEPS)):
            self.number(WARM_SEQUENCE, tokens, 1)
            self.propose([Ask(WARM_SEQUENCE, tokens, 2, "", SlotParams)])
        self.forget(WARM_SEQUENCE)
        self._chance = chance

    # ---------------------------------------------------------------- what the scheduler asks

    def number(self, seq: int, tokens: Sequence[int], limit: int) -> int:
        """See `Proposer`."""
        line = self._lines.get(seq)
        if line is None:
            line = self._lines[seq] = _Line(self._chance)
            line.failed = max(tokens) >= self._draft_vocab_size
        for right in line.judge(tokens):
            self._chance += WEIGHT_OVERALL * (right - self._chance)
        limit = min(limit, self.max_tokens - len(tokens))
        if limit < 1 or line.failed:
            return 0
        once_s = max(0, len(tokens) - line.computed - 1) * self._token_s
        number = self._worth.drafts([line.chance] * limit, self._round_s, once_s / CATCH_UP_STEPS)
        if number:
            return number
        number = min(TRY_DRAFTS, limit)
        cost_s = once_s + number * self._round_s + self._worth.extra_s(number)
        return number if cost_s < TRY_SHARE * self._since_try_s else 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """See `Proposer`. Who has much to catch up with gets no guess before that is done."""
        self._since_try_s = 0.0
        self._steps += 1
        for ask in asks:
            self._lines[ask.seq].guess = []
        began, rounds = time.perf_counter(), 1
        try:
            going, caught_up = self._catch_up(asks)
            while going := [ask for ask in going if len(self._lines[ask.seq].guess) < ask.number]:
                self._run(going, [self._row(ask, self._lines[ask.seq].guess[-1:]) for ask in going], [])
                rounds += 1
            if 0 < caught_up <= FEW_TOKENS * len(asks):
                self._rounds.append((time.perf_counter() - began) / rounds)
                self._round_s = statistics.median(self._rounds)
        except RequestFailed:
            for ask in asks:
                self._unseat(ask.seq)
                self._lines[ask.seq].failed = True
        return [self._lines[ask.seq].settle(len(ask.tokens), self._vocab_size) for ask in asks]

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None:
        """See `Proposer`."""
        self._since_try_s += seconds
        self._worth.saw_step(sequences, tokens, drafts, seconds)

    def forget(self, seq: int) -> None:
        """See `Proposer`."""
        self._unseat(seq)
        self._lines.pop(seq, None)

    def close(self) -> None:
        """See `Proposer`."""
        self._executor.close()

    # ---------------------------------------------------------------- the draft's own steps

    def _catch_up(self, asks: Sequence[Ask]) -> tuple[list[Ask], int]:
        """Compute what the draft doesn't know of the texts yet.

        Returns who has its first guess now, and how many tokens were computed.
        """
        began = time.perf_counter()
        budget = self._max_batched_tokens
        running: list[Ask] = []
        rows: list[Row] = []
        slots: list[tuple[int, SlotParams]] = []
        for ask in sorted(asks, key=lambda ask: len(ask.tokens) - self._lines[ask.seq].computed):
            if budget == 0 or not self._seat(ask):
                continue
            line = self._lines[ask.seq]
            tokens = ask.tokens[line.computed : line.computed + budget]
            if line.unknown:
                slots.append((line.slot, self._params(ask)))
                line.unknown = False
            rows.append(self._row(ask, tokens))
            running.append(ask)
            budget -= len(tokens)
        if not rows:
            return [], 0
        self._run(running, rows, slots)
        computed = sum(len(row.tokens) for row in rows)
        if computed > FEW_TOKENS * len(rows):
            self._token_s = min(self._token_s, (time.perf_counter() - began) / computed)
        for ask in running:
            self._kv.commit(ask.seq, ask.tokens, self._lines[ask.seq].computed)
        return [ask for ask in running if self._lines[ask.seq].guess], computed

    def _seat(self, ask: Ask) -> bool:
        """Slot and KV for its tokens and guesses; False when only those of this step could give way."""
        line, total = self._lines[ask.seq], len(ask.tokens) + ask.number - 1
        if line.slot >= 0:
            self._seated.move_to_end(ask.seq)
        line.step = self._steps
        while True:
            if line.slot < 0 and self._slots:
                found = self._kv.admit(ask.seq, ask.tokens, ask.salt, len(ask.tokens) - 1, 0)
                if found is not None:
                    line.slot, line.computed, line.unknown = self._slots.pop(), found, True
                    self._kv.seat(ask.seq, line.slot)
                    self._seated[ask.seq] = line
            if line.slot >= 0 and self._kv.extend(ask.seq, line.computed, total):
                return True
            victim = next(iter(self._seated), None)
            if victim is None or self._seated[victim].step == self._steps:
                return False
            self._unseat(victim)

    def _unseat(self, seq: int) -> None:
        line = self._seated.pop(seq, None)
        if line is not None:
            self._kv.release(seq)
            self._slots.append(line.slot)
            line.slot, line.computed = -1, 0

    def _params(self, ask: Ask) -> SlotParams:
        """How the sequence samples, as far as a model without its adapter can."""
        params = ask.params()
        size = self._draft_vocab_size
        return msgspec.structs.replace(
            params,
            adapter="",
            logprobs=None,
            logit_bias={token: bias for token, bias in params.logit_bias.items() if token < size},
            allowed_token_ids=tuple(token for token in params.allowed_token_ids if token < size),
            bad_words=tuple(word for word in params.bad_words if max(word) < size),
            stop_ids=tuple(token for token in params.stop_ids if token < size),
        )

    def _row(self, ask: Ask, tokens: Sequence[int]) -> Row:
        line = self._lines[ask.seq]
        start, known = self._kv.changes(ask.seq)
        sample = line.computed + len(tokens) >= len(ask.tokens)
        return Row(line.slot, line.computed, tuple(tokens), start, known, sample)

    def _run(self, asks: Sequence[Ask], rows: list[Row], slots: list[tuple[int, SlotParams]]) -> None:
        """One step of the draft; what it samples are guesses. Raises RequestFailed."""
        ops, _ = self._kv.drain()
        self._executor.submit(Plan(self._steps, tuple(rows), ops, tuple(slots)))
        for ask, row, got in zip(asks, rows, self._executor.collect().rows, strict=True):
            line = self._lines[ask.seq]
            line.computed += len(row.tokens)
            line.guess += [sampled.token for sampled in got.sampled]


class _Line:
    """What the draft knows of one sequence."""

    __slots__ = ("chance", "computed", "failed", "guess", "known", "slot", "step", "unknown")

    def __init__(self, chance: float) -> None:
        self.slot = -1
        self.unknown = True  # the executor hasn't been told how it samples
        self.computed = 0  # tokens that have KV; beyond `known` those are guesses
        self.known = 0  # tokens when it was last asked for
        self.guess: list[int] = []  # what was guessed to follow them
        self.chance = chance  # that a guess is right, if all before it were
        self.step = 0  # of the proposer, when it was last asked for
        self.failed = False  # the draft can't compute it

    def judge(self, tokens: Sequence[int]) -> list[bool]:
        """Compare the guesses with what came: for each that could be judged, was it right?

        The KV of those that were wrong is given up; the last token is always computed again, for its logits.
        """
        judged: list[bool] = []
        came = tokens[self.known : self.known + len(self.guess)]
        for token, guess in zip(came, self.guess, strict=False):
            judged.append(token == guess)
            self.chance += WEIGHT_OWN * (judged[-1] - self.chance)
            if not judged[-1]:
                break
        if came:
            self.computed = min(self.computed, self.known + sum(judged))
            self.guess = []
        self.computed = min(self.computed, len(tokens) - 1)
        return judged

    def settle(self, known: int, vocab_size: int) -> list[int]:
        """The guesses that follow `known` tokens, up to the first that the served model doesn't know."""
        self.known = known
        foreign = next((i for i, token in enumerate(self.guess) if token >= vocab_size), len(self.guess))
        del self.guess[foreign:]
        return list(self.guess)
