"""Attention in the emulator against float64, and the promise that a row's bits are its own."""

import pytest
import torch

from engine.attention.gpu_kernels import PART, PLAIN, TENSOR
from tests.gpu.harness import TOLERANCE, Case, World, emulator

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DECODE = {"lens": (1, 16, 17, 300, 600), "rows": (1,) * 5}
PREFILL = {"lens": (1, 40, 300), "rows": (1, 40, 7)}

CASES = {
    "decode on tensor cores": Case(**DECODE),
    "decode without": Case(path=PLAIN, **DECODE),
    "prefill on tensor cores": Case(**PREFILL),
    "prefill without": Case(path=PLAIN, **PREFILL),
    "float16, head 64, block 32": Case(F16, "float16", head_size=64, block_size=32, **DECODE),
    "float16, head 96, block 8": Case(F16, "float16", heads=2, head_size=96, block_size=8, path=TENSOR, **DECODE),
    "head 256": Case(head_size=256, heads=4, block_size=64, path=TENSOR, **DECODE),
    "head 80": Case(head_size=80, heads=4, kv_heads=4, **DECODE),
    "16 query heads of one KV head": Case(heads=16, kv_heads=1, head_size=64, **DECODE),
    "float32": Case(F32, "float32", heads=4, head_size=64, block_size=4, **DECODE),
    "int8 keys and values": Case(BF16, "int8", heads=4, **DECODE),
    "fp8 e4m3": Case(BF16, "fp8_e4m3", heads=4, **DECODE),
    "fp8 e5m2, prefill": Case(F16, "fp8_e5m2", heads=4, head_size=64, **PREFILL),
    "sliding window": Case(window=100, lens=(50, 333, 700), rows=(1, 5, 1)),
    "sliding window without tensor cores": Case(window=100, path=PLAIN, lens=(50, 333, 700), rows=(1, 5, 1)),
    "soft cap": Case(softcap=5.0, **DECODE),
    "soft cap without tensor cores": Case(softcap=5.0, path=PLAIN, **DECODE),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_is_that_of_float64(case: Case) -> None:
    assert World(case, emulator()).error() < TOLERANCE[case.dtype]


@pytest.mark.parametrize("path", [PLAIN, TENSOR])
def test_a_row_gets_the_same_bits_alone_and_in_any_batch_or_chunk(path: int) -> None:
    world = World(Case(lens=(20, 700, 300), rows=(20, 9, 12), path=path), emulator())
    together = world.run()
    at = world.q_start.tolist()
    for i in range(3):
        assert torch.equal(world.run((i,)), together[at[i] : at[i + 1]])
        first = world.run((i,), rows=1)  # a decode step: split over parts and merged by a second kernel
        assert torch.equal(first, together[at[i] : at[i] + 1])


def test_each_byte_of_the_cache_is_read_once() -> None:
    case = Case(lens=(4 * PART,), rows=(1,), heads=8, kv_heads=2)
    world, kernels = World(case, emulator()), emulator()
    cached = 2 * case.lens[0] * case.kv_heads * case.head_size * 2 // 16
    queries = case.heads * case.head_size * 2 // 16
    before = kernels.loads()
    world.run()
    # Each of 4 parts of a KV head has 4 warps, and each of them loads the 4 query rows.
    assert kernels.loads() - before == cached + queries * 4 * 4
