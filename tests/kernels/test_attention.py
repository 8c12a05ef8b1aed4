"""Paged attention against float64, for every instruction set, KV dtype, block size, head size and group."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_oracle import Oracle
from tests.kernels.harness import (
    BF16,
    F8E4M3,
    F8E5M2,
    F16,
    F32,
    I8,
    QK_NORM_FULL,
    QK_NORM_HEAD,
    ROPE_INTERLEAVED,
    Attention,
    instruction_sets,
)

SETS = instruction_sets()
DTYPES = [F32, BF16, F16, I8, F8E4M3, F8E5M2]
# Largest difference to float64 relative to the largest |value|: f32 arithmetic over some hundred keys, and operands
# (query, weights, result) rounded to 8 bits.
TOLERANCE = {F32: 2e-6, BF16: 8e-3}


def random_qkv(rng: np.random.Generator, kernel: Attention, n: int) -> np.ndarray:
    return rng.standard_normal((n, kernel.width), np.float32)


def assert_matches(got: list[np.ndarray], want: list[np.ndarray], tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max())


def ragged_steps(rng: np.random.Generator, kernel: Attention) -> list[list[tuple[int, np.ndarray]]]:
    """Prefills, chunks and decodes mixed, with contexts that end inside and at the end of tiles, groups and splits."""
    plan = [{0: 5, 1: 64, 2: 1}, {0: 1, 1: 1, 2: 40, 3: 255}, {0: 11, 1: 3, 2: 1, 3: 1}, {0: 1, 1: 1, 2: 1, 3: 1}]
    return [[(seq, random_qkv(rng, kernel, n)) for seq, n in step.items()] for step in plan]


def norms_of(flags: int) -> tuple[np.ndarray, np.ndarray] | None:
    rng = np.random.default_rng(2)
    sizes = {QK_NORM_HEAD: (64, 64), QK_NORM_FULL: (4 * 64, 2 * 64)}.get(flags)
    if sizes is None:
        return None
    return rng.uniform(0.5, 1.5, sizes[0]).astype(np.float32), rng.uniform(0.5, 1.5, sizes[1]).astype(np.float32)


@cache
def questions(options: tuple[tuple[str, Any], ...]) -> list[tuple[list[tuple[int, np.ndarray]], list[np.ndarray]]]:
    """Ragged steps and their answers; the same for every instruction set and block size."""
    chosen = dict(options)
    kernel = Attention(SETS[0], norms=norms_of(chosen.get("flags", 0)), num_blocks=1, **chosen)
    oracle = Oracle(kernel, dtype=chosen["dtype"], compute=chosen["compute"])
    steps = ragged_steps(np.random.default_rng(1), kernel)
    kernel.close()
    return [(step, oracle.step(step)) for step in steps]


def check(isa: str, *, block_size: int = 16, tolerance: float | None = None, **options: Any) -> None:
    norms, blocks = norms_of(options.get("flags", 0)), 400 // block_size + 8
    kernel = Attention(isa, block_size=block_size, num_blocks=blocks, norms=norms, **options)
    kernel.fill(0xFF)  # NaN in every float format: nothing behind a context's end may be read
    for step, answer in questions(tuple(options.items())):
        assert_matches(kernel.step(step), answer, tolerance or TOLERANCE[options["compute"]])
    kernel.close()


@pytest.mark.parametrize("compute", [F32, BF16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", SETS)
def test_every_dtype_matches_float64_over_a_ragged_batch(isa: str, dtype: int, compute: int) -> None:
    for block_size in (7, 16):
        check(isa, dtype=dtype, compute=compute, block_size=block_size, rotary_dim=0)


@pytest.mark.parametrize("head_size", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("isa", SETS)
def test_every_head_size_and_group_matches_float64(isa: str, head_size: int) -> None:
    for heads, kv_heads in ((2, 2), (9, 3), (8, 1)):
        for dtype, compute in ((F32, F32), (BF16, BF16), (I8, BF16)):
            check(isa, dtype=dtype, compute=compute, head_size=head_size, heads=heads, kv_heads=kv_heads, rotary_dim=0)


@pytest.mark.parametrize("block_size", [1, 7, 16, 32, 544])
@pytest.mark.parametrize("isa", SETS)
def test_every_block_size_matches_float64(isa: str, block_size: int) -> None:
    check(isa, dtype=BF16, compute=BF16, block_size=block_size, rotary_dim=0)


@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("flags", [0, ROPE_INTERLEAVED, QK_NORM_HEAD, QK_NORM_FULL])
@pytest.mark.parametrize("isa", SETS)
def test_rotary_and_norms_match_float64(isa: str, flags: int, rotary_dim: int) -> None:
    check(isa, dtype=F32, compute=F32, flags=flags, rotary_dim=rotary_dim, tolerance=1e-5)


@pytest.mark.parametrize("isa", SETS)
def test_windows_and_soft_caps_match_float64(isa: str) -> None:
    for window in (1, 5, 64, 100):
        check(isa, dtype=F32, compute=F32, window=window, rotary_dim=0)
        check(isa, dtype=BF16, compute=BF16, window=window, softcap=3.0, rotary_dim=0)


# One row at a time at the borders of tiles, windows, groups and splits, chunks in between.
SINGLE = [1, 1, 13, 1, 1, 46, 1, 1, 1, 34, 1, 1, 151, 1, 1, 1, 1, 254, 1, 1, 1, 7, 1]


def fed(kernel: Attention, rows: np.ndarray, cuts: list[int]) -> bytes:
    """The attention of one sequence's rows, given in chunks of these sizes."""
    assert sum(cuts) == len(rows)
    return b"".join(kernel.step([(0, part)])[0].tobytes() for part in np.split(rows, np.cumsum(cuts)[:-1]))


@pytest.mark.parametrize("compute", [F32, BF16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", SETS)
def test_no_bit_depends_on_chunks_block_size_or_threads(isa: str, dtype: int, compute: int) -> None:
    rng = np.random.default_rng(4)
    n = sum(SINGLE)
    for shape in ({"heads": 6, "head_size": 64}, {"heads": 4, "head_size": 80, "window": 100}):
        answers = []
        rows = None
        for block_size, threads, cuts in (
            (16, 2, SINGLE),
            (16, 1, [n]),
            (1, 2, [33, 300, 1, n - 334]),
            (544, 2, [17, n - 17]),
            (7, 1, SINGLE[::-1]),
        ):
            kernel = Attention(isa, dtype=dtype, compute=compute, block_size=block_size, num_blocks=n, **shape)
            rows = random_qkv(rng, kernel, n) if rows is None else rows
            kernel.lib.h_threads(threads)
            answers.append(fed(kernel, rows, cuts))
            kernel.lib.h_threads(1)
            kernel.close()
        assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("dtype", [BF16, I8])
@pytest.mark.parametrize("isa", SETS)
def test_no_bit_depends_on_the_other_sequences(isa: str, dtype: int) -> None:
    rng = np.random.default_rng(5)
    together = Attention(isa, dtype=dtype, num_blocks=200, block_size=16)
    alone = [Attention(isa, dtype=dtype, num_blocks=200, block_size=32) for _ in range(4)]
    for step in ragged_steps(rng, together):
        for (seq, qkv), got in zip(step, together.step(step), strict=True):
            assert got.tobytes() == alone[seq].step([(0, qkv)])[0].tobytes()
    for kernel in (together, *alone):
        kernel.close()
