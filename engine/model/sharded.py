"""The decoder cut over several ranks (Megatron-LM, arXiv 1909.08053), by the plan that transformers has for its models.

q, k, v, gate and up are cut by rows of their matrices: a rank computes some of the heads and of the MLP's inner values.
o and down are cut by columns, and what the ranks give is added up: two sums a layer. The rest is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import torch
import torch.nn.functional as F

from engine.errors import ConfigError
from engine.model.decoder import Decoder
from engine.model.spec import TRANSFORMERS, DecoderSpec
from engine.model.weights import Weight

CUT_BY_ROWS = frozenset({"q", "k", "v", "gate", "up"})
CUT_BY_COLUMNS = frozenset({"o", "down"})


@dataclass(frozen=True, slots=True)
class Sharding:
    """One rank of `count`. `total` gives every rank the sum of a float32 tensor over all of them, the same bits."""

    rank: int
    count: int
    total: Callable[[torch.Tensor], torch.Tensor]


class ShardedDecoder(Decoder):
    """A rank's part of a decoder. Its `spec` has the heads of this rank alone."""

    def __init__(
        self, spec: DecoderSpec, weights: Iterable[Weight], dtype: torch.dtype, device: torch.device, sharding: Sharding
    ) -> None:
        """`spec` and `weights` of the whole model."""
        self._sharding = sharding
        super().__init__(shard_spec(spec, sharding.count), weights, dtype, device)

    def _tensor(self, weight: Weight) -> torch.Tensor:
        whole, role = super()._tensor(weight), _role(weight.name)
        rank, count = self._sharding.rank, self._sharding.count
        if role in CUT_BY_ROWS:
            return whole.chunk(count, 0)[rank].clone()
        if role in CUT_BY_COLUMNS and whole.dim() == 2:
            return whole.chunk(count, 1)[rank].clone(memory_format=torch.contiguous_format)
        return whole

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if _role(name) not in CUT_BY_COLUMNS:
            return super()._linear(name, x)
        out = self._sharding.total(F.linear(x, self._weights[name]).float()).to(x.dtype)
        bias = self._weights.get(name + ".bias")
        return out if bias is None else out + bias


def _role(name: str) -> str:
    """The last part of a weight's name: "q" of "layers.0.q.bias"."""
    return name.removesuffix(".bias").rpartition(".")[2]


def shard_spec(spec: DecoderSpec, count: int) -> DecoderSpec:
    """What one rank of `count` computes. Raises ConfigError when the model can't be cut into so many parts."""
    if count == 1:
        return spec
    if spec.family == TRANSFORMERS:
        raise ConfigError("--tensor-parallel-size: a model that transformers computes can't be cut")
    if spec.qk_norm == "full":
        raise ConfigError("--tensor-parallel-size: this model's norm over all heads can't be cut")
    sizes = {"KV heads": spec.num_kv_heads, "heads": spec.num_heads, "inner values": spec.intermediate_size}
    if spec.num_experts:
        sizes["inner values of an expert"] = spec.moe_intermediate_size
    for what, size in sizes.items():
        if size % count:
            fit = [n for n in range(2, 65) if not any(s % n for s in sizes.values())]
            hint = f"it divides by {', '.join(map(str, fit))}" if fit else "it can't be cut at all"
            raise ConfigError(f"--tensor-parallel-size {count}: the model has {size} {what}; {hint}")
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // count,
        num_kv_heads=spec.num_kv_heads // count,
        intermediate_size=spec.intermediate_size // count,
        moe_intermediate_size=spec.moe_intermediate_size // count,
    )


def whole_bytes(spec: DecoderSpec, element_bytes: int) -> int:
    """Of the weights, what every rank has whole: the embedding and the head."""
    return spec.vocab_size * spec.hidden_size * element_bytes * (1 if spec.tie_embeddings else 2)
