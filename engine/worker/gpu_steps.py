"""Steps on a GPU: the next is queued while the one before is still on its way."""

from __future__ import annotations

import queue
from dataclasses import dataclass

import numpy as np

from engine.core.plan import Copied, Plan, Result
from engine.worker.batch import Batch, build_batch, results
from engine.worker.gpu_blocks import GpuBlocks
from engine.worker.gpu_compute import Flight, GpuCompute
from engine.worker.runner import StepQueue, failure
from engine.worker.slots import Slots
from engine.worker.storage import KVStorage

POLL_S = 0.0002  # between looks at the device and at the plans that may follow


@dataclass(frozen=True, slots=True)
class Flying:
    """A step that was queued."""

    plan: Plan
    copies: tuple[Copied, ...]  # of host and disk; those of the device are timed by its events
    batch: Batch | None  # None: the plan has no rows
    flight: Flight | None

    def landed(self) -> bool:
        return self.flight is None or self.flight.landed.done()


class GpuRunner:
    """Turns plans into results in two halves: queue, and wait. The same order of things as `Runner.run`."""

    def __init__(self, compute: GpuCompute, slots: Slots, storage: KVStorage, blocks: GpuBlocks) -> None:
        self._compute = compute
        self._slots = slots
        self._storage = storage
        self._blocks = blocks

    def can_follow(self, plan: Plan, before: Flying) -> bool:
        """Whether a plan can be queued before the results of the step before it are known."""
        slots = self._slots
        settled = before.flight is not None and before.flight.settled
        plain = all(slots.constraints[row.slot] is None and not row.masks for row in plan.rows)
        return settled and plain and not plan.slots

    def launch(self, plan: Plan, *, settled: bool) -> Flying:
        """Queue a step. Raises RequestFailed for what can't be run; KV operations run whatever else fails."""
        slots = self._slots
        moved = self._storage.run(plan.ops, dict(plan.disk_keys))
        copies = tuple(c for c in moved if c.kind.startswith("disk"))
        for slot, params in plan.slots:
            slots.take(slot, params)
        if not plan.rows:
            return Flying(plan, copies, None, None)
        batch = build_batch(plan, slots, settled=settled)
        counts = -(-(batch.pos_start + np.diff(batch.q_start)) // slots.block_size)
        for line, n in zip(batch.slots.tolist(), counts.tolist(), strict=True):
            self._blocks.touch(slots.tables[line, :n].tolist())
        return Flying(plan, copies, batch, self._compute.launch(batch, slots))

    def finish(self, flying: Flying) -> Result:
        """Wait for a step. Raises RequestFailed."""
        if flying.batch is None or flying.flight is None:
            return Result((), copies=flying.copies + self._blocks.finished())
        flight = flying.flight
        drawn, hidden = self._compute.finish(flight, self._slots)
        rows = results(flying.plan, drawn, hidden, flying.batch, self._slots)
        copies = flying.copies + self._blocks.finished()
        return Result(rows, flight.landed.seconds_since(flight.began), copies)


class GpuSteps(StepQueue):
    """Runs steps in order, at most two of them queued on the device."""

    def __init__(self, runner: GpuRunner) -> None:
        self._runner = runner
        self._ended = False
        super().__init__()

    def _loop(self) -> None:
        flying: Flying | None = None
        while (plan := self._next(flying)) is not None or flying is not None:
            if flying is not None and (plan is None or not self._runner.can_follow(plan, flying)):
                self._land(flying)
                flying = None
            if plan is None:
                continue
            try:
                launched = self._runner.launch(plan, settled=flying is None)
            except Exception as error:
                if flying is not None:
                    self._land(flying)
                flying = None
                self._results.put(failure(plan, error))
                continue
            if flying is not None:
                self._land(flying)
            flying = launched

    def _next(self, flying: Flying | None) -> Plan | None:
        """The next plan; None when there is none and the flying step has landed, or to end."""
        if self._ended:
            return None
        while True:
            try:
                plan = self._plans.get(timeout=POLL_S if flying else None)
            except queue.Empty:
                if flying is not None and flying.landed():
                    return None
                continue
            self._ended = plan is None
            return plan

    def _land(self, flying: Flying) -> None:
        try:
            self._results.put(self._runner.finish(flying))
        except Exception as error:
            self._results.put(failure(flying.plan, error))
