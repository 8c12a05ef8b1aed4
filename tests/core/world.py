"""A core over the shadow executor, a client that remembers what it was told, and the oracle of what is right.

The oracle is written without any of the engine's code: it walks the shadow's model token by token.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.api import AddRequest, Delta, FinishReason, Grammar, SamplingParams, Stats
from engine.core.engine import EngineCore
from engine.core.plan import Geometry
from engine.core.proposer import Ask
from engine.core.settings import CoreSettings
from tests.shadow import ShadowExecutor, alternatives, last_hidden, next_token, scored

VOCAB = 40
EOS = frozenset({7})


class StripedGrammar:
    """A Constraint: the n-th token is n modulo `stripe`; after `length` tokens it is complete. Ready after `delay`."""

    def __init__(self, stripe: int, length: int, delay: int) -> None:
        self.stripe, self.length, self.delay = stripe, length, delay
        self.taken = 0

    def ready(self) -> bool:
        self.delay -= 1
        return self.delay < 0

    def failed(self) -> str:
        return "stripes of zero" if self.stripe == 0 else ""

    def allows(self, token: int) -> bool:
        return token % self.stripe == self.taken % self.stripe

    def mask(self) -> bytes | None:
        words = bytearray(-(-VOCAB // 32) * 4)
        for token in range(VOCAB):
            if self.allows(token):
                words[token // 8] |= 1 << token % 8
        return bytes(words)

    def advance(self, token: int) -> bool:
        if not self.allows(token):
            return False
        self.taken += 1
        return True

    def rollback(self, tokens: int) -> None:
        self.taken -= tokens
        assert self.taken >= 0

    def stopped(self) -> bool:
        return self.taken >= self.length

    def fork(self) -> StripedGrammar:
        copy = StripedGrammar(self.stripe, self.length, self.delay)
        copy.taken = self.taken
        return copy


def compile_stripes(grammar: Grammar) -> StripedGrammar:
    """A ConstraintFactory. The text is "stripe length delay"."""
    stripe, length, delay = map(int, grammar.text.split())
    return StripedGrammar(stripe, length, delay)


class HalfRight:
    """A Proposer: what the model samples for seed 0 and choice 0, which others may take or leave."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.forgotten: list[int] = []

    def number(self, seq: int, tokens: Sequence[int], limit: int) -> int:
        assert seq not in self.forgotten
        return limit

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        guesses = []
        for ask in asks:
            known = list(ask.tokens)
            for i in range(ask.number):
                token = next_token(known[-self.window :], 0, 0, VOCAB)
                known.append(token if (len(known) + i) % 5 else (token + 1) % VOCAB)
            guesses.append(known[len(ask.tokens) :])
        return guesses

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None:
        assert 0 <= drafts <= tokens - sequences

    def forget(self, seq: int) -> None:
        assert seq not in self.forgotten, "a sequence ends once"
        self.forgotten.append(seq)

    def close(self) -> None: ...


