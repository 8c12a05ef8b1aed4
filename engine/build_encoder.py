"""From the configuration to a running encoder: the same engine over another executor, without a KV cache."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

from engine import machine
from engine.api import Pooling, Ready
from engine.build import core_settings, pick_device
from engine.config import OPTIONS, EngineConfig
from engine.errors import ConfigError
from engine.model.encoder_config import EncoderSpec, load_encoder_spec
from engine.process import Engine
from engine.worker.settings import ExecutorSettings

THREAD_TOKENS = 512  # that a step gives each thread
POOLINGS: tuple[Pooling, ...] = ("mean", "cls")
# What has no meaning without native kernels and an answer. Beside these: whatever concerns KV.
_MEANINGLESS = "quantization lora chat_template speculate draft_model num_drafts isa attention_backend".split()
_MEANINGLESS += ["tensor_parallel_size"]


def build_encoder(config: EngineConfig, path: Path) -> Engine:
    """Load the model and make the engine. Raises ConfigError."""
    from engine.core.engine import EngineCore
    from engine.text.tokenizer import Tokenizer
    from engine.worker.encoder_executor import EncoderExecutor

    began = time.perf_counter()
    spec = load_encoder_spec(path)
    settings = encoder_settings(config, spec)
    executor = EncoderExecutor(path, spec, settings)
    geometry = executor.start()
    tokenizer = Tokenizer.load(path)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens, the encoder knows {spec.vocab_size}")
    scheduling = dataclasses.replace(core_settings(config, settings), enable_prefix_caching=False)
    core = EngineCore(executor, geometry, scheduling, frozenset(), None)
    loaded_s = time.perf_counter() - began
    notes = (
        *(f"{name:<8} {text}" for name, text in _said(config, spec, settings)),
        f"schedule {settings.max_num_seqs} texts and {settings.max_batched_tokens} tokens a step; "
        f"loaded in {loaded_s:.1f} s",
    )
    ready = Ready(
        pid=os.getpid(),
        model=config.model.model,
        max_model_len=geometry.max_model_len,
        vocab_size=geometry.vocab_size,
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        kv_bytes_per_block=geometry.bytes_per_block,
        dtype=settings.dtype,
        kv_dtype="none",
        backend=f"torch/{settings.device}",
        generates=False,
        poolings=tuple(sorted(POOLINGS, key=lambda pooling: pooling != spec.pooling)),
        notes=notes,
    )
    return Engine(core, ready)


def encoder_settings(config: EngineConfig, spec: EncoderSpec) -> ExecutorSettings:
    """The executor's share of the configuration. Raises ConfigError for what this model can't have."""
    seats = config.schedule.max_num_seqs
    meaningless = [
        option
        for name, option in OPTIONS.items()
        if (name in _MEANINGLESS or option.group == "kv") and name != "num_kv_blocks"
        if getattr(getattr(config, option.group), name) != option.default
    ]
    if config.kv.num_kv_blocks not in (None, seats):  # a restarted engine is told of the seats that it had
        meaningless.append(OPTIONS["num_kv_blocks"])
    if meaningless:
        flag = meaningless[0].flag
        raise ConfigError(f"{flag} means nothing for an encoder, which neither keeps KV nor writes text: leave it out")
    longest = config.model.max_model_len or spec.max_position
    if longest > spec.max_position:
        raise ConfigError(f"--max-model-len {longest}: this encoder takes {spec.max_position} tokens at most")
    threads = config.parallel.threads or machine.cores()
    return ExecutorSettings(
        max_model_len=longest,
        max_num_seqs=seats,
        max_batched_tokens=config.schedule.max_num_batched_tokens or threads * THREAD_TOKENS,
        num_blocks=seats,
        dtype="float32" if config.model.dtype == "auto" else config.model.dtype,  # type: ignore[arg-type]
        threads=threads,
        device=pick_device(config.parallel.device),
    )


def examine_encoder(config: EngineConfig, path: Path) -> list[tuple[str, str]]:
    """What `octavo doctor` shows of an encoder. Raises ConfigError."""
    spec = load_encoder_spec(path)
    return _said(config, spec, encoder_settings(config, spec))


def _said(config: EngineConfig, spec: EncoderSpec, settings: ExecutorSettings) -> list[tuple[str, str]]:
    limits = f"texts of up to {settings.max_model_len} tokens, pooled by {spec.pooling}"
    return [
        ("model", f"{config.model.model}: an encoder ({spec.family}), {limits}"),
        ("compute", f"torch on {settings.device}, {settings.threads} threads, {settings.dtype}"),
    ]
