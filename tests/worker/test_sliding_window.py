"""A model all of whose layers slide: what lies behind the window is given back, and no bit tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from engine.api import AddRequest, SamplingParams, TokenLogprobs
from engine.core.engine import EngineCore
from engine.core.settings import CoreSettings
from engine.model.config import load_spec
from engine.worker.native_executor import NativeExecutor
from engine.worker.settings import ExecutorSettings
from tests.worker.driver import prompts, tiny_model

WINDOW, PROMPT, OUTPUT = 32, 100, 200
SETTINGS = ExecutorSettings(
    max_model_len=512, max_num_seqs=8, max_batched_tokens=64, num_blocks=300, host_blocks=64, image_cache=False
)
CORE = CoreSettings(max_num_batched_tokens=64, max_num_seqs=8)
Answers = dict[tuple[str, int], list[tuple[int, TokenLogprobs]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return tiny_model(directory, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=WINDOW)


class Serving:
    """One engine over the real kernels, and the most blocks that were in use at a time."""

    def __init__(self, model: Path, settings: ExecutorSettings, core: CoreSettings, *, keep: bool = False) -> None:
        """`keep`: the engine isn't told of the window, so that nothing is given back."""
        executor = NativeExecutor(model, load_spec(model), settings)
        geometry = executor.start()
        assert geometry.window == WINDOW + 128
        if keep:
            geometry = msgspec.structs.replace(geometry, window=0)
        self.core = EngineCore(executor, geometry, core, frozenset(), None)
        self.most = 0

    def answers(self) -> Answers:
        """Three requests, the second with two choices, the third beginning like the first."""
        first, second = prompts([PROMPT, PROMPT])
        for i, (prompt, n) in enumerate([(first, 1), (second, 2), (first[:80] + second, 1)]):
            params = SamplingParams(temperature=0.7, seed=i, max_tokens=OUTPUT, logprobs=1, n=n)
            self.core.add(AddRequest(id=str(i), prompt=prompt, params=params, arrival=float(i)))
        got: Answers = {}
        while self.core.has_work():
            for delta in self.core.step().deltas:
                assert not delta.error
                got.setdefault((delta.id, delta.choice), []).extend(zip(delta.tokens, delta.logprobs, strict=True))
            self.core.kv.check()
            usage = self.core.kv.usage()
            self.most = max(self.most, usage.total - usage.free)
        return got


@pytest.fixture(scope="module")
def kept(model: Path) -> Answers:
    serving = Serving(model, SETTINGS, replace(CORE, enable_prefix_caching=False), keep=True)
    answers = serving.answers()
    assert {len(got) for got in answers.values()} == {OUTPUT}
    assert serving.most > 4 * (PROMPT + OUTPUT) // 16 - 4
    serving.core.close()
    return answers


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("caching", [False, True])
def test_what_lies_behind_the_window_is_given_back_and_no_bit_tells(
    model: Path, kept: Answers, caching: bool, overlap: int
) -> None:
    serving = Serving(model, SETTINGS, replace(CORE, enable_prefix_caching=caching, overlap=overlap))
    for turn in range(2):
        assert serving.answers() == kept
        assert (serving.core.stats().prefix_hits > 0) == caching or turn == 0
    assert serving.most <= 4 * ((WINDOW + 128) // 16 + 3)
    serving.core.close()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_sequences_with_holes_are_preempted_and_no_bit_tells(model: Path, kept: Answers, preemption: str) -> None:
    serving = Serving(model, replace(SETTINGS, num_blocks=30), replace(CORE, preemption=preemption, overlap=1))
    assert serving.answers() == kept
    stats = serving.core.stats()
    assert (stats.preemptions_swap if preemption == "swap" else stats.preemptions_recompute) > 0
    serving.core.close()
