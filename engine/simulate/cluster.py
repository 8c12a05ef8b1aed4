"""Replicas in virtual time: each is the real EngineCore; only the executor and the clock are made up."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from engine.api import AddRequest, SamplingParams
from engine.core.engine import EngineCore
from engine.core.plan import Copied, Geometry, Plan, Result, RowResult, Sampled
from engine.core.settings import CoreSettings
from engine.errors import ConfigError
from engine.simulate.cost import CostModel
from engine.simulate.trace import Arrival

Routing = Literal["round-robin", "least-loaded", "prefix"]
SPILL = 1.5  # a replica with more than this times the mean load (and some slack) loses its prefix affinity
SPILL_SLACK = 8
TOKEN = 1 << 30  # what every simulated step samples; no prompt has it


class Clock:
    """Seconds since the beginning of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimExecutor:
    """An executor whose steps take virtual time and give made-up tokens."""

    def __init__(self, geometry: Geometry, cost: CostModel, clock: Clock) -> None:
        self._geometry, self._cost, self._clock = geometry, cost, clock
        self._results: deque[Result] = deque()

    def start(self) -> Geometry:
        return self._geometry

    def submit(self, plan: Plan) -> None:
        moved = Counter(op.kind for op in plan.ops if op.kind not in ("map", "unmap"))
        size, rate, compute = self._geometry.bytes_per_block, self._cost.copy_bytes_per_s, self._cost.plan_s(plan)
        copies = tuple(Copied(kind, n * size, n * size / rate) for kind, n in moved.items())
        self._clock.now += sum(copied.seconds for copied in copies) + compute
        rows = tuple(
            RowResult(sampled=(Sampled(TOKEN),) * (1 + len(row.choices)) if row.sample else ()) for row in plan.rows
        )
        self._results.append(Result(rows, compute_s=compute, copies=copies))

    def collect(self) -> Result:
        return self._results.popleft()

    def close(self) -> None:
        self._results.clear()

    def load_adapter(self, name: str, path: str) -> None:
        raise ConfigError("adapters are not simulated")

    def unload_adapter(self, name: str) -> None:
        raise ConfigError("adapters are not simulated")


@dataclass(slots=True)
class Served:
    """What became of one request. Times in seconds."""

    arrival: float
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Replica:
    """One engine with its own clock."""

    def __init__(self, geometry: Geometry, settings: CoreSettings, cost: CostModel) -> None:
        self.clock = Clock()
        self.core = EngineCore(
            SimExecutor(geometry, cost, self.clock), geometry, settings, frozenset(), None, self.clock
        )
        self.load = 0  # tokens of requests that have not ended
        self.sizes: dict[str, int] = {}

    def add(self, id: str, arrival: Arrival, index: int) -> None:
        self.clock.now = max(self.clock.now, arrival.time)
        params = SamplingParams(temperature=0, max_tokens=arrival.output, ignore_eos=True)
        self.core.add(AddRequest(id=id, prompt=arrival.tokens(index), params=params, arrival=arrival.time))
        self.sizes[id] = arrival.prompt + arrival.output
        self.load += self.sizes[id]


@dataclass(slots=True)
class Report:
    """One simulated run."""

    served: list[Served]
    seconds: float  # virtual
    queried: int = 0
    hits: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)
    whole: bool = True  # False: given up before the end

    def percentile(self, what: Literal["ttft", "tpot"], share: float) -> float:
        """In seconds, over the requests that were served."""
        values = sorted(getattr(s, what) for s in self.served if not s.error and s.first >= 0)
        return values[min(len(values) - 1, int(share * len(values)))] if values else float("inf")

    @property
    def refused(self) -> int:
        return sum(1 for s in self.served if s.error)

    @property
    def hit_ratio(self) -> float:
        return self.hits / self.queried if self.queried else 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(s.tokens for s in self.served) / self.seconds if self.seconds else 0.0


def simulate(
    trace: list[Arrival],
    replicas: int,
    geometry: Geometry,
    settings: CoreSettings,
    cost: CostModel,
    routing: Routing = "round-robin",
    lost: Callable[[Served], bool] = lambda one: False,
) -> Report:
    """Run the whole trace and let every request end; or until `lost`, told of each that ended, gives the run up."""
    fleet = [Replica(geometry, settings, cost) for _ in range(replicas)]
    served = [Served(a.time) for a in trace]
    ready: list[tuple[float, int]] = []  # (its time, replica) of those with work
    busy: set[int] = set()
    coming, whole = 0, True
    while whole and (coming < len(trace) or ready):
        if coming < len(trace) and (not ready or trace[coming].time <= ready[0][0]):
            where = _route(routing, fleet, trace[coming], coming)
            fleet[where].add(str(coming), trace[coming], coming)
            if where not in busy:
                busy.add(where)
                heapq.heappush(ready, (fleet[where].clock.now, where))
            coming += 1
            continue
        _, where = heapq.heappop(ready)
        whole = not any(lost(one) for one in _step(fleet[where], served))
        if fleet[where].core.has_work():
            heapq.heappush(ready, (fleet[where].clock.now, where))
        else:
            busy.discard(where)
    stats = [r.core.stats() for r in fleet]
    return Report(
        served,
        max(r.clock.now for r in fleet),
        sum(s.prefix_queries for s in stats),
        sum(s.prefix_hits + s.prefix_hits_host for s in stats),
        {
            "swap": sum(s.preemptions_swap for s in stats),
            "recompute": sum(s.preemptions_recompute for s in stats),
        },
        whole,
    )


def _step(replica: Replica, served: list[Served]) -> list[Served]:
    """Those that ended."""
    ended = []
    for delta in replica.core.step().deltas:
        one = served[int(delta.id)]
        if delta.tokens:
            if one.first < 0:
                one.first = replica.clock.now
            one.last = replica.clock.now
            one.tokens += len(delta.tokens)
        if delta.finish is not None:
            one.error = delta.error
            replica.load -= replica.sizes.pop(delta.id)
            ended.append(one)
    return ended


def _route(routing: Routing, fleet: list[Replica], arrival: Arrival, index: int) -> int:
    if routing == "round-robin":
        return index % len(fleet)
    least = min(range(len(fleet)), key=lambda i: (fleet[i].load, i))
    if routing == "least-loaded" or not arrival.blocks:
        return least
    # Rendezvous hashing of the first block: the same prefix goes to the same replica while that one has room.
    key = str(arrival.blocks[0])
    home = max(range(len(fleet)), key=lambda i: zlib.crc32(f"{key}/{i}".encode()))
    mean = sum(len(r.sizes) for r in fleet) / len(fleet)
    return home if len(fleet[home].sizes) <= SPILL * mean + SPILL_SLACK else least
