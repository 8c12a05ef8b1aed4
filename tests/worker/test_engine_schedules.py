"""The real scheduler over the real kernels: no pressure, preemption of either kind, overlap, tiers, virtual memory.

What each request gets, tokens and logprobs, is the same bits in all of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.api import AddRequest, SamplingParams, Stats, TokenLogprobs
from engine.core.engine import EngineCore
from engine.core.settings import CoreSettings
from engine.model.config import load_spec
from engine.worker.native_executor import NativeExecutor
from engine.worker.settings import ExecutorSettings
from tests.worker.driver import prompts, tiny_model

SETTINGS = ExecutorSettings(
    max_model_len=256, max_num_seqs=16, max_batched_tokens=64, num_blocks=400, host_blocks=64, image_cache=False
)
CORE = CoreSettings(max_num_batched_tokens=64, max_num_seqs=16)
Answers = dict[tuple[str, int], list[tuple[int, TokenLogprobs]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def requests() -> list[AddRequest]:
    """24 prompts of 1 to 90 tokens, greedy and drawn, some penalised, some with two choices."""
    return [
        AddRequest(
            id=str(i),
            prompt=prompt,
            params=SamplingParams(
                temperature=0.8 if i % 2 else 0.0,
                seed=i,
                max_tokens=20,
                logprobs=1,
                repetition_penalty=1.2 if i % 3 == 0 else 1.0,
                n=2 if i % 5 == 0 else 1,
            ),
            arrival=float(i),
        )
        for i, prompt in enumerate(prompts([30, 5, 60, 90, 17, 1, 44, 80] * 3))
    ]


def run(core: EngineCore) -> Answers:
    answers: Answers = {}
    for request in requests():
        core.add(request)
    while core.has_work():
        for delta in core.step().deltas:
            assert not delta.error
            answers.setdefault((delta.id, delta.choice), []).extend(zip(delta.tokens, delta.logprobs, strict=True))
    return answers


def serve(model: Path, settings: ExecutorSettings, core_settings: CoreSettings) -> tuple[Answers, Stats]:
    executor = NativeExecutor(model, load_spec(model), settings)
    core = EngineCore(executor, executor.start(), core_settings, frozenset(), None)
    answers = run(core)
    stats = core.stats()
    core.close()
    return answers, stats


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> Answers:
    answers, stats = serve(model, SETTINGS, replace(CORE, enable_prefix_caching=False))
    assert stats.preemptions_swap == stats.preemptions_recompute == stats.prefix_hits == 0
    assert len({tuple(token for token, _ in got) for got in answers.values()}) > 20
    return answers


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_pressure_changes_no_bit(model: Path, undisturbed: Answers, overlap: int, preemption: str) -> None:
    answers, stats = serve(
        model, replace(SETTINGS, num_blocks=24), replace(CORE, overlap=overlap, preemption=preemption)
    )
    assert answers == undisturbed
    assert stats.preemptions_swap + stats.preemptions_recompute > 0
    if preemption != "auto":
        assert stats.preemptions_swap > 0 if preemption == "swap" else stats.preemptions_recompute > 0


@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_a_warm_prefix_cache_changes_no_bit(model: Path, undisturbed: Answers, block_size: int) -> None:
    settings = replace(SETTINGS, block_size=block_size, num_blocks=4000 // block_size)
    executor = NativeExecutor(model, load_spec(model), settings)
    core = EngineCore(executor, executor.start(), replace(CORE, overlap=1), frozenset(), None)
    assert run(core) == undisturbed
    cold = core.stats().prefix_hits
    assert run(core) == undisturbed
    assert core.stats().prefix_hits > cold
    core.close()


def test_virtual_memory_changes_no_bit(model: Path, undisturbed: Answers) -> None:
    answers, _ = serve(
        model, replace(SETTINGS, kv_manager="virtual", num_blocks=60), replace(CORE, kv_manager="virtual", overlap=1)
    )
    assert answers == undisturbed


def test_prefixes_from_the_disk_of_an_earlier_run_change_no_bit(
    model: Path, undisturbed: Answers, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, num_blocks=24, host_blocks=8, disk_dir=str(tmp_path), disk_bytes=64 << 20)
    first, stats = serve(model, settings, CORE)
    assert first == undisturbed
    assert stats.disk_blocks_used > 0
    second, stats = serve(model, settings, CORE)
    assert second == undisturbed
    assert stats.prefix_hits_disk > 0


def test_prefixes_saved_by_an_engine_that_ends_are_hit_by_the_next_and_change_no_bit(
    model: Path, undisturbed: Answers, tmp_path: Path
) -> None:
    settings = replace(SETTINGS, host_blocks=8, disk_dir=str(tmp_path), disk_bytes=64 << 20)  # no pressure: no demotion
    executor = NativeExecutor(model, load_spec(model), settings)
    core = EngineCore(executor, executor.start(), CORE, frozenset(), None)
    assert run(core) == undisturbed
    assert core.stats().disk_blocks_used == 0
    core.save()
    saved = core.stats().disk_blocks_used
    core.kv.check()
    core.close()
    second, stats = serve(model, settings, CORE)
    assert second == undisturbed
    assert 0 < stats.prefix_hits_disk <= saved * settings.block_size


@pytest.mark.parametrize("overlap", [0, 1])
def test_choices_of_one_request_get_what_each_gets_alone(model: Path, overlap: int) -> None:
    prompt = prompts([75])[0]
    params = SamplingParams(
        temperature=0.9, seed=3, n=4, max_tokens=12, logprobs=2, repetition_penalty=1.3, logit_bias={5: 2.0}
    )
    executor = NativeExecutor(model, load_spec(model), SETTINGS)
    core = EngineCore(
        executor, executor.start(), replace(CORE, overlap=overlap, enable_prefix_caching=False), frozenset(), None
    )

    def answers(*unwanted: int) -> dict[int, list[tuple[int, TokenLogprobs]]]:
        core.add(AddRequest(id="a", prompt=prompt, params=params, arrival=0.0))
        for choice in unwanted:
            core.abort("a", choice)
        got: dict[int, list[tuple[int, TokenLogprobs]]] = {choice: [] for choice in range(4)}
        while core.has_work():
            for delta in core.step().deltas:
                got[delta.choice].extend(zip(delta.tokens, delta.logprobs, strict=True))
        return got

    together = answers()
    assert len({tuple(token for token, _ in got) for got in together.values()}) == 4
    for choice in range(4):
        assert answers(*({0, 1, 2, 3} - {choice}))[choice] == together[choice]
    core.close()
