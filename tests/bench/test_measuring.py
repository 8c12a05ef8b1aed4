"""The measuring loop and what is worked out from it, over the real scheduler in virtual time: no model is loaded."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from engine.bench.ceilings import Ceilings, roofline_s
from engine.bench.drive import Job, Recorder, Run, greedy, serve, words
from engine.bench.memory import Sharing, beams, samples
from engine.bench.paper import Curve, Paper, Waste, Way, _crossing, settings_of
from engine.core.engine import EngineCore
from engine.core.plan import Geometry
from engine.core.settings import CoreSettings
from engine.simulate.cluster import Clock, Replica, SimExecutor
from engine.simulate.cost import CostModel, ModelSize, fit
from server.bench.paper import svg

COST = CostModel(0.01, 0.002, 1e-4, 1e-4, 1e-7, 4e9, "made up")
CONTEXT, BLOCK, ROWS = 256, 16, 4
GEOMETRY = Geometry(
    num_blocks=ROWS * CONTEXT // BLOCK,
    block_size=BLOCK,
    max_model_len=CONTEXT,
    max_num_seqs=64,
    vocab_size=1 << 31,
    bytes_per_block=1 << 16,
)


def replica(way: str) -> Replica:
    return Replica(GEOMETRY, CoreSettings(**settings_of(way)), COST)


def run(jobs: list[Job], way: str = "paged", concurrency: int = 0, static: bool = False) -> tuple[Run, Waste]:
    r, waste = replica(way), Waste()

    def wait(seconds: float) -> None:
        r.clock.now += seconds

    done = serve(r.core, jobs, concurrency, static=static, each_step=waste.see, clock=r.clock, wait=wait)
    return done, waste


def some_jobs(count: int = 24, gap: float = 0.0) -> list[Job]:
    rng = random.Random(1)
    return [Job(words(rng, rng.randint(8, 60), 1000), greedy(rng.randint(4, 40)), i * gap) for i in range(count)]


def test_every_job_gets_all_of_its_tokens_whatever_the_way() -> None:
    jobs = some_jobs()
    for way in ("static", "reserved", "paged"):
        done, _ = run(jobs, way, ROWS if way == "static" else 0, way == "static")
        assert [len(t.tokens[0]) for t in done.timed] == [job.params.max_tokens for job in jobs]
        assert done.output_tokens == sum(job.params.max_tokens or 0 for job in jobs)


def test_a_static_batch_ends_as_a_whole_before_the_next_begins() -> None:
    done, _ = run(some_jobs(), "static", ROWS, static=True)
    for first in range(0, 24 - ROWS, ROWS):
        batch, after = done.timed[first : first + ROWS], done.timed[first + ROWS]
        assert after.begin >= max(t.end for t in batch)


def test_an_open_loop_counts_latency_from_the_arrival_not_from_the_step() -> None:
    done, _ = run(some_jobs(gap=0.5))
    assert [t.begin for t in done.timed] == [i * 0.5 for i in range(24)]
    assert all(t.ttft > 0 and t.end >= t.tokens[0][-1] for t in done.timed)


def test_pages_waste_little_and_hold_more_at_once_than_reserved_contexts() -> None:
    _, reserved = run(some_jobs(), "reserved")
    _, paged = run(some_jobs(), "paged")
    assert reserved.most_running == ROWS
    assert paged.most_running > ROWS
    assert paged.share < 0.3 < reserved.share


def test_choices_and_beams_share_the_prompt() -> None:
    rng = random.Random(2)
    prompts = [words(rng, 64, 1000) for _ in range(2)]
    for jobs in (samples(prompts, [8, 8], 4), samples(prompts, [8, 8], 1)):
        seen = Sharing()
        serve(replica("paged").core, jobs, each_step=seen.see)
        assert (seen.share > 0.4) == (jobs[0].params.n == 4)
    assert [job.params.beam_width for job in beams(prompts, [8, 8], 4)] == [4, 4]


def test_recorded_steps_give_back_the_cost_model_that_made_them() -> None:
    clock = Clock()
    executor = SimExecutor(GEOMETRY, COST, clock)
    recorder = Recorder(executor, clock)
    core = EngineCore(recorder, GEOMETRY, CoreSettings(enable_prefix_caching=False), frozenset(), None, clock)
    serve(core, some_jobs(), clock=clock)
    recorder.rest()
    fitted = fit(recorder.samples, 4e9, "recorded")
    assert fitted.error < 0.02
    assert fitted.step_s(100, 4, 1000) == pytest.approx(COST.step_s(100, 4, 1000), rel=0.1)


def test_the_roofline_is_the_longer_of_memory_and_products() -> None:
    size, lid = ModelSize(100e6, 200e6, 1000), Ceilings("x", 2, 20e9, 1e11, 4e11, 8e11)
    assert roofline_s(size, 10_000_000, lid, "bfloat16", 1, 1, 0) == pytest.approx(0.01)
    assert roofline_s(size, 10_000_000, lid, "bfloat16", 1000, 1, 0) == pytest.approx(0.45, rel=0.01)
    assert roofline_s(size, 10_000_000, lid, "int8", 1000, 1, 0) == pytest.approx(0.225, rel=0.01)


def test_a_rate_at_a_latency_lies_between_the_measured_points() -> None:
    curve = Curve("x", [1.0, 2.0, 3.0], [0.1, 0.2, 0.9])
    assert _crossing(curve, 0.15) == pytest.approx(1.5)
    assert _crossing(curve, 0.05) == 0.0
    assert _crossing(curve, 2.0) == 3.0


def test_the_plot_is_an_svg_with_every_way_in_it() -> None:
    ways = [Way(name, 0.5, 4, 1.0, 100.0, 1.0, 0.1, 0.01) for name in ("static", "reserved", "paged")]
    curves = [Curve(w.name, [1.0, 2.0], [0.1, 0.2]) for w in ways]
    drawn = svg(Paper(CONTEXT, 1024, ways, curves))
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert all(drawn.count(w.name) == 2 for w in ways)
