"""What fits: weights, KV cache and workspace against the memory that is free, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.model.names import shapes
from engine.model.safetensors_files import SafetensorsFiles
from engine.model.spec import TRANSFORMERS, DecoderSpec
from engine.model.weights import Quantization, gguf_of, kept_types

_GIB = 1 << 30
_DENSE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of 32 inputs in the native kernels' panels, by ggml type (csrc/cpu/pack.h).
_PANEL_BYTES = {2: 18, 3: 20, 8: 34, 12: 18.5}
_SPARE = 0.05  # of the free memory stays free: the process itself, and what the estimate misses


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes, but `context` (tokens of the longest sequence to be served)."""

    weights: int
    kv: int
    workspace: int
    free: int
    kv_per_token: int
    context: int
    draft: int = 0  # of a draft model: its weights, KV and workspace

    def __str__(self) -> str:
        """The arithmetic in one line."""
        total = self.weights + self.kv + self.workspace + self.draft
        tokens = self.kv // self.kv_per_token
        draft = f" + draft model {_gib(self.draft)}" if self.draft else ""
        return (
            f"weights {_gib(self.weights)} + KV {_gib(self.kv)} ({tokens} tokens of {self.kv_per_token} bytes) "
            f"+ workspace {_gib(self.workspace)}{draft} = {_gib(total)} of {_gib(self.free)} free; "
            f"context {self.context}"
        )


def plan_memory(
    spec: DecoderSpec,
    weights: int,
    *,
    kv_element_bytes: float,
    free: int,
    max_batched_tokens: int,
    max_num_seqs: int,
    kv: int | None = None,
    max_model_len: int | None = None,
    draft: int = 0,
) -> MemoryPlan:
    """The plan for a model whose weights take `weights` bytes (see `weight_bytes`), with `free` bytes to be had.

    `kv` is the size of the cache in bytes, None = what is left, as far as `max_num_seqs` full contexts can use it.
    `max_model_len` is the context asked for, in tokens: it is never cut; None = the longest that fits. Raises
    ConfigError with the numbers when it doesn't fit. `draft` bytes are taken by a draft model.
    """
    token = int(2 * spec.num_layers * spec.num_kv_heads * spec.head_size * kv_element_bytes)
    workspace = workspace_bytes(spec, max_batched_tokens, max_num_seqs)
    usable = int(free * (1 - _SPARE))
    left = usable - weights - workspace - draft
    wanted = max_model_len or spec.max_position
    if kv is None:
        kv = min(max(left, 0), wanted * max_num_seqs * token)
    context = min(wanted, kv // token)
    plan = MemoryPlan(
        weights=weights,
        kv=kv,
        workspace=workspace,
        free=free,
        kv_per_token=token,
        context=max_model_len or context,
        draft=draft,
    )
    if kv > left or context < 1:
        raise ConfigError(f"too large for this machine: {plan}. Choose less KV memory, a smaller model or fewer bits")
    if max_model_len and context < max_model_len:
        raise ConfigError(
            f"a context of {max_model_len} tokens needs {_gib(max_model_len * token)} of KV cache: {plan}. "
            f"The longest that fits is {context}"
        )
    return plan


def weight_bytes(spec: DecoderSpec, path: Path, *, dtype: str, quantization: Quantization) -> int:
    """Bytes of the weights as `load_native` keeps them, from headers alone.

    A tied embedding counts twice: once as the table that is looked up, once packed as the output head.
    """
    if quantization == "gguf":
        path = gguf_of(path)
    keeps_blocks = quantization == "gguf" or (quantization == "auto" and dtype == "bfloat16")
    types = kept_types(spec, path) if keeps_blocks else {}
    dense = _DENSE_BYTES[dtype] if quantization != "int8" else _PANEL_BYTES[8] / 32
    if spec.family == TRANSFORMERS:
        stored = SafetensorsFiles(path).tensors.values()
        return sum(math.prod(tensor.shape) for tensor in stored) * _DENSE_BYTES[dtype]
    total = 0.0
    for name, shape in shapes(spec).items():
        elements = shape[0] * (shape[1] if len(shape) == 2 else 1)
        block_type = types.get(name, -1)
        matrix = elements * (_PANEL_BYTES[block_type] / 32 if block_type >= 0 else dense)
        if len(shape) == 1:
            total += elements * 4
        elif name in ("embed", "positions"):
            total += elements * (_PANEL_BYTES[block_type] / 32 if block_type >= 0 else _DENSE_BYTES[dtype])
            total += matrix if name == "embed" and spec.tie_embeddings else 0
        else:
            total += matrix
    return int(total)


def workspace_bytes(spec: DecoderSpec, max_batched_tokens: int, max_num_seqs: int) -> int:
    """float32 activations of one step's rows, and logits of one row a sequence."""
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_size
    inter = max(spec.intermediate_size, spec.moe_intermediate_size * max(spec.experts_per_token, 1))
    row = 4 * spec.hidden_size + 2 * qkv + 3 * inter
    return 4 * (max_batched_tokens * row + max_num_seqs * spec.vocab_size)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
