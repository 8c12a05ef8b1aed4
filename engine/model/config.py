"""config.json (or GGUF metadata) -> DecoderSpec: one function a family, from its fields to what computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.model.gguf import GGUFFile
from engine.model.gguf_config import config_of_gguf
from engine.model.rope import rope_spec, served_context
from engine.model.spec import Activation, DecoderSpec, LayerSpec

Config = Mapping[str, Any]
Fields = dict[str, Any]


def load_spec(path: str | Path, *, max_model_len: int | None = None) -> DecoderSpec:
    """The decoder in a model directory or GGUF file; of a directory without a native decoder, by transformers.

    `max_model_len` is the longest context to be served, in tokens (None = all that the model takes); it picks
    between the factors of longrope models. Raises ConfigError in one line for what can't be served.
    """
    config = read_config(path)
    if Path(path).is_dir() and architecture_of(config) not in FAMILIES and not _why_never(config):
        from engine.model.fallback import probe_spec

        return probe_spec(Path(path))
    return spec_of_config(config, max_model_len=max_model_len)


def read_config(path: str | Path) -> dict[str, Any]:
    """config.json of a model directory, or the same fields made of GGUF metadata."""
    path = Path(path)
    if path.is_file():
        return config_of_gguf(GGUFFile(path))
    try:
        config = json.loads((path / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is no model directory: it has no config.json") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / 'config.json'} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path / 'config.json'} is not a JSON object")
    return config


def spec_of_config(config: Config, *, max_model_len: int | None = None) -> DecoderSpec:
    """DecoderSpec of the fields of a config.json. See `load_spec`."""
    architecture = architecture_of(config)
    family = FAMILIES.get(architecture)
    if family is None:
        raise ConfigError(_why_not(architecture, config))
    try:
        fields = family(config)
        return _finish(config, fields, max_model_len)
    except KeyError as error:
        raise ConfigError(f"config.json of this {architecture} misses the field {error}") from error
    except (TypeError, ValueError, ZeroDivisionError, OverflowError, IndexError) as error:
        raise ConfigError(f"config.json of this {architecture} has a field that can't be used: {error}") from error


def architecture_of(config: Config) -> str:
    """First entry of `architectures`, "" if there is none."""
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures and isinstance(architectures[0], str):
        return architectures[0]
    return ""


def _why_not(architecture: str, config: Config) -> str:
    supported = ", ".join(sorted(FAMILIES))
    name = architecture or f"model_type {config.get('model_type')!r}"
    never = _why_never(config)
    if never:
        return f"{name} {never}"
    return f"{name} is not among the architectures with a native decoder: {supported}"


def _why_never(config: Config) -> str:
    """Why no decoder of any kind can serve it, "" if one may."""
    if config.get("is_encoder_decoder"):
        return "is an encoder-decoder model; only decoder-only language models can be served"
    if architecture_of(config).endswith(("Classification", "ForQuestionAnswering", "ForMultipleChoice")):
        return "gives classes; only models that write text or embed it can be served"
    if "vision_config" in config or "audio_config" in config:
        return "takes images or sound; only text models can be served"
    return ""


# ---------------------------------------------------------------- fields that families share


# A broken or hostile file may claim any size; beyond these nothing has been published.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "num_layers": 4096,
    "num_heads": 1 << 14,
    "num_kv_heads": 1 << 14,
    "intermediate_size": 1 << 22,
    "max_position": 1 << 28,
    "head_size": 1 << 14,
    "num_experts": 1 << 14,
    "moe_intermediate_size": 1 << 22,
    "rotary_dim": 1 << 14,
}
_MAY_BE_ZERO = ("num_experts", "moe_intermediate_size", "rotary_dim", "head_size")


def _finish(config: Config, fields: Fields, max_model_len: int | None) -> DecoderSpec:
    """Fill in what every family has in common, unless it said otherwise."""
    for name, most in _LIMITS.items():
        value = fields.get(name, 0)
        if not isinstance(value, int) or not 0 <= value <= most or (value == 0 and name not in _MAY_BE_ZERO):
            raise ConfigError(f"config.json says {name} = {value!r}; it must be a number from 1 to {most}")
    heads = fields["num_heads"]
    fields.setdefault("head_size", fields["hidden_size"] // heads)
    if fields["head_size"] <= 0:
        raise ConfigError(f"{heads} attention heads don't fit a hidden size of {fields['hidden_size']}")
    fields.setdefault("attn_scale", fields["head_size"] ** -0.5)
    fields.setdefault("rotary_dim", 0 if "learned_positions" in fields else fields["head_size"])
    ropes = fields.pop("ropes", None)
    if fields["rotary_dim"]:
        scalings = ropes or [_rope_parameters(config)]
        trained = fields["max_position"]
        fields["max_position"] = served_context(scalings[0][1], trained)
        context = max_model_len or fields["max_position"]
        fields["rope"] = tuple(
            rope_spec(fields["rotary_dim"], theta, scaling, trained, context) for theta, scaling in scalings
        )
    layers: Callable[[int], LayerSpec] = fields.pop("layer", lambda i: LayerSpec())
    fields["layers"] = tuple(layers(i) for i in range(fields["num_layers"]))
    spec = DecoderSpec(**fields)
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(f"{spec.num_heads} attention heads can't share {spec.num_kv_heads} KV heads evenly")
    if spec.rotary_dim % 2 or spec.rotary_dim > spec.head_size:
        raise ConfigError(f"rotary size {spec.rotary_dim} does not fit the head size {spec.head_size}")
    return spec


def _rope_parameters(config: Config, default_theta: float = 10000.0) -> tuple[float, Config]:
    """(theta, scaling) in the older form (rope_theta, rope_scaling) or the newer (rope_parameters)."""
    scaling: Config = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta: float = scaling.get("rope_theta") or config.get("rope_theta") or default_theta
    # Phi-3 keeps the trained length beside the scaling.
    original = config.get("original_max_position_embeddings")
    if original is not None and "original_max_position_embeddings" not in scaling:
        scaling = {**scaling, "original_max_position_embeddings": original}
    return float(theta), scaling


def _activation(name: str) -> Activation:
    known: dict[str, Activation] = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    }
    if name not in known:
        raise ConfigError(f"activation {name!r} is not supported (supported: {', '.join(known)})")
    return known[name]


def _base(config: Config, family: str) -> Fields:
    """Fields as nearly all families of the last years name them."""
    heads = config["num_attention_heads"]
    fields: Fields = {
        "family": family,
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "intermediate_size": config["intermediate_size"],
        "max_position": config["max_position_embeddings"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "activation": _activation(config.get("hidden_act") or config.get("hidden_activation") or "silu"),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }
    if config.get("head_dim"):
        fields["head_size"] = config["head_dim"]
    return fields


def _windows(config: Config, default: Callable[[int], bool]) -> Callable[[int], int]:
    """Window of each layer: by `layer_types` where the config lists them, else by the family's rule."""
    window = config.get("sliding_window") or 0
    types = config.get("layer_types")
    if types:
        return lambda i: window if types[i] == "sliding_attention" else 0
    return lambda i: window if window and default(i) else 0


