"""The decoder for a GPU: the reference decoder's arithmetic in fewer passes over memory.

Norm with residual, rotation with the cache write, gate and activation are kernels of csrc/gpu; matrices that read the
same input are one. Families that need more than that are computed by `Decoder` as it is.
"""

from __future__ import annotations

import torch

from engine.attention.gpu_kernels import GpuKernels
from engine.model.decoder import Attend, Decoder
from engine.model.spec import DecoderSpec


def can_fuse(spec: DecoderSpec) -> bool:
    """Whether `FusedDecoder` computes such models."""
    return (
        (spec.norm, spec.norm_placement, spec.activation) == ("rms", "pre", "silu")
        and spec.gated
        and spec.final_norm
        and not spec.parallel_residual
        and spec.residual_scale == 1.0
        and spec.learned_positions < 0
        and spec.qk_norm != "full"
        and not any(layer.moe for layer in spec.layers)
    )


class FusedDecoder(Decoder):
    """Leaves queries and keys as they are: the attention behind `attend` rotates them where it writes keys."""

    kernels: GpuKernels

    def fuse(self, kernels: GpuKernels) -> FusedDecoder:
        """Make one matrix of those that share their input. Comes before the first step."""
        self.kernels = kernels
        for layer in range(self.spec.num_layers):
            at = f"layers.{layer}."
            self._join(at + "qkv", [at + role for role in "qkv"])
            self._join(at + "gate_up", [at + "gate", at + "up"])
        return self

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See `Decoder.forward`; positions are the attention's to know."""
        spec, weights = self.spec, self._weights
        residual = weights["embed"][tokens]
        if spec.embedding_scale != 1.0:
            residual = residual * spec.embedding_scale
        x = torch.empty_like(residual)
        self.kernels.rms_norm(x, residual, weights["layers.0.attn_norm"], spec.norm_eps)
        for layer in range(spec.num_layers):
            at = f"layers.{layer}."
            after = f"layers.{layer + 1}.attn_norm" if layer + 1 < spec.num_layers else "final_norm"
            for part, norm in ((self._mixed(layer, x, attend), at + "mlp_norm"), (None, after)):
                out = self._gated(at, x) if part is None else part
                x = torch.empty_like(out)
                self.kernels.rms_norm(x, out, weights[norm], spec.norm_eps, residual)
        return x

    def _mixed(self, layer: int, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        spec, at, rows = self.spec, f"layers.{layer}.", x.shape[0]
        sizes = [n * spec.head_size for n in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        q, k, v = (t.view(rows, -1, spec.head_size) for t in torch.split(self._linear(at + "qkv", x), sizes, dim=1))
        if spec.qk_norm == "head":
            q, k = self._head_norm(at + "q_norm", q), self._head_norm(at + "k_norm", k)
        return self._linear(at + "o", attend(layer, q, k, v).reshape(rows, sizes[0]))

    def _gated(self, at: str, x: torch.Tensor) -> torch.Tensor:
        both = self._linear(at + "gate_up", x)
        up = torch.empty(x.shape[0], both.shape[1] // 2, dtype=x.dtype, device=x.device)
        self.kernels.silu_mul(up, both)
        return self._linear(at + "down", up)

    def _head_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, self.spec.head_size)
        out = torch.empty_like(flat)
        self.kernels.rms_norm(out, flat, self._weights[name], self.spec.norm_eps)
        return out.view(x.shape)

    def _join(self, name: str, parts: list[str]) -> None:
        for suffix in ("", ".bias"):
            if all(part + suffix in self._weights for part in parts):
                self._weights[name + suffix] = torch.cat([self._weights.pop(part + suffix) for part in parts])
