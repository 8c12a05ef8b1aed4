"""The memory plan against what the native model really takes, and what it refuses."""

from pathlib import Path

import pytest

from engine import native
from engine.build import choose
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.model.memory import plan_memory, weight_bytes
from engine.model.pull import pull
from engine.model.spec import DecoderSpec
from engine.model.weights import Quantization, load_native

GIB = 1 << 30


@pytest.fixture(scope="module")
def path() -> Path:
    return pull("smollm2")


@pytest.fixture(scope="module")
def spec(path: Path) -> DecoderSpec:
    return load_spec(path)


@pytest.mark.parametrize("quantization", ["none", "int8", "gguf"])
def test_the_estimate_is_what_the_native_model_takes(path: Path, spec: DecoderSpec, quantization: Quantization) -> None:
    model = native.Model(native.load("", 1), spec)
    load_native(spec, path, model, quantization=quantization)
    model.finish()
    estimate = weight_bytes(spec, path, dtype="bfloat16", quantization=quantization)
    assert estimate == pytest.approx(model.size_bytes, rel=0.02)
    model.close()


def test_the_longest_context_that_fits_is_chosen_and_said(spec: DecoderSpec) -> None:
    arguments = {"kv_element_bytes": 2, "max_batched_tokens": 256, "max_num_seqs": 16}
    token = 2 * 30 * 3 * 64 * 2
    plan = plan_memory(spec, GIB // 4, free=8 * GIB, **arguments)
    assert plan.context == 8192
    assert plan.kv == 16 * 8192 * token
    small = plan_memory(spec, GIB // 4, free=8 * GIB, kv=100 * token, **arguments)
    assert small.context == 100
    assert "KV 0.00 GiB (100 tokens of 23040 bytes)" in str(small)
    assert "of 8.00 GiB free; context 100" in str(small)
    asked = plan_memory(spec, GIB // 4, free=8 * GIB, kv=100 * token, max_model_len=70, **arguments)
    assert asked.context == 70
    beside = plan_memory(spec, GIB // 4, free=8 * GIB, draft=2 * GIB, max_model_len=8192, **arguments)
    assert plan.kv - beside.kv == 0  # both hold what 16 full contexts need
    assert "+ draft model 2.00 GiB =" in str(beside)
    with pytest.raises(ConfigError, match=r"draft model 7\.50 GiB"):
        plan_memory(spec, GIB // 4, free=8 * GIB, draft=15 * GIB // 2, max_model_len=8192, **arguments)


@pytest.mark.parametrize(
    ("weights", "kv", "context", "says"),
    [
        (9 * GIB, None, None, r"too large for this machine: weights 9.00 GiB"),
        (GIB, 8 * GIB, None, r"too large for this machine: weights 1.00 GiB \+ KV 8.00 GiB"),
        (GIB, GIB, 65536, r"65536 tokens needs 1.41 GiB of KV cache.*longest that fits is 46603"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    spec: DecoderSpec, weights: int, kv: int | None, context: int | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        plan_memory(
            spec,
            weights,
            kv_element_bytes=2,
            free=8 * GIB,
            max_batched_tokens=256,
            max_num_seqs=16,
            kv=kv,
            max_model_len=context,
        )
    assert "\n" not in str(caught.value)


def test_a_context_that_was_asked_for_is_never_cut_to_the_pool(path: Path, spec: DecoderSpec) -> None:
    with pytest.raises(ConfigError, match=r"^--kv-memory 64MiB: a context of 8192 tokens needs 0\.18 GiB"):
        choose(EngineConfig.of("smollm2", max_model_len=8192, kv_memory="64MiB"), path, spec)
    assert choose(EngineConfig.of("smollm2", kv_memory="64MiB"), path, spec).memory.context == 2912
    # A restarted engine is told of the blocks that it had, and must get them.
    assert (
        choose(EngineConfig.of("smollm2", max_model_len=8192, num_kv_blocks=511), path, spec).settings.num_blocks == 511
    )
