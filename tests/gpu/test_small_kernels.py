"""Writes to the cache, block moves, norm, activation and sampling in the emulator."""

import numpy as np
import pytest
import torch

from engine.attention.encoding import STORAGE_DTYPES, byte_view, token_head_scales
from engine.attention.gpu_kernels import Pages, problem_with
from engine.attention.paged import split_kv_cache, write_to_paged_cache
from engine.errors import EngineDead
from engine.sampling.reference import RowParams, uniform, weights
from tests.gpu.harness import emulator


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (80, 32), (256, 16)])
def test_the_cache_gets_the_bytes_that_torch_would_write(kv_dtype: str, head_size: int, block_size: int) -> None:
    torch.manual_seed(0)
    dtype = STORAGE_DTYPES[kv_dtype]
    activations = dtype if dtype.itemsize > 1 else torch.bfloat16
    k, v = (torch.randn(6, 3, head_size).mul(40).to(activations) for _ in "kv")
    k[1, 1] = 0
    k[2, 0, :4] = torch.tensor([1e5, -1e5, 1e-4, 3e-3]).to(activations)
    slots = torch.tensor([0, 2 * block_size + 3, -1, block_size - 1, 2 * block_size, block_size])
    written, expected = (torch.zeros(2, 3, block_size, 3, head_size).to(dtype) for _ in range(2))
    scales = [torch.zeros(3, block_size, 3) for _ in range(2)] if kv_dtype == "int8" else [torch.tensor([0.5])] * 2
    emulator().write(k, v, Pages(*split_kv_cache(written, 3, head_size), *scales), slots)
    wanted = [token_head_scales(k), token_head_scales(v)] if kv_dtype == "int8" else [s[0] for s in scales]
    write_to_paged_cache(k, v, *split_kv_cache(expected, 3, head_size), slots, kv_dtype, wanted[0], wanted[1])
    assert torch.equal(byte_view(written), byte_view(expected))
    if kv_dtype == "int8":
        keep = slots >= 0
        assert torch.equal(scales[0].flatten(0, 1)[slots[keep]], wanted[0][keep])


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_are_rotated_on_the_way(interleaved: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    angle = torch.rand(9, 16) * 6
    positions, cos_sin = torch.tensor([0, 5, 8], dtype=torch.int32), torch.cat([angle.cos(), angle.sin()], 1)
    storage = torch.zeros(2, 1, 4, 2, 64)
    key, value = split_kv_cache(storage, 2, 64)
    turned = q.clone()
    emulator().write(
        k, v, Pages(key, value), torch.tensor([0, 1, 3]), q=turned, positions=positions, cos_sin=cos_sin,
        interleaved=interleaved,
    )  # fmt: skip
    cos, sin = angle[positions.long()].cos()[:, None], angle[positions.long()].sin()[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        out = x.clone()
        a, b = (slice(0, 32, 2), slice(1, 32, 2)) if interleaved else (slice(0, 16), slice(16, 32))
        out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., b] * cos + x[..., a] * sin
        return out

    torch.testing.assert_close(turned, rotate(q))
    torch.testing.assert_close(key[0][:, :, [0, 1, 3]].permute(2, 0, 1, 3).flatten(2), rotate(k))
    assert torch.equal(value[0][:, :, [0, 1, 3]].permute(2, 0, 1), v)


@pytest.mark.parametrize("head_size", [64, 3])  # whole 16-byte words, or not
def test_blocks_move_as_they_are(head_size: int) -> None:
    storage = torch.randint(0, 255, (2, 7, 5, 1, head_size), dtype=torch.uint8)
    before = storage.clone()
    emulator().copy_blocks(storage, torch.tensor([[1, 4], [0, 6]]))
    before[:, 4], before[:, 6] = before[:, 1], before[:, 0]
    assert torch.equal(storage, before)
    host = torch.zeros(9, *storage.shape[2:], dtype=torch.uint8)
    emulator().swap_blocks(host, storage[0], torch.tensor([[1, 2], [2, 3], [5, 0]]))
    assert torch.equal(host[[2, 3, 0]], storage[0][[1, 2, 5]])
    assert not host[[1, 4, 5, 6, 7, 8]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norm_with_residual_and_gated_activation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 300).to(dtype), torch.randn(3, 300).to(dtype), torch.rand(300)
    total = (x.float() + residual.float()).to(dtype)
    out = torch.empty_like(x)
    emulator().rms_norm(out, x, weight, 1e-5, residual)
    wide = total.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert torch.equal(residual, total)
    torch.testing.assert_close(out, expected.to(dtype))
    gated = torch.empty(3, 150, dtype=dtype)
    emulator().silu_mul(gated, x)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(gated, (gate * torch.sigmoid(gate) * up).to(dtype))


def test_tokens_are_the_largest_or_where_the_numbers_fall() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 5000)).astype(np.float32) * 4
    logits[0, [7, 4000]] = 50  # among equals the lowest id
    temperature = np.array([0, 0, 1, 1, 0.5, 2, 1, 1], np.float32)
    seed = np.arange(8, dtype=np.uint64) * 2**40 + 3
    position = np.arange(8, dtype=np.uint32) + 100
    tokens = emulator().sample(
        torch.from_numpy(logits), torch.from_numpy(temperature), torch.from_numpy(seed),
        torch.zeros(8, dtype=torch.uint32), torch.from_numpy(position),
    ).tolist()  # fmt: skip
    for row, token in enumerate(tokens):
        if temperature[row] == 0:
            assert token == int(logits[row].argmax())
            continue
        p = weights(logits[row], RowParams(temperature=float(temperature[row])))
        mass, u = np.cumsum(p) / p.sum(), uniform(int(seed[row]), 0, int(position[row]))
        assert (mass[token - 1] if token else 0) - 1e-6 <= u <= mass[token] + 1e-6


def test_what_the_kernels_cannot_have_is_said_and_refused() -> None:
    assert "544" in problem_with(544, 128, torch.bfloat16)
    assert "84" in problem_with(16, 84, torch.bfloat16)
    assert not problem_with(16, 80, torch.int8)
    assert problem_with(8, 64, torch.int8)
    k = torch.zeros(1, 1, 512)
    storage = torch.zeros(2, 1, 16, 1, 512)
    with pytest.raises(EngineDead, match="head size 512"):
        emulator().write(k, k, Pages(*split_kv_cache(storage, 1, 512)), torch.tensor([0]))
