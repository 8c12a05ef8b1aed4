"""The attention backend over the kernels, held against the reference backend on the same batches."""

from pathlib import Path

import pytest
import torch

from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.gpu import GpuAttention
from engine.attention.reference import ReferenceAttention
from engine.build import pick_gpu_backend
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.spec import DecoderSpec
from tests.gpu.harness import emulator

SPEC = DecoderSpec(
    family="llama", vocab_size=8, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_size=64,
    intermediate_size=8, max_position=512, attn_scale=0.125,
)  # fmt: skip
BLOCK = 16


def cache_of(kv_dtype: str) -> KVCache:
    return KVCache.allocate(2, 24, BLOCK, 2, 64, kv_dtype, torch.device("cpu"))


def batch_of(tables: torch.Tensor, slots: list[int], starts: list[int], counts: list[int]) -> AttentionBatch:
    positions = [torch.arange(p, p + n) for p, n in zip(starts, counts, strict=True)]
    mapping = [tables[s][p // BLOCK] * BLOCK + p % BLOCK for s, p in zip(slots, positions, strict=True)]
    q_start = torch.tensor([0, *counts]).cumsum(0).tolist()
    return AttentionBatch(q_start, starts, slots, tables, torch.cat(mapping))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8_e4m3"])
def test_steps_of_prefill_and_decode_give_what_the_reference_gives(kv_dtype: str) -> None:
    torch.manual_seed(0)
    ours, theirs = cache_of(kv_dtype), cache_of(kv_dtype)
    backends = [GpuAttention(SPEC, ours, emulator()), ReferenceAttention(SPEC, theirs)]
    tables = torch.randperm(24).view(3, 8)
    steps = [([2, 0], [0, 0], [40, 21]), ([0, 2], [21, 40], [1, 60]), ([2, 0, 1], [100, 22, 0], [1, 1, 5])]
    for slots, starts, counts in steps:
        batch, rows = batch_of(tables, slots, starts, counts), sum(counts)
        for layer in range(2):
            q, k, v = (torch.randn(rows, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
            outs = [torch.empty_like(q) for _ in backends]
            for backend, out in zip(backends, outs, strict=True):
                backend.plan(batch)
                backend.run(layer, q, k, v, out)
            torch.testing.assert_close(outs[0], outs[1], atol=1.2e-2, rtol=1e-2)


def test_a_cache_that_the_kernels_cannot_read_is_refused() -> None:
    cache = KVCache.allocate(2, 2, 544, 2, 64, "bfloat16", torch.device("cpu"))
    with pytest.raises(ConfigError, match="544"):
        GpuAttention(SPEC, cache, emulator())


def choice(monkeypatch: pytest.MonkeyPatch, path: str, **settings: object) -> tuple[str, str]:
    """What would be chosen on an NVIDIA GPU, with a PATH of one directory."""
    monkeypatch.setenv("PATH", path)
    return pick_gpu_backend(EngineConfig.of("a-model", **settings), "cuda:0", SPEC)


@pytest.fixture
def compilers(tmp_path: Path) -> str:
    """A directory with an nvcc that can be found."""
    (tmp_path / "nvcc").touch(0o755)
    return str(tmp_path)


def test_the_kernels_of_ours_come_first_then_triton_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, compilers: str
) -> None:
    assert choice(monkeypatch, compilers) == ("cuda", "GPU kernels on cuda:0")
    name, why = choice(monkeypatch, compilers, block_size=544)
    assert name == "triton"
    assert "block size 544" in why
    name, why = choice(monkeypatch, "/nowhere")
    assert name == "triton"
    assert "nvcc is not on the PATH" in why
    name, why = choice(monkeypatch, compilers, kv_manager="virtual")
    assert name == "reference"
    assert "attention of its own" in why


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "cuda", "block_size": 544}, "block size 544"),
        ({"attention_backend": "flashinfer"}, "not installed"),
        ({"attention_backend": "flashinfer", "kv_cache_dtype": "int8"}, "16-bit"),
        ({"attention_backend": "rocm"}, "drives its GPUs by cuda"),
    ],
)
def test_a_backend_that_was_asked_for_is_had_or_refused(
    monkeypatch: pytest.MonkeyPatch, compilers: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choice(monkeypatch, compilers, **settings)
    assert choice(monkeypatch, compilers, attention_backend="triton") == ("triton", "on cuda:0, as asked")
