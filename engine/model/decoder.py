"""The reference decoder: plain torch, driven by a `DecoderSpec` alone. The oracle of the native step.

It knows no cache: attention over what came before is the caller's (`Attend`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F

from engine.model.spec import TRANSFORMERS, DecoderSpec, RopeSpec
from engine.model.weights import Weight, iter_weights

# (layer, q [rows, heads, head_size], k and v [rows, kv_heads, head_size]) -> [rows, heads, head_size]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class TorchDecoder(Protocol):
    """What computes a model in torch: `Decoder`, or the code of transformers (`engine.model.fallback`)."""

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """tokens, positions [rows] (integers) -> hidden states after the final norm [rows, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size]."""


def load_decoder(
    spec: DecoderSpec, path: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> TorchDecoder:
    """The decoder of a spec that `load_spec` made of `path`. Raises ConfigError."""
    if spec.family == TRANSFORMERS:
        from engine.model.fallback import TransformersDecoder

        return TransformersDecoder(spec, Path(path), dtype, device)
    return Decoder.load(spec, path, dtype, device)


class Decoder:
    """One model on one device. Matrices are kept in `dtype`; norms and the logits are computed in float32.

    row_tile: multiply so many rows at a time, the last filled up. A library's product may add in another order for
    another number of rows; for the same number it doesn't, so that what a row gets doesn't depend on its batch.
    """

    row_tile = 0  # 0 = as many as there are

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Iterable[Weight],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self._weights = {w.name: self._tensor(w) for w in weights}
        self._act = _ACTIVATIONS[spec.activation]
        self._inv_freq = [torch.tensor(rope.inv_freq, dtype=torch.float32, device=self.device) for rope in spec.rope]

    @classmethod
    def load(
        cls,
        spec: DecoderSpec,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> Self:
        """Read the weights of a model directory or GGUF file, dequantised. Raises ConfigError."""
        return cls(spec, iter_weights(spec, path), dtype, device)

    def set_weight(self, name: str, values: torch.Tensor) -> None:
        """A weight that comes from no checkpoint, on the device and of the type that it is computed with."""
        self._weights[name] = values

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """tokens, positions [rows] (integers) -> hidden states after the final norm [rows, hidden_size].

        `attend` is called once a layer, in order, with rotated queries and keys.
        """
        spec = self.spec
        x = self._weights["embed"][tokens] * spec.embedding_scale
        if spec.learned_positions >= 0:
            x = x + self._weights["positions"][positions + spec.learned_positions]
        rotations = [self._rotation(i, rope, positions) for i, rope in enumerate(spec.rope)]
        for layer in range(spec.num_layers):
            x = self._layer(layer, x, rotations, attend)
        return self._norm("final_norm", x) if spec.final_norm else x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> float32 [rows, vocab_size]."""
        head = "embed" if self.spec.tie_embeddings else "lm_head"
        logits = self._linear(head, hidden).float() * self.spec.logit_scale
        cap = self.spec.final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _layer(
        self, layer: int, x: torch.Tensor, rotations: list[tuple[torch.Tensor, torch.Tensor]], attend: Attend
    ) -> torch.Tensor:
        spec, at = self.spec, f"layers.{layer}."
        before, after = spec.norm_placement != "post", spec.norm_placement != "pre"
        mixed = self._attention(layer, self._norm(at + "attn_norm", x) if before else x, rotations, attend)
        if after:
            mixed = self._norm(at + "attn_post_norm", mixed)
        attended = x + mixed * spec.residual_scale
        mlp_input = x if spec.parallel_residual else attended
        out = self._mlp(layer, self._norm(at + "mlp_norm", mlp_input) if before else mlp_input)
        if after:
            out = self._norm(at + "mlp_post_norm", out)
        return attended + out * spec.residual_scale

    def _attention(
        self, layer: int, x: torch.Tensor, rotations: list[tuple[torch.Tensor, torch.Tensor]], attend: Attend
    ) -> torch.Tensor:
        spec, at, rows = self.spec, f"layers.{layer}.", x.shape[0]
        q, k, v = (self._linear(at + role, x) for role in "qkv")
        if spec.qk_norm == "full":
            q, k = self._norm(at + "q_norm", q), self._norm(at + "k_norm", k)
        q = q.view(rows, spec.num_heads, spec.head_size)
        k = k.view(rows, spec.num_kv_heads, spec.head_size)
        v = v.view(rows, spec.num_kv_heads, spec.head_size)
        if spec.qk_norm == "head":
            q, k = self._norm(at + "q_norm", q), self._norm(at + "k_norm", k)
        rope = spec.layers[layer].rope
        if rotations and rope >= 0:
            q, k = self._rotate(q, *rotations[rope]), self._rotate(k, *rotations[rope])
        return self._linear(at + "o", attend(layer, q, k, v).reshape(rows, spec.num_heads * spec.head_size))

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        if not self.spec.layers[layer].moe:
            return self._dense_mlp(f"layers.{layer}.", x)
        weights, experts = self._route(layer, x)
        out = torch.zeros_like(x)
        for expert in torch.unique(experts).tolist():
            row, choice = torch.where(experts == expert)
            part = self._dense_mlp(f"layers.{layer}.experts.{expert}.", x[row])
            out.index_add_(0, row, part * weights[row, choice, None].to(x.dtype))
        return out

    def _dense_mlp(self, at: str, x: torch.Tensor) -> torch.Tensor:
        up = self._linear(at + "up", x)
        up = self._act(self._linear(at + "gate", x)) * up if self.spec.gated else self._act(up)
        return self._linear(at + "down", up)

    def _route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids of each row's experts: [rows, experts_per_token] each."""
        scores = torch.softmax(self._linear(f"layers.{layer}.router", x).float(), dim=-1)
        weights, experts = torch.topk(scores, self.spec.experts_per_token, dim=-1)
        if self.spec.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias, tile, rows = self._weights[name], self._weights.get(name + ".bias"), self.row_tile, x.shape[0]
        if not tile or rows == tile:
            return F.linear(x, weight, bias)
        whole = F.pad(x, (0, 0, 0, -rows % tile))
        return torch.cat([F.linear(part, weight, bias) for part in torch.split(whole, tile)])[:rows]

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension, in float32."""
        weight, bias, wide = self._weights[name], self._weights.get(name + ".bias"), x.float()
        if self.spec.norm == "layer":
            return F.layer_norm(wide, wide.shape[-1:], weight, bias, self.spec.norm_eps).to(x.dtype)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        return (wide * scale * weight).to(x.dtype)

    def _rotation(self, index: int, rope: RopeSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [rows, 1, rotary_dim / 2] of one set of frequencies."""
        angles = positions.float()[:, None, None] * self._inv_freq[index]
        return angles.cos() * rope.scale, angles.sin() * rope.scale

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the first rotary_dim elements of each head; x [rows, heads, head_size]."""
        dim = self.spec.rotary_dim
        turned, kept = x[..., :dim].float(), x[..., dim:]
        if self.spec.rope_interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((turned.to(x.dtype), kept), dim=-1)

    def _tensor(self, weight: Weight) -> torch.Tensor:
        """On the device: matrices in `dtype`, norms in float32."""
        data: Any = weight.data
        if weight.dtype == "bf16":
            stored = torch.from_numpy(data.view("int16").copy()).view(torch.bfloat16)
        else:
            stored = torch.from_numpy(weight.float32() if weight.dtype == "blocks" else data.copy())
        is_norm = "norm" in weight.name
        return stored.to(device=self.device, dtype=torch.float32 if is_norm else self.dtype)


class DenseCausalAttention:
    """`Attend` for one sequence with its keys and values in plain tensors: for tests and small tools."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._keys: list[torch.Tensor] = [torch.empty(0)] * spec.num_layers
        self._values: list[torch.Tensor] = [torch.empty(0)] * spec.num_layers

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Append k and v, then attend; the rows continue the sequence."""
        spec = self._spec
        past = self._keys[layer].shape[0]
        keys = self._keys[layer] = torch.cat((self._keys[layer], k)) if past else k
        values = self._values[layer] = torch.cat((self._values[layer], v)) if past else v
        group = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float().repeat_interleave(group, 1)) * spec.attn_scale
        if spec.attn_softcap:
            scores = spec.attn_softcap * torch.tanh(scores / spec.attn_softcap)
        at = torch.arange(past, keys.shape[0], device=q.device)[:, None]
        key = torch.arange(keys.shape[0], device=q.device)[None]
        window = spec.layers[layer].window
        seen = (key <= at) & (key > at - window) if window else key <= at
        probabilities = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
        mixed = torch.einsum("hqk,khd->qhd", probabilities, values.float().repeat_interleave(group, 1))
        return mixed.to(q.dtype)
