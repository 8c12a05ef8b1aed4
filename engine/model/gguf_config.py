"""GGUF metadata in the words of config.json, so that one function a family serves both forms."""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.model.gguf import GGUFFile, dequantise

# GGUF architecture -> the class name that config.json would carry.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
}

# config.json field <- metadata key, after the architecture's prefix.
_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "use_parallel_residual": "use_parallel_residual",
}


def config_of_gguf(file: GGUFFile) -> dict[str, Any]:
    """The fields of config.json for this file. Raises ConfigError for an architecture that is not known."""
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ConfigError(f"{file.path} holds the architecture {name!r}; supported in GGUF are {known}")
    values = {key: metadata[f"{name}.{key}"] for key in {*_FIELDS.values()} if f"{name}.{key}" in metadata}
    config: dict[str, Any] = {field: values[key] for field, key in _FIELDS.items() if key in values}
    config["architectures"] = [ARCHITECTURES[name]]
    config["model_type"] = name
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight")
    config["vocab_size"] = embedding.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if isinstance(config.get("num_key_value_heads"), list) or isinstance(config.get("intermediate_size"), list):
        raise ConfigError(f"{file.path} has layers of different shapes, which is not supported")
    for role in ("bos", "eos"):
        if f"tokenizer.ggml.{role}_token_id" in metadata:
            config[f"{role}_token_id"] = metadata[f"tokenizer.ggml.{role}_token_id"]
    try:
        _rope(config, file, name)
        _family(config, file, name)
    except KeyError as error:
        raise ConfigError(f"{file.path} lacks the metadata for {error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{file.path} has metadata that can't be used: {error}") from error
    return config


def _rope(config: dict[str, Any], file: GGUFFile, name: str) -> None:
    metadata = file.metadata
    divisors = _values(file, "rope_freqs.weight")
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    original = metadata.get(f"{name}.rope.scaling.original_context_length")
    factor = metadata.get(f"{name}.rope.scaling.factor")
    if divisors is not None:
        config["rope_scaling"] = {"rope_type": "divisors", "divisors": divisors}
    elif "rope_factors_long.weight" in file.tensors:
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": _values(file, "rope_factors_long.weight"),
            "short_factor": _values(file, "rope_factors_short.weight"),
            "original_max_position_embeddings": original,
            "attention_factor": metadata.get(f"{name}.rope.scaling.attn_factor"),
        }
    elif kind in ("linear", "yarn"):
        config["rope_scaling"] = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    rotary = metadata.get(f"{name}.rope.dimension_count")
    if rotary is not None:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        config["partial_rotary_factor"] = rotary / head


def _values(file: GGUFFile, name: str) -> list[float] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    values: list[float] = dequantise(file.blocks(tensor), tensor.type).reshape(-1).tolist()
    return values


def _family(config: dict[str, Any], file: GGUFFile, name: str) -> None:
    """What GGUF leaves to the reader's knowledge of the family."""
    if name == "llama" and config.get("num_experts"):
        config["architectures"] = ["MixtralForCausalLM"]
        config["num_local_experts"] = config["num_experts"]
    elif name == "llama" and config.get("sliding_window"):
        config["architectures"] = ["MistralForCausalLM"]
    elif name == "gpt2":
        config |= {
            "n_embd": config["hidden_size"],
            "n_layer": config["num_hidden_layers"],
            "n_head": config["num_attention_heads"],
            "n_inner": config["intermediate_size"],
            "n_positions": config["max_position_embeddings"],
            "layer_norm_epsilon": config.get("layer_norm_eps", 1e-5),
        }
    elif name == "qwen3moe":
        config["norm_topk_prob"] = True
    elif name in ("gemma2", "gemma3"):
        # The scale of the largest models is by hidden size and heads, of all others by head size.
        largest = {"gemma2": 46, "gemma3": 62}[name]
        head = config["head_dim"]
        if config["num_hidden_layers"] == largest:
            head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = head
        if name == "gemma3" and "rope_scaling" not in config and file.metadata.get("gemma3.rope.scaling.factor"):
            factor = file.metadata["gemma3.rope.scaling.factor"]
            config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif name == "phi3" and not config.get("sliding_window"):
        config["sliding_window"] = None
