"""Which stored tensor gives which canonical weight, for every family and both file formats.

Canonical names and shapes are those of `engine.model.spec`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`name` (canonical, of `shape`) <- `source`, after taking the expert, transposing, and picking rows.

    `source_rows` = rows that the source must have where `rows` picks some of them.
    """

    name: str
    shape: tuple[int, ...]
    source: str
    optional: bool = False
    expert: int = -1
    transpose: bool = False
    rows: slice | npt.NDArray[np.int64] | None = None
    source_rows: int = 0
    add_one: bool = False

    def without_expert(self) -> Rule:
        return replace(self, expert=-1)


def shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Shape of every canonical weight that this spec computes with, biases aside."""
    hidden = spec.hidden_size
    found: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden)}
    if spec.learned_positions >= 0:
        found["positions"] = (spec.max_position + spec.learned_positions, hidden)
    for i in range(spec.num_layers):
        for role, shape in _layer_shapes(spec, i).items():
            found[f"layers.{i}.{role}"] = shape
    if spec.final_norm:
        found["final_norm"] = (hidden,)
    if not spec.tie_embeddings:
        found["lm_head"] = (spec.vocab_size, hidden)
    return found


def _layer_shapes(spec: DecoderSpec, i: int) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    found: dict[str, tuple[int, ...]] = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    if spec.norm_placement != "post":
        found |= {"attn_norm": (hidden,), "mlp_norm": (hidden,)}
    if spec.norm_placement != "pre":
        found |= {"attn_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if spec.qk_norm == "head":
        found |= {"q_norm": (spec.head_size,), "k_norm": (spec.head_size,)}
    elif spec.qk_norm == "full":
        found |= {"q_norm": (q,), "k_norm": (kv,)}
    if spec.layers[i].moe:
        found["router"] = (spec.num_experts, hidden)
        for j in range(spec.num_experts):
            found |= {f"experts.{j}.{role}": shape for role, shape in _mlp_shapes(spec, spec.moe_intermediate_size)}
    else:
        found |= dict(_mlp_shapes(spec, spec.intermediate_size))
    return found


def _mlp_shapes(spec: DecoderSpec, inter: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if spec.gated:
        yield "gate", (inter, spec.hidden_size)
    yield "up", (inter, spec.hidden_size)
    yield "down", (spec.hidden_size, inter)


def is_ignored(name: str) -> bool:
    """Tensors that checkpoints carry and no one computes with: buffers, and an output head that is tied."""
    buffers = (".inv_freq", ".attn.bias", ".masked_bias", ".attention.bias", "rope_freqs.weight")
    tied = ("lm_head.weight", "embed_out.weight")
    return name.endswith(buffers) or name in tied or name.startswith("rope_factors_")


# ---------------------------------------------------------------- safetensors

_LLAMA = {
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attn_norm": "model.layers.{i}.input_layernorm",
    "mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "q": "model.layers.{i}.self_attn.q_proj",
    "k": "model.layers.{i}.self_attn.k_proj",
    "v": "model.layers.{i}.self_attn.v_proj",
    "o": "model.layers.{i}.self_attn.o_proj",
    "q_norm": "model.layers.{i}.self_attn.q_norm",
    "k_norm": "model.layers.{i}.self_attn.k_norm",
    "gate": "model.layers.{i}.mlp.gate_proj",
    "up": "model.layers.{i}.mlp.up_proj",
    "down": "model.layers.{i}.mlp.down_proj",
    "router": "model.layers.{i}.mlp.gate",
    "experts.gate": "model.layers.{i}.mlp.experts.{j}.gate_proj",
    "experts.up": "model.layers.{i}.mlp.experts.{j}.up_proj",
    "experts.down": "model.layers.{i}.mlp.experts.{j}.down_proj",
}
_MIXTRAL = _LLAMA | {
    "router": "model.layers.{i}.block_sparse_moe.gate",
    "experts.gate": "model.layers.{i}.block_sparse_moe.experts.{j}.w1",
    "experts.up": "model.layers.{i}.block_sparse_moe.experts.{j}.w3",
    "experts.down": "model.layers.{i}.block_sparse_moe.experts.{j}.w2",
}
_POST_NORMS = {
    "attn_post_norm": "model.layers.{i}.post_attention_layernorm",
    "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "mlp_post_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_PHI3 = _LLAMA | {
    **dict.fromkeys("qkv", "model.layers.{i}.self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "model.layers.{i}.mlp.gate_up_proj"),
}
_GPT2 = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "attn_norm": "transformer.h.{i}.ln_1",
    "mlp_norm": "transformer.h.{i}.ln_2",
    **dict.fromkeys("qkv", "transformer.h.{i}.attn.c_attn"),
    "o": "transformer.h.{i}.attn.c_proj",
    "up": "transformer.h.{i}.mlp.c_fc",
    "down": "transformer.h.{i}.mlp.c_proj",
}
_OPT = {
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "final_norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
    "attn_norm": "model.decoder.layers.{i}.self_attn_layer_norm",
    "mlp_norm": "model.decoder.layers.{i}.final_layer_norm",
    "q": "model.decoder.layers.{i}.self_attn.q_proj",
    "k": "model.decoder.layers.{i}.self_attn.k_proj",
    "v": "model.decoder.layers.{i}.self_attn.v_proj",
    "o": "model.decoder.layers.{i}.self_attn.out_proj",
    "up": "model.decoder.layers.{i}.fc1",
    "down": "model.decoder.layers.{i}.fc2",
}
_GPT_NEOX = {
    "embed": "gpt_neox.embed_in",
    "final_norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "attn_norm": "gpt_neox.layers.{i}.input_layernorm",
    "mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
    **dict.fromkeys("qkv", "gpt_neox.layers.{i}.attention.query_key_value"),
    "o": "gpt_neox.layers.{i}.attention.dense",
    "up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
    "down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "mixtral": _MIXTRAL,
    "gemma2": _LLAMA | _POST_NORMS,
    "gemma3": _LLAMA | _POST_NORMS,
    "olmo2": _LLAMA | _POST_NORMS,
    "phi3": _PHI3,
    "gpt2": _GPT2,
    "opt": _OPT,
    "gpt_neox": _GPT_NEOX,
}


def safetensors_rules(spec: DecoderSpec, names: set[str]) -> list[Rule]:
    """Rules for a checkpoint in Hugging Face's form that holds the tensors `names`.

    Checkpoints of the bare decoder leave the outermost module's name out of all their tensors' names.
    """
    patterns = _NAMES.get(spec.family, _LLAMA)
    prefix = patterns["embed"].split(".")[0] + "."
    bare = not any(name.startswith(prefix) for name in names)
    rules: list[Rule] = []
    for name, shape in shapes(spec).items():
        role, place = _role(name)
        source = patterns[role].format(**place)
        if bare:
            source = source.removeprefix(prefix)
        part = _fused_part(spec, role, patterns)
        if spec.family == "gpt2" and role in ("q", "k", "v", "o", "up", "down"):
            part |= {"transpose": True}
        if spec.family.startswith("gemma") and role.endswith("norm"):
            part |= {"add_one": True}
        rules.append(Rule(name=name, shape=shape, source=f"{source}.weight", **part))
        if role not in ("embed", "positions"):
            bias = part | {"transpose": False}
            rules.append(Rule(name=f"{name}.bias", shape=shape[:1], source=f"{source}.bias", optional=True, **bias))
    return rules


def _role(name: str) -> tuple[str, dict[str, int]]:
    """layers.3.experts.7.up -> ("experts.up", {i: 3, j: 7})"""
    parts = name.split(".")
    if parts[0] != "layers":
        return name, {}
    if parts[2] == "experts":
        return f"experts.{parts[4]}", {"i": int(parts[1]), "j": int(parts[3])}
    return parts[2], {"i": int(parts[1])}


def _fused_part(spec: DecoderSpec, role: str, patterns: Mapping[str, str]) -> dict[str, Any]:
    """Which rows of a fused tensor are this role's, {} where the tensor is its own."""
    if role in ("gate", "up") and patterns.get("gate") == patterns.get("up"):
        inter = spec.intermediate_size
        start = 0 if role == "gate" else inter
        return {"rows": slice(start, start + inter), "source_rows": 2 * inter}
    if role not in ("q", "k", "v") or patterns["q"] != patterns["k"]:
        return {}
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    if spec.family == "gpt_neox":  # [heads][q, k, v][head_size]
        part = "qkv".index(role)
        rows = np.arange(3 * q).reshape(spec.num_heads, 3, spec.head_size)[:, part].reshape(-1)
        return {"rows": rows, "source_rows": 3 * q}
    return {"rows": _qkv_slice(role, q, kv), "source_rows": q + 2 * kv}