@dataclass
class Answer:
    """What the client got for one choice."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    last: Delta | None = None  # the terminal one


class World:
    """One core after another (crashes), the same client."""

    def __init__(self, geometry: Geometry, settings: CoreSettings, *, drafts: bool = False) -> None:
        self.settings = settings
        self.drafts = drafts
        self.now = 0.0
        self.crashes = 0
        self.requests: dict[str, AddRequest] = {}
        self.answers: dict[tuple[str, int], Answer] = {}
        self.disturbed: set[str] = set()  # may have ended early: aborted, or in a step that failed
        self.executor = ShadowExecutor(geometry)
        self.core = self._start()

    def _start(self) -> EngineCore:
        executor = self.executor
        proposer = HalfRight(executor.geometry.window) if self.drafts else None
        core = EngineCore(
            executor, executor.start(), self.settings, EOS, compile_stripes, lambda: self.now, proposer=proposer
        )
        if not executor.pages:

            def may_write(block: int) -> bool:
                return next(view.refs for view in core.kv.blocks() if view.id == block) == 1

            executor.may_write = may_write
        return core

    # ---------------------------------------------------------------- what the client does

    def add(self, id: str, prompt: Sequence[int], *, arrival: float | None = None, **fields: Any) -> AddRequest:
        """Send a request; `fields` go to AddRequest or SamplingParams, whichever has them."""
        outer = {name: fields.pop(name) for name in list(fields) if name in AddRequest.__struct_fields__}
        params = SamplingParams(**{"seed": 0, **fields})
        request = AddRequest(
            id=id, prompt=tuple(prompt), params=params, arrival=self.now if arrival is None else arrival, **outer
        )
        self.requests[id] = request
        for choice in range(params.n):
            self.answers[id, choice] = Answer()
        self.core.add(request)
        return request

    def abort(self, id: str, choice: int = -1) -> None:
        self.disturbed.add(id)
        self.core.abort(id, choice)

    def crash(self) -> None:
        """The engine dies and a new one is given what was in flight, as `engine.client` does it."""
        self.crashes += 1
        before = self.executor
        index = tuple(sorted(before.disk_keys.items()))
        self.executor = ShadowExecutor(msgspec.structs.replace(before.geometry, disk_index=index), before)
        self.core = self._start()
        for id, request in self.requests.items():
            choices = range(request.params.n)
            if all(self.answers[id, c].last for c in choices):
                continue
            resume = tuple(tuple(self.answers[id, c].tokens) for c in choices)
            self.core.add(msgspec.structs.replace(request, resume=resume if any(resume) else ()))
            for choice in choices:
                if self.answers[id, choice].last:
                    self.core.abort(id, choice)

    # ---------------------------------------------------------------- what the engine does

    def step(self) -> Stats:
        self.now += 1.0
        out = self.core.step()
        if self.executor.broken is not None:
            raise self.executor.broken
        self.core.kv.check()
        for delta in out.deltas:
            self._hear(delta)
        return out.stats

    def _hear(self, delta: Delta) -> None:
        answer = self.answers[delta.id, delta.choice]
        if answer.last is not None:
            # Only a choice that had ended before a crash is told of again, and only that it is over.
            assert self.crashes, f"{delta} comes after the end"
            assert delta.finish is not None
            assert not delta.tokens
            return
        answer.deltas.append(delta)
        answer.tokens.extend(delta.tokens)
        answer.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            answer.last = delta

    def run(self, limit: int = 20000) -> Stats:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "it goes on for ever"
        return self.core.stats()

    # ---------------------------------------------------------------- what must be true

    def check_answers(self) -> None:
        """Every choice ended once, with the oracle's tokens (or a part of them, if it was disturbed)."""
        for (id, choice), answer in self.answers.items():
            assert answer.last is not None, f"{id}/{choice} was never told that it is over"
            self.check_answer(id, choice)
        self.check_empty()

    def check_empty(self) -> None:
        """Nothing is held: every block is free or could be at once."""
        assert not self.core.has_work()
        usage = self.core.kv.usage()
        assert usage.free == usage.total
        assert usage.shared == 0
        assert usage.saved == 0
        self.core.kv.reset()
        self.core.kv.check()
        usage = self.core.kv.usage()
        assert (usage.cached, usage.host_used, usage.disk_used) == (0, 0, 0), "something leaked"

    def check_answer(self, id: str, choice: int) -> None:
        request, answer = self.requests[id], self.answers[id, choice]
        last = answer.last
        assert last is not None
        expected = self.oracle(request, choice)
        if last.error_kind in ("invalid", "overloaded"):
            return
        if last.finish in (FinishReason.ABORT, FinishReason.ERROR):
            assert id in self.disturbed or last.error_kind == "deadline", last
            assert answer.tokens == expected.tokens[: len(answer.tokens)]
            return
        assert answer.tokens == expected.tokens, f"{id}/{choice}"
        assert (last.finish, last.stop_token) == (expected.finish, expected.stop_token)
        if request.params.logprobs is not None and request.params.beam_width == 0:
            assert [(lp.logprob, lp.rank, lp.top) for lp in answer.logprobs] == [
                (s.logprob, s.rank, s.top) for s in expected.scores
            ]
        if request.pooling:
            assert last.embedding == expected.embedding
        if request.params.prompt_logprobs is not None:
            deltas = [d for c in range(request.params.n) for d in self.answers[id, c].deltas]
            told = next(d.prompt_logprobs for d in deltas if d.prompt_logprobs)
            assert [(s.logprob, s.rank, s.top) for s in told[1:]] == [
                (s.logprob, s.rank, s.top) for s in expected.prompt_scores
            ]

    def oracle(self, request: AddRequest, choice: int) -> Expected:
        """What this choice must get, whatever else happens."""
        limit = min(self.executor.geometry.max_model_len, self.core.kv.max_tokens + 1)
        return expected(request, choice, limit, self.executor.geometry.window)


