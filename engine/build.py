"""From the configuration to a running engine: the only file that knows every part, and what "auto" means.

Imports are local, so that a process loads only what it uses: the native path never imports torch.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine import machine
from engine.api import Ready
from engine.config import EngineConfig, memory
from engine.errors import ConfigError
from engine.process import Engine

if TYPE_CHECKING:
    from engine.core.plan import Executor, Geometry
    from engine.core.settings import CoreSettings
    from engine.model.spec import DecoderSpec
    from engine.native import Kernels
    from engine.worker.settings import ExecutorSettings

log = logging.getLogger("octavo.engine")

GIB = 1 << 30
AUTO_KV_BYTES = GIB  # enough for some 45,000 tokens of the default model, and allocated in no time
AUTO_KV_SHARE = 0.4  # of the free memory, when one context alone needs more than AUTO_KV_BYTES
AUTO_SWAP_SHARE = 0.1  # of the free memory, and at most half of the pool
AUTO_BATCHED_TOKENS = 512
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Choice:
    """What "auto" came to, and why."""

    backend: str  # "native" or "reference"
    settings: ExecutorSettings
    why: str


def find_model(config: EngineConfig, *, progress: bool = False) -> Path:
    """Local path of the model, fetched and converted if need be. Raises ConfigError."""
    from engine.model.pull import pull

    return pull(config.model.model, revision=config.model.revision or None, progress=progress)


def build(config: EngineConfig) -> Engine:
    """Load the model and make the engine. Raises ConfigError."""
    from engine.core.engine import EngineCore
    from engine.model.config import load_spec
    from engine.sampling.grammar import GrammarCompiler
    from engine.text.tokenizer import Tokenizer

    began = time.perf_counter()
    path = find_model(config)
    spec = load_spec(path, max_model_len=config.model.max_model_len)
    choice = choose(config, spec)
    executor = make_executor(choice, path, spec)
    geometry = executor.start()
    geometry = msgspec.structs.replace(geometry, max_model_len=context_length(config, spec, geometry))
    tokenizer = Tokenizer.load(path)
    core = EngineCore(
        executor,
        geometry,
        core_settings(config, choice.settings),
        frozenset(tokenizer.eos_token_ids),
        GrammarCompiler(tokenizer.backend.to_str(), tokenizer.eos_token_ids, geometry.vocab_size),
    )
    loaded_s = time.perf_counter() - began
    return Engine(core, describe(config, path, spec, choice, geometry, loaded_s))


def choose(config: EngineConfig, spec: DecoderSpec) -> Choice:
    """Resolve every "auto". Raises ConfigError for what this machine can't do."""
    device = pick_device(config.parallel.device)
    backend, why = pick_backend(config, device)
    free = machine.available_memory()
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = dtype if config.kv.kv_cache_dtype == "auto" else config.kv.kv_cache_dtype
    context = config.model.max_model_len or spec.max_position
    if context > spec.max_position:
        raise ConfigError(f"--max-model-len {context}: the model was trained for {spec.max_position} tokens at most")
    kv_bytes = kv_budget(config, spec, kv_dtype, context, free)
    return Choice(backend, executor_settings(config, device, dtype, kv_dtype, context, kv_bytes, free), why)


