"""One decoder described by data: what a `config.json` or a GGUF header says, reduced to what computes.

Both the native step (csrc/cpu) and the torch reference are driven by a `DecoderSpec`; a family is a
function from its config fields to this, never a second implementation.
"""

from __future__ import annotations

from typing import Literal

import msgspec

TRANSFORMERS = "transformers"  # family of what has no native decoder: transformers computes all but attention

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class LayerSpec(msgspec.Struct, frozen=True):
    """What may differ from layer to layer."""

    window: int = 0  # sliding window in tokens, the token itself included; 0 = full attention
    rope: int = 0  # index into DecoderSpec.rope; -1 = no rotary in this layer
    moe: bool = False


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary frequencies, already scaled (linear, llama3, yarn, longrope ... are folded in).

    `inv_freq` has rotary_dim / 2 entries (float64 -> float32); `scale` multiplies cos and sin (yarn, longrope).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and switches of a decoder-only transformer. Sizes in elements."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_position: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post", "sandwich"] = "pre"  # post: OLMo2 (after the sublayer), sandwich: Gemma 2/3
    parallel_residual: bool = False  # GPT-NeoX: attention and MLP read the same input
    activation: Activation = "silu"
    gated: bool = True  # act(gate) * up, else act(up)
    qk_norm: Literal["", "head", "full"] = ""  # per head (Qwen3, Gemma 3) or over the whole projection (OLMo2)
    rotary_dim: int = 0  # 0 = no rotary anywhere
    rope_interleaved: bool = False  # pairs (2i, 2i+1) instead of halves (i, i + rotary_dim/2)
    rope: tuple[RopeSpec, ...] = ()
    learned_positions: int = -1  # >= 0: learned position table, the offset added to a position (OPT: 2, GPT-2: 0)
    attn_scale: float = 1.0  # multiplies q . k
    attn_softcap: float = 0.0  # cap * tanh(score / cap); 0 = off
    final_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # Granite
    logit_scale: float = 1.0  # multiplies the logits
    final_norm: bool = True
    tie_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    layers: tuple[LayerSpec, ...] = ()

    @property
    def widest_window(self) -> int:
        """Tokens that a token's attention reads at most, in any layer, its own included; 0 = all."""
        windows = [layer.window for layer in self.layers]
        return max(windows, default=0) if all(windows) else 0


WEIGHT_ROLES = """
Canonical weight names (the loaders map every checkpoint to these; shapes as [out, in], row major):
  embed [vocab, hidden]            positions [max_position + offset, hidden]
  final_norm(.bias) [hidden]       lm_head(.bias) [vocab, hidden]  (absent when tied)
  layers.{i}.attn_norm(.bias)      before attention (pre, sandwich)
  layers.{i}.attn_post_norm        after attention (post, sandwich)
  layers.{i}.mlp_norm(.bias)       before the MLP (pre, sandwich)
  layers.{i}.mlp_post_norm         after the MLP (post, sandwich)
  layers.{i}.q|k|v|o(.bias)        q [heads*head, hidden], k/v [kv_heads*head, hidden], o [hidden, heads*head]
  layers.{i}.q_norm|k_norm         [head] or [heads*head]
  layers.{i}.gate|up|down(.bias)   gate/up [inter, hidden], down [hidden, inter]; no gate when not gated
  layers.{i}.router [experts, hidden]; layers.{i}.experts.{j}.gate|up|down
Norm weights are stored as they multiply: a (1 + w) family adds the one when loading.
"""
