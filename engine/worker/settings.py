"""What both executors are told at start. `build.py` resolves every "auto" before it makes one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

Dtype = Literal["float32", "bfloat16", "float16"]
KVDtype = Literal["float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2"]
Quantization = Literal["auto", "none", "int8", "gguf"]
KVManager = Literal["paged", "virtual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """Sizes and choices of one executor. Byte budgets count when the number of blocks beside them is 0."""

    max_model_len: int  # tokens of one sequence, prompt and output
    max_num_seqs: int  # slots
    max_batched_tokens: int  # rows of one step; buffers are made for this many

    block_size: int = 16  # tokens, any integer from 1
    num_blocks: int = 0  # device blocks; 0 = as many as kv_bytes holds
    kv_bytes: int = 0
    host_blocks: int = 0  # swap space; 0 = as many as host_bytes holds
    host_bytes: int = 0
    disk_dir: str = ""  # "" = no disk tier
    disk_bytes: int = 0

    dtype: Dtype = "bfloat16"  # of activations and of weights that aren't quantised
    kv_dtype: KVDtype = "bfloat16"
    kv_manager: KVManager = "paged"
    quantization: Quantization = "auto"  # how matrices are kept: see engine.model.weights.load_native
    image_cache: bool = True  # native: keep the packed weights beside the model for the next start
    threads: int = 0  # native: 0 = one a core
    isa: str = ""  # native: "" = the best that this machine has
    device: str = "cpu"  # torch executor: a torch device
    attention: str = "reference"  # torch executor: reference or flashinfer; GPU executor: cuda, rocm or triton
    gpu_memory: float = 0.0  # GPU executor: share of its memory for everything; 0 = the pool's size is given above
    deterministic: bool = False  # on a GPU: products of a fixed number of rows, so that no bits depend on the batch


def device_blocks(settings: ExecutorSettings, bytes_per_block: int) -> int:
    """Blocks of the device pool. Raises ConfigError when not one sequence of a single block fits."""
    blocks = settings.num_blocks or settings.kv_bytes // bytes_per_block
    if blocks < 1:
        raise ConfigError(
            f"no room for KV blocks: one of {settings.block_size} tokens takes {bytes_per_block} bytes, "
            f"the budget is {settings.kv_bytes}; raise the KV memory or lower the block size"
        )
    return blocks


def host_blocks(settings: ExecutorSettings, bytes_per_block: int) -> int:
    """Blocks of the host pool; 0 = no swapping."""
    return settings.host_blocks or settings.host_bytes // bytes_per_block
