"""Costs: what moving a block and what computing a token take on this machine, as measured so far."""

from __future__ import annotations

MOVES = ("out", "in", "disk_out", "disk_in")  # kinds of `KVOp` between tiers
ASSUMED_BYTES_PER_S = {"out": 4e9, "in": 4e9, "disk_out": 1e9, "disk_in": 1e9}  # before the first measurement
PREFILL_TOKENS_PER_S = 2000.0
WEIGHT = 0.2  # of a new measurement in the running mean
DOUBT = 1.001  # a rate grows by so much for each block that wasn't moved because of it


class Costs:
    """Running means: bytes a second of each kind of move, prompt tokens computed a second.

    What is not done any more isn't measured any more, so one slow copy would forbid copies for ever. Each refusal
    therefore makes the rate that it rests on a little better, until the move is tried and measured again.
    """

    def __init__(self, bytes_per_block: int, block_size: int) -> None:
        self.bytes_per_block = bytes_per_block
        self.block_size = block_size
        self.copy_rates = dict(ASSUMED_BYTES_PER_S)
        self.prefill_rate = PREFILL_TOKENS_PER_S
        self._measured: set[str] = set()

    def saw_copy(self, kind: str, size_bytes: int, seconds: float) -> None:
        """A step's moves of one kind took so long. Copies within the device are no choice: they don't count."""
        if kind in self.copy_rates and size_bytes > 0 and seconds > 0:
            self.copy_rates[kind] = self._blend(kind, self.copy_rates[kind], size_bytes / seconds)

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """A step that was mostly prefill computed so many tokens in so long."""
        if tokens > 0 and seconds > 0:
            self.prefill_rate = self._blend("prefill", self.prefill_rate, tokens / seconds)

    def _blend(self, what: str, old: float, new: float) -> float:
        first = what not in self._measured
        self._measured.add(what)
        return new if first else old + WEIGHT * (new - old)

    def doubt(self, blocks: int, *kinds: str) -> None:
        """So many blocks were not moved in these ways, because that would have cost more than computing them."""
        for kind in kinds:
            self.copy_rates[kind] *= DOUBT**blocks

    def compute_s(self, tokens: int) -> float:
        return tokens / self.prefill_rate

    def swap_s(self, out: int, back: int) -> float:
        """Move so many blocks to the host, and later so many back."""
        return self._move_s("out", out) + self._move_s("in", back)

    def bring_s(self, host: int, disk: int) -> float:
        """Move blocks up to the device: those on disk go by the host."""
        return self._move_s("in", host + disk) + self._move_s("disk_in", disk)

    def _move_s(self, kind: str, blocks: int) -> float:
        return blocks * self.bytes_per_block / self.copy_rates[kind]

    def worth_keeping(self) -> bool:
        """Is a block, copied to the host and back, cheaper than computing its tokens again?"""
        return self.swap_s(1, 1) < self.compute_s(self.block_size)

    def worth_storing(self) -> bool:
        """The same of a block on the host that would go to disk and come back from there."""
        return self._move_s("disk_out", 1) + self.bring_s(0, 1) < self.compute_s(self.block_size)
