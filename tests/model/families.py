"""A tiny random-weight model of every native family, made and saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 384

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "rope_theta": 10000.0,
}
_MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SWA = {"sliding_window": 7}

# name -> (architecture, fields of its config beyond the common ones)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-biased": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-3.1": ("Llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "mistral": ("Mistral", {"head_dim": 24, **_SWA}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **_SWA}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", _SWA),
    "phi3-long": ("Phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128}),
    "phi4-partial": ("Phi3", {"partial_rotary_factor": 0.5}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
        | _SWA,
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2, **_SWA}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "gpt2": ("GPT2", {"n_positions": 128, "n_embd": 64, "n_layer": 3, "n_head": 4}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-serial": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False}),
}


def make(name: str, directory: Path, **changes: Any) -> Any:
    """Save the model of that name to `directory`, weights drawn from its name; returns transformers' own.

    `changes` are further fields of its config.
    """
    architecture, fields = FAMILIES[name]
    config_class = getattr(transformers, f"{architecture}Config")
    model_class = getattr(transformers, _model_class(architecture))
    config = config_class(**{**_COMMON, **fields, **changes})
    torch.manual_seed(sum(name.encode()))
    model = model_class(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros and ones at initialisation would hide a missing bias or norm
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(directory)
    return model


def _model_class(architecture: str) -> str:
    special = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
    return special.get(architecture, f"{architecture}ForCausalLM")
