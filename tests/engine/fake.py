"""An engine for tests of the process around it: the real core over the shadow executor, and requests that harm it.

`build` is named to the client as the factory; it runs in the engine's process. What a seed does to a step is the
only hook: the executor does it when a row of that seed samples its token number FATAL_AT.
"""

from __future__ import annotations

import os
import signal
import time

from engine.api import Ready
from engine.build import make_publisher
from engine.config import EngineConfig
from engine.core.engine import EngineCore
from engine.core.plan import Geometry, Plan
from engine.core.settings import CoreSettings
from engine.errors import ConfigError
from engine.process import Engine
from tests.shadow import ShadowExecutor

VOCAB = 997
END = 3  # the end token
FATAL_AT = 5  # output tokens before it happens
SEGFAULT, KILL, HANG, SPIN, RAISE = 1_000_001, 1_000_002, 1_000_003, 1_000_004, 1_000_005
SLEEPY = 1_000_006  # a long step that ends
STEP_S = 0.003


class HarmfulExecutor(ShadowExecutor):
    """Does what a step's seeds say, and takes STEP_S a step, so that a test has time to interfere."""

    def submit(self, plan: Plan) -> None:
        seeds = {slot: params.seed for slot, params in plan.slots}
        for slot, known in self.slots.items():
            seeds.setdefault(slot, known.params.seed)
        prompts = {slot: params.prompt_len for slot, params in plan.slots}
        for slot, known in self.slots.items():
            prompts.setdefault(slot, known.params.prompt_len)
        time.sleep(STEP_S)
        for row in plan.rows:
            if row.sample and row.start + len(row.tokens) - prompts[row.slot] == FATAL_AT:
                harm(seeds[row.slot], self, plan)
        super().submit(plan)


def harm(seed: int, executor: ShadowExecutor, plan: Plan) -> None:
    if seed == SEGFAULT:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif seed == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif seed == HANG:
        time.sleep(3600)
    elif seed == SPIN:
        while True:
            pass
    elif seed == SLEEPY:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
    elif seed == RAISE:
        executor.fail_at.add(plan.step)


def build(config: EngineConfig) -> Engine:
    """The factory. The geometry comes from the configuration."""
    if config.model.model == "broken":
        raise ConfigError("the model is broken: mend it")
    if config.model.model == "bug":
        raise ZeroDivisionError("oh")
    if config.model.model == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    geometry = Geometry(
        num_blocks=config.kv.num_kv_blocks or 4096,
        block_size=config.kv.block_size,
        host_blocks=0 if config.kv.swap_space == "0" else 64,
        max_model_len=config.model.max_model_len or 4096,
        max_num_seqs=config.schedule.max_num_seqs,
        vocab_size=VOCAB,
        bytes_per_block=1024,
    )
    settings = CoreSettings(
        max_num_seqs=config.schedule.max_num_seqs,
        max_num_batched_tokens=config.schedule.max_num_batched_tokens or 512,
        kv_events=bool(config.kv.kv_events),
    )
    executor = HarmfulExecutor(geometry)
    core = EngineCore(executor, executor.start(), settings, frozenset({END}), None)
    ready = Ready(
        pid=os.getpid(),
        model=config.model.model,
        max_model_len=geometry.max_model_len,
        vocab_size=VOCAB,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        kv_bytes_per_block=1024,
        dtype="none",
        kv_dtype="none",
        backend="shadow",
    )
    return Engine(core, ready, make_publisher(config))


def build_unstable(config: EngineConfig) -> Engine:
    """The first time as `build`; after that it can't start. A file in OCTAVO_TEST_MARK tells the two apart."""
    mark = os.environ["OCTAVO_TEST_MARK"]
    if os.path.exists(mark):
        os.kill(os.getpid(), signal.SIGKILL)
    with open(mark, "w"):
        pass
    return build(config)
