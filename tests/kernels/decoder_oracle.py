"""A decoder by its definition, in float64, over whole sequences: the oracle of the native step; and its driver.

Weights are dictionaries under the canonical names of engine/model/spec.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from engine import native
from engine.model.spec import DecoderSpec, LayerSpec, RopeSpec

Weights = dict[str, np.ndarray]
PER_BLOCK = 5  # tokens of a KV block in these tests: no power of two


def small_spec(**changes: Any) -> DecoderSpec:
    """A two-layer Llama with odd sizes; `changes` are fields of DecoderSpec."""
    fields: dict[str, Any] = {
        "family": "test",
        "vocab_size": 97,
        "hidden_size": 72,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "intermediate_size": 88,
        "max_position": 128,
        "rotary_dim": 16,
        "attn_scale": 0.25,
    }
    fields.update(changes)
    half = fields["rotary_dim"] // 2
    if half and "rope" not in fields:
        fields["rope"] = (RopeSpec(inv_freq=tuple(float(10000.0 ** (-i / half)) for i in range(half))),)
    fields.setdefault("layers", tuple(LayerSpec(rope=0 if half else -1) for _ in range(fields["num_layers"])))
    return DecoderSpec(**fields)


def random_weights(spec: DecoderSpec, seed: int, *, biases: bool = False) -> Weights:
    """Every weight that the spec asks for, float32."""
    rng = np.random.default_rng(seed)
    h, q, kv = spec.hidden_size, spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    weights: Weights = {}

    def matrix(name: str, rows: int, cols: int, bias: bool = biases) -> None:
        weights[name] = (rng.standard_normal((rows, cols)) / math.sqrt(cols)).astype(np.float32)
        if bias:
            weights[f"{name}.bias"] = (rng.standard_normal(rows) * 0.3).astype(np.float32)

    def norm(name: str, size: int = h) -> None:
        weights[name] = (1 + rng.standard_normal(size) * 0.2).astype(np.float32)
        if spec.norm == "layer" and size == h:
            weights[f"{name}.bias"] = (rng.standard_normal(size) * 0.2).astype(np.float32)

    def mlp(prefix: str, inter: int) -> None:
        for name in ("gate", "up") if spec.gated else ("up",):
            matrix(prefix + name, inter, h)
        matrix(f"{prefix}down", h, inter)

    weights["embed"] = rng.standard_normal((spec.vocab_size, h)).astype(np.float32)
    if spec.learned_positions >= 0:
        size = spec.max_position + spec.learned_positions
        weights["positions"] = (rng.standard_normal((size, h)) * 0.3).astype(np.float32)
    for i, layer in enumerate(spec.layers):
        at = f"layers.{i}."
        if spec.norm_placement != "post":
            norm(f"{at}attn_norm")
            norm(f"{at}mlp_norm")
        if spec.norm_placement != "pre":
            norm(f"{at}attn_post_norm")
            norm(f"{at}mlp_post_norm")
        for name, rows, cols in (("q", q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            matrix(at + name, rows, cols)
        if spec.qk_norm:
            norm(f"{at}q_norm", spec.head_size if spec.qk_norm == "head" else q)
            norm(f"{at}k_norm", spec.head_size if spec.qk_norm == "head" else kv)
        if layer.moe:
            matrix(f"{at}router", spec.num_experts, h, bias=False)
            for expert in range(spec.num_experts):
                mlp(f"{at}experts.{expert}.", spec.moe_intermediate_size)
        else:
            mlp(at, spec.intermediate_size)
    if spec.final_norm:
        norm("final_norm")
    if not spec.tie_embeddings:
        matrix("lm_head", spec.vocab_size, h)
    return weights


class Oracle:
    """Logits and final hidden states of one sequence, float64."""

    def __init__(self, spec: DecoderSpec, weights: Weights) -> None:
        self.spec = spec
        self.w = {name: value.astype(np.float64) for name, value in weights.items()}

    def run(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        s = self.spec
        positions = np.arange(len(tokens))
        x = self.w["embed"][tokens] * s.embedding_scale
        if s.learned_positions >= 0:
            x = x + self.w["positions"][positions + s.learned_positions]
        for i, layer in enumerate(s.layers):
            at = f"layers.{i}."
            attention = self._attention(self._norm(f"{at}attn_norm", x), at, layer, positions)
            if s.parallel_residual:
                x = x + s.residual_scale * (attention + self._mlp(self._norm(f"{at}mlp_norm", x), at, layer))
                continue
            x = x + s.residual_scale * self._norm(f"{at}attn_post_norm", attention)
            mlp = self._mlp(self._norm(f"{at}mlp_norm", x), at, layer)
            x = x + s.residual_scale * self._norm(f"{at}mlp_post_norm", mlp)
        hidden = self._norm("final_norm", x)
        head = "embed" if s.tie_embeddings else "lm_head"
        logits = (hidden @ self.w[head].T + self.w.get("lm_head.bias", 0)) * s.logit_scale
        if s.final_softcap:
            logits = s.final_softcap * np.tanh(logits / s.final_softcap)
        return logits, hidden

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        if name not in self.w:
            return x
        if self.spec.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.spec.norm_eps)
        return x * scale * self.w[name] + self.w.get(f"{name}.bias", 0)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[name].T + self.w.get(f"{name}.bias", 0)

    def _heads(self, name: str, x: np.ndarray) -> np.ndarray:
        s = self.spec
        if s.qk_norm == "head":
            x = x.reshape(len(x), -1, s.head_size)
        if s.qk_norm:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + s.norm_eps) * self.w[name]
        return x.reshape(len(x), -1, s.head_size)

    def _rotate(self, x: np.ndarray, rope: int, positions: np.ndarray) -> np.ndarray:
        s = self.spec
        if rope < 0 or not s.rotary_dim:
            return x
        frequencies = np.array(s.rope[rope].inv_freq, np.float32)
        angle = (positions[:, None].astype(np.float32) * frequencies).astype(np.float64)[:, None]
        cos, sin = np.cos(angle) * s.rope[rope].scale, np.sin(angle) * s.rope[rope].scale
        half, out = s.rotary_dim // 2, x.copy()
        first = slice(0, 2 * half, 2) if s.rope_interleaved else slice(0, half)
        second = slice(1, 2 * half, 2) if s.rope_interleaved else slice(half, 2 * half)
        a, b = x[..., first], x[..., second]
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        return out

    def _attention(self, x: np.ndarray, at: str, layer: LayerSpec, positions: np.ndarray) -> np.ndarray:
        s = self.spec
        q = self._rotate(self._heads(f"{at}q_norm", self._linear(f"{at}q", x)), layer.rope, positions)
        k = self._rotate(self._heads(f"{at}k_norm", self._linear(f"{at}k", x)), layer.rope, positions)
        v = self._linear(f"{at}v", x).reshape(len(x), -1, s.head_size)
        group = s.num_heads // s.num_kv_heads
        scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, 1)) * s.attn_scale
        if s.attn_softcap:
            scores = s.attn_softcap * np.tanh(scores / s.attn_softcap)
        behind = positions[:, None] - positions[None]
        hidden = (behind < 0) | (behind >= layer.window if layer.window else False)
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self._linear(f"{at}o", np.einsum("hqk,khd->qhd", weights, np.repeat(v, group, 1)).reshape(len(x), -1))

    def _mlp(self, x: np.ndarray, at: str, layer: LayerSpec) -> np.ndarray:
        if not layer.moe:
            return self._feed_forward(x, at)
        s = self.spec
        logits = self._linear(f"{at}router", x)
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = np.zeros_like(x)
        for row, share in enumerate(p):
            best = np.argsort(-share, kind="stable")[: s.experts_per_token]
            total = share[best].sum() if s.norm_topk_prob else 1
            for expert in best:
                out[row] += share[expert] / total * self._feed_forward(x[row : row + 1], f"{at}experts.{expert}.")[0]
        return out

    def _feed_forward(self, x: np.ndarray, at: str) -> np.ndarray:
        up = self._linear(f"{at}up", x)
        inner = self._act(self._linear(f"{at}gate", x)) * up if self.spec.gated else self._act(up)
        return self._linear(f"{at}down", inner)

    def _act(self, x: np.ndarray) -> np.ndarray:
        if self.spec.activation == "silu":
            return x / (1 + np.exp(-x))
        if self.spec.activation == "gelu":
            return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        if self.spec.activation == "gelu_tanh":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return np.maximum(x, 0)


# ---------------------------------------------------------------- the native side
def native_model(
    kernels: native.Kernels, spec: DecoderSpec, weights: Weights, *, dtype: Any = "float32", quant: int = native.W_F32
) -> native.Model:
    """A finished model from float32 weights; matrices are kept as `quant`."""
    model = native.Model(kernels, spec, dtype)
    for name, value in weights.items():
        rows, cols = value.shape if value.ndim == 2 else (value.shape[0], 1)
        kept = native.W_F32 if value.ndim == 1 or name == "positions" or name.endswith("router") else quant
        model.set(name, value, native.F32, rows, cols, kept)
    model.finish()
    return model


class Session:
    """A model with a KV pool: sequences are named by number and grow by the tokens given to `step`."""

    def __init__(
        self, kernels: native.Kernels, spec: DecoderSpec, model: native.Model, kv_dtype: int, blocks: int = 128
    ):
        self.spec, self.model, self.kernels = spec, model, kernels
        self.size = kernels.kv_block_bytes(spec, PER_BLOCK, kv_dtype) * blocks
        self.kv = native.KV(kernels.alloc(self.size), blocks, PER_BLOCK, kv_dtype)
        self.free = list(np.random.default_rng(1).permutation(blocks))
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def close(self) -> None:
        self.kernels.free(self.kv.data, self.size)
        self.model.close()

    def step(self, rows: list[tuple[int, list[int]]], *, hidden: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Logits (and final hidden states) of every token given, in order."""
        tokens = np.array([token for _, many in rows for token in many], np.int32)
        q_start = np.cumsum([0] + [len(many) for _, many in rows]).astype(np.int32)
        pos_start = np.array([self.lengths.get(seq, 0) for seq, _ in rows], np.int32)
        for seq, many in rows:
            self.lengths[seq] = self.lengths.get(seq, 0) + len(many)
            table = self.tables.setdefault(seq, [])
            while len(table) * PER_BLOCK < self.lengths[seq]:
                table.append(self.free.pop())
        width = max(len(table) for table in self.tables.values())
        tables = np.zeros((len(rows), width), np.int32)
        for line, (seq, _) in enumerate(rows):
            tables[line, : len(self.tables[seq])] = self.tables[seq]
        lines = np.arange(len(rows), dtype=np.int32)
        wanted = np.arange(len(tokens), dtype=np.int32)
        logits = np.full((len(tokens), self.spec.vocab_size), np.nan, np.float32)
        states = np.full((len(tokens), self.spec.hidden_size), np.nan, np.float32)
        at = native.pointer
        batch = native.Batch(
            n_rows=len(tokens),
            n_seqs=len(rows),
            tokens=at(tokens),
            q_start=at(q_start),
            pos_start=at(pos_start),
            tables=at(tables),
            table_stride=width,
            table_line=at(lines),
            n_logits=len(tokens),
            logit_rows=at(wanted),
            logits=at(logits),
            n_hidden=len(tokens) if hidden else 0,
            hidden_rows=at(wanted),
            hidden=at(states),
        )
        self.model.step(self.kv, batch)
        return logits, states
