"""How many replicas a load needs: the smallest fleet whose simulated latencies keep the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine.simulate.cluster import Report

LARGEST_FLEET = 32  # simulated whole; a larger load is cut into equal shards of about this size
SHARE = 0.95  # of requests that must keep the objective
LASTS_S = 60.0  # seconds of arrivals at least: queues that only begin to grow look short


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds for SHARE of the requests; 0 = none."""

    ttft: float
    tpot: float

    def kept(self, report: Report) -> bool:
        return (
            report.refused == 0
            and (not self.ttft or report.percentile("ttft", SHARE) <= self.ttft)
            and (not self.tpot or report.percentile("tpot", SHARE) <= self.tpot)
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`replicas` for the whole load; `report` is of the shard that was simulated, with `simulated` replicas."""

    replicas: int
    simulated: int
    shards: float
    report: Report


def replicas_for(
    rate: float, requests: int, objective: Objective, run: Callable[[float, int], Report]
) -> Answer | None:
    """`run(rate, replicas)` simulates a trace of so many requests. None when even one at a time misses the objective.

    A trace too short for its rate (LASTS_S), or a load of more than LARGEST_FLEET replicas, is answered by a shard of
    the traffic: routing among more replicas changes little once each has its own queue, so the fleet grows linearly.
    """
    lonely = run(rate / 1e6, 1)
    if not objective.kept(lonely):
        return None
    shard = min(rate, requests / LASTS_S)
    while True:
        found = _smallest(shard, objective, run)
        if found is not None:
            replicas, report = found
            return Answer(math.ceil(replicas * rate / shard), replicas, rate / shard, report)
        shard /= 8


def _smallest(rate: float, objective: Objective, run: Callable[[float, int], Report]) -> tuple[int, Report] | None:
    """Doubling, then halving the gap; None beyond LARGEST_FLEET."""
    high, report = 1, run(rate, 1)
    while not objective.kept(report):
        if high >= LARGEST_FLEET:
            return None
        high *= 2
        report = run(rate, high)
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        tried = run(rate, middle)
        if objective.kept(tried):
            high, report = middle, tried
        else:
            low = middle
    return high, report
