"""GGUF files of tiny models, written with the gguf package by the rules of its converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Quantise = Callable[[str, Array], tuple[Array, gguf.GGMLQuantizationType]]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_neox": gguf.MODEL_ARCH.GPTNEOX,
}
_PAIRED = ("llama", "mistral", "mixtral", "smollm3", "granite")


def as_float(name: str, values: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
    return values.astype(np.float32), gguf.GGMLQuantizationType.F32


def permute(values: Array, heads: int) -> Array:
    """The converter's order of rows for rotation of neighbouring pairs."""
    shape = values.shape
    return values.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def unpermute(values: Array, heads: int) -> Array:
    shape = values.shape
    return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write(model: Any, path: Path, quantise: Quantise = as_float) -> None:
    """Write transformers' `model` to a GGUF file, with a tokenizer of as many made-up tokens."""
    config = model.config
    kind = config.model_type
    architecture = ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _metadata(writer, config)
    _tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    experts: dict[str, list[Array]] = {}
    tied = getattr(config, "tie_word_embeddings", False)
    for name, tensor in _state(model).items():
        if name.endswith((".inv_freq", ".attention.bias", ".masked_bias", ".attn.bias")):
            continue
        if tied and name in ("lm_head.weight", "embed_out.weight"):
            continue
        if ".experts." in name:
            head, _, tail = name.partition(".experts.")
            experts.setdefault(f"{head}.experts.{tail.partition('.')[2]}", []).append(tensor)
            continue
        _add(writer, names, name, _transformed(kind, config, name, tensor), quantise)
    for name, parts in experts.items():
        _add(writer, names, name, np.stack(parts), quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _state(model: Any) -> dict[str, Array]:
    """Tensors under the names of the saved checkpoint (experts one by one)."""
    import tempfile

    from safetensors.numpy import load_file

    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def _transformed(kind: str, config: Any, name: str, values: Array) -> Array:
    if kind in _PAIRED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        return permute(values, heads)
    if kind.startswith("gemma") and "norm" in name:
        return values + 1
    if kind == "gpt2" and values.ndim == 2 and name.rpartition(".weight")[0].endswith(("c_attn", "c_proj", "c_fc")):
        return values.T
    if kind == "gpt_neox" and ".query_key_value." in name:
        heads, hidden = config.num_attention_heads, config.hidden_size
        return values.reshape(heads, 3, hidden // heads, -1).swapaxes(0, 1).reshape(values.shape)
    return values


def _add(writer: gguf.GGUFWriter, names: Any, name: str, values: Array, quantise: Quantise) -> None:
    mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert mapped, name
    if values.ndim == 1:
        writer.add_tensor(mapped, values.astype(np.float32))
        return
    data, kind = quantise(mapped, np.ascontiguousarray(values, np.float32))
    writer.add_tensor(mapped, data, raw_dtype=kind)


def _metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    kind = config.model_type
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", config.num_attention_heads))
    writer.add_feed_forward_length(4 * config.hidden_size if kind == "gpt2" else config.intermediate_size)
    if kind in ("gpt2", "gpt_neox"):
        writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", getattr(config, "layer_norm_epsilon", 1e-5)))
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if kind != "gpt2":
        parameters = config.rope_parameters
        parameters = parameters.get("full_attention", parameters)
        writer.add_rope_freq_base(parameters["rope_theta"])
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(head * parameters.get("partial_rotary_factor", 1.0)))
    if getattr(config, "sliding_window", None) and kind != "smollm3":
        writer.add_sliding_window(config.sliding_window)
    if kind == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if kind == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<a>", "<b>", "<c>", "t", "1", "t1", *(f"t{i}" for i in range(6, vocab_size))])
    writer.add_token_types([3] * 3 + [1] * (vocab_size - 3))
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
