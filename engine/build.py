"""From the configuration to a running engine: the only file that knows every part, and what "auto" means.

Imports are local, so that a process loads only what it uses: the native path never imports torch.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine import machine
from engine.api import Ready
from engine.build_draft import choose_draft, draft_proposer
from engine.config import EngineConfig, adapters, is_private, memory, nth_endpoint
from engine.errors import ConfigError, InvalidRequest
from engine.model.spec import TRANSFORMERS, DecoderSpec
from engine.process import Engine

if TYPE_CHECKING:
    from engine.build_draft import Draft
    from engine.core.engine import EngineCore
    from engine.core.plan import Executor, Geometry
    from engine.core.proposer import Proposer
    from engine.core.settings import CoreSettings
    from engine.kv_events import Publisher
    from engine.model.memory import MemoryPlan
    from engine.native import Kernels
    from engine.worker.settings import ExecutorSettings

log = logging.getLogger("octavo.engine")

GIB = 1 << 30
AUTO_KV_BYTES = GIB  # enough for some 45,000 tokens of the default model, and allocated in no time
AUTO_KV_SHARE = 0.4  # of the free memory, when one context alone needs more than AUTO_KV_BYTES
AUTO_SWAP_SHARE = 0.1  # of the free memory, and at most half of the pool
AUTO_BATCHED_TOKENS = 512
GPU_BACKENDS = ("cuda", "rocm", "triton", "flashinfer")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class Choice:
    """What "auto" came to, and why."""

    backend: str  # native, reference, or one of GPU_BACKENDS
    settings: ExecutorSettings
    memory: MemoryPlan
    why: str
    draft: Draft | None = None


def find_model(config: EngineConfig, *, progress: bool = False) -> Path:
    """Local path of the model, fetched and converted if need be. Raises ConfigError."""
    from engine.model.pull import pull

    return pull(config.model.model, revision=config.model.revision or None, progress=progress)


def build(config: EngineConfig) -> Engine:
    """Load the model and make the engine. Raises ConfigError."""
    try:
        return load_engine(config)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        what = f"{config.model.model} is computed by {error.name}, which isn't installed"
        raise ConfigError(f"{what}: pip install torch transformers, or build the image with TORCH=keep") from None


def load_engine(config: EngineConfig) -> Engine:
    """`build`, where all that the model needs is installed."""
    from engine.core.engine import EngineCore
    from engine.model.config import load_spec
    from engine.model.encoder_config import is_encoder
    from engine.sampling.grammar import GrammarCompiler
    from engine.text.tokenizer import Tokenizer

    began = time.perf_counter()
    path = find_model(config)
    if is_encoder(path):
        from engine.build_encoder import build_encoder

        return build_encoder(config, path)
    spec = load_spec(path, max_model_len=config.model.max_model_len)
    choice = choose(config, path, spec)
    ranks = config.parallel.tensor_parallel_size
    executor = make_executor(choice, path, spec, ranks)
    geometry = executor.start()
    geometry = msgspec.structs.replace(geometry, max_model_len=context_length(config, spec, geometry))
    tokenizer = Tokenizer.load(path)
    core = EngineCore(
        executor,
        geometry,
        core_settings(config, choice.settings),
        frozenset(tokenizer.eos_token_ids),
        GrammarCompiler(tokenizer.backend.to_str(), tokenizer.eos_token_ids, geometry.vocab_size),
        proposer=make_proposer(config, choice, geometry.vocab_size),
    )
    for name, directory in adapters(config.model.lora).items():
        load_adapter(core, name, directory)
    loaded_s = time.perf_counter() - began
    return Engine(core, describe(config, path, spec, choice, geometry, loaded_s), make_publisher(config))


def make_publisher(config: EngineConfig) -> Publisher | None:
    """What publishes KV events, if they are asked for. Each replica has ports of its own, from the first on."""
    kv, rank = config.kv, config.replica
    if not kv.kv_events:
        return None
    from engine.kv_events import Publisher

    out, replay = nth_endpoint(kv.kv_events, rank), nth_endpoint(kv.kv_events_replay, rank)
    if not (is_private(out) and is_private(replay)):
        log.warning("--kv-events: whoever reaches the socket reads the tokens of all prompts")
    return Publisher(out, replay, kv.kv_events_topic, rank)


def load_adapter(core: EngineCore, name: str, directory: str) -> None:
    """Serve a LoRA adapter from the start. Raises ConfigError."""
    try:
        core.control("load_adapter", {"name": name, "path": directory})
    except InvalidRequest as error:
        raise ConfigError(f"--lora {name}={directory}: {error}") from None


def choose(config: EngineConfig, path: Path, spec: DecoderSpec) -> Choice:
    """Resolve every "auto". Raises ConfigError for what this machine can't do."""
    device = pick_device(config.parallel.device)
    backend, why = pick_backend(config, device, spec)
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    if config.model.max_model_len and config.model.max_model_len > spec.max_position:
        raise ConfigError(
            f"--max-model-len {config.model.max_model_len}: this model takes {spec.max_position} tokens at most"
        )
    kept = config.model.quantization if backend == "native" else "none"
    free = free_memory(config, device)
    settings = executor_settings(config, spec, device, dtype)
    if backend in GPU_BACKENDS:
        settings = dataclasses.replace(settings, attention=backend)
        if backend != "flashinfer" and config.kv.kv_memory == "auto" and not config.kv.num_kv_blocks:
            settings = dataclasses.replace(settings, gpu_memory=config.kv.gpu_memory_utilization)
    draft = choose_draft(config, path, settings, native=backend == "native")
    plan = plan_kv(config, path, spec, dtype, kept, free, draft.size_bytes if draft else 0)
    settings = dataclasses.replace(settings, **kv_sizes(config, plan))
    return Choice(backend, settings, plan, why, draft)


