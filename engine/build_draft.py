"""The draft model of speculation: what it is, what it takes, and the `Proposer` that it becomes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.spec import TRANSFORMERS, DecoderSpec

if TYPE_CHECKING:
    from engine.core.plan import Executor
    from engine.core.proposer import Proposer
    from engine.worker.settings import ExecutorSettings

MOST_KV_TOKENS = 32768  # its KV pool holds one context, but no more than this
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Draft:
    """A draft model, and how it computes."""

    path: Path
    spec: DecoderSpec
    settings: ExecutorSettings
    size_bytes: int  # weights, KV and workspace


def choose_draft(config: EngineConfig, target: Path, settings: ExecutorSettings, *, native: bool) -> Draft | None:
    """What `--draft-model` names, to compute where the served model at `target` does. Raises ConfigError.

    Its KV is its own, paged, without tiers. On the CPU it computes in bfloat16 and keeps 4 and 8 bit blocks as they
    are, whatever the served model does: its tokens are only guesses.
    """
    wanted, name = config.schedule.speculate, config.schedule.draft_model
    if wanted == "draft" and not name:
        raise ConfigError("--speculate draft needs a --draft-model")
    if not name or wanted in ("off", "ngram"):
        return None
    from engine.model.config import load_spec
    from engine.model.memory import weight_bytes, workspace_bytes
    from engine.model.pull import pull

    path = pull(name, progress=False)
    spec = load_spec(path, max_model_len=None)
    if native and spec.family == TRANSFORMERS:
        raise ConfigError(f"--draft-model {name}: its architecture has no native decoder, so it can't be fast enough")
    check_vocabulary(name, path, target)
    dtype = "bfloat16" if native else settings.dtype
    length = min(settings.max_model_len, spec.max_position)
    blocks = -(-min(length, MOST_KV_TOKENS) // settings.block_size)
    own = dataclasses.replace(
        settings,
        max_model_len=length,
        num_blocks=blocks,
        kv_bytes=0,
        host_bytes=0,
        disk_dir="",
        disk_bytes=0,
        dtype=dtype,
        kv_dtype=dtype,
        kv_manager="paged",
        quantization="auto",
    )
    weights = weight_bytes(spec, path, dtype=dtype, quantization="auto" if native else "none")
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * _BYTES[dtype]
    workspace = workspace_bytes(spec, settings.max_batched_tokens, settings.max_num_seqs)
    return Draft(path, spec, own, weights + blocks * settings.block_size * token + workspace)


def check_vocabulary(name: str, path: Path, target: Path) -> None:
    """Guesses are token ids, so both models must mean the same by them. Raises ConfigError."""
    from engine.text.tokenizer import Tokenizer

    own, served = (Tokenizer.load(at).backend.get_vocab(with_added_tokens=True) for at in (path, target))
    if own != served:
        differ = sum(served.get(token) != id for token, id in own.items())
        raise ConfigError(
            f"--draft-model {name} has another vocabulary than the served model: "
            f"{len(own)} tokens, {differ} of them are not among its {len(served)}"
        )


def draft_proposer(draft: Draft, executor: Executor, vocab_size: int, most_drafts: int) -> Proposer:
    """Load the draft model; `vocab_size` is that of the served one. Raises ConfigError."""
    from engine.speculate.draft import DraftProposer

    proposer = DraftProposer(
        executor,
        executor.start(),
        most_drafts=most_drafts,
        max_batched_tokens=draft.settings.max_batched_tokens,
        vocab_size=vocab_size,
    )
    proposer.warm_up()
    return proposer
