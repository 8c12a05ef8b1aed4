"""How many replicas a load needs: the smallest fleet whose simulated latencies keep the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.plan import Geometry
from engine.simulate.cluster import Report, Served
from engine.simulate.cost import CostModel
from engine.simulate.trace import Arrival

SHARD = 4  # replicas that a shard of a larger load is simulated with
LARGEST_FLEET = 32  # for a load that is simulated whole
STEP = 1.06  # between the rates that a shard is tried at
SLOWEST = 96  # tries of a shard: the last is at 1/250 of the first, where requests hardly meet
SHARE = 0.95  # of requests that must keep the objective
LASTS_S = 60.0  # seconds of arrivals at least: queues that only begin to grow look short


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds for SHARE of the requests; 0 = none."""

    ttft: float
    tpot: float

    def kept(self, report: Report) -> bool:
        return (
            report.whole
            and report.refused == 0
            and (not self.ttft or report.percentile("ttft", SHARE) <= self.ttft)
            and (not self.tpot or report.percentile("tpot", SHARE) <= self.tpot)
        )

    def watch(self, requests: int) -> Callable[[Served], bool]:
        """Told of every request that ended: True once too many of so many have missed a limit."""
        allowed = requests - 1 - int(SHARE * requests)
        late = [0, 0]

        def lost(one: Served) -> bool:
            late[0] += bool(self.ttft) and one.ttft > self.ttft
            late[1] += bool(self.tpot) and one.tpot > self.tpot
            return max(late) > allowed

        return lost


@dataclass(frozen=True, slots=True)
class Answer:
    """`replicas` for the whole load; `report` is of the shard that was simulated, with `simulated` replicas."""

    replicas: int
    simulated: int
    shards: float
    report: Report


def estimate(trace: Sequence[Arrival], cost: CostModel, geometry: Geometry) -> float:
    """Requests a second of a replica that always decodes the largest batch its pool holds and finds no prefix."""
    prompt = sum(a.prompt for a in trace) / len(trace)
    output = sum(a.output for a in trace) / len(trace)
    pool = geometry.num_blocks * geometry.block_size
    batch = max(1, min(geometry.max_num_seqs, int(pool / (prompt + output))))
    decode = cost.step_s(batch, batch, round(batch * (prompt + output / 2))) / batch
    return 1 / (prompt * cost.per_token + output * decode)


def replicas_for(
    rate: float, requests: int, objective: Objective, capacity: float, run: Callable[[float, int], Report]
) -> Answer | None:
    """`run(rate, replicas)` simulates up to so many requests. None when even requests that hardly meet miss.

    A load of few replicas, by the estimate of a replica's `capacity` (requests/s), is simulated whole. Of a larger one,
    or one for which the trace is too short (LASTS_S), SHARD replicas are: routing among more changes little once each
    has its own queue, so the fleet grows linearly with the rate that they sustain.
    """
    if rate > SHARD * capacity or rate * LASTS_S > requests:
        replicas = max(1, min(SHARD, int(requests / LASTS_S / capacity)))
        most = min(rate, requests / LASTS_S, 2 * replicas * capacity)
        shares = [(most / STEP**i, replicas) for i in range(SLOWEST)]
        first = math.ceil(math.log(max(1.0, most / (replicas * capacity)), STEP))
        found = _first_kept(shares, first, objective, run)
        if found is None:
            return None
        (share, _), report = found
        if share < rate:
            return Answer(math.ceil(replicas * rate / share), replicas, rate / share, report)
    fleets = [(rate, n) for n in range(1, LARGEST_FLEET + 1)]
    found = _first_kept(fleets, min(LARGEST_FLEET, math.ceil(rate / capacity)) - 1, objective, run)
    return found and Answer(found[0][1], found[0][1], 1.0, found[1])


def _first_kept(
    tries: list[tuple[float, int]], start: int, objective: Objective, run: Callable[[float, int], Report]
) -> tuple[tuple[float, int], Report] | None:
    """Tries go from too little to enough. From `start` by growing strides to both sides of the border, then halving."""
    best: Report | None = None
    low, high, at, stride = -1, len(tries), start, 1  # tries[low] misses, tries[high] keeps
    while high - low > 1:
        report = run(*tries[at])
        if objective.kept(report):
            high, best = at, report
        else:
            low = at
        if best is None:
            at = min(low + stride, high - 1)
        elif low < 0:
            at = max(high - stride, 0)
        else:
            at = (low + high) // 2
        stride *= 2
    return None if best is None else (tries[high], best)
