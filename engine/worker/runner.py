"""One step: KV operations, slots, forward pass, sampling. The same for every executor."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from engine.core.plan import Plan, Result
from engine.errors import OctavoError, RequestFailed
from engine.worker.batch import Batch, Drawn, Draws, Float32, build_batch, results
from engine.worker.slots import Slots
from engine.worker.storage import KVStorage


class Compute(Protocol):
    """The arithmetic behind a step."""

    def forward(self, batch: Batch, slots: Slots) -> Float32:
        """All layers over all rows; keeps the logits of logit_rows. Returns hidden states [hidden_rows, hidden]."""

    def sample(self, draws: Draws, slots: Slots) -> Drawn:
        """Draw and score from the logits that `forward` kept."""


class Runner:
    """Turns plans into results."""

    def __init__(self, compute: Compute, slots: Slots, storage: KVStorage) -> None:
        self._compute = compute
        self._slots = slots
        self._storage = storage

    def run(self, plan: Plan) -> Result:
        """One step. Raises RequestFailed for what can't be run.

        KV operations run whatever else fails: they may belong to sequences that are not in this plan.
        """
        slots = self._slots
        copies = self._storage.run(plan.ops, dict(plan.disk_keys))
        for slot, params in plan.slots:
            slots.take(slot, params)
        if not plan.rows:
            return Result((), copies=copies)
        batch = build_batch(plan, slots)
        started = time.perf_counter()
        hidden = self._compute.forward(batch, slots)
        computed = time.perf_counter()
        drawn = self._compute.sample(batch.draws, slots)
        done = time.perf_counter()
        rows = results(plan, drawn, hidden, batch, slots)
        return Result(rows, computed - started, copies, done - computed)


class StepQueue(ABC):
    """A thread of its own that takes plans and gives results in order, so that the next plan is made meanwhile."""

    def __init__(self) -> None:
        self._plans: queue.SimpleQueue[Plan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | OctavoError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="octavo-step", daemon=True)
        self._thread.start()

    def submit(self, plan: Plan) -> None:
        """Begin a step."""
        self._plans.put(plan)

    def collect(self) -> Result:
        """Wait for the oldest step. Raises RequestFailed when it raised."""
        result = self._results.get()
        if isinstance(result, OctavoError):
            raise result
        return result

    def close(self) -> None:
        """Finish what was submitted and end the thread; idempotent."""
        if self._thread.is_alive():
            self._plans.put(None)
            self._thread.join()

    @abstractmethod
    def _loop(self) -> None:
        """The thread: from the queue of plans, until a None, to the queue of results."""


class StepThread(StepQueue):
    """Runs steps one after another."""

    def __init__(self, run: Callable[[Plan], Result]) -> None:
        self._run = run
        super().__init__()

    def _loop(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                self._results.put(self._run(plan))
            except Exception as error:
                self._results.put(failure(plan, error))


def failure(plan: Plan, error: Exception) -> OctavoError:
    """What `collect` raises for a step that raised `error`: it may touch only the requests of its plan."""
    if isinstance(error, OctavoError):
        return error
    failed = RequestFailed(f"step {plan.step} failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
