"""One loaded model, many engine cores over it in turn: the ground that the measurements stand on."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec

from engine.api import AddRequest, SamplingParams, Stats
from engine.build import ELEMENT_BYTES, choose, core_settings, find_model, make_executor
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.plan import Executor, Geometry, Plan, Result
from engine.core.settings import CoreSettings
from engine.errors import ConfigError, RequestFailed
from engine.model.config import load_spec
from engine.model.memory import weight_bytes
from engine.model.spec import DecoderSpec
from engine.simulate.cost import ModelSize, StepSample
from engine.worker.settings import ExecutorSettings

LOWEST_TOKEN = 100  # made-up prompts use ids from here on: below are control tokens


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `at`: seconds after the beginning (open loop)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at: float = 0.0


@dataclass(slots=True)
class Timed:
    """One request served. Times in seconds after the beginning; `tokens` are times of tokens, by choice."""

    begin: float
    tokens: list[list[float]]
    cached: int = 0
    end: float = 0.0

    @property
    def ttft(self) -> float:
        return min(times[0] for times in self.tokens if times) - self.begin

    @property
    def tpot(self) -> list[float]:
        return [(t[-1] - t[0]) / (len(t) - 1) for t in self.tokens if len(t) > 1]

    @property
    def itl(self) -> list[float]:
        return [b - a for times in self.tokens for a, b in itertools.pairwise(times)]


@dataclass(slots=True)
class Run:
    """What a core made of the jobs. `before` and `after` are its counters."""

    timed: list[Timed]
    seconds: float
    before: Stats
    after: Stats

    @property
    def output_tokens(self) -> int:
        return sum(len(times) for t in self.timed for times in t.tokens)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    def count(self, name: str) -> float:
        """How much a counter of `Stats` grew."""
        return float(getattr(self.after, name) - getattr(self.before, name))


class Bench:
    """A loaded model. Close it, or use it as a context manager."""

    def __init__(self, model: str = "smollm2", **settings: Any) -> None:
        """Keywords are settings of `EngineConfig`. Raises ConfigError."""
        self.config = EngineConfig.of(model, **settings)
        self.path = find_model(self.config, progress=True)
        self.spec = load_spec(self.path, max_model_len=self.config.model.max_model_len)
        self.choice = choose(self.config, self.path, self.spec)
        if self.choice.backend != "native":
            raise ConfigError(f"this measures the C++ kernels, and they aren't used here: {self.choice.why}")
        self.executor = make_executor(self.choice, self.path, self.spec)
        self.geometry = self.executor.start()

    @property
    def settings(self) -> ExecutorSettings:
        return self.choice.settings

    def core(self, executor: Executor | None = None, geometry: Geometry | None = None, **changes: Any) -> EngineCore:
        """A new core, with nothing cached, over the same model; `changes` are of its CoreSettings."""
        settings = self.core_settings(**changes)
        return EngineCore(executor or self.executor, geometry or self.geometry, settings, frozenset(), None)

    def core_settings(self, **changes: Any) -> CoreSettings:
        """What the configuration comes to, with changes."""
        return dataclasses.replace(core_settings(self.config, self.settings), **changes)

    @property
    def arithmetic(self) -> str:
        """What the products of this model are computed in."""
        kept = self.settings.quantization
        blocks = kept in ("int8", "gguf") or (kept == "auto" and self.path.suffix == ".gguf")
        return "int8" if blocks else self.settings.dtype

    def model_size(self) -> ModelSize:
        """What of the model a step reads and multiplies with: all but the table of embeddings."""

        def kept(spec: DecoderSpec, quantization: str, dtype: str) -> int:
            return weight_bytes(spec, self.path, quantization=quantization, dtype=dtype)  # type: ignore[arg-type]

        spec, bodiless = self.spec, msgspec.structs.replace(self.spec, vocab_size=0)
        table = spec.vocab_size * spec.hidden_size
        quantization, dtype = self.settings.quantization, self.settings.dtype
        body = kept(bodiless, quantization, dtype)
        ends = kept(spec, quantization, dtype) - body  # the table and the head
        head = ends - table * ELEMENT_BYTES[dtype] if quantization == "int8" else ends // 2
        return ModelSize(
            parameters=kept(bodiless, "none", "bfloat16") / 2 + table,
            weight_bytes=body + head,
            kv_bytes_per_token=self.geometry.bytes_per_block / self.geometry.block_size,
        )

    def close(self) -> None:
        self.executor.close()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Recorder:
    """An executor that notes what each step computed and took, from its submission to the next one."""

    def __init__(self, executor: Executor, clock: Callable[[], float] = time.perf_counter) -> None:
        self._executor = executor
        self._clock = clock
        self._shape: tuple[int, int, int] | None = None
        self._since = 0.0
        self.samples: list[StepSample] = []

    def start(self) -> Geometry:
        return self._executor.start()

    def submit(self, plan: Plan) -> None:
        self.rest()
        tokens = sum(len(row.tokens) for row in plan.rows)
        keys = sum(row.start + len(row.tokens) for row in plan.rows)
        if not plan.ops:
            self._shape = tokens, sum(row.sample for row in plan.rows), keys
        self._since = self._clock()
        self._executor.submit(plan)

    def rest(self) -> None:
        """The step before is over: the next one begins, or there is nothing to do."""
        if self._shape is not None:
            self.samples.append(StepSample(*self._shape, self._clock() - self._since))
        self._shape = None

    def collect(self) -> Result:
        return self._executor.collect()

    def load_adapter(self, name: str, directory: str) -> None:
        self._executor.load_adapter(name, directory)

    def unload_adapter(self, name: str) -> None:
        self._executor.unload_adapter(name)

    def close(self) -> None:
        """The executor is the bench's."""


