"""The GPU executor on a fake device, with the GPU's own kernels in the host emulator: the whole path but the GPU.

The fake runs queued work late and in random order (see `fake_device.py`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.core.plan import Geometry, SlotParams
from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.worker.gpu_executor import GpuExecutor, pool_blocks
from engine.worker.settings import ExecutorSettings
from engine.worker.torch_executor import TorchExecutor
from tests.gpu.harness import build_emulator
from tests.worker.driver import Driver, Job, overlapped, prompts, tiny_lora, tiny_model
from tests.worker.fake_device import FakeDevice

SETTINGS = ExecutorSettings(
    max_model_len=320, max_num_seqs=4, max_batched_tokens=64, block_size=16, num_blocks=48, host_blocks=16,
    dtype="float32", kv_dtype="float32", deterministic=True,
)  # fmt: skip
GREEDY = SlotParams(temperature=0.0)
KINDS = [
    GREEDY,
    SlotParams(seed=3),
    SlotParams(seed=4, top_k=40, logprobs=1),
    SlotParams(seed=5, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


class Running:
    """A started executor and its device."""

    def __init__(self, model: Path, seed: int = 0, *, deaf: bool = False, **changes: object) -> None:
        settings = dataclasses.replace(SETTINGS, **changes)  # type: ignore[arg-type]
        self.device = FakeDevice(seed, deaf=deaf)
        kernels = self.device.emulate(build_emulator())
        self.executor = GpuExecutor(model, load_spec(model), settings, self.device, kernels, row_tile=8)
        self.geometry: Geometry = self.executor.start()

    def driver(self, seed: int = 0) -> Driver:
        return Driver(self.executor, self.geometry, seed)


def jobs(new_tokens: int = 6) -> list[Job]:
    return [Job(p, kind, new_tokens) for p, kind in zip(prompts([1, 20, 9, 33]), KINDS, strict=True)]


@pytest.fixture(scope="module")
def alone(model: Path) -> list[list[int]]:
    """What each job gets with the device to itself, step by step."""
    running = Running(model)
    done = running.driver().generate(jobs(), together=False)
    running.executor.close()
    return [[s.token for s in job.sampled] for job in done]


def test_greedy_tokens_are_those_of_the_reference_executor(model: Path, alone: list[list[int]]) -> None:
    reference = TorchExecutor(model, load_spec(model), dataclasses.replace(SETTINGS, deterministic=False))
    done = Driver(reference, reference.start()).generate(jobs()[:1])
    reference.close()
    assert [s.token for s in done[0].sampled] == alone[0]


@pytest.mark.parametrize("seed", range(2))
def test_batches_chunks_and_swaps_change_no_token_in_any_order_of_the_streams(
    model: Path, alone: list[list[int]], seed: int
) -> None:
    running = Running(model, seed)
    done = running.driver(seed).generate(jobs(), chunk=7 + seed, swap=True)
    running.executor.close()
    assert [[s.token for s in job.sampled] for job in done] == alone
    assert running.device.replayed > 0


def test_without_the_waits_between_streams_tokens_are_wrong(model: Path, alone: list[list[int]]) -> None:
    def tokens(seed: int) -> list[list[int]]:
        running = Running(model, seed, deaf=True)
        done = running.driver(seed).generate(jobs(), chunk=7, swap=True)
        running.executor.close()
        return [[s.token for s in job.sampled] for job in done]

    assert any(tokens(seed) != alone for seed in range(8))


def test_a_step_can_be_queued_before_the_tokens_of_the_one_before_are_known(
    model: Path, alone: list[list[int]]
) -> None:
    running = Running(model, 1)
    for i in (0, 1, 3):  # drawn on the device, drawn there by seed, and by the host
        done = overlapped(running.driver(i), jobs()[i], slot=i)
        assert [s.token for s in done.sampled] == alone[i]
    running.executor.close()


def test_rows_of_an_adapter_run_beside_those_of_the_base(model: Path, alone: list[list[int]], tmp_path: Path) -> None:
    running = Running(model)
    running.executor.load_adapter("a", str(tiny_lora(tmp_path / "a", 1, ["self_attn.q_proj"])))
    with_adapter = [Job(j.prompt, SlotParams(temperature=0.0, adapter="a"), 6) for j in jobs()[:2]]
    done = running.driver().generate([*with_adapter, *jobs()[:2]])
    running.executor.close()
    assert [[s.token for s in job.sampled] for job in done[2:]] == alone[:2]
    assert [s.token for s in done[0].sampled] != alone[0]


def test_the_pool_is_what_steps_and_weights_leave(model: Path) -> None:
    share = dataclasses.replace(SETTINGS, num_blocks=0, gpu_memory=0.9)
    assert pool_blocks(share, 10, (800, 1000), 200) == 50  # 800 - 100 - 200
    with pytest.raises(ConfigError, match="no room"):
        pool_blocks(share, 10, (300, 1000), 200)
    with pytest.raises(ConfigError, match="don't fit"):
        pool_blocks(SETTINGS, 10, (500, 1000), 100)
    assert pool_blocks(SETTINGS, 10, (580, 1000), 100) == 48