# ---------------------------------------------------------------- families


def _llama(config: Config) -> Fields:
    return _base(config, "llama") | {"norm_eps": config.get("rms_norm_eps", 1e-6)}


def _mistral(config: Config) -> Fields:
    window = _windows(config, lambda i: True)
    return _base(config, "mistral") | {"layer": lambda i: LayerSpec(window=window(i))}


def _smollm3(config: Config) -> Fields:
    """Every fourth layer has no rotary; `no_rope_layers` lists 1 for the layers that have one."""
    interval = config.get("no_rope_layer_interval", 4)
    rotary = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(config["num_hidden_layers"])]
    uses_window = bool(config.get("use_sliding_window"))
    window = _windows(config, lambda i: uses_window and bool(rotary[i]))
    tied = {"tie_embeddings": bool(config.get("tie_word_embeddings", True))}
    return (
        _base(config, "smollm3") | tied | {"layer": lambda i: LayerSpec(window=window(i), rope=0 if rotary[i] else -1)}
    )


def _qwen2(config: Config) -> Fields:
    """The first `max_window_layers` layers attend fully, the others in a window, if it is switched on."""
    first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else config["num_hidden_layers"]
    window = _windows(config, lambda i: i >= first)
    if not config.get("use_sliding_window"):
        window = _no_window
    return _base(config, "qwen2") | {"layer": lambda i: LayerSpec(window=window(i))}


def _no_window(layer: int) -> int:
    return 0


def _qwen3(config: Config) -> Fields:
    fields = _qwen2(config) | {"family": "qwen3", "qk_norm": "head"}
    fields.setdefault("head_size", 128)
    return fields


def _qwen3_moe(config: Config) -> Fields:
    fields = _qwen3(config)
    dense = set(config.get("mlp_only_layers") or ())
    step = config.get("decoder_sparse_step", 1)
    layer = fields["layer"]

    def sparse(i: int) -> LayerSpec:
        return LayerSpec(window=layer(i).window, moe=i not in dense and (i + 1) % step == 0)

    return fields | {
        "family": "qwen3_moe",
        "num_experts": config.get("num_experts") or config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "layer": sparse,
    }


def _mixtral(config: Config) -> Fields:
    window = _windows(config, lambda i: True)
    return _base(config, "mixtral") | {
        "norm_eps": config.get("rms_norm_eps", 1e-5),
        "num_experts": config["num_local_experts"],
        "experts_per_token": config["num_experts_per_tok"],
        "moe_intermediate_size": config["intermediate_size"],
        "layer": lambda i: LayerSpec(window=window(i), moe=True),
    }


