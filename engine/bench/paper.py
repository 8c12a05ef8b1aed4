"""The PagedAttention paper's claims (Kwon et al., SOSP 2023) on the model at hand: waste, throughput, sharing.

Three ways to serve the same requests in the same KV memory: `static` batches with reserved contexts, `reserved`:
iteration-level scheduling with reserved contexts (the paper's "Orca (Max)"), and `paged`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from engine.bench.drive import Bench, Job, Recorder, Run, greedy, serve, words
from engine.bench.memory import Shared, beams, parallel, samples
from engine.core.engine import EngineCore
from engine.core.plan import Geometry
from engine.simulate.cluster import Replica
from engine.simulate.cost import CostModel, StepSample, fit
from engine.simulate.trace import Arrival, at_rate

WAYS = ("static", "reserved", "paged")
RATES = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # times what static batching sustains


@dataclass(slots=True)
class Waste:
    """How full the KV memory was that sequences held, step by step."""

    held: int = 0  # tokens times steps
    room: int = 0
    most_running: int = 0

    def see(self, core: EngineCore) -> None:
        usage, running = core.kv.usage(), core.scheduler.life.running.sequences
        self.held += sum(seq.computed for seq in running)
        self.room += (usage.total - usage.free) * core.geometry.block_size
        self.most_running = max(self.most_running, len(running))

    @property
    def share(self) -> float:
        """Of the memory given to sequences that holds no token."""
        return 1 - self.held / max(1, self.room)


@dataclass(frozen=True, slots=True)
class Way:
    """All requests at once, one way. Times in seconds."""

    name: str
    waste: float
    most_running: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    token_latency: float  # mean over requests of (end - arrival) / output tokens: the paper's normalised latency
    tpot: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Open loop in virtual time with the steps just measured: normalised latency in seconds at each rate."""

    name: str
    rates: list[float]
    latencies: list[float]


@dataclass(slots=True)
class Paper:
    """All of a run."""

    context: int
    pool_tokens: int
    ways: list[Way] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    fit_error: float = 0.0

    def at_latency(self, seconds: float) -> dict[str, float]:
        """Requests a second that each way serves at this normalised latency; 0 when it is never that quick."""
        return {c.name: _crossing(c, seconds) for c in self.curves}


def settings_of(way: str) -> dict[str, Any]:
    """No prefix cache: the paper's baselines had none, and it would count as memory without tokens."""
    return {"kv_manager": "paged" if way == "paged" else "reserve", "enable_prefix_caching": False}


def reproduce(bench: Bench, trace: Sequence[Arrival], *, context: int, rows: int, requests: int) -> Paper:
    """`rows` contexts' worth of KV memory for everyone. Raises ConfigError when the pool can't hold them."""
    pages = -(-context // bench.geometry.block_size)
    geometry = msgspec.structs.replace(
        bench.geometry, num_blocks=rows * pages, max_model_len=context, pages_per_slot=pages, host_blocks=0
    )
    paper, steps = Paper(context, rows * context), []
    rng = random.Random("paper")
    jobs = [Job(words(rng, a.prompt, geometry.vocab_size), greedy(a.output)) for a in trace[:requests]]
    for way in WAYS:
        recorder, waste = Recorder(bench.executor), Waste()
        core = bench.core(recorder, geometry, **settings_of(way))
        run = serve(core, jobs, rows if way == "static" else 0, static=way == "static", each_step=waste.see)
        recorder.rest()
        steps += recorder.samples
        paper.ways.append(_way(way, run, waste))
    paper.curves, paper.fit_error = _curves(bench, geometry, trace, steps, paper.ways[0].requests_per_s)
    few = [a for a in trace if a.prompt <= context // 4][:16]
    prompts, outputs = [words(rng, a.prompt, geometry.vocab_size) for a in few], [min(a.output, 128) for a in few]
    paper.shared = [
        parallel(bench, samples(prompts, outputs, 4), "4 samples", 8),
        parallel(bench, beams(prompts[:8], outputs[:8], 4), "4 beams", 8),
    ]
    return paper


def _latencies(run: Run) -> list[float]:
    return [(t.end - t.begin) / len(t.tokens[0]) for t in run.timed]


def _way(name: str, run: Run, waste: Waste) -> Way:
    tpot = [value for t in run.timed for value in t.tpot]
    return Way(
        name,
        waste.share,
        waste.most_running,
        run.seconds,
        run.tokens_per_s,
        len(run.timed) / run.seconds,
        statistics.fmean(_latencies(run)),
        statistics.median(tpot),
    )


def _curves(
    bench: Bench, geometry: Geometry, trace: Sequence[Arrival], steps: list[StepSample], base: float
) -> tuple[list[Curve], float]:
    """The real scheduler over a virtual clock, for rates that would take hours. Poisson arrivals, as in the paper."""
    rng, now, poisson = random.Random("arrivals"), 0.0, []
    for arrival in trace:
        poisson.append(replace(arrival, time=now))
        now += rng.expovariate(1.0)
    cost = fit(steps, copy_bytes_per_s=4e9, origin="fitted to the steps of this run")
    rates = [base * rate for rate in RATES]
    curves = [
        Curve(way, rates, [_simulated(bench, geometry, poisson, cost, way, rate) for rate in rates]) for way in WAYS
    ]
    return curves, cost.error


def _simulated(
    bench: Bench, geometry: Geometry, trace: Sequence[Arrival], cost: CostModel, way: str, rate: float
) -> float:
    settings = bench.core_settings(**settings_of(way))
    replica = Replica(msgspec.structs.replace(geometry, vocab_size=1 << 31), settings, cost)
    arrivals = at_rate(list(trace), rate)
    jobs = [Job(a.tokens(i), greedy(a.output), a.time) for i, a in enumerate(arrivals)]

    def wait(seconds: float) -> None:
        replica.clock.now += seconds

    rows = geometry.num_blocks // geometry.pages_per_slot
    static = way == "static"
    run = serve(replica.core, jobs, rows if static else 0, static=static, clock=replica.clock, wait=wait)
    return statistics.fmean(_latencies(run))


def _crossing(curve: Curve, seconds: float) -> float:
    """The rate at which the curve first passes a latency, between its points linearly."""
    last_rate, last = 0.0, curve.latencies[0]
    for rate, latency in zip(curve.rates, curve.latencies, strict=True):
        if latency > seconds:
            if last_rate == 0.0:
                return 0.0
            return last_rate + (rate - last_rate) * (seconds - last) / max(1e-12, latency - last)
        last_rate, last = rate, latency
    return curve.rates[-1]