def plan_kv(
    config: EngineConfig, path: Path, spec: DecoderSpec, dtype: str, kept: str, free: int, draft: int = 0
) -> MemoryPlan:
    """The size of the KV pool beside the weights. Raises ConfigError with the arithmetic when they don't fit."""
    from engine.model.memory import plan_memory, weight_bytes

    kv, asked = config.kv, config.model.max_model_len
    kv_dtype = dtype if kv.kv_cache_dtype == "auto" else kv.kv_cache_dtype
    element = ELEMENT_BYTES[kv_dtype] + (4 / spec.head_size if kv_dtype == "int8" else 0)  # int8 has a scale a head
    sizes: dict[str, Any] = {
        "kv_element_bytes": element,
        "free": free,
        "max_batched_tokens": batched_tokens(config),
        "max_num_seqs": config.schedule.max_num_seqs,
        "draft": draft,
    }
    weights = weight_bytes(spec, path, dtype=dtype, quantization=kept)  # type: ignore[arg-type]
    if (ranks := config.parallel.tensor_parallel_size) > 1:  # all sizes are a rank's
        from engine.model.sharded import shard_spec, whole_bytes

        whole = whole_bytes(spec, int(ELEMENT_BYTES[dtype]))
        spec, weights = shard_spec(spec, ranks), whole + (weights - whole) // ranks
    token = int(2 * spec.num_layers * spec.num_kv_heads * spec.head_size * element)
    if kv.num_kv_blocks or kv.kv_memory != "auto":
        try:
            if kv.num_kv_blocks:  # also how a restarted engine is told of the pool that it had: taken as it is
                return plan_memory(spec, weights, kv=kv.num_kv_blocks * kv.block_size * token, **sizes)
            return plan_memory(spec, weights, kv=memory(kv.kv_memory, free), max_model_len=asked, **sizes)
        except ConfigError as error:
            raise ConfigError(f"{config_words(config)}: {error}") from None
    room = plan_memory(spec, weights, max_model_len=asked, **sizes).kv
    one_context = min(spec.max_position * token, int(free * AUTO_KV_SHARE))
    if asked:
        one_context = -(-asked // kv.block_size) * kv.block_size * token
    return plan_memory(spec, weights, kv=min(room, max(AUTO_KV_BYTES, one_context)), max_model_len=asked, **sizes)


def kv_sizes(config: EngineConfig, plan: MemoryPlan) -> dict[str, Any]:
    """Sizes of the KV pool and its tiers, as fields of `ExecutorSettings`."""
    kv, free = config.kv, plan.free
    swap = min(plan.kv // 2, int(free * AUTO_SWAP_SHARE)) if kv.swap_space == "auto" else memory(kv.swap_space, free)
    return {
        "num_blocks": kv.num_kv_blocks or 0,
        "kv_bytes": plan.kv,
        "host_bytes": swap,
        "disk_dir": kv.kv_disk,
        "disk_bytes": memory(kv.kv_disk_size, free) if kv.kv_disk else 0,
    }


def executor_settings(config: EngineConfig, spec: DecoderSpec, device: str, dtype: str) -> ExecutorSettings:
    """The executor's share of the configuration, resolved but for `kv_sizes`."""
    from engine.worker.settings import ExecutorSettings

    kv = config.kv
    values: dict[str, Any] = {
        "max_model_len": config.model.max_model_len or spec.max_position,
        "max_num_seqs": config.schedule.max_num_seqs,
        "max_batched_tokens": batched_tokens(config),
        "block_size": kv.block_size,
        "dtype": dtype,
        "kv_dtype": dtype if kv.kv_cache_dtype == "auto" else kv.kv_cache_dtype,
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
        "kv_events": bool(config.kv.kv_events),
        "stall_s": config.schedule.target_itl / 1000,
        "num_drafts": config.schedule.num_drafts,
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


def pick_backend(config: EngineConfig, device: str, spec: DecoderSpec) -> tuple[str, str]:
    """("native" or "reference", why). Raises ConfigError when what was asked for can't be had."""
    wanted, isa = config.parallel.attention_backend, config.parallel.isa
    if (ranks := config.parallel.tensor_parallel_size) > 1:
        if wanted not in ("auto", "reference"):
            raise ConfigError(f"--attention-backend {wanted} is of one rank: leave it on auto with several")
        return "reference", f"--tensor-parallel-size {ranks}: {ranks} ranks in torch"
    if wanted == "reference":
        return "reference", "--attention-backend reference"
    if device != "cpu":
        if wanted == "native":
            raise ConfigError(f"--attention-backend native computes on the CPU, not on {device}; add --device cpu")
        return pick_gpu_backend(config, device, spec)
    if wanted in GPU_BACKENDS:
        raise ConfigError(f"--attention-backend {wanted} needs a GPU; the device is {device}")
    if spec.family == TRANSFORMERS:
        if wanted == "native":
            raise ConfigError("--attention-backend native: this architecture has no native decoder; leave it on auto")
        log.warning("no native decoder for this architecture: transformers computes it, which is many times slower")
        return "reference", "computed by transformers, for want of a native decoder"
    try:
        set_in_use = load_kernels(config).isa
        return "native", f"kernels for {set_in_use}" + ("" if isa == "auto" else ", as asked")
    except (ConfigError, OSError, ImportError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if wanted == "native" or isa != "auto":
        raise ConfigError(f"the C++ kernels can't be used: {problem}")
    log.warning("the C++ kernels can't be used (%s): serving with torch, which is many times slower", problem)
    return "reference", f"the C++ kernels can't be used: {problem}"


def pick_gpu_backend(config: EngineConfig, device: str, spec: DecoderSpec) -> tuple[str, str]:
    """("cuda" or "rocm", "triton", "flashinfer" or "reference", why). Raises ConfigError for what can't be had.

    "auto" is the first of native kernels, Triton and torch that can serve the cache's shape and types.
    """
    from engine.attention import flashinfer_attention, gpu, triton_attention

    wanted, native = config.parallel.attention_backend, gpu.backend_name()
    dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = dtype if config.kv.kv_cache_dtype == "auto" else config.kv.kv_cache_dtype
    problems = {
        native: gpu.problem(spec, config.kv.block_size, kv_dtype, dtype),
        "triton": triton_attention.problem(kv_dtype, dtype),
        "flashinfer": flashinfer_attention.problem(kv_dtype, dtype),
    }
    if config.kv.kv_manager == "virtual":
        problems = dict.fromkeys(problems, "--kv-manager virtual has an attention of its own")
    elif spec.family == TRANSFORMERS:
        problems |= dict.fromkeys((native, "triton"), "transformers computes this architecture, a step at a time")
    if wanted != "auto":
        if wanted not in problems:
            raise ConfigError(f"--attention-backend {wanted}: this torch drives its GPUs by {native}")
        if problems[wanted]:
            raise ConfigError(f"--attention-backend {wanted} can't be used: {problems[wanted]}")
        return wanted, f"on {device}, as asked"
    if not problems[native]:
        return native, f"GPU kernels on {device}"
    if not problems["triton"]:
        return "triton", f"on {device}; not {native}: {problems[native]}"
    why = f"not {native}: {problems[native]}; not triton: {problems['triton']}"
    log.warning("attention in torch, which is many times slower: %s", why)
    return "reference", f"on {device}; {why}"


def load_kernels(config: EngineConfig) -> Kernels:
    """The C++ kernels with the instruction set and threads of the configuration. Raises ConfigError."""
    from engine import native

    isa = "" if config.parallel.isa == "auto" else config.parallel.isa
    return native.load(isa, config.parallel.threads or machine.cores())


def make_executor(choice: Choice, path: Path, spec: DecoderSpec, ranks: int = 1) -> Executor:
    """The executor of a choice, not started yet."""
    if ranks > 1:
        from engine.worker.tensor_parallel import TensorParallelExecutor

        return TensorParallelExecutor(path, spec, choice.settings, ranks)
    if choice.backend == "native":
        from engine.worker.native_executor import NativeExecutor

        return NativeExecutor(path, spec, choice.settings)
    if choice.backend in ("cuda", "rocm", "triton"):
        return make_gpu_executor(choice, path, spec)
    from engine.worker.torch_executor import TorchExecutor

    return TorchExecutor(path, spec, choice.settings)


def make_gpu_executor(choice: Choice, path: Path, spec: DecoderSpec) -> Executor:
    """The executor of a GPU of this machine, with its kernels compiled. Raises ConfigError."""
    import torch

    from engine.attention.gpu import load_kernels as load_gpu_kernels
    from engine.worker.device import CudaDevice
    from engine.worker.gpu_executor import GpuExecutor

    device = torch.device(choice.settings.device)
    kernels = load_gpu_kernels(device) if choice.backend != "triton" else None
    return GpuExecutor(path, spec, choice.settings, CudaDevice(device), kernels)


def make_proposer(config: EngineConfig, choice: Choice, vocab_size: int) -> Proposer | None:
    """What guesses tokens, if anything does."""
    most = config.schedule.num_drafts
    if (draft := choice.draft) is not None:
        executor = make_executor(dataclasses.replace(choice, settings=draft.settings), draft.path, draft.spec)
        return draft_proposer(draft, executor, vocab_size, most)
    if config.schedule.speculate != "ngram":
        return None
    from engine.speculate.ngram import NgramProposer

    return NgramProposer(most)


def free_memory(config: EngineConfig, device: str) -> int:
    """Bytes that are free on the device; on a CPU, the share of a replica and rank of it."""
    if device == "cpu":
        return machine.available_memory() // (config.parallel.replicas * config.parallel.tensor_parallel_size)
    import torch

    return int(torch.cuda.mem_get_info(device)[0])


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
    backend = f"cpu/{load_kernels(config).isa}" if choice.backend == "native" else f"{choice.backend}/{s.device}"
    pool = f"{geometry.num_blocks} KV blocks of {geometry.block_size} tokens ({config_words(config)})"
    tiers = f", {geometry.host_blocks} swap blocks" if geometry.host_blocks else ""
    tiers += f", {geometry.disk_blocks} disk blocks" if geometry.disk_blocks else ""
    size = f"{s.max_num_seqs} sequences and {s.max_batched_tokens} tokens a step"
    size += f", drafts by {config.schedule.draft_model} ({choice.draft.spec.family})" if choice.draft else ""
    notes = (
        f"model    {config.model.model} ({spec.family}, context {geometry.max_model_len}) from {path}",
        f"compute  {backend}, {s.threads} threads, {s.dtype}, quantization {s.quantization} ({choice.why})",
        f"memory   {pool}{tiers}: {choice.memory}",
        f"schedule {size}; loaded in {loaded_s:.1f} s",
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
        return f"--num-kv-blocks {config.kv.num_kv_blocks}"
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
    from engine.model.encoder_config import is_encoder

    path = find_model(config, progress=True)
    if is_encoder(path):
        from engine.build_encoder import examine_encoder

        return examine_encoder(config, path)
    spec = load_spec(path, max_model_len=config.model.max_model_len)
    choice = choose(config, path, spec)
    s = choice.settings
    return [
        (
            "model",
            f"{config.model.model}: {spec.family}, {spec.num_layers} layers, context {spec.max_position}, {path}",
        ),
        ("compute", f"{choice.backend} on {s.device}, {s.threads} threads, {s.dtype} ({choice.why})"),
        ("KV pool", f"{s.kv_dtype}, size {config_words(config)}: {choice.memory}"),
        ("swap", f"{s.host_bytes / GIB:.2f} GiB of host memory"),
    ]
