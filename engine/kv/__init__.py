"""KV memory bookkeeping: ids only, no tensors. The scheduler knows a manager by the protocol below.

Managers: `paged.PagedKV` (blocks anywhere, shared), `contiguous.ContiguousKV` (vAttention, and the
reserve-the-maximum baseline). A sequence is named by an integer that the scheduler chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from engine.core.plan import KVOp


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What the memory looks like now (blocks), and counters since the start."""

    total: int
    free: int  # free or evictable at once
    cached: int = 0  # held by the prefix index alone
    shared: int = 0  # held by more than one sequence
    saved: int = 0  # blocks that sharing saves
    host_total: int = 0
    host_used: int = 0
    disk_used: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0  # on the device
    hit_tokens_host: int = 0
    hit_tokens_disk: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    copies: int = 0  # copy-on-write


class Promotion(NamedTuple):
    """What a prefix hit found below the device: blocks, how many of them are worth it, and both costs of them all."""

    host: int
    disk: int
    worth: int
    bring_s: float
    compute_s: float


class BlockView(NamedTuple):
    """One block as `inspect` shows it."""

    id: int
    refs: int
    cached: bool  # the prefix index is one of the holders
    holders: tuple[int, ...]  # sequences


class KVManager(Protocol):
    """Makes room for tokens and says by which operations. Every method but `check` is cheap."""

    @property
    def ids_are_addresses(self) -> bool:
        """Block ids name places in reserved ranges, of which there are more than blocks of memory."""

    @property
    def max_tokens(self) -> int:
        """The most tokens that one sequence alone can have in the pool."""

    def admit(self, seq: int, tokens: Sequence[int], salt: str, limit: int, spare: int) -> int | None:
        """Begin a sequence; claim its cached prefix within tokens[:limit] and return that length.

        None, and nothing changed, when the pool can't take all of `tokens` and still leave `spare` blocks.
        """

    def promotion(self, seq: int) -> Promotion | None:
        """What `admit` found for this sequence in the tiers below; None when nothing lay there."""

    def extend(self, seq: int, computed: int, total: int) -> bool:
        """Make [computed, total) writable by this sequence alone; False, and nothing changed, when full."""

    def commit(self, seq: int, tokens: Sequence[int], computed: int) -> None:
        """tokens[:computed] have their KV now: it may be shared with later sequences, and is given back where it lies

        behind every later row's window. No row of the sequence begins before `computed` from here on.
        """

    def fork(self, parent: int, child: int, computed: int) -> bool:
        """Begin `child` with the parent's KV of [0, computed); False when that would need room, or what the parent

        has given back.
        """

    def survives(self, seq: int) -> int:
        """Tokens of this sequence whose KV others hold too, so that a release loses nothing of them."""

    def swap_blocks(self, seq: int, computed: int) -> tuple[int, int] | None:
        """Blocks that a swap would copy out, and later in; None when this manager or the tiers can't."""

    def swap_out(self, seq: int, computed: int) -> bool:
        """Move [0, computed) to the host; False, and nothing changed, when there is no room."""

    def swap_in(self, seq: int, total: int, spare: int) -> bool:
        """Bring it back; False, and nothing changed, when `total` tokens and `spare` blocks don't fit."""

    def release(self, seq: int) -> None:
        """Give everything back. Idempotent; the only way to end a sequence."""

    def table(self, seq: int) -> Sequence[int]:
        """Logical to physical blocks, the first `behind` of them without meaning; [] while swapped out."""

    def behind(self, seq: int) -> int:
        """Leading blocks that the sequence has given back, because they lie behind its window."""

    def changes(self, seq: int) -> tuple[int, tuple[int, ...]]:
        """(first changed index, table from there on) since the last call; (0, ()) when nothing changed."""

    def seat(self, seq: int, slot: int) -> None:
        """The sequence, just begun or brought back, has taken this slot; `changes` gives its whole table next."""

    def missing(self, seq: int, total: int) -> int:
        """Blocks that the table lacks for `total` tokens."""

    def available(self) -> int:
        """Blocks that are free or evictable."""

    def drain(self) -> tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]:
        """Operations since the last call, in the order in which they must run before the next forward pass,

        and for each disk block written by them what it holds (`Plan.disk_keys`).
        """

    def store(self) -> Iterator[tuple[tuple[KVOp, ...], tuple[tuple[int, bytes], ...]]]:
        """Copy cached prefixes to disk, part by part, what is likeliest to be asked for first.

        Each part is what `drain` gives, to be run before the next is asked for. Nothing else may be called meanwhile.
        """

    def reset(self) -> None:
        """Forget every cached prefix that no live sequence relies on, and whatever else is kept for later."""

    def usage(self) -> Usage: ...

    def held(self) -> Iterable[int]:
        """Ids of the device blocks in use, the index's included."""

    def blocks(self) -> list[BlockView]:
        """The same with their holders. For people: it walks all tables."""

    def content(self, block: int) -> tuple[int, ...]:
        """Tokens that the prefix index knows this block to hold; () when at most a sequence knows."""

    def check(self) -> None:
        """Raise AssertionError if any count disagrees with what is held. For tests and after a failure."""