def _qkv_slice(role: str, q: int, kv: int) -> slice:
    start, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[role]
    return slice(start, start + size)


# ---------------------------------------------------------------- GGUF

_GGUF = {
    "embed": "token_embd",
    "positions": "position_embd",
    "final_norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "blk.{i}.attn_norm",
    "attn_post_norm": "blk.{i}.post_attention_norm",
    "mlp_norm": "blk.{i}.ffn_norm",
    "mlp_post_norm": "blk.{i}.post_ffw_norm",
    "q": "blk.{i}.attn_q",
    "k": "blk.{i}.attn_k",
    "v": "blk.{i}.attn_v",
    "o": "blk.{i}.attn_output",
    "q_norm": "blk.{i}.attn_q_norm",
    "k_norm": "blk.{i}.attn_k_norm",
    "gate": "blk.{i}.ffn_gate",
    "up": "blk.{i}.ffn_up",
    "down": "blk.{i}.ffn_down",
    "router": "blk.{i}.ffn_gate_inp",
    "experts.gate": "blk.{i}.ffn_gate_exps",
    "experts.up": "blk.{i}.ffn_up_exps",
    "experts.down": "blk.{i}.ffn_down_exps",
}
_FUSED_QKV = dict.fromkeys("qkv", "blk.{i}.attn_qkv")
_GGUF_NAMES: Mapping[str, Mapping[str, str]] = {
    "phi3": _GGUF | _FUSED_QKV | {"gate": "blk.{i}.ffn_up"},
    "gpt2": _GGUF | _FUSED_QKV,
    "gptneox": _GGUF | _FUSED_QKV,
}
# The converter writes q and k of these for rotation of neighbouring pairs; undone, halves rotate as elsewhere.
_PAIRED_ROTARY = ("llama", "mistral", "granite", "smollm3")


