"""The FlashInfer backend against a stand-in for the library, which does what its documentation says of the wrapper."""

import sys
import types
from typing import Any

import pytest
import torch

from engine.attention import AttentionBatch
from engine.attention.cache import KVCache
from engine.attention.flashinfer_attention import FlashInferAttention, problem
from engine.attention.reference import ReferenceAttention, attend, causal_mask
from engine.model.spec import DecoderSpec, LayerSpec

SPEC = DecoderSpec(
    family="llama", vocab_size=8, hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32,
    intermediate_size=8, max_position=512, attn_scale=0.2, layers=(LayerSpec(), LayerSpec(window=6)),
)  # fmt: skip
BLOCK = 16


class Wrapper:
    """Pages are (keys, values) of [page, token, head, dimension]; `window_left` keys left of a row's own are seen."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD"

    def plan(
        self, *, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        causal: bool, sm_scale: float, window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype,
        kv_data_type: torch.dtype, disable_split_kv: bool,
    ) -> None:  # fmt: skip
        assert causal
        assert disable_split_kv
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 32)
        self.q_start, self.kv_start = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()
        self.page, self.scale, self.window, self.cap = page_size, sm_scale, window_left + 1, logits_soft_cap or 0.0

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        for i, last in enumerate(self.last):
            mine = self.indices[self.kv_start[i] : self.kv_start[i + 1]]
            tokens = (len(mine) - 1) * self.page + last
            keys, values = (side[mine].flatten(0, 1)[:tokens].float() for side in pages)
            rows = slice(self.q_start[i], self.q_start[i + 1])
            n = rows.stop - rows.start
            mask = causal_mask(n, tokens - n, self.window, q.device)
            out[rows] = attend(q[rows], keys, values, mask, self.scale, self.cap).to(out.dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.usefixtures("library")
def test_prefill_and_decode_give_what_the_reference_gives() -> None:
    torch.manual_seed(0)
    caches = [KVCache.allocate(2, 12, BLOCK, 2, 32, "bfloat16", torch.device("cpu")) for _ in range(2)]
    backends = [FlashInferAttention(SPEC, caches[0]), ReferenceAttention(SPEC, caches[1])]
    tables = torch.randperm(12).view(2, 6)
    for starts, counts in (([0, 0], [33, 16]), ([33, 16], [1, 20])):
        at = [torch.arange(p, p + n) for p, n in zip(starts, counts, strict=True)]
        mapping = torch.cat([tables[i][p // BLOCK] * BLOCK + p % BLOCK for i, p in enumerate(at)])
        batch = AttentionBatch([0, counts[0], sum(counts)], starts, [0, 1], tables, mapping)
        for layer in range(2):
            q, k, v = (torch.randn(sum(counts), heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
            outs = [torch.empty_like(q) for _ in backends]
            for backend, out in zip(backends, outs, strict=True):
                backend.plan(batch)
                backend.run(layer, q, k, v, out)
            torch.testing.assert_close(outs[0], outs[1])


def test_what_it_cannot_do_or_is_not_there_is_said() -> None:
    assert "16-bit" in problem("int8", "bfloat16")
    assert "16-bit" in problem("float32", "float32")
    assert "not installed" in problem("bfloat16", "bfloat16")
