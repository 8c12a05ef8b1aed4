"""Model directories: shards, what is missing or left over, and files that are broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.model.config import FAMILIES, load_spec, spec_of_config
from engine.model.weights import iter_weights, to_bfloat16, to_float32
from tests.model.families import make


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good")
    make("llama-tied-biased", directory)
    return directory


def read_everything(path: Path) -> dict[str, Any]:
    spec = load_spec(path)
    return {weight.name: weight.float32() for weight in iter_weights(spec, path)}


def changed(good: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model directory with other tensors."""
    tensors = load_file(good / "model.safetensors")
    change(tensors)
    (directory / "config.json").write_bytes((good / "config.json").read_bytes())
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_shards_hold_the_same_weights_as_one_file(good: Path, tmp_path: Path) -> None:
    tensors = load_file(good / "model.safetensors")
    (tmp_path / "config.json").write_bytes((good / "config.json").read_bytes())
    where = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for shard in sorted(set(where.values())):
        save_file({name: tensors[name] for name in tensors if where[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file({"consolidated": torch.zeros(1)}, tmp_path / "consolidated.safetensors")  # not in the index: not read
    expected, found = read_everything(good), read_everything(tmp_path)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"misses model-1\.safetensors"):
        read_everything(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_as_they_are_stored(good: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    def convert(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    path = changed(good, tmp_path, convert)
    found = read_everything(path)
    stored = load_file(path / "model.safetensors")["model.layers.1.self_attn.k_proj.weight"]
    assert stored.dtype == dtype
    np.testing.assert_array_equal(found["layers.1.k"], stored.float().numpy())


def test_a_bare_decoder_is_read_without_the_outer_name(good: Path, tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    expected, found = read_everything(good), read_everything(changed(good, tmp_path, strip))
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


K = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{K}.weight"), f"has no tensor {K}.weight"),
        (lambda t: t.pop(f"{K}.bias"), r"has k.bias in 2 layers only"),
        (lambda t: t.update({"model.vision.weight": torch.zeros(1)}), "has a tensor model.vision.weight, which"),
        (lambda t: t.update({f"{K}.weight": torch.zeros(3, 64)}), r"gives \(3, 64\) for layers.1.k, not \(32, 64\)"),
        (lambda t: t.update({f"{K}.weight": torch.zeros(32, 64, dtype=torch.int8)}), "stored as i8"),
    ],
)
def test_names_the_first_tensor_that_is_wrong(
    good: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], says: str
) -> None:
    path = changed(good, tmp_path, change)
    with pytest.raises(ConfigError, match=says) as caught:
        read_everything(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", None, "is no model directory"),
        ("config.json", "{", "can't be read"),
        ("config.json", "[1]", "is not a JSON object"),
        ("model.safetensors", None, r"has no \*.safetensors"),
        ("model.safetensors", "", "no usable safetensors file"),
        ("model.safetensors", "\xff" * 8, "its header claims"),
        ("model.safetensors", "\x02" + "\x00" * 7 + "[]", "no JSON object"),
        ("model.safetensors.index.json", '{"weight_map": 3}', "can't be used"),
    ],
)
def test_says_in_one_line_what_is_wrong_with_a_file(
    good: Path, tmp_path: Path, name: str, content: str | None, says: str
) -> None:
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if content is None:
        (tmp_path / name).unlink()
        (tmp_path / "pytorch_model.bin").touch()
    else:
        (tmp_path / name).write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=says) as caught:
        read_everything(tmp_path)
    assert "\n" not in str(caught.value)


@settings(max_examples=150)
@given(data=st.data())
def test_a_changed_header_is_read_or_refused_in_one_line(good: Path, data: st.DataObject) -> None:
    content = bytearray((good / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header - 1))
        content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789{}[]",:')))
    path = good / "changed"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_bytes((good / "config.json").read_bytes())
    (path / "model.safetensors").write_bytes(content)
    message = ""
    try:
        read_everything(path)
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=300)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_rounding_to_bfloat16_is_torchs(values: list[float]) -> None:
    array = np.array(values, np.float32)
    ours = to_float32(to_bfloat16(array), "bf16")
    np.testing.assert_array_equal(ours, torch.from_numpy(array).bfloat16().float().numpy())


# ---------------------------------------------------------------- config.json


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "images or sound"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not among.*LlamaForCausalLM"),
        ({"architectures": [], "model_type": "new"}, "model_type 'new' is not among"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported"),
        ({"rope_scaling": {"rope_type": "new"}}, "rope scaling of kind 'new' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "misses the field 'factor'"),
        ({"num_hidden_layers": 10**12}, "num_layers = 1000000000000"),
        ({"num_hidden_layers": None}, "num_layers = None"),
        ({"hidden_size": -64}, "hidden_size = -64"),
        ({"num_key_value_heads": 3}, "4 attention heads can't share 3 KV heads"),
        ({"num_attention_heads": 128, "num_key_value_heads": 128}, "don't fit a hidden size of 64"),
        ({"rope_theta": "large"}, "can't be used"),
    ],
)
def test_says_why_a_config_cannot_be_served(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        spec_of_config(LLAMA | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", [key for key in LLAMA if key not in ("architectures", "num_key_value_heads")])
def test_names_a_missing_field(field: str) -> None:
    with pytest.raises(ConfigError, match=f"LlamaForCausalLM misses the field '{field}'"):
        spec_of_config({key: value for key, value in LLAMA.items() if key != field})


junk = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))


@settings(max_examples=300)
@given(architecture=st.sampled_from(sorted(FAMILIES)), changes=st.dictionaries(st.sampled_from(sorted(LLAMA)), junk))
def test_any_field_of_any_type_gives_a_spec_or_one_line(architecture: str, changes: dict[str, Any]) -> None:
    message = ""
    try:
        spec_of_config(LLAMA | changes | {"architectures": [architecture]})
    except ConfigError as error:
        message = str(error)
    assert "\n" not in message


def test_the_context_of_a_stretched_rope_is_as_long_as_the_stretch() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert spec_of_config(LLAMA | {"rope_scaling": yarn}).max_position == 1024
    assert spec_of_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).max_position == 512
    assert spec_of_config(LLAMA).max_position == 256