def serve(
    core: EngineCore,
    jobs: Sequence[Job],
    concurrency: int = 0,
    *,
    static: bool = False,
    each_step: Callable[[EngineCore], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Run:
    """Run all jobs as they arrive, at most `concurrency` at a time (0 = no limit). Raises RequestFailed.

    `static`: batches as before Orca: a batch ends as a whole before the next one begins.
    """
    waiting, before = deque(jobs), core.stats()
    timed: list[Timed] = []
    alive: dict[str, tuple[Timed, int]] = {}  # with the choices that still run
    began = clock()
    while waiting or alive:
        now = clock() - began
        opened = not static or not alive
        while opened and waiting and waiting[0].at <= now and (not concurrency or len(alive) < concurrency):
            job = waiting.popleft()
            one = Timed(job.at or now, [[] for _ in range(job.params.n)])
            timed.append(one)
            alive[str(len(timed))] = one, job.params.n
            core.add(AddRequest(id=str(len(timed)), prompt=job.prompt, params=job.params, arrival=time.time()))
        if not alive:
            wait(waiting[0].at - now)
            continue
        deltas = core.step().deltas
        if each_step is not None:
            each_step(core)
        now = clock() - began
        for delta in deltas:
            if delta.error:
                raise RequestFailed(delta.error)
            one, left = alive[delta.id]
            one.cached = max(one.cached, delta.cached_tokens)
            one.tokens[delta.choice].extend([now] * len(delta.tokens))
            if delta.finish is not None:
                one.end = now
                alive[delta.id] = one, left - 1
                if left == 1:
                    del alive[delta.id]
    seconds = clock() - began
    while core.has_work():  # a step that was planned ahead is still on its way
        core.step()
    return Run(timed, seconds, before, core.stats())


def greedy(output: int, **more: Any) -> SamplingParams:
    """Exactly `output` tokens."""
    return SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, seed=0, **more)


def words(rng: random.Random, count: int, vocab_size: int) -> tuple[int, ...]:
    """A made-up prompt."""
    return tuple(rng.randrange(LOWEST_TOKEN, vocab_size) for _ in range(count))


def chat(count: int, vocab_size: int, seed: int) -> list[Job]:
    """The lengths of `octavo bench serve --workload chat`."""
    rng = random.Random(f"chat/{seed}")

    def length(sigma: float, most: int) -> int:
        return max(8, min(most, round(rng.lognormvariate(math.log(100), sigma))))

    return [Job(words(rng, length(0.7, 1024), vocab_size), greedy(length(0.6, 512))) for _ in range(count)]


def mixed(count: int, vocab_size: int, seed: int) -> list[Job]:
    """Chat, with every 8th request a long one: 1,500 in, 64 out."""
    rng = random.Random(f"mixed/{seed}")
    jobs = chat(count, vocab_size, seed)
    return [Job(words(rng, 1500, vocab_size), greedy(64)) if i % 8 == 7 else job for i, job in enumerate(jobs)]
