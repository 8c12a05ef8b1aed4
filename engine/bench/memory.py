"""KV memory under pressure, with and without the prefix cache, and shared: the real engine, each way in turn."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

import msgspec

from engine.api import SamplingParams
from engine.bench.drive import Bench, Job, Run, chat, greedy, serve, words
from engine.core.engine import EngineCore

PRESSURE_REQUESTS = 64
PREFIX_TOKENS, OWN_TOKENS = 512, 32


@dataclass(slots=True)
class Sharing:
    """Means over the steps of a run, in blocks."""

    used: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    peak: int = 0

    def see(self, core: EngineCore) -> None:
        usage = core.kv.usage()
        self.used.append(usage.total - usage.free)
        self.saved.append(usage.saved)
        self.peak = max(self.peak, usage.shared)

    @property
    def share(self) -> float:
        """Of the memory that the sequences would take each for itself."""
        return sum(self.saved) / max(1, sum(self.used) + sum(self.saved))


@dataclass(frozen=True, slots=True)
class Pressed:
    """One way of preempting; medians over the repeats."""

    mode: str
    seconds: float
    runs: list[float]
    swaps: float
    recomputes: float
    swapped_blocks: float
    computed_tokens: float  # prompt, output and what was computed again


def pressure(bench: Bench, repeats: int, requests: int = PRESSURE_REQUESTS) -> tuple[int, int, list[Pressed]]:
    """(blocks wanted, blocks there, results): all requests at once on a quarter of the blocks that they want."""
    size = bench.geometry.block_size
    jobs = chat(requests, bench.geometry.vocab_size, seed=1)
    wanted = sum(-(-(len(job.prompt) + (job.params.max_tokens or 0)) // size) for job in jobs)
    largest = max(-(-(len(job.prompt) + (job.params.max_tokens or 0)) // size) for job in jobs)
    blocks = max(wanted // 4, largest + 1)
    geometry = msgspec.structs.replace(bench.geometry, num_blocks=blocks)
    runs: dict[str, list[Run]] = {mode: [] for mode in ("auto", "swap", "recompute")}
    for repeat in range(repeats):
        for mode in list(runs) if repeat % 2 == 0 else list(runs)[::-1]:
            run = serve(bench.core(geometry=geometry, preemption=mode), jobs)
            expected = [job.params.max_tokens for job in jobs]
            assert [len(t.tokens[0]) for t in run.timed] == expected, "every request gets all of its tokens"
            runs[mode].append(run)

    def middle(of: list[Run], name: str) -> float:
        return statistics.median(run.count(name) for run in of)

    return (
        wanted,
        blocks,
        [
            Pressed(
                mode,
                statistics.median(run.seconds for run in of),
                [run.seconds for run in of],
                middle(of, "preemptions_swap"),
                middle(of, "preemptions_recompute"),
                middle(of, "swap_out_blocks"),
                middle(of, "step_tokens"),
            )
            for mode, of in runs.items()
        ],
    )


@dataclass(frozen=True, slots=True)
class Cached:
    """The prefix workload; times in seconds, medians over requests and repeats."""

    caching: bool
    ttft: float
    tokens_per_s: float
    hit_rate: float  # of the prompt tokens that were looked up


def prefixes(bench: Bench, repeats: int, requests: int = 64, concurrency: int = 16) -> list[Cached]:
    """One system prompt for all, with the prefix cache on and off."""
    rows: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    vocab = bench.geometry.vocab_size
    for repeat in range(repeats):
        rng = random.Random(f"prefix/{repeat}")
        shared = words(rng, PREFIX_TOKENS, vocab)
        jobs = [Job(shared + words(rng, OWN_TOKENS, vocab), greedy(64)) for _ in range(requests)]
        for caching in (True, False) if repeat % 2 == 0 else (False, True):
            run = serve(bench.core(enable_prefix_caching=caching), jobs, concurrency)
            hits = run.count("prefix_hits") / max(1.0, run.count("prefix_queries"))
            rows[caching].append((statistics.median(t.ttft for t in run.timed), run.tokens_per_s, hits))
    return [Cached(caching, *(statistics.median(c) for c in zip(*of, strict=True))) for caching, of in rows.items()]


@dataclass(frozen=True, slots=True)
class Shared:
    """Choices of one prompt. Shares are of the memory that they would take each for itself."""

    name: str
    saved: float
    peak_shared_blocks: int
    copies: float  # of blocks, on a write to a shared one
    tokens_per_s: float


def parallel(bench: Bench, jobs: list[Job], name: str, concurrency: int) -> Shared:
    """Run jobs with several choices or beams each, without the prefix cache: what is shared is theirs alone."""
    seen = Sharing()
    run = serve(bench.core(enable_prefix_caching=False), jobs, concurrency, each_step=seen.see)
    return Shared(name, seen.share, seen.peak, run.count("cow_copies"), run.tokens_per_s)


def samples(prompts: list[tuple[int, ...]], outputs: list[int], n: int) -> list[Job]:
    """n choices of each prompt."""
    params = [
        SamplingParams(n=n, temperature=0.8, max_tokens=o, ignore_eos=True, seed=i) for i, o in enumerate(outputs)
    ]
    return [Job(p, s) for p, s in zip(prompts, params, strict=True)]


def beams(prompts: list[tuple[int, ...]], outputs: list[int], width: int) -> list[Job]:
    """A beam search for each prompt."""
    return [Job(p, greedy(o, beam_width=width)) for p, o in zip(prompts, outputs, strict=True)]
