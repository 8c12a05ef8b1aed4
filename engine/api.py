"""The contract between the API process and the engine: the only messages that cross the socket.

Frozen msgspec structs, encoded as msgpack (never pickle). Both sides import this file and nothing else
of each other. It imports neither torch nor numpy.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec


class FinishReason(enum.StrEnum):
    """Why a choice ended. Every accepted request ends in exactly one of these per choice."""

    STOP = "stop"  # an end token or a stop token id
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left, a stop string matched, or a deadline passed
    ERROR = "error"  # this request failed; `Delta.error` says why


# What becomes of the hidden states of a text: the last token's, the mean of all, or (encoders) the first token's.
Pooling = Literal["last", "mean", "cls"]


class Grammar(msgspec.Struct, frozen=True, tag=True):
    """A constraint on the output, enforced by llguidance token masks."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    text: str  # the schema, expression or grammar as text; for "choice" a JSON list of strings


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How tokens are chosen. Validated by `engine.validate` before it reaches the engine.

    `logprobs`: None = off, k >= 0 = the chosen token's logprob and the k most likely alternatives, raw
    (of the model's distribution before temperature, penalties and filters).
    `seed` is filled in when the request is accepted, so a request is a function of itself alone.
    """

    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # 0 = greedy: the nucleus keeps one token
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output only
    frequency_penalty: float = 0.0  # counts output only
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not appear
    seed: int | None = None
    max_tokens: int | None = None  # None = the room that the context leaves
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    beam_width: int = 0  # > 0: beam search, `n` best beams are returned
    length_penalty: float = 1.0  # beam search only


class AddRequest(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="add"):
    """One request. `resume[i]` holds the tokens that choice i has already delivered (crash resume)."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float  # time.time() when the API accepted it
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # prefix-cache partition (tenant)
    adapter: str = ""  # LoRA adapter name; "" = base model
    pooling: Pooling | Literal[""] = ""  # non-empty: an embedding request, no tokens are generated
    deadline: float | None = None  # time.time() after which it ends with ABORT
    ttft_deadline: float | None = None  # the same, but only until the first token
    resume: tuple[tuple[int, ...], ...] = ()
    key: str = ""  # API-key label for fairness and per-key limits


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request, or one of its choices (`choice` >= 0). Idempotent; unknown ids are ignored."""

    id: str
    choice: int = -1


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Ask for a snapshot; answered by `Snapshot` with the same `token`."""

    token: int
    what: Literal["kv", "requests", "request", "live", "block"]
    id: str = ""  # of the request, or the block's number


class Control(msgspec.Struct, frozen=True, tag="control"):
    """An operator's command; answered by `Snapshot` with the same `token`."""

    token: int
    command: Literal["load_adapter", "unload_adapter", "reset_prefix_cache", "export_kv", "import_kv"]
    argument: dict[str, str] = {}


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish nothing more; exit now."""


ToEngine = AddRequest | Abort | Inspect | Control | Shutdown


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Raw logprobs at one position. `top` = (token id, logprob) pairs, most likely first."""

    logprob: float
    rank: int  # 1 = the most likely token
    top: tuple[tuple[int, float], ...] = ()


class Delta(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """What one step gave one choice. `logprobs` is parallel to `tokens` when it was asked for."""

    id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token: int | None = None  # the stop token that ended it (also the last of `tokens`)
    error: str = ""
    error_kind: str = ""  # "", "invalid", "overloaded", "failed", "deadline"
    cached_tokens: int = -1  # set in the first delta: prompt tokens found in the prefix cache
    preemptions: int = 0  # so far
    queued_s: float = -1.0  # set in the first delta: arrival to first scheduled
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # set in the first delta, when asked for
    embedding: bytes = b""  # float32 little-endian, for embedding requests


class Stats(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Counters and gauges after a step, all since the engine's start. The server's metrics are made of these."""

    step: int = 0
    time: float = 0.0  # time.time() of the last step
    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0  # free or evictable at once
    blocks_cached: int = 0  # held by the prefix index alone
    blocks_shared: int = 0  # held by more than one sequence
    bytes_saved: int = 0  # by sharing, now
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    disk_blocks_used: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found on the device
    prefix_hits_host: int = 0
    prefix_hits_disk: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swap_out_blocks: int = 0
    swap_in_blocks: int = 0
    cow_copies: int = 0
    cost_swap_s: float = 0.0  # the last decision's two costs
    cost_recompute_s: float = 0.0
    cost_bring_s: float = 0.0  # of the last prefix hit below the device: to move it up, to compute it
    cost_compute_s: float = 0.0
    copy_bytes_per_s: dict[str, float] = {}  # measured, by kind of KV operation: out, in, disk_out, disk_in
    prefill_tokens_per_s: float = 0.0
    spec_proposed: int = 0
    spec_accepted: int = 0
    step_s: float = 0.0  # total wall time of steps
    step_tokens: int = 0  # tokens computed
    schedule_s: float = 0.0  # total time spent outside of the worker
    sample_s: float = 0.0
    guess_s: float = 0.0  # total time that speculation took to guess


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is up."""

    pid: int
    model: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    dtype: str
    kv_dtype: str
    backend: str  # what computes: "cpu/amx", "reference", "cuda", ...
    generates: bool = True  # False: an encoder, which gives vectors alone
    poolings: tuple[Pooling, ...] = ("mean", "last")  # that it can do, the default first
    notes: tuple[str, ...] = ()  # what was chosen and why, for the start-up log


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine can't start: one line for the user."""

    message: str


class StepOut(msgspec.Struct, frozen=True, tag="step"):
    """All deltas of one step: one message a step, never one a token."""

    deltas: tuple[Delta, ...]
    stats: Stats


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """Answer to `Inspect` or `Control`: JSON bytes."""

    token: int
    json: bytes
    error: str = ""
    invalid: bool = False  # the error is the asker's: what was asked can't be done


FromEngine = Ready | Failed | StepOut | Snapshot