def executor_settings(
    config: EngineConfig, device: str, dtype: str, kv_dtype: str, context: int, kv_bytes: int, free: int
) -> ExecutorSettings:
    """The executor's share of the configuration, resolved."""
    from engine.worker.settings import ExecutorSettings

    kv, schedule = config.kv, config.schedule
    swap = min(kv_bytes // 2, int(free * AUTO_SWAP_SHARE)) if kv.swap_space == "auto" else memory(kv.swap_space, free)
    values: dict[str, Any] = {
        "max_model_len": context,
        "max_num_seqs": schedule.max_num_seqs,
        "max_batched_tokens": batched_tokens(config),
        "block_size": kv.block_size,
        "num_blocks": kv.num_kv_blocks or 0,
        "kv_bytes": kv_bytes,
        "host_bytes": swap,
        "disk_dir": kv.kv_disk,
        "disk_bytes": memory(kv.kv_disk_size, free) if kv.kv_disk else 0,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "kv_manager": kv.kv_manager,
        "quantization": config.model.quantization,
        "threads": config.parallel.threads or machine.cores(),
        "isa": "" if config.parallel.isa == "auto" else config.parallel.isa,
        "device": device,
        "deterministic": config.parallel.deterministic,
    }
    return ExecutorSettings(**values)


def batched_tokens(config: EngineConfig) -> int:
    """Tokens that one step computes at most."""
    schedule = config.schedule
    return schedule.max_num_batched_tokens or max(AUTO_BATCHED_TOKENS, schedule.max_num_seqs)


def core_settings(config: EngineConfig, executor: ExecutorSettings) -> CoreSettings:
    """The scheduler's share of the configuration, resolved."""
    from engine.core.settings import CoreSettings

    values: dict[str, Any] = {
        "max_num_seqs": config.schedule.max_num_seqs,
        "max_num_batched_tokens": executor.max_batched_tokens,
        "enable_prefix_caching": config.kv.enable_prefix_caching,
        "preemption": config.kv.preemption,
        "kv_manager": config.kv.kv_manager,
    }
    return CoreSettings(**values)


def pick_device(wanted: str) -> str:
    """ "auto" is the first GPU that torch can use, else the CPU."""
    if wanted != "auto":
        return wanted
    if machine.accelerators():
        import torch

        if torch.cuda.is_available():
            return "cuda:0"
    return "cpu"


def pick_backend(config: EngineConfig, device: str) -> tuple[str, str]:
    """("native" or "reference", why). Raises ConfigError when what was asked for can't be had."""
    wanted, isa = config.parallel.attention_backend, config.parallel.isa
    if wanted == "reference":
        return "reference", "--attention-backend reference"
    if device != "cpu":
        if wanted == "native":
            raise ConfigError(f"--attention-backend native computes on the CPU, not on {device}; add --device cpu")
        return "reference", f"on {device}"
    try:
        set_in_use = load_kernels(config).isa
        return "native", f"kernels for {set_in_use}" + ("" if isa == "auto" else ", as asked")
    except (ConfigError, OSError, ImportError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if wanted == "native" or isa != "auto":
        raise ConfigError(f"the C++ kernels can't be used: {problem}")
    log.warning("the C++ kernels can't be used (%s): serving with torch, which is many times slower", problem)
    return "reference", f"the C++ kernels can't be used: {problem}"


def load_kernels(config: EngineConfig) -> Kernels:
    """The C++ kernels with the instruction set and threads of the configuration. Raises ConfigError."""
    from engine import native

    isa = "" if config.parallel.isa == "auto" else config.parallel.isa
    return native.load(isa, config.parallel.threads or machine.cores())


def make_executor(choice: Choice, path: Path, spec: DecoderSpec) -> Executor:
    """The executor of a choice, not started yet."""
    if choice.backend == "native":
        from engine.worker.native_executor import NativeExecutor

        return NativeExecutor(path, spec, choice.settings)
    from engine.worker.torch_executor import TorchExecutor

    return TorchExecutor(path, spec, choice.settings)


def kv_bytes_per_token(spec: DecoderSpec, kv_dtype: str) -> int:
    """K and V of one token over all layers, without scales and padding."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * ELEMENT_BYTES[kv_dtype]


def kv_budget(config: EngineConfig, spec: DecoderSpec, kv_dtype: str, context: int, free: int) -> int:
    """Bytes of the KV pool. Raises ConfigError when they are not there."""
    token = kv_bytes_per_token(spec, kv_dtype)
    if config.kv.num_kv_blocks:
        need = config.kv.num_kv_blocks * config.kv.block_size * token
        asked = f"--num-kv-blocks {config.kv.num_kv_blocks}"
    elif config.kv.kv_memory != "auto":
        need = memory(config.kv.kv_memory, free)
        asked = f"--kv-memory {config.kv.kv_memory}"
    else:
        return max(min(AUTO_KV_BYTES, free // 2), min(context * token, int(free * AUTO_KV_SHARE)))
    if need > free:
        raise ConfigError(f"{asked} needs {need / GIB:.1f} GiB, but {free / GIB:.1f} GiB are free; choose less")
    if need < config.kv.block_size * token:
        raise ConfigError(f"{asked} is less than one block ({config.kv.block_size * token} bytes); choose more")
    return need


def context_length(config: EngineConfig, spec: DecoderSpec, geometry: Geometry) -> int:
    """What was asked for; else the model's own context, as far as the pool holds one such sequence."""
    if config.model.max_model_len:
        return config.model.max_model_len
    return min(spec.max_position, geometry.num_blocks * geometry.block_size)


def describe(
    config: EngineConfig, path: Path, spec: DecoderSpec, choice: Choice, geometry: Geometry, loaded_s: float
) -> Ready:
    """What the client and the start-up log are told."""
    s = choice.settings
    backend = f"reference/{s.device}" if choice.backend == "reference" else f"cpu/{load_kernels(config).isa}"
    pool_bytes = geometry.num_blocks * geometry.bytes_per_block
    tokens = geometry.num_blocks * geometry.block_size
    tiers = f", swap {geometry.host_blocks} blocks" if geometry.host_blocks else ""
    tiers += f", disk {geometry.disk_blocks} blocks" if geometry.disk_blocks else ""
    why = config_words(config)
    notes = (
        f"model    {config.model.model} ({spec.family}, context {geometry.max_model_len}) from {path}",
        f"compute  {backend}, {s.threads} threads, {s.dtype}, quantization {s.quantization} ({choice.why})",
        f"memory   {geometry.num_blocks} KV blocks of {geometry.block_size} tokens = {tokens} tokens, "
        f"{pool_bytes / GIB:.2f} GiB {s.kv_dtype} ({why}){tiers}",
        f"schedule {s.max_num_seqs} sequences and {s.max_batched_tokens} tokens a step; loaded in {loaded_s:.1f} s",
    )
    return Ready(
        pid=os.getpid(),
        model=config.model.model,
        max_model_len=geometry.max_model_len,
        vocab_size=geometry.vocab_size,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        kv_bytes_per_block=geometry.bytes_per_block,
        dtype=s.dtype,
        kv_dtype=s.kv_dtype,
        backend=backend,
        notes=notes,
    )


def config_words(config: EngineConfig) -> str:
    """Where the size of the pool came from."""
    if config.kv.num_kv_blocks:
        return "--num-kv-blocks"
    return "auto, see --kv-memory" if config.kv.kv_memory == "auto" else f"--kv-memory {config.kv.kv_memory}"


def examine(config: EngineConfig) -> list[tuple[str, str]]:
    """What `octavo doctor` shows: the machine, and what would be chosen on it and why."""
    found = [
        ("processor", f"{machine.processor()}, {machine.cores()} cores for this process"),
        (
            "memory",
            f"{machine.available_memory() / GIB:.1f} GiB free of {machine.total_memory() / GIB:.1f} GiB, "
            f"transparent huge pages: {machine.huge_pages() or 'not known'}",
        ),
        ("accelerators", ", ".join(machine.accelerators()) or "none"),
        ("compilers", ", ".join(machine.compilers()) or "none: install g++ to build the kernels"),
    ]
    try:
        kernels = load_kernels(config)
        found.append(("kernels", f"{kernels.isa} in use; this machine runs {', '.join(kernels.isas)}"))
    except (ConfigError, OSError, ImportError) as error:
        found.append(("kernels", f"can't be used: {error}"))
    try:
        found += _choices(config)
    except ConfigError as error:
        found.append(("model", f"can't be served: {error}"))
    return found


def _choices(config: EngineConfig) -> list[tuple[str, str]]:
    from engine.model.config import load_spec

    path = find_model(config, progress=True)
    spec = load_spec(path, max_model_len=config.model.max_model_len)
    choice = choose(config, spec)
    s = choice.settings
    token = kv_bytes_per_token(spec, s.kv_dtype)
    return [
        (
            "model",
            f"{config.model.model}: {spec.family}, {spec.num_layers} layers, context {spec.max_position}, {path}",
        ),
        ("compute", f"{choice.backend} on {s.device}, {s.threads} threads, {s.dtype} ({choice.why})"),
        (
            "KV pool",
            f"{s.kv_bytes / GIB:.2f} GiB {s.kv_dtype}, {token} bytes a token: about {s.kv_bytes // token} tokens "
            f"({config_words(config)})",
        ),
        ("swap", f"{s.host_bytes / GIB:.2f} GiB of host memory"),
    ]
