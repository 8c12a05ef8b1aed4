"""The simulator: real scheduling in virtual time, the cost model, and the search for a fleet."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine.core.plan import Geometry
from engine.core.settings import CoreSettings
from engine.errors import ConfigError
from engine.simulate.capacity import LASTS_S, Objective, replicas_for
from engine.simulate.cluster import Report, simulate
from engine.simulate.cost import CostModel, ModelSize, StepSample, fit, load_fit, roofline
from engine.simulate.trace import Arrival, at_rate, generate, load

STEP = CostModel(0.01, 0.0, 1e-5, 0.0, 0.0, 1e10, "test")
POOL = Geometry(
    num_blocks=2000, block_size=16, max_model_len=4096, max_num_seqs=64, vocab_size=1 << 31, bytes_per_block=1 << 16
)
SETTINGS = CoreSettings(max_num_seqs=64, max_num_batched_tokens=512)


def run(trace: list[Arrival], replicas: int = 1, routing: str = "round-robin", pool: Geometry = POOL) -> Report:
    return simulate(trace, replicas, pool, SETTINGS, STEP, routing)  # type: ignore[arg-type]


def test_one_request_takes_the_steps_that_it_needs() -> None:
    (one,) = run([Arrival(5.0, 100, 11)]).served
    assert one.ttft == pytest.approx(0.01)
    assert one.tpot == pytest.approx(0.01)
    assert one.tokens == 11


def test_every_request_ends_with_all_its_tokens_also_under_pressure() -> None:
    trace = at_rate(generate(200, seed=1), 50.0)
    small = Geometry(**{f: getattr(POOL, f) for f in POOL.__struct_fields__} | {"num_blocks": 120})
    report = run(trace, pool=small)
    assert [s.tokens for s in report.served] == [a.output for a in trace]
    assert sum(report.preemptions.values()) > 0


def test_a_shared_prefix_is_computed_once_and_affinity_finds_it() -> None:
    trace = [Arrival(0.5 * i, 1000, 4, (i % 3, 100 + i)) for i in range(60)]
    assert run(trace).hit_ratio > 0.4
    assert run(trace, 8, "prefix").hit_ratio > run(trace, 8, "round-robin").hit_ratio


def test_the_answer_is_the_smallest_fleet_that_keeps_the_objective() -> None:
    trace = generate(300, seed=2, output=20)
    objective = Objective(ttft=0.2, tpot=0.0)
    for rate, capacity in ((5.0, 1.0), (200.0, 20.0)):
        answer = replicas_for(rate, len(trace), objective, capacity, lambda r, n: run(at_rate(trace, r), n))
        assert answer is not None
        share = rate / answer.shards
        simulated = at_rate(trace, share)
        assert simulated[-1].time - simulated[0].time > 0.9 * LASTS_S  # queues have time to grow
        assert objective.kept(run(simulated, answer.simulated))
        if answer.shards == 1:
            assert answer.simulated == 1 or not objective.kept(run(simulated, answer.simulated - 1))
        assert answer.replicas == -(-answer.simulated * answer.shards // 1)


def test_an_objective_below_one_step_has_no_answer() -> None:
    assert replicas_for(1.0, 5, Objective(ttft=0.001, tpot=0), 1.0, lambda r, n: run(generate(5, 0), n)) is None


def test_a_fit_finds_the_model_that_made_the_samples() -> None:
    truth = CostModel(0.005, 0.001, 2e-5, 1e-4, 1e-8, 1e9, "truth")
    shapes = [(b, b, b * c) for b in (1, 4, 16, 64, 128) for c in (64, 1024)]
    shapes += [(n, 1, n) for n in (64, 256, 512)]
    samples = [StepSample(t, s, k, truth.step_s(t, s, k)) for t, s, k in shapes]
    found = fit(samples, 1e9, "test")
    assert found.error < 0.03


def test_a_roofline_says_that_it_was_not_measured() -> None:
    assert "not measured" in roofline("H200", ModelSize(8e9, 16e9, 131072)).origin
    with pytest.raises(ConfigError, match="H200"):
        roofline("H300", ModelSize(8e9, 16e9, 131072))


def test_published_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "t.csv.gz"
    with gzip.open(azure, "wt") as f:
        f.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
        f.write("2023-11-16 18:15:50.9951690,396,109\n")
    assert load(azure)[1] == Arrival(pytest.approx(4.314579), 396, 109)
    mooncake = tmp_path / "t.jsonl"
    row = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]}
    mooncake.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    first = load(mooncake)[0]
    assert first.tokens(0) == (8,) * 512 + (10,) * 88


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n3,4\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n"])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--trace"):
        load(path)


def test_a_file_that_is_no_fit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="bench steps"):
        load_fit(path)
