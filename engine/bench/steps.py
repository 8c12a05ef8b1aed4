"""How long steps take: decode by batch and context, prefill, and a served load, beside this machine's ceilings."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from engine import native
from engine.bench.ceilings import Ceilings, ceilings, roofline_s
from engine.bench.drive import LOWEST_TOKEN, Bench, Job, Recorder, chat, greedy, serve, words
from engine.core.plan import KVOp, Plan, Result, Row, SlotParams
from engine.simulate.cluster import simulate
from engine.simulate.cost import StepSample, fit
from engine.simulate.trace import at_rate, generate

BATCHES = (1, 4, 16, 64)
CONTEXTS = (64, 256, 1024, 4096)
PREFILLS = (32, 128, 512)
REPEATS = 5
SERVED = ((1, 2), (4, 8), (16, 48), (64, 64))  # (concurrency, requests) of the chat whose steps are recorded


@dataclass(frozen=True, slots=True)
class Point:
    """A kind of step. `seconds` is the median; the forward pass and the sampler are parts of it."""

    kind: str  # "decode" or "prefill"
    batch: int  # sequences
    tokens: int  # computed
    context: int  # tokens that stand before, a sequence
    seconds: float
    forward_s: float
    sample_s: float
    roofline_s: float  # the shortest time that the ceilings allow
    phases: dict[str, float]  # seconds of the forward pass by `native.PHASES`, the mean

    @property
    def share(self) -> float:
        """Of the roofline that the forward pass reaches."""
        return self.roofline_s / self.forward_s


@dataclass(frozen=True, slots=True)
class Measured:
    """All of a run."""

    ceilings: Ceilings
    points: list[Point]
    served: list[StepSample]  # steps of the engine under load, with all that is around the forward pass
    copy_bytes_per_s: float

    def samples(self) -> list[StepSample]:
        """For a cost model."""
        grid = [StepSample(p.tokens, p.batch, p.batch * p.context + p.tokens, p.seconds) for p in self.points]
        return grid + self.served


class Pool:
    """Sequences made by hand: slot s has blocks of its own, all of them filled with the KV of one real block."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._step = 0
        self._block_size = bench.geometry.block_size
        self.copy_bytes_per_s = self._fill()

    def _fill(self) -> float:
        """Memory that was never written reads as one page of zeros, which is quicker than any real cache."""
        size, blocks = self._block_size, self._bench.geometry.num_blocks
        row = Row(slot=0, start=0, tokens=tuple(range(LOWEST_TOKEN, LOWEST_TOKEN + size)), table=(0,))
        self.run((row,))
        self.run((), tuple(KVOp("copy", 0, block) for block in range(1, blocks)))
        rates = []
        for first in range(1, blocks // 2, max(1, blocks // 8)):
            ops = tuple(KVOp("copy", first + i, blocks // 2 + i) for i in range(min(64, blocks - blocks // 2)))
            (copied,) = self.run((), ops)[1].copies
            rates.append(copied.size_bytes / copied.seconds)
        return statistics.median(rates)

    def run(self, rows: tuple[Row, ...], ops: tuple[KVOp, ...] = ()) -> tuple[float, Result]:
        """(seconds, result) of one step."""
        self._step += 1
        greedy = SlotParams(temperature=0)
        plan = Plan(self._step, rows, ops, tuple((row.slot, greedy) for row in rows))
        began = time.perf_counter()
        self._bench.executor.submit(plan)
        result = self._bench.executor.collect()
        return time.perf_counter() - began, result

    def rows(self, batch: int, tokens: int, context: int) -> tuple[Row, ...] | None:
        """`batch` sequences, each with `tokens` to compute after `context`; None when the pool hasn't room."""
        each = -(-(context + tokens) // self._block_size)
        if batch * each > self._bench.geometry.num_blocks or context + tokens > self._bench.settings.max_model_len:
            return None
        ids = tuple(LOWEST_TOKEN + 7 * i % 1000 for i in range(tokens))
        return tuple(
            Row(slot=s, start=context, tokens=ids, table=tuple(range(s * each, (s + 1) * each)), sample=True)
            for s in range(batch)
        )


def _shapes(max_num_seqs: int, max_batched_tokens: int) -> Iterator[tuple[str, int, int, int]]:
    """(kind, sequences, tokens of each, context)."""
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch <= max_num_seqs:
                yield "decode", batch, 1, context
    for tokens in PREFILLS:
        for context in (0, 1024):
            if tokens <= max_batched_tokens:
                yield "prefill", 1, tokens, context


def measure(bench: Bench, repeats: int = REPEATS, served: tuple[tuple[int, int], ...] = SERVED) -> Measured:
    """About a minute: the ceilings, then each kind of step `repeats` times, then chat at several concurrencies."""
    settings, size = bench.settings, bench.model_size()
    lid = ceilings(settings.isa, settings.threads)
    head = bench.spec.vocab_size * bench.spec.hidden_size
    pool, kernels = Pool(bench), native.Kernels(native.library())
    points = []
    for kind, batch, tokens, context in _shapes(settings.max_num_seqs, settings.max_batched_tokens):
        rows = pool.rows(batch, tokens, context)
        if rows is None:
            continue
        pool.run(rows)  # the first one brings the caches into a usual state
        kernels.phases()
        runs = [pool.run(rows) for _ in range(repeats)]
        total = batch * tokens
        points.append(
            Point(
                kind,
                batch,
                total,
                context,
                statistics.median(s for s, _ in runs),
                statistics.median(r.compute_s for _, r in runs),
                statistics.median(r.sample_s for _, r in runs),
                roofline_s(size, head, lid, bench.arithmetic, total, batch, batch * context + total),
                {name: seconds / repeats for name, seconds in kernels.phases().items()},
            )
        )
    recorder = Recorder(bench.executor)
    for concurrency, requests in served:
        concurrency = min(concurrency, settings.max_num_seqs)
        serve(bench.core(recorder), chat(requests, bench.geometry.vocab_size, seed=concurrency), concurrency)
        recorder.rest()
    return Measured(lid, points, recorder.samples, pool.copy_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Check:
    """The same arrivals served, foretold with the steps measured before, and with those of the serving itself: the

    two differ when the machine has changed its speed meanwhile. Medians in seconds.
    """

    rate: float
    ttft: tuple[float, float, float]
    tpot: tuple[float, float, float]
    tokens_per_s: tuple[float, float, float]


def check(bench: Bench, samples: list[StepSample], copy_bytes_per_s: float, rate: float, requests: int) -> Check:
    """Serve what `octavo plan` makes up, in real time and in virtual time."""
    arrivals = at_rate(generate(requests, seed=0), rate)
    rng, vocab = random.Random("check"), bench.geometry.vocab_size
    jobs = [Job(words(rng, a.prompt, vocab), greedy(a.output), a.time) for a in arrivals]
    recorder = Recorder(bench.executor)
    run = serve(bench.core(recorder), jobs)
    geometry = msgspec.structs.replace(bench.geometry, vocab_size=1 << 31)
    before, own = (
        simulate(arrivals, 1, geometry, bench.core_settings(), fit(steps, copy_bytes_per_s, "fitted to this run"))
        for steps in (samples, recorder.samples)
    )
    tpots = [value for one in run.timed for value in one.tpot]
    first = statistics.median(one.ttft for one in run.timed)
    return Check(
        rate,
        (first, before.percentile("ttft", 0.5), own.percentile("ttft", 0.5)),
        (statistics.median(tpots), before.percentile("tpot", 0.5), own.percentile("tpot", 0.5)),
        (run.tokens_per_s, before.tokens_per_s, own.tokens_per_s),
    )
