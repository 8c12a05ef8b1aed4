"""The native step against the reference decoder: every family in float32, every way to keep a matrix."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.model.config import load_spec
from engine.model.decoder import Decoder, DenseCausalAttention
from engine.model.spec import DecoderSpec
from engine.model.weights import Quantization, iter_weights
from tests.model import gguf_files
from tests.model.families import FAMILIES, VOCAB, make
from tests.model.native_step import NativeStep
from tests.model.test_gguf import Kind, quantiser
from tests.model.test_quantised import SCHEMES, quantise

CHUNKS = [7, 1, 1, 16, 3, 2]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def prompt() -> list[int]:
    tokens: list[int] = torch.randint(3, VOCAB, (sum(CHUNKS),), generator=torch.Generator().manual_seed(7)).tolist()
    return tokens


@torch.inference_mode()
def reference(spec: DecoderSpec, path: Path) -> npt.NDArray[np.float32]:
    decoder = Decoder(spec, iter_weights(spec, path))
    positions = torch.arange(sum(CHUNKS))
    logits: npt.NDArray[np.float32] = decoder.logits(
        decoder.forward(torch.tensor(prompt()), positions, DenseCausalAttention(spec))
    ).numpy()
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_of_the_reference_paged_and_in_chunks(name: str, tmp_path: Path) -> None:
    make(name, tmp_path)
    spec = load_spec(tmp_path)
    step = NativeStep(spec, tmp_path)
    found = step.logits(prompt(), CHUNKS)
    np.testing.assert_allclose(found, reference(spec, tmp_path), atol=1e-4, rtol=0)
    np.testing.assert_array_equal(step.logits(prompt(), [sum(CHUNKS)]), found)
    step.close()


def relative_error(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("quantization", "most"), [("none", 0.01), ("int8", 0.03), ("auto", 0.01)])
def test_a_model_kept_in_fewer_bits_stays_near_the_reference(
    quantization: Quantization, most: float, tmp_path: Path
) -> None:
    make("llama", tmp_path)
    spec = load_spec(tmp_path)
    step = NativeStep(spec, tmp_path, "bfloat16", quantization)
    assert relative_error(step.logits(prompt(), CHUNKS), reference(spec, tmp_path)) < most
    step.close()


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K, Kind.BF16])
def test_gguf_blocks_stay_near_the_reference_of_their_values(kind: Kind, tmp_path: Path) -> None:
    theirs = make("llama", tmp_path, hidden_size=256, intermediate_size=256, head_dim=64)
    path = tmp_path / "model.gguf"
    gguf_files.write(theirs, path, quantiser(kind))
    spec = load_spec(path)
    step = NativeStep(spec, path, "bfloat16", "auto")
    assert relative_error(step.logits(prompt(), CHUNKS), reference(spec, path)) < 0.02
    step.close()


@pytest.mark.parametrize("name", [name for name in SCHEMES if SCHEMES[name][2] >= 0])
def test_a_quantised_checkpoint_keeps_its_bits(name: str, tmp_path: Path) -> None:
    quantise(tmp_path, name)
    spec = load_spec(tmp_path)
    step = NativeStep(spec, tmp_path, "bfloat16", "auto")
    assert relative_error(step.logits(prompt(), CHUNKS), reference(spec, tmp_path)) < 0.03
    step.close()


def test_gate_and_up_may_be_stored_differently(tmp_path: Path) -> None:
    theirs = make("llama", tmp_path)

    def mixed(name: str, values: gguf_files.Array) -> tuple[gguf_files.Array, Kind]:
        return quantiser(Kind.Q4_1 if "gate" in name else Kind.Q8_0)(name, values)

    path = tmp_path / "model.gguf"
    gguf_files.write(theirs, path, mixed)
    spec = load_spec(path)
    step = NativeStep(spec, path, "bfloat16", "auto")
    assert relative_error(step.logits(prompt(), CHUNKS), reference(spec, path)) < 0.02
    step.close()