def _phi3(config: Config) -> Fields:
    window = _windows(config, lambda i: True)
    fields = _base(config, "phi3") | {"layer": lambda i: LayerSpec(window=window(i))}
    partial = config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    head_size = fields.get("head_size", fields["hidden_size"] // fields["num_heads"])
    return fields | {"rotary_dim": int(head_size * (partial or 1.0)), "norm_eps": config.get("rms_norm_eps", 1e-5)}


def _gemma2(config: Config) -> Fields:
    window = _windows(config, lambda i: i % 2 == 0)
    return _base(config, "gemma2") | {
        "activation": _activation(config.get("hidden_activation") or "gelu_pytorch_tanh"),
        "norm_placement": "sandwich",
        "attn_scale": config.get("query_pre_attn_scalar", 256) ** -0.5,
        "attn_softcap": config.get("attn_logit_softcapping") or 0.0,
        "final_softcap": config.get("final_logit_softcapping") or 0.0,
        "embedding_scale": config["hidden_size"] ** 0.5,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "layer": lambda i: LayerSpec(window=window(i)),
        "head_size": config.get("head_dim", 256),
    }


def _gemma3(config: Config) -> Fields:
    """Windowed layers rotate by a frequency of their own, without scaling."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    window = _windows(config, lambda i: (i + 1) % pattern != 0)
    parameters = config.get("rope_parameters") or {}
    if "full_attention" in parameters:
        ropes = [
            _rope_parameters({"rope_parameters": parameters[kind]}) for kind in ("full_attention", "sliding_attention")
        ]
    else:
        ropes = [_rope_parameters(config, 1_000_000.0), (float(config.get("rope_local_base_freq", 10000.0)), {})]
    return _gemma2(config) | {
        "family": "gemma3",
        "qk_norm": "head",
        "ropes": ropes,
        "layer": lambda i: LayerSpec(window=window(i), rope=1 if window(i) else 0),
    }


def _olmo2(config: Config) -> Fields:
    return _base(config, "olmo2") | {
        "norm_placement": "post",
        "qk_norm": "full",
        "norm_eps": config.get("rms_norm_eps", 1e-5),
    }


def _granite(config: Config) -> Fields:
    return _base(config, "granite") | {
        "embedding_scale": config.get("embedding_multiplier", 1.0),
        "residual_scale": config.get("residual_multiplier", 1.0),
        "attn_scale": config.get("attention_multiplier", 1.0),
        "logit_scale": 1.0 / config.get("logits_scaling", 1.0),
    }


def _gpt2(config: Config) -> Fields:
    if config.get("scale_attn_by_inverse_layer_idx") or config.get("reorder_and_upcast_attn"):
        raise ConfigError("GPT-2 with scale_attn_by_inverse_layer_idx or reorder_and_upcast_attn is not supported")
    hidden, heads = config["n_embd"], config["n_head"]
    return {
        "family": "gpt2",
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": config["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "intermediate_size": config.get("n_inner") or 4 * hidden,
        "max_position": config["n_positions"],
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "activation": _activation(config.get("activation_function", "gelu_new")),
        "gated": False,
        "learned_positions": 0,
        "attn_scale": (hidden // heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0,
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _opt(config: Config) -> Fields:
    hidden = config["hidden_size"]
    if config.get("word_embed_proj_dim", hidden) != hidden or not config.get("do_layer_norm_before", True):
        raise ConfigError("OPT with projected embeddings or norms after the sublayers (OPT-350m) is not supported")
    return {
        "family": "opt",
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_attention_heads"],
        "intermediate_size": config["ffn_dim"],
        "max_position": config["max_position_embeddings"],
        "norm": "layer",
        "activation": _activation(config.get("activation_function", "relu")),
        "gated": False,
        "learned_positions": 2,
        "final_norm": not config.get("_remove_final_layer_norm", False),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
    }


def _gpt_neox(config: Config) -> Fields:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    parameters = config.get("rope_parameters") or {}
    rotary = parameters.get(
        "partial_rotary_factor", config.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    )
    theta, scaling = _rope_parameters(config, config.get("rotary_emb_base", 10000.0))
    return {
        "family": "gpt_neox",
        "vocab_size": config["vocab_size"],
        "hidden_size": hidden,
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "intermediate_size": config["intermediate_size"],
        "max_position": config["max_position_embeddings"],
        "norm": "layer",
        "norm_eps": config.get("layer_norm_eps", 1e-5),
        "parallel_residual": bool(config.get("use_parallel_residual", True)),
        "activation": _activation(config.get("hidden_act", "gelu")),
        "gated": False,
        "rotary_dim": int(hidden // heads * rotary),
        "ropes": [(theta, scaling)],
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


FAMILIES: Mapping[str, Callable[[Config], Fields]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "SmolLM3ForCausalLM": _smollm3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Olmo2ForCausalLM": _olmo2,
    "GraniteForCausalLM": _granite,
    "GPT2LMHeadModel": _gpt2,
    "OPTForCausalLM": _opt,
    "GPTNeoXForCausalLM": _gpt_neox,
}