@dataclass
class Expected:
    tokens: list[int]
    finish: FinishReason
    stop_token: int | None = None
    scores: list[Any] = field(default_factory=list)
    prompt_scores: list[Any] = field(default_factory=list)
    embedding: bytes = b""


def expected(request: AddRequest, choice: int, limit: int, window: int) -> Expected:
    """`window`: tokens that the model looks back; 0 = all, as in a slice from -window."""
    params, prompt = request.params, list(request.prompt)
    if request.pooling:
        mean = array.array("f", [sum(prompt) / len(prompt)]).tobytes()
        return Expected(
            [], FinishReason.STOP, embedding=mean if request.pooling == "mean" else last_hidden(prompt[-window:])
        )
    if params.beam_width:
        return expected_beam(request, choice, limit, window)
    top = params.prompt_logprobs or 0
    prompt_scores = [scored(prompt[:i][-window:], VOCAB, prompt[i], top) for i in range(1, len(prompt))]
    end = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
    stops = stops_of(params)
    grammar = compile_stripes(params.grammar) if params.grammar is not None else None
    history, scores = list(prompt), []
    while len(history) < end:
        early = len(history) - len(prompt) < params.min_tokens

        def banned(token: int, early: bool = early) -> bool:
            return (early and token in stops) or (grammar is not None and not grammar.allows(token))

        token = next_token(history[-window:], params.seed or 0, choice, VOCAB, banned)
        scores.append(scored(history[-window:], VOCAB, token, params.logprobs or 0))
        history.append(token)
        output = history[len(prompt) :]
        if token in stops:
            return Expected(output, FinishReason.STOP, token, scores, prompt_scores)
        if grammar is not None:
            grammar.advance(token)
            if grammar.stopped():
                return Expected(output, FinishReason.STOP, None, scores, prompt_scores)
    return Expected(history[len(prompt) :], FinishReason.LENGTH, None, scores, prompt_scores)


def stops_of(params: SamplingParams) -> frozenset[int]:
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else EOS)


def expected_beam(request: AddRequest, choice: int, limit: int, window: int) -> Expected:
    """Beam search to the very end, without any early stop."""
    params, prompt = request.params, list(request.prompt)
    width, stops = max(params.beam_width, params.n), stops_of(params)
    end = limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int], FinishReason]] = []
    for length in range(1, end - len(prompt) + 1):
        grown = []
        for total, output in live:
            for token, logprob in alternatives((prompt + output)[-window:], VOCAB):
                if length > params.min_tokens or token not in stops:
                    grown.append((total + logprob, [*output, token]))
        grown.sort(key=lambda g: -g[0])  # stable: of equals the better beam's
        live = []
        for place, (total, output) in enumerate(grown[: 2 * width]):
            score = total / length**params.length_penalty
            if output[-1] in stops:
                if place < width:
                    ended.append((score, output, FinishReason.STOP))
            elif len(live) < width:
                live.append((total, output))
                if len(prompt) + length == end:
                    ended.append((score, output, FinishReason.LENGTH))
        ended.sort(key=lambda e: -e[0])
        ended = ended[:width]
        if not live:
            break
    _, output, finish = ended[choice]
    return Expected(output, finish, output[-1] if finish is FinishReason.STOP else None)
