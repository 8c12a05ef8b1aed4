"""The native decoder step against the definition in float64, and its bits against itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import native
from engine.errors import ConfigError, RequestFailed
from engine.model.spec import DecoderSpec, LayerSpec, RopeSpec
from tests.kernels.decoder_oracle import Oracle, Session, native_model, random_weights, small_spec

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 97, 60)]


def frequencies(dim: int, base: float) -> tuple[float, ...]:
    return tuple(float(base ** (-2 * i / dim)) for i in range(dim // 2))


FAMILIES: dict[str, tuple[DecoderSpec, bool]] = {  # spec, with biases
    "llama": (small_spec(), False),
    "llama_tied_interleaved": (small_spec(tie_embeddings=True, rope_interleaved=True), False),
    "qwen2_biases": (small_spec(num_kv_heads=1), True),
    "qwen3_head_norm": (small_spec(qk_norm="head"), False),
    "gemma": (
        small_spec(
            norm_placement="sandwich",
            activation="gelu_tanh",
            qk_norm="head",
            embedding_scale=8.5,
            attn_softcap=20.0,
            final_softcap=10.0,
            tie_embeddings=True,
            rope=(RopeSpec(frequencies(16, 1e4)), RopeSpec(frequencies(16, 1e6), 1.1)),
            layers=(LayerSpec(window=7, rope=0), LayerSpec(rope=1)),
        ),
        False,
    ),
    "olmo2": (small_spec(norm_placement="post", qk_norm="full"), False),
    "granite": (small_spec(residual_scale=0.22, logit_scale=0.125, embedding_scale=12.0), False),
    "gpt_neox": (small_spec(norm="layer", parallel_residual=True, gated=False, activation="gelu", rotary_dim=8), True),
    "gpt2": (small_spec(norm="layer", gated=False, activation="gelu_tanh", rotary_dim=0, learned_positions=0), True),
    "opt": (small_spec(norm="layer", gated=False, activation="relu", rotary_dim=0, learned_positions=2), True),
    "qwen3_moe": (
        small_spec(
            num_experts=6,
            experts_per_token=2,
            moe_intermediate_size=40,
            layers=(LayerSpec(moe=True), LayerSpec(moe=False)),
        ),
        False,
    ),
    "no_final_norm": (small_spec(final_norm=False), False),
}


@pytest.fixture(scope="module")
def best() -> native.Kernels:
    return native.load("", 2)


def all_sets() -> Iterator[native.Kernels]:
    for isa in native.load().isas:
        yield native.load(isa, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_and_hidden_states_follow_the_definition(family: str) -> None:
    spec, biases = FAMILIES[family]
    weights = random_weights(spec, 3, biases=biases)
    want, want_hidden = Oracle(spec, weights).run(TOKENS)
    for isa in ("portable", ""):
        kernels = native.load(isa, 2)
        session = Session(kernels, spec, native_model(kernels, spec, weights), native.F32)
        got, hidden = session.step([(0, TOKENS)], hidden=True)
        session.close()
        np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max(), err_msg=kernels.isa)
        np.testing.assert_allclose(hidden, want_hidden, atol=2e-4 * np.abs(want_hidden).max(), err_msg=kernels.isa)


@pytest.mark.parametrize("quant", [native.W_BF16, native.W_Q8])
def test_bfloat16_and_int8_stay_near_the_definition(quant: int) -> None:
    spec, _ = FAMILIES["llama"]
    weights = random_weights(spec, 3)
    want, _ = Oracle(spec, weights).run(TOKENS)
    for kernels in all_sets():
        model = native_model(kernels, spec, weights, dtype="bfloat16", quant=quant)
        session = Session(kernels, spec, model, native.BF16)
        got, _ = session.step([(0, TOKENS)])
        session.close()
        error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
        assert error < 0.02, (kernels.isa, error)


MODES: list[tuple[Any, int, int]] = [
    ("float32", native.W_F32, native.F32),
    ("bfloat16", native.W_BF16, native.BF16),
    ("bfloat16", native.W_Q8, native.I8),
]


@pytest.mark.parametrize(("dtype", "quant", "kv_dtype"), MODES)
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3_moe"])
def test_bits_of_a_row_depend_on_nothing_but_its_sequence(family: str, dtype: Any, quant: int, kv_dtype: int) -> None:
    """Alone in one step; token by token; in odd chunks beside other sequences; with one thread: the same bits."""
    spec, biases = FAMILIES[family]
    weights = random_weights(spec, 11, biases=biases)
    others = [[int(t) for t in np.random.default_rng(seed).integers(0, 97, 60)] for seed in range(3)]
    for isa in native.load().isas:
        kernels = native.load(isa, 2)
        session = Session(kernels, spec, native_model(kernels, spec, weights, dtype=dtype, quant=quant), kv_dtype)
        whole, _ = session.step([(0, TOKENS)])
        single = np.concatenate([session.step([(1, [token])])[0] for token in TOKENS])
        np.testing.assert_array_equal(single.view(np.int32), whole.view(np.int32), err_msg=f"{isa}: one by one")
        mixed, at = [], 0
        for size in (1, 33, 2, 7, 17):
            mates = [(10 + i, other[at : at + 1 + 5 * i]) for i, other in enumerate(others)]
            first = sum(len(tokens) for _, tokens in mates)
            logits, _ = session.step([*mates, (2, TOKENS[at : at + size])])
            mixed.append(logits[first:])
            at += size
        np.testing.assert_array_equal(
            np.concatenate(mixed).view(np.int32), whole.view(np.int32), err_msg=f"{isa}: mixed"
        )
        native.load(isa, 1)
        one_thread, _ = session.step([(3, TOKENS)])
        np.testing.assert_array_equal(one_thread.view(np.int32), whole.view(np.int32), err_msg=f"{isa}: one thread")
        session.close()


def test_a_missing_weight_is_named(best: native.Kernels) -> None:
    spec, _ = FAMILIES["llama"]
    weights = random_weights(spec, 1)
    for missing in ("layers.1.up", "layers.0.gate", "final_norm", "layers.1.k"):
        with pytest.raises(ConfigError, match=missing.replace(".", r"\.")):
            native_model(best, spec, {n: w for n, w in weights.items() if n != missing})


def test_unknown_names_and_wrong_shapes_are_refused(best: native.Kernels) -> None:
    model = native.Model(best, small_spec(), "float32")
    data = np.zeros((72, 72), np.float32)
    for name in ("layers.7.q", "layers.0.attn", "tail", "layers.0.experts.0.up"):
        with pytest.raises(ConfigError, match="no weight of this model has that name"):
            model.set(name, data, native.F32, 72, 72, native.W_F32)
    with pytest.raises(ConfigError, match=r"layers\.0\.q: has shape \[72, 72\], the model wants \[64, 72\]"):
        model.set("layers.0.q", data, native.F32, 72, 72, native.W_F32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", [3, 97, 5], "row 1 has token 97, the vocabulary has 97"),
        ("tokens", [3, -1, 5], "token -1"),
        ("q_start", [0, 2], "q_start must run from 0 to n_rows"),
        ("pos_start", [-1], "position -1"),
        ("logit_rows", [3], "logit row 3"),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused(
    best: native.Kernels, field: str, value: list[int], message: str
) -> None:
    spec, _ = FAMILIES["llama"]
    session = Session(best, spec, native_model(best, spec, random_weights(spec, 1)), native.F32)
    arrays = {"tokens": [3, 4, 5], "q_start": [0, 3], "pos_start": [0], "table_line": [0], "logit_rows": [2]}
    arrays[field] = value
    kept = {name: np.array(numbers, np.int32) for name, numbers in arrays.items()}
    tables, logits = np.zeros((1, 4), np.int32), np.zeros((1, 97), np.float32)
    batch = native.Batch(n_rows=3, n_seqs=1, tables=native.pointer(tables), table_stride=4, n_logits=1)
    batch.logits = native.pointer(logits)
    for name, array in kept.items():
        setattr(batch, name, native.pointer(array))
    with pytest.raises(RequestFailed, match=message):
        session.model.step(session.kv, batch)
    session.close()


def test_a_packed_image_gives_the_same_bits(best: native.Kernels, tmp_path: Path) -> None:
    spec, biases = FAMILIES["qwen2_biases"]
    weights = random_weights(spec, 2, biases=biases)
    model = native_model(best, spec, weights, dtype="bfloat16", quant=native.W_Q8)
    model.save_image(tmp_path / "image", "model, set 1")
    size = model.size_bytes
    session = Session(best, spec, model, native.BF16)
    want, _ = session.step([(0, TOKENS)])
    session.close()
    loaded = native.Model(best, spec, "bfloat16")
    loaded.load_image(tmp_path / "image", "model, set 1")
    assert loaded.size_bytes == size
    session = Session(best, spec, loaded, native.BF16)
    got, _ = session.step([(0, TOKENS)])
    session.close()
    np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def test_a_wrong_or_damaged_image_is_refused(best: native.Kernels, tmp_path: Path) -> None:
    spec, _ = FAMILIES["llama"]
    path = tmp_path / "image"
    model = native_model(best, spec, random_weights(spec, 2))
    model.save_image(path, "mine")
    whole = path.read_bytes()
    with pytest.raises(ConfigError, match="packed for 'mine', not for 'yours'"):
        native.Model(best, spec, "float32").load_image(path, "yours")
    for damaged in (whole[:-100], b"x" + whole[1:], whole[:50], b""):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match="image"):
            native.Model(best, spec, "float32").load_image(path, "mine")
    with pytest.raises(ConfigError, match="can't open"):
        native.Model(best, spec, "float32").load_image(tmp_path / "nothing", "mine")


def test_the_set_can_not_change_under_a_loaded_model(best: native.Kernels) -> None:
    model = native.Model(best, small_spec(), "float32")
    with pytest.raises(ConfigError, match="while models are loaded"):
        native.load("portable")
    model.close()
    with pytest.raises(ConfigError, match="instruction set 'sse9' is not one of portable"):
        native.load("sse9")
    assert native.load("portable").isa == "portable"
    native.load("", 2)
