"""Ledger: every live request, and everything that a client is told. Each choice gets exactly one terminal delta."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

import msgspec

from engine.api import AddRequest, Delta, FinishReason, TokenLogprobs
from engine.core.request import Request

FINISHED_KEPT = 256  # requests whose timeline stays visible


class Counters:
    """Since the start; `EngineCore.stats` shows them."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions_swap = 0
        self.preemptions_recompute = 0
        self.cost_swap_s = 0.0
        self.cost_recompute_s = 0.0
        self.cost_bring_s = 0.0
        self.cost_compute_s = 0.0
        self.spec_proposed = 0
        self.spec_accepted = 0


class Ledger:
    """Requests by id, those that ended lately, deltas not yet given out, deadlines."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.finished: deque[Request] = deque(maxlen=FINISHED_KEPT)
        self.deltas: list[Delta] = []
        self.counters = Counters()
        # A heap of (time, number of the request, only until the first token, id): no request is kept alive by it.
        self._deadlines: list[tuple[float, int, bool, str]] = []
        self._entered = 0

    def enter(self, request: Request) -> None:
        """An accepted request."""
        add = request.add
        self.requests[add.id] = request
        request.open.update(range(add.params.n))
        self._entered += 1
        request.number = self._entered
        for at, until_first in ((add.deadline, False), (add.ttft_deadline, True)):
            if at is not None:
                heapq.heappush(self._deadlines, (at, request.number, until_first, add.id))

    def expired(self, now: float) -> Iterator[tuple[Request, str]]:
        """Live requests whose deadline has passed, and which one."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, until_first, id = heapq.heappop(self._deadlines)
            request = self.requests.get(id)
            if request is not None and request.number == number and not (until_first and request.told):
                yield request, "time to first token" if until_first else "time limit"

    def refuse(self, add: AddRequest, kind: str, message: str) -> None:
        """A request that is not accepted: every choice ends at once."""
        for choice in range(add.params.n):
            self.deltas.append(Delta(add.id, choice, (), finish=FinishReason.ERROR, error=message, error_kind=kind))

    def abort_unseen(self, add: AddRequest) -> None:
        """A request that never came to the scheduler was called back."""
        for choice in range(add.params.n):
            self.deltas.append(Delta(add.id, choice, (), finish=FinishReason.ABORT))

    def tell(
        self,
        request: Request,
        choice: int,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        preemptions: int = 0,
        finish: FinishReason | None = None,
        stop_token: int | None = None,
        error: str = "",
        kind: str = "",
        embedding: bytes = b"",
    ) -> None:
        """One delta; a choice's first one says where the request had been."""
        request.generated += len(tokens)
        cached, queued = -1, -1.0
        scores: tuple[TokenLogprobs | None, ...] = ()
        if request.scored and not request.scores_told and len(request.scores) == request.prompt_len:
            request.scores_told = True
            scores = tuple(request.scores)
        if choice not in request.told:
            request.told.add(choice)
            cached = request.cached
            if request.admitted is not None:
                queued = max(0.0, request.admitted - request.add.arrival)
        self.deltas.append(
            Delta(
                request.add.id,
                choice,
                tokens,
                logprobs,
                finish,
                stop_token,
                error,
                kind,
                cached,
                preemptions,
                queued,
                scores,
                embedding,
            )
        )

    def close(
        self,
        request: Request,
        choice: int,
        now: float,
        finish: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        preemptions: int = 0,
        stop_token: int | None = None,
        error: str = "",
        kind: str = "",
        embedding: bytes = b"",
    ) -> None:
        """The terminal delta of a choice; with the last one the request is over."""
        add = request.add
        request.open.remove(choice)
        self.tell(
            request,
            choice,
            tokens,
            logprobs,
            preemptions=preemptions,
            finish=finish,
            stop_token=stop_token,
            error=error,
            kind=kind,
            embedding=embedding,
        )
        request.note(now, "finished", choice=choice, reason=finish.value, error=error)
        request.reasons[choice] = finish.value
        if not request.open:
            request.finished = now
            request.add = msgspec.structs.replace(add, prompt=(), resume=())  # what is left is for people
            request.scores.clear()
            del self.requests[add.id]
            self.finished.append(request)

    def take_deltas(self) -> list[Delta]:
        """Everything to be told since the last call, in order."""
        deltas, self.deltas = self.deltas, []
        return deltas
