"""A GGUF file of the Llama family -> a model directory in Hugging Face form. numpy only."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.model.config import spec_of_config
from engine.model.gguf import GGUFFile
from engine.model.gguf_config import config_of_gguf
from engine.model.gguf_tokenizer import tokenizer_files
from engine.model.names import safetensors_rules, shapes
from engine.model.weights import Weight, iter_weights, to_bfloat16

_CONFIG_FIELDS = (
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
)


def write_directory(gguf: Path, directory: Path) -> None:
    """Write config.json, model.safetensors (bf16), tokenizer and generation files into an existing directory.

    Takes one weight at a time into memory. Raises ConfigError for a family other than Llama's.
    """
    file = GGUFFile(gguf)
    fields = config_of_gguf(file)
    if fields["architectures"] != ["LlamaForCausalLM"] or fields.get("rope_scaling"):
        raise ConfigError(f"{gguf} can't be converted; only plain Llama-family files are. It can be served as it is.")
    config: dict[str, Any] = {key: fields[key] for key in _CONFIG_FIELDS if key in fields}
    config |= {"model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16"}
    config |= {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name, data in tokenizer_files(file.metadata).items():
        (directory / name).write_bytes(data)
    spec = spec_of_config(config)
    whole = {"model.embed_tokens.weight"}  # a name by which the rules know the whole model from the bare decoder
    sources = {rule.name: rule.source for rule in safetensors_rules(spec, whole)}
    stored = {sources[name]: shape for name, shape in shapes(spec).items()}
    _write_safetensors(directory / "model.safetensors", stored, iter_weights(spec, gguf))


def _write_safetensors(path: Path, stored: dict[str, tuple[int, ...]], weights: Iterator[Weight]) -> None:
    """`weights` come in the order of `stored`, which maps names to shapes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in stored.items():
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, weight in zip(stored, weights, strict=True):
            if weight.shape != stored[name]:
                raise ConfigError(f"weight {weight.name} has the shape {weight.shape}, not {stored[name]}")
            stream.write(to_bfloat16(weight.float32()).tobytes())
