"""A request and its sequences (one a choice or beam): tokens, how far they are computed, what became of them.

tokens     [ prompt ............ | output .... ]          known
confirmed  [0, confirmed) has KV, by results that came back; the last token has none (but in a beam that waits)
computed   [0, computed) has KV once all submitted steps have run; [computed, known) is to be computed
pending    tokens sampled by submitted steps that haven't come back: known = len(tokens) + pending
"""

from __future__ import annotations

import enum
import hashlib
from collections import deque
from typing import TYPE_CHECKING, Any

from engine.api import AddRequest, TokenLogprobs
from engine.core.constraint import Constraint
from engine.core.plan import SlotParams

if TYPE_CHECKING:
    from engine.core.beam import BeamSearch

TIMELINE_EVENTS = 200  # kept of one request: the first ones and the last ones


class Status(enum.Enum):
    """Where a sequence stands. Only RUNNING and SWAPPED hold KV."""

    COMPILING = "compiling"  # its grammar isn't ready
    FOLLOWING = "following"  # a choice that waits for the prompt that its leader computes
    WAITING = "waiting"
    SWAPPED = "swapped"  # waiting, with its KV on the host
    RUNNING = "running"  # has a slot
    PARKED = "parked"  # a beam that knows its continuations, has lost its KV and waits for the other beams
    FINISHED = "finished"


LEGAL: dict[Status, frozenset[Status]] = {
    Status.COMPILING: frozenset({Status.WAITING, Status.FOLLOWING, Status.FINISHED}),
    Status.FOLLOWING: frozenset({Status.WAITING, Status.RUNNING, Status.FINISHED}),
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.SWAPPED: frozenset({Status.RUNNING, Status.WAITING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.PARKED, Status.FINISHED}),
    Status.PARKED: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class Sequence:
    """One line of tokens. Mutated by the scheduler alone."""

    __slots__ = (
        "choice",
        "computed",
        "confirmed",
        "constraint",
        "cumulative",
        "drafts",
        "end",
        "epoch",
        "id",
        "key",
        "lockstep",
        "pending",
        "preemptions",
        "request",
        "resend",
        "samples",
        "slot",
        "status",
        "stops",
        "tokens",
        "top",
        "trail",
        "turn",
    )

    def __init__(self, id: int, request: Request, choice: int, tokens: list[int]) -> None:
        self.id = id
        self.request = request
        self.choice = choice
        self.tokens = tokens
        self.computed = 0
        self.confirmed = 0
        self.pending = 0
        self.epoch = 0  # results of an older epoch are void: the sequence was preempted or has ended
        self.status = Status.COMPILING
        self.slot = -1
        self.resend = False  # the worker doesn't know yet that this sequence has the slot
        self.preemptions = 0
        self.key: tuple[float, ...] = ()  # place among the running (policy)
        self.turn = 0  # of its key, while it waits (policy)
        self.constraint: Constraint | None = None
        self.drafts: tuple[int, ...] = ()
        # What doesn't change, beside what does: the step reads these for every sequence.
        self.end = request.end  # len(tokens) at which it ends with LENGTH
        self.stops = request.stops
        self.samples = request.samples
        self.lockstep = request.add.params.grammar is not None or request.beam is not None  # needs every result
        # Beam search: the continuations that the last step found (None = not yet), what they stand on.
        self.top: tuple[tuple[int, float], ...] | None = None
        self.cumulative = 0.0
        self.trail: tuple[TokenLogprobs, ...] = ()

    def to(self, status: Status) -> None:
        assert status in LEGAL[self.status], f"{self.status.value} -> {status.value}"
        self.status = status

    @property
    def output(self) -> list[int]:
        return self.tokens[self.request.prompt_len :]

    def slot_params(self) -> SlotParams:
        """What the worker needs to sample for this sequence."""
        request, params = self.request, self.request.add.params
        penalised = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )
        return SlotParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=params.bad_words,
            seed=request.seed,
            choice=self.choice,
            logprobs=params.logprobs,
            min_tokens=params.min_tokens,
            stop_ids=tuple(sorted(self.stops)) if params.min_tokens else (),
            adapter=request.add.adapter,
            prompt=request.add.prompt if penalised or params.bad_words else (),
            output=tuple(self.output),
            prompt_len=request.prompt_len,
        )


class Request:
    """A user's request: what was asked, its sequences, its story."""

    def __init__(self, add: AddRequest, *, max_len: int, eos: frozenset[int], now: float) -> None:
        params = add.params
        self.add = add
        self.prompt_len = len(add.prompt)
        self.number = 0  # in the order of acceptance
        self.seed = params.seed if params.seed is not None else _seed_of(add.id)
        self.stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        wanted = max_len if params.max_tokens is None else self.prompt_len + params.max_tokens
        self.end = min(wanted, max_len)
        self.samples = not add.pooling and self.end > self.prompt_len
        self.salt = f"{add.adapter}\0{add.cache_salt}"
        self.sequences: list[Sequence] = []  # alive
        self.open: set[int] = set()  # choices without a terminal delta
        self.beam: BeamSearch | None = None
        self.grammar: Constraint | None = None  # as compiled, before any token
        self.running = 0  # sequences with a slot
        self.cached = -1  # prompt tokens found in the prefix cache when it was first admitted
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.finished: float | None = None
        self.told: set[int] = set()  # choices whose first delta was sent
        self.scores: list[TokenLogprobs | None] = [None]  # prompt logprobs so far; the first token has none
        self.scores_told = any(add.resume)
        self.reasons: dict[int, str] = {}
        self.generated = 0  # tokens told, of all choices
        self.preemptions = 0  # of all choices
        self._head: list[dict[str, Any]] = []
        self._tail: deque[dict[str, Any]] = deque(maxlen=TIMELINE_EVENTS // 2)

    @property
    def scored(self) -> bool:
        """Does every prompt token but the first want a logprob?"""
        return self.add.params.prompt_logprobs is not None

    @property
    def prefix_limit(self) -> int:
        """Prompt tokens that a prefix hit may skip: those whose score or hidden state is still wanted it may not."""
        if self.scored and len(self.scores) < self.prompt_len:
            return len(self.scores) - 1
        return 0 if self.add.pooling == "mean" else self.end

    def note(self, now: float, event: str, **details: Any) -> None:
        """Write into the timeline."""
        entry = {"t": now, "event": event, **details}
        (self._head if len(self._head) < TIMELINE_EVENTS // 2 else self._tail).append(entry)

    @property
    def timeline(self) -> list[dict[str, Any]]:
        return [*self._head, *self._tail]


def _seed_of(id: str) -> int:
    """The seed of a request that came without one: the same after a restart."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")
