"""GPTQ, AWQ, compressed-tensors and fp8 checkpoints: packed here value by value, as their writers publish them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.model.decoder import Decoder, DenseCausalAttention
from engine.model.weights import iter_weights
from tests.model.families import VOCAB, make

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # what is stored, and the dense weight that it stands for


def pack(values: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Fields of int32 along an axis, value by value; `order` = which value of a word each field holds."""
    values = values.movedim(axis, -1)
    n = 32 // bits
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // n, dtype=torch.int64)
    for word in range(words.shape[-1]):
        for field in range(n):
            at = word * n + (order[field] if order else field)
            words[..., word] |= (values[..., at].long() & ((1 << bits) - 1)) << (bits * field)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).movedim(-1, axis).contiguous()


def integers(shape: tuple[int, int], bits: int, group: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Unsigned values [out, in], scales and zeros [out, groups], the group of each input."""
    rows, columns = shape
    values = torch.randint(0, 1 << bits, shape)
    scales = ((torch.rand(rows, columns // group) * 0.02 + 0.005) * 2.0 ** (4 - bits)).half()
    zeros = torch.full_like(scales, 1 << (bits - 1)).long()
    if not symmetric:
        zeros = torch.randint(1, 1 << bits, scales.shape)
    return values, scales, zeros, torch.arange(columns) // group


def dense(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    return (values - zeros[:, group_of]) * scales.float()[:, group_of]


def gptq(shape: tuple[int, int], bits: int, *, symmetric: bool, shuffled: bool = False, v2: bool = False) -> Packed:
    values, scales, zeros, group_of = integers(shape, bits, 32, symmetric=symmetric)
    if shuffled:
        group_of = group_of[torch.randperm(len(group_of))]
    stored = {
        "qweight": pack(values.T, bits, 0),
        "qzeros": pack(zeros.T - (0 if v2 else 1), bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": group_of.int(),
    }
    return stored, dense(values, scales, zeros, group_of)


def awq(shape: tuple[int, int], *, symmetric: bool) -> Packed:
    values, scales, zeros, group_of = integers(shape, 4, 32, symmetric=symmetric)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": pack(values.T, 4, 1, order),
        "qzeros": pack(zeros.T, 4, 1, order),
        "scales": scales.T.contiguous(),
    }
    return stored, dense(values, scales, zeros, group_of)


def packed_integers(shape: tuple[int, int], bits: int, *, symmetric: bool) -> Packed:
    values, scales, zeros, group_of = integers(shape, bits, 32, symmetric=symmetric)
    stored = {
        "weight_packed": pack(values, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(zeros, bits, 0)
    return stored, dense(values, scales, zeros, group_of)


def int8(shape: tuple[int, int], *, by_channel: bool) -> Packed:
    values = torch.randint(-128, 128, shape).to(torch.int8)
    scales = (torch.rand(shape[0] if by_channel else 1, 1) * 0.001 + 0.0005).bfloat16()
    stored = {"weight": values, "weight_scale": scales if by_channel else scales[0]}
    return stored, values.float() * scales.float()


def fp8(shape: tuple[int, int], dtype: torch.dtype, scales: str) -> Packed:
    values = (torch.randn(shape) * 2).to(dtype)
    rows, columns = shape
    if scales == "block":
        scale = torch.rand(-(-rows // 16), -(-columns // 16)) * 0.1
        spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
        return {"weight": values, "weight_scale_inv": scale}, values.float() * spread
    scale = torch.rand(rows if scales == "channel" else 1, 1) * 0.1
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def group_config(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"strategy": "group", "group_size": 32, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": 32}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

# name -> (quantization_config, packer, ggml type of the blocks it fits exactly or -1)
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int]], Packed], int]] = {
    "gptq-4": (GPTQ4, lambda s: gptq(s, 4, symmetric=True), 2),
    "gptq-4-asymmetric": (GPTQ4, lambda s: gptq(s, 4, symmetric=False), -1),
    "gptq-4-act-order": (GPTQ4 | {"desc_act": True}, lambda s: gptq(s, 4, symmetric=True, shuffled=True), -1),
    "gptq-4-v2": (GPTQ4 | {"checkpoint_format": "gptq_v2"}, lambda s: gptq(s, 4, symmetric=True, v2=True), 2),
    "gptq-2": (GPTQ4 | {"bits": 2}, lambda s: gptq(s, 2, symmetric=False), -1),
    "gptq-8": (GPTQ4 | {"bits": 8}, lambda s: gptq(s, 8, symmetric=True), 8),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda s: awq(s, symmetric=False),
        -1,
    ),
    "awq-symmetric": ({"quant_method": "awq", "bits": 4}, lambda s: awq(s, symmetric=True), 2),
    "ct-int4": (group_config(num_bits=4), lambda s: packed_integers(s, 4, symmetric=True), 2),
    "ct-int4-asymmetric": (group_config(num_bits=4), lambda s: packed_integers(s, 4, symmetric=False), -1),
    "ct-int8-packed": (group_config(num_bits=8), lambda s: packed_integers(s, 8, symmetric=True), 8),
    "ct-int8-channel": (group_config(num_bits=8), lambda s: int8(s, by_channel=True), 8),
    "ct-int8-tensor": (group_config(num_bits=8), lambda s: int8(s, by_channel=False), 8),
    "ct-fp8-channel": (group_config(num_bits=8, type="float"), lambda s: fp8(s, E4M3, "channel"), -1),
    "ct-fp8-tensor": (group_config(num_bits=8, type="float"), lambda s: fp8(s, E4M3, "tensor"), -1),
    "fp8-block": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, lambda s: fp8(s, E4M3, "block"), -1),
    "fp8-e5m2": ({"quant_method": "fp8"}, lambda s: fp8(s, E5M2, "channel"), -1),
}


def quantise(directory: Path, name: str) -> Any:
    """Replace the projections of a tiny llama by quantised ones; transformers' model with the same values."""
    torch.set_num_threads(1)
    config, packer, _ = SCHEMES[name]
    theirs = make("llama", directory)
    tensors = load_file(directory / "model.safetensors")
    for weight in [key for key in tensors if key.endswith("_proj.weight")]:
        stem = weight.removesuffix(".weight")
        stored, values = packer(tuple(tensors.pop(weight).shape))  # type: ignore[arg-type]
        tensors |= {f"{stem}.{part}": tensor for part, tensor in stored.items()}
        theirs.get_parameter(weight).data.copy_(values)
    save_file(tensors, directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return theirs


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_checkpoint_gives_the_logits_of_its_values(name: str, tmp_path: Path) -> None:
    theirs = quantise(tmp_path, name)
    spec = load_spec(tmp_path)
    tokens = torch.randint(3, VOCAB, (20,))
    expected = theirs(tokens[None]).logits[0]
    for keep_blocks in (False, True):
        weights = list(iter_weights(spec, tmp_path, keep_blocks=keep_blocks))
        types = {weight.ggml_type for weight in weights if weight.name.endswith((".q", ".up", ".down"))}
        assert types == {SCHEMES[name][2] if keep_blocks else -1}
        decoder = Decoder(spec, weights)
        with torch.inference_mode():
            ours = decoder.logits(decoder.forward(tokens, torch.arange(20), DenseCausalAttention(spec)))
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes' are not supported"),
        ({"quant_method": "gptq", "bits": 3}, "gptq weight model.layers.0.self_attn.q_proj can't be read: 3 bits"),
        ({"quant_method": "gptq"}, "can't be read: 'bits'"),
        ({"quant_method": "awq"}, "can't be read"),
        ([1], "is not a JSON object"),
    ],
)
def test_says_in_one_line_what_it_cannot_read(tmp_path: Path, config: Any, says: str) -> None:
    quantise(tmp_path, "gptq-4")
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=says) as caught:
        list(iter_weights(load_spec(tmp_path), tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_fp8_code_has_torchs_value(dtype: torch.dtype) -> None:
    from engine.model import quantised

    table = quantised._E4M3 if dtype == E4M3 else quantised._E5M2
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(table, expected)
