"""Two ranks compute what one does, in float32; a rank that dies takes the engine with it, and no token is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine.api import AddRequest, SamplingParams
from engine.client import EngineClient, LocalClient, ProcessClient
from engine.config import EngineConfig
from engine.core.plan import Executor, SlotParams
from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.model.decoder import Decoder, DenseCausalAttention
from engine.model.pull import pull
from engine.model.sharded import ShardedDecoder, Sharding, shard_spec
from engine.model.weights import iter_weights
from engine.worker.settings import ExecutorSettings
from engine.worker.tensor_parallel import TensorParallelExecutor
from engine.worker.torch_executor import TorchExecutor
from tests.engine.test_client import until
from tests.model.families import make
from tests.worker.driver import Driver, Job, prompts, tiny_lora, tiny_model

ROOT = Path(__file__).parent.parent.parent
GREEDY = SlotParams(temperature=0.0, logprobs=2)
SETTINGS = ExecutorSettings(
    max_model_len=256,
    max_num_seqs=8,
    max_batched_tokens=256,
    num_blocks=96,
    host_blocks=24,
    dtype="float32",
    kv_dtype="float32",
    threads=2,
)


class Threads:
    """A group of ranks on threads: `total(rank)` adds up in the order of ranks, as the real ones do."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * count

    def total(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def add(x: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = x
            self._barrier.wait()
            total = sum(self._parts[1:], self._parts[0])
            self._barrier.wait()
            return total

        return add


@torch.inference_mode()
def logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    hidden = decoder.forward(tokens, torch.arange(len(tokens)), DenseCausalAttention(decoder.spec))
    return decoder.logits(hidden)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2", "opt", "gpt-neox", "mixtral"])
def test_two_ranks_give_the_logits_of_one(family: str, tmp_path: Path) -> None:
    make(family, tmp_path)
    spec = load_spec(tmp_path)
    tokens = torch.arange(3, 24)
    want = logits(Decoder.load(spec, tmp_path), tokens)
    group, cpu = Threads(2), torch.device("cpu")

    def rank(number: int) -> torch.Tensor:
        sharding = Sharding(number, 2, group.total(number))
        decoder = ShardedDecoder(spec, iter_weights(spec, tmp_path), torch.float32, cpu, sharding)
        return logits(decoder, tokens)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, atol=2e-4, rtol=2e-4)


def test_what_cannot_be_cut_is_refused_with_what_can(tmp_path: Path) -> None:
    spec = load_spec(pull("smollm2"))
    with pytest.raises(ConfigError, match="3 KV heads; it divides by 3"):
        shard_spec(spec, 2)
    assert shard_spec(spec, 3).num_heads == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_model(tmp_path_factory.mktemp("model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(pull("smollm2") / name)
    return directory


def jobs() -> list[Job]:
    return [Job(prompt, GREEDY, 12) for prompt in prompts((5, 40, 17, 90))]


def test_an_executor_of_two_processes_draws_the_tokens_of_one(model: Path, tmp_path: Path) -> None:
    spec = load_spec(model)
    alone: Executor = TorchExecutor(model, spec, SETTINGS)
    lora = tiny_lora(tmp_path / "lora", 1, ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"))

    def run(executor: Executor) -> list[Job]:
        driver = Driver(executor, executor.start())
        try:
            plain = driver.generate(jobs(), chunk=32, swap=True)
            executor.load_adapter("a", str(lora))
            adapted = [Job(job.prompt, SlotParams(temperature=0.0, logprobs=2, adapter="a"), 6) for job in jobs()]
            return [*plain, *driver.generate(adapted)]
        finally:
            executor.close()

    for one, two in zip(run(alone), run(TensorParallelExecutor(model, spec, SETTINGS, 2)), strict=True):
        assert [s.token for s in one.sampled] == [s.token for s in two.sampled]
        for a, b in zip(one.sampled, two.sampled, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


SUMS = """
import sys, os, torch, torch.distributed as dist
from pathlib import Path
from engine.worker.tensor_parallel import SharedSum, gathered_sum
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
shared = SharedSum(directory / "sums", rank, 2, 4096)
torch.manual_seed(rank)
for i in range(200):
    x = torch.randn(1 + i % 7, 96)
    one, two = shared(x), gathered_sum(x)
    assert torch.equal(one, two), i
    torch.save(two, directory / f"last-{rank}")
dist.barrier()
"""


def test_sums_in_shared_memory_are_those_of_gloo_on_both_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SUMS]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=ROOT) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    first, second = (torch.load(tmp_path / f"last-{rank}", weights_only=True) for rank in range(2))
    assert torch.equal(first, second)


def ranks_of(engine: int) -> list[int]:
    """Processes that the engine started."""
    found = []
    for task in Path(f"/proc/{engine}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


async def stream(client: EngineClient, id: str) -> list[int]:
    params = SamplingParams(max_tokens=120, seed=3, ignore_eos=True)
    request = AddRequest(id=id, prompt=tuple(range(20, 60)), params=params, arrival=0.0)
    return [token async for delta in client.submit(request) for token in delta.tokens]


def test_a_killed_rank_ends_the_engine_which_resumes_with_new_ranks(model: Path) -> None:
    config = EngineConfig.of(
        str(model), tensor_parallel_size=2, dtype="float32", num_kv_blocks=64, max_model_len=512, swap_space="0"
    )

    async def run() -> tuple[list[int], list[int]]:
        client = ProcessClient(config)
        try:
            await client.start()
            engine = client.health()["engine"]["pid"]
            (rank,) = ranks_of(engine)
            undisturbed = await stream(client, "a")
            again = asyncio.ensure_future(stream(client, "b"))
            await until(lambda: client.stats.generation_tokens > 125)
            os.kill(rank, signal.SIGKILL)
            await until(lambda: client.health()["engine"]["pid"] != engine)
            return undisturbed, await again
        finally:
            await client.close()

    undisturbed, resumed = asyncio.run(run())
    assert len(undisturbed) == 120
    assert resumed == undisturbed


def test_ranks_on_a_cpu_are_not_mixed_with_its_kernels() -> None:
    config = EngineConfig.of("smollm2", tensor_parallel_size=3, attention_backend="native")

    async def run() -> None:
        client = LocalClient(config)
        try:
            await client.start()
        finally:
            await client.close()

    with pytest.raises(ConfigError, match="leave it on auto"):
        asyncio.run(run())
