"""The Triton kernels in Triton's interpreter, against float64 over what the cache holds."""

import os
from dataclasses import dataclass

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are defined

import pytest
import torch

from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.encoding import byte_view
from engine.attention.reference import causal_mask
from engine.attention.triton_attention import TritonAttention
from engine.model.spec import DecoderSpec, LayerSpec

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    block: int
    head: int
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int = 0
    softcap: float = 0.0


CASES = {
    "block 544": Case(544, 64),
    "block 544, int8": Case(544, 80, kv_dtype="int8"),
    "block 7, head 20": Case(7, 20, "float32", "float32"),
    "block 1, fp8": Case(1, 24, "float16", "fp8_e4m3"),
    "block 100, fp8 e5m2": Case(100, 48, "float16", "fp8_e5m2"),
    "window": Case(24, 40, "float16", "float16", window=50),
    "soft cap": Case(24, 40, "float32", "float32", softcap=3.0),
}


def spec_of(case: Case) -> DecoderSpec:
    return DecoderSpec(
        family="llama", vocab_size=8, hidden_size=8, num_layers=1, num_heads=4, num_kv_heads=2, head_size=case.head,
        intermediate_size=8, max_position=1024, attn_scale=case.head**-0.5, attn_softcap=case.softcap,
        layers=(LayerSpec(window=case.window),),
    )  # fmt: skip


class World:
    """Two sequences whose blocks are scattered, stepped together."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(case.block)
        self.case, self.spec = case, spec_of(case)
        per_sequence = -(-400 // case.block)
        device = torch.device("cpu")
        self.cache = KVCache.allocate(1, 2 * per_sequence + 1, case.block, 2, case.head, case.kv_dtype, device)
        self.cache.fp8_scale = 0.5
        if case.kv_dtype != "int8":
            self.cache.layers[0].view(torch.uint8).fill_(0xFF)  # NaN in every floating type
        self.tables = torch.randperm(2 * per_sequence + 1)[: 2 * per_sequence].view(2, per_sequence)
        self.backend = TritonAttention(self.spec, self.cache)
        self.dtype = getattr(torch, case.dtype)

    def slots(self, sequence: int, first: int, last: int) -> torch.Tensor:
        at = torch.arange(first, last)
        return self.tables[sequence][at // self.case.block] * self.case.block + at % self.case.block

    def fill(self, sequence: int, tokens: int) -> None:
        """The first tokens of a sequence, written by torch: the interpreter is slow."""
        k, v = (torch.randn(tokens, 2, self.case.head).to(self.dtype) for _ in "kv")
        self.cache.write(0, k, v, self.slots(sequence, 0, tokens))

    def step(self, starts: list[int], counts: list[int], sequences: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Random rows through the backend: queries and what came out."""
        rows = sum(counts)
        q, k, v = (torch.randn(rows, heads, self.case.head).to(self.dtype) for heads in (4, 2, 2))
        mapping = torch.cat([self.slots(s, p, p + n) for s, p, n in zip(sequences, starts, counts, strict=True)])
        q_start = torch.tensor([0, *counts]).cumsum(0).tolist()
        self.backend.plan(AttentionBatch(q_start, starts, sequences, self.tables, mapping))
        out = torch.full_like(q, float("nan"))
        self.backend.run(0, q, k, v, out)
        return q, out

    def expected(self, sequence: int, start: int, q: torch.Tensor) -> torch.Tensor:
        """Of rows that stand from `start` on, in float64."""
        keys, values = self.cache.read(0, self.slots(sequence, 0, start + len(q)))
        grouped = q.double().view(len(q), 2, 2, self.case.head)
        scores = torch.einsum("rhgd,khd->hgrk", grouped, keys.double()) * self.spec.attn_scale
        if self.case.softcap:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        mask = causal_mask(len(q), start, self.case.window, q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("hgrk,khd->rhgd", weights, values.double()).flatten(1, 2)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_steps_of_prefill_and_decode_are_those_of_float64(case: Case) -> None:
    world = World(case)
    world.fill(1, 282)
    for starts, counts in (([0, 282], [20, 9]), ([20, 291], [1, 1])):
        q, out = world.step(starts, counts, [0, 1])
        wanted = torch.cat([world.expected(0, starts[0], q[: counts[0]]), world.expected(1, starts[1], q[counts[0] :])])
        error = (out.double() - wanted).abs().max().nan_to_num(nan=float("inf"))
        assert error < TOLERANCE[world.dtype]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "fp8_e5m2", "bfloat16"])
def test_the_cache_gets_the_bytes_that_torch_would_write(kv_dtype: str) -> None:
    world = World(Case(7, 20, kv_dtype=kv_dtype))
    ours, theirs = world.cache, KVCache.allocate(1, 200, 7, 2, 20, kv_dtype, torch.device("cpu"))
    theirs.fp8_scale = 0.5
    k, v = (torch.randn(5, 2, 20).mul(40).to(torch.bfloat16) for _ in "kv")
    k[1, 1] = 0
    k[2, 0, :5] = torch.tensor([1e5, -1e5, 1e-4, 3e-3, float("nan") if kv_dtype != "int8" else 1.0]).to(torch.bfloat16)
    slots = torch.tensor([3, 50, -1, 0, 7])
    world.backend.plan(AttentionBatch([0, 5], [0], [0], world.tables, slots))
    world.backend.run(0, torch.zeros(5, 4, 20).bfloat16(), k, v, torch.zeros(5, 4, 20).bfloat16())
    theirs.write(0, k, v, slots)
    written = torch.tensor([3, 50, 0, 7])
    for side in (0, 1):
        a, b = (byte_view(c.layers[0][side].flatten(0, 1))[written] for c in (ours, theirs))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_row_gets_the_same_bits_alone_and_in_any_batch_or_chunk() -> None:
    world = World(Case(24, 40, "float16", "float16"))
    world.fill(1, 290)
    q, k, v = (torch.randn(28, heads, 40).half() for heads in (4, 2, 2))
    tables, slots = world.tables, torch.cat([world.slots(0, 0, 18), world.slots(1, 290, 300)])

    def run(first: int, last: int, batch: AttentionBatch) -> torch.Tensor:
        out = torch.empty_like(q[first:last])
        world.backend.plan(batch)
        world.backend.run(0, q[first:last], k[first:last], v[first:last], out)
        return out

    together = run(0, 28, AttentionBatch([0, 18, 28], [0, 290], [0, 1], tables, slots))  # a program has all parts
    for first, last in ((18, 26), (26, 28)):  # few rows late in a sequence: parts are split and merged
        alone = run(first, last, AttentionBatch([0, last - first], [first + 272], [1], tables, slots[first:last]))
        assert torch.equal(alone, together[first:last])
