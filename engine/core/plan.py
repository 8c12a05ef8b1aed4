"""What a step asks of the worker and what it gets back. All that the worker ever sees of a request.

A plan is self-contained data: it can be encoded as msgpack and sent to another rank as it is.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import msgspec

LAST_SAMPLED = -1
"""A token id in `Row.tokens` that stands for what this slot sampled in the step before (overlap)."""


class KVOp(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One block-sized move, run in order before the forward pass.

    copy: device src -> device dst (copy-on-write)   out: device src -> host dst   in: host src -> device dst
    disk_out: host src -> disk dst                   disk_in: disk src -> host dst
    map: commit physical page dst of sequence slot src   unmap: the reverse, harmless if it has none
    (virtual-contiguous manager)
    """

    kind: Literal["copy", "out", "in", "disk_out", "disk_in", "map", "unmap"]
    src: int
    dst: int


class SlotParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling state of a sequence slot, sent when a sequence takes the slot."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int | None = None
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()  # banned while fewer than min_tokens were generated
    adapter: str = ""
    prompt: tuple[int, ...] = ()  # only when a penalty or bad_words needs it
    output: tuple[int, ...] = ()  # tokens generated before this slot was taken (resume, swap-in, fork); always sent
    prompt_len: int = 0


class Row(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One sequence's share of a step: `tokens` stand at positions start, start+1, ...

    The KV of [0, start) is computed; after the step that of [0, start + len(tokens)) is.
    `table` replaces the slot's block table from index `table_start` on (only changes are sent).
    `drafts` of the trailing tokens are guesses: the worker samples at the last drafts + 1 positions.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    table_start: int = 0
    table: tuple[int, ...] = ()
    sample: bool = False  # sample after the last token (and after each draft)
    drafts: int = 0
    choices: tuple[int, ...] = ()  # further choices that draw from the same last position (without drafts)
    masks: tuple[bytes | None, ...] = ()  # one token bitmask per sampled position (little-endian 32-bit words)
    top: int = -1  # >= 0: return this many alternatives with the sampled tokens (beam search needs 2 x width)
    score: int = -1  # >= 0: prompt logprobs with that many alternatives at each position of this row ...
    targets: tuple[int, ...] = ()  # ... of these tokens (the token after each position)
    pooling: Literal["", "last", "mean", "cls"] = ""  # return hidden states: of the last or first token, or their sum


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One step. Operations run first, then slots are set, then one forward pass over all rows."""

    step: int
    rows: tuple[Row, ...]
    ops: tuple[KVOp, ...] = ()
    slots: tuple[tuple[int, SlotParams], ...] = ()  # sequences that took a slot since the last plan
    disk_keys: tuple[tuple[int, bytes], ...] = ()  # disk block, and what it holds: opaque, kept beside its bytes


class Sampled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled or scored position. `top` is (token id, raw logprob), most likely first."""

    token: int
    logprob: float = 0.0
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


class RowResult(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Parallel to `Plan.rows`."""

    sampled: tuple[Sampled, ...] = ()  # when the row samples: drafts + 1 entries, then one for each of `choices`
    scores: tuple[Sampled, ...] = ()  # one per target
    hidden: bytes = b""  # float32 little-endian [hidden_size]


class Copied(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step's KV operations of one kind moved, and how long that took."""

    kind: str
    size_bytes: int
    seconds: float


class Result(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a step gave. Times in seconds."""

    rows: tuple[RowResult, ...]
    compute_s: float = 0.0
    copies: tuple[Copied, ...] = ()  # one for each kind of KV operation that moved anything
    sample_s: float = 0.0


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor offers, known after it has loaded the model."""

    num_blocks: int
    block_size: int
    host_blocks: int = 0
    disk_blocks: int = 0
    max_model_len: int
    max_num_seqs: int  # slots
    vocab_size: int
    bytes_per_block: int
    hidden_size: int = 0
    window: int = 0  # tokens before a row's first one that its attention may read, in any layer; 0 = all
    pages_per_slot: int = 0  # virtual-contiguous storage: page p of slot s is block s * pages_per_slot + p
    identity: dict[str, str] = {}  # what decides the bytes of a block: equal ones can exchange blocks
    disk_index: tuple[tuple[int, bytes], ...] = ()  # intact disk blocks of an earlier run, with their `disk_keys`


@runtime_checkable
class BlockAccess(Protocol):
    """An executor whose device blocks can be read and written from outside, between two steps."""

    def read_block(self, block: int) -> bytes:
        """`Geometry.bytes_per_block` bytes."""

    def write_block(self, block: int, data: bytes) -> None:
        """The reverse. Raises RequestFailed for a block or a size that there is not."""


class Executor(Protocol):
    """Runs plans. Implemented by `engine.worker`; the shadow executor of the tests is another."""

    def start(self) -> Geometry:
        """Load the model and the KV storage. Raises ConfigError."""

    def submit(self, plan: Plan) -> None:
        """Begin a step. At most two may be in flight when overlap is on, else one."""

    def collect(self) -> Result:
        """Wait for the oldest submitted step. Raises RequestFailed when the step raised."""

    def load_adapter(self, name: str, directory: str) -> None:
        """Serve a LoRA adapter under this name from the next plan on. May run on any thread, beside steps; no slot

        names it before it has returned. Raises ConfigError.
        """

    def unload_adapter(self, name: str) -> None:
        """Forget it; no slot of a later plan may name it. Unknown names are ignored."""

    def close(self) -> None:
        """Free everything; idempotent."""
