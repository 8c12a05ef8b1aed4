"""GGUF files: every family and every storage type against transformers, and files that are broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.model.decoder import Decoder, DenseCausalAttention
from engine.model.gguf import GGUFFile
from engine.model.weights import iter_weights
from engine.text.tokenizer import Tokenizer
from tests.model import gguf_files
from tests.model.families import FAMILIES, VOCAB, make

Kind = gguf.GGMLQuantizationType


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def same_logits(path: Path, theirs: Any, atol: float = 1e-4) -> None:
    decoder = Decoder.load(load_spec(path), path)
    tokens = torch.randint(3, VOCAB, (30,))
    with torch.inference_mode():
        ours = decoder.logits(decoder.forward(tokens, torch.arange(30), DenseCausalAttention(decoder.spec)))
        torch.testing.assert_close(ours, theirs(tokens[None]).logits[0].float(), atol=atol, rtol=0)


# smollm3 and gemma3 in GGUF leave the pattern of their layers to the reader: every fourth, every sixth.
IN_GGUF: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_hidden_layers": 2},
    "mixtral": {},
    "smollm3": {"no_rope_layer_interval": 4},
    "qwen2": {"use_sliding_window": False, "attention_bias": True},
    "qwen3": {},
    "qwen3-moe": {"mlp_only_layers": []},
    "phi3": {},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 6},
    "olmo2": {},
    "granite": {},
    "gpt2": {"n_positions": 256},
    "gpt-neox": {},
}


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_family_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path, **IN_GGUF[name])
    gguf_files.write(theirs, tmp_path / "model.gguf")
    same_logits(tmp_path / "model.gguf", theirs)


def test_every_family_but_opt_is_covered() -> None:
    assert {FAMILIES[name][0] for name in FAMILIES} - {FAMILIES[name][0] for name in IN_GGUF} == {"OPT"}


# ---------------------------------------------------------------- storage types

BY_PACKAGE = [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
# The package can't quantise to these: random blocks with scales of a sensible size. (kind, offsets of the float16s)
BY_HAND = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,)}


def random_blocks(kind: Kind, halves: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(kind))
    blocks = rng.integers(0, 256, (shape[0], shape[1] // elements, size), np.uint8)
    for at in halves:
        scale = rng.uniform(0.5e-4, 2e-4, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def quantiser(kind: Kind) -> gguf_files.Quantise:
    def quantise(name: str, values: gguf_files.Array) -> tuple[gguf_files.Array, Kind]:
        if kind in BY_HAND:
            return random_blocks(kind, BY_HAND[kind], values.shape), kind
        return gguf.quantize(values, kind), kind

    return quantise


@pytest.mark.parametrize("kind", [*BY_PACKAGE, *BY_HAND], ids=lambda kind: kind.name)
def test_a_storage_type_gives_the_logits_of_its_values(kind: Kind, tmp_path: Path) -> None:
    theirs = make("llama", tmp_path, hidden_size=256, intermediate_size=256, head_dim=64)
    path = tmp_path / "model.gguf"
    gguf_files.write(theirs, path, quantiser(kind))
    # The reference: transformers with the values that the package reads out of the file.
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            values = stored[names.get_name(name, try_suffixes=(".weight",))]
            if ".q_proj." in name or ".k_proj." in name:
                values = gguf_files.unpermute(values, values.shape[0] // 64)
            parameter.copy_(torch.from_numpy(np.array(values)))
    same_logits(path, theirs)


def test_blocks_are_passed_on_as_they_are_and_hold_the_same_values(tmp_path: Path) -> None:
    theirs = make("llama", tmp_path)
    path = tmp_path / "model.gguf"
    gguf_files.write(theirs, path, quantiser(Kind.Q4_1))
    spec = load_spec(path)
    dense = {weight.name: weight for weight in iter_weights(spec, path)}
    for weight in iter_weights(spec, path, keep_blocks=True):
        assert weight.ggml_type == (Kind.Q4_1 if len(weight.shape) == 2 else -1)
        np.testing.assert_array_equal(weight.float32(), dense[weight.name].float32())


def test_the_scaling_of_llama_3_comes_as_divisors(tmp_path: Path) -> None:
    theirs = make("llama-3.1", tmp_path)
    spec = load_spec(tmp_path)
    plain = [10000.0 ** (-2 * i / spec.head_size) for i in range(spec.head_size // 2)]
    divisors = np.array([f / scaled for f, scaled in zip(plain, spec.rope[0].inv_freq, strict=True)], np.float32)
    writer_add = gguf.GGUFWriter.write_header_to_file

    def add_divisors(writer: Any, *args: Any, **kwargs: Any) -> None:
        writer.add_tensor("rope_freqs.weight", divisors)
        writer_add(writer, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add_divisors)
        gguf_files.write(theirs, tmp_path / "model.gguf")
    same_logits(tmp_path / "model.gguf", theirs)


# ---------------------------------------------------------------- files that are broken


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    gguf_files.write(make("llama", directory), directory / "model.gguf")
    return directory / "model.gguf"


def read_everything(path: Path) -> None:
    spec = load_spec(path)
    for _ in iter_weights(spec, path):
        pass
    Tokenizer.load(path)


def test_a_good_file_is_read(good: Path) -> None:
    read_everything(good)


def test_a_key_that_others_are_reckoned_from_may_not_be_missing(good: Path) -> None:
    content = good.read_bytes()
    for key in (b"llama.embedding_length", b"llama.attention.head_count", b"llama.block_count"):
        assert content.count(key) >= 1
        assert refused(good, content.replace(key, key[:-1] + b"?", 1), read_everything), key


@settings(max_examples=150)
@given(data=st.data())
def test_a_changed_header_is_read_or_refused_in_one_line(good: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    header = int(next(iter(GGUFFile(good).tensors.values())).offset)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        value = data.draw(st.one_of(st.integers(0, 255), st.sampled_from([0, 1, 255])))
        width = data.draw(st.sampled_from([1, 1, 8]))
        content[at : at + width] = bytes([value]) * width
    refused(good, bytes(content), read_everything)


@settings(max_examples=100)
@given(data=st.data())
def test_a_file_cut_short_is_refused_in_one_line(good: Path, data: st.DataObject) -> None:
    content = good.read_bytes()
    cut = content[: data.draw(st.integers(0, len(content) - 100))]
    assert refused(good, cut, read_everything)


def refused(good: Path, content: bytes, read: Callable[[Path], None]) -> bool:
    """Whether a copy of `good` with this content is refused; anything but a ConfigError of one line fails."""
    message = ""
    path = good.with_name("changed.gguf")
    path.write_bytes(content)
    try:
        read(path)
    except ConfigError as error:
        message = str(error)
    finally:
        path.unlink()
    assert "\n" not in message
    return bool(message)