def gguf_rules(spec: DecoderSpec, architecture: str) -> list[Rule]:
    """Rules for a GGUF file of `architecture` (its own name, such as "llama" for Mistral too)."""
    patterns = _GGUF_NAMES.get(architecture, _GGUF)
    q, kv = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    rules: list[Rule] = []
    for name, shape in shapes(spec).items():
        role, place = _role(name)
        part: dict[str, Any] = {}
        if role.startswith("experts."):
            part = {"expert": place["j"]}
        elif role in ("q", "k", "v") and patterns["q"] == patterns["k"]:
            part = {"rows": _qkv_slice(role, q, kv), "source_rows": q + 2 * kv}
        elif role in ("gate", "up") and patterns["gate"] == patterns["up"]:
            part = _fused_part(spec, role, patterns)
        elif role in ("q", "k") and architecture in _PAIRED_ROTARY:
            part = {"rows": _halves(shape[0], spec.head_size), "source_rows": shape[0]}
        source = patterns[role].format(**place)
        rules.append(Rule(name=name, shape=shape, source=f"{source}.weight", **part))
        if role not in ("embed", "positions"):
            rules.append(Rule(name=f"{name}.bias", shape=shape[:1], source=f"{source}.bias", optional=True, **part))
    return rules


def _halves(rows: int, head_size: int) -> npt.NDArray[np.int64]:
    """Order of rows that turns neighbouring pairs (2i, 2i + 1) of each head into halves (i, i + head_size / 2)."""
    return np.arange(rows).reshape(-1, head_size // 2, 2).swapaxes(1, 2).reshape(-1)
