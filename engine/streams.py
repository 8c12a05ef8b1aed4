"""What the client remembers of the requests in flight, and the mailbox that each reader takes deltas from.

A reader that falls behind costs nothing but its own mailbox: one slot a choice, into which deltas merge.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from engine.api import AddRequest, Delta, FinishReason
from engine.errors import OctavoError

MERGE_AT = 32  # deltas that pile up in a slot before they become one


def merge(deltas: list[Delta]) -> Delta:
    """One delta that says what these (of one choice, in order) say together."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return msgspec.structs.replace(
        last,
        tokens=tuple(t for d in deltas for t in d.tokens),
        logprobs=tuple(p for d in deltas for p in d.logprobs),
        cached_tokens=next((d.cached_tokens for d in deltas if d.cached_tokens >= 0), -1),
        queued_s=next((d.queued_s for d in deltas if d.queued_s >= 0), -1.0),
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs), ()),
        embedding=next((d.embedding for d in deltas if d.embedding), b""),
    )


class Choice:
    """One answer of a request: the tokens delivered so far, and what its reader hasn't taken yet."""

    __slots__ = ("_earlier", "done", "preemptions", "slot", "started", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.done = False
        self.started = False  # the facts of a first delta (cached tokens, prompt logprobs ...) were delivered
        self.preemptions = 0
        self._earlier = 0  # preemptions under the engines before this one
        self.slot: list[Delta] = []

    def put(self, delta: Delta) -> None:
        """Take a delta of the engine. What an earlier engine told before is not told again."""
        if delta.cached_tokens >= 0 or delta.prompt_logprobs:
            if self.started:
                delta = msgspec.structs.replace(delta, cached_tokens=-1, queued_s=-1.0, prompt_logprobs=())
            self.started = True
        if self._earlier:
            delta = msgspec.structs.replace(delta, preemptions=self._earlier + delta.preemptions)
        self.preemptions = max(self.preemptions, delta.preemptions)
        self.tokens += delta.tokens
        self.done = delta.finish is not None
        self.slot.append(delta)
        if len(self.slot) >= MERGE_AT:
            self.slot = [merge(self.slot)]

    def engine_died(self) -> None:
        """The next engine counts from zero."""
        self._earlier = self.preemptions


class Live:
    """One request in flight: enough to continue it in another engine, and its reader's mailbox."""

    __slots__ = ("_waiter", "choices", "deaths", "failure", "mark", "request", "sent")

    def __init__(self, request: AddRequest) -> None:
        self.request = request
        self.choices = [Choice() for _ in range(1 if request.pooling else max(request.params.n, 1))]
        self.sent = False  # this engine knows of it
        self.deaths = 0  # engines in a row that died with it on board, without a token for it in between
        self.mark = 0  # progress at the last death
        self.failure: OctavoError | None = None  # raised to the reader after what was delivered
        self._waiter: asyncio.Future[None] | None = None

    @property
    def progress(self) -> int:
        """Grows with everything that is delivered."""
        return sum(len(c.tokens) + c.done for c in self.choices)

    @property
    def open(self) -> int:
        """Choices that have no terminal delta yet."""
        return sum(not c.done for c in self.choices)

    def resumed(self) -> AddRequest:
        """The request as the next engine gets it: with the tokens that were delivered."""
        if not any(c.tokens for c in self.choices):
            return self.request
        return msgspec.structs.replace(self.request, resume=tuple(tuple(c.tokens) for c in self.choices))

    def put(self, delta: Delta) -> bool:
        """Deliver a delta; False when its choice has ended already."""
        if not 0 <= delta.choice < len(self.choices) or self.choices[delta.choice].done:
            return False
        self.choices[delta.choice].put(delta)
        self.wake()
        return True

    def end(self, finish: FinishReason, *, choice: int = -1, error: str = "", kind: str = "") -> int:
        """Give every open choice (or one) its terminal delta here and now; how many that were."""
        ended = 0
        for i, c in enumerate(self.choices):
            if not c.done and choice in (-1, i):
                c.put(Delta(self.request.id, i, (), finish=finish, error=error, error_kind=kind))
                ended += 1
        self.wake()
        return ended

    def fail(self, error: OctavoError) -> None:
        """Raise `error` in the reader, after what was delivered before."""
        self.failure = error
        self.wake()

    def take(self) -> Delta | None:
        """The oldest choice's merged delta."""
        for c in self.choices:
            if c.slot:
                delta, c.slot = merge(c.slot), []
                return delta
        return None

    def wake(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until something is in the mailbox or the request has ended."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Stream(AsyncIterator[Delta]):
    """The deltas of one request. Closing it before its end, or dropping it, aborts the request."""

    def __init__(self, live: Live, abort: Callable[[str], None]) -> None:
        self._live = live
        self._abort = abort
        self._loop = asyncio.get_running_loop()

    async def __anext__(self) -> Delta:
        while (delta := self._live.take()) is None:
            if self._live.failure:
                raise self._live.failure
            if not self._live.open:
                raise StopAsyncIteration
            await self._live.wait()
        return delta

    async def aclose(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._live.open:
            self._abort(self._live.request.id)

    def __del__(self) -> None:
        # The collector may run in any thread; the client lives on its loop.
        if self._live.open and not self._live.failure and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, self._live.request.id)
