"""Costs: what moving a block and what computing a token take on this machine, as measured so far."""

from __future__ import annotations

COPY_BYTES_PER_S = 4e9  # before the first measurement: below any machine's memory bandwidth
PREFILL_TOKENS_PER_S = 2000.0
WEIGHT = 0.2  # of a new measurement in the running mean


class Costs:
    """Running means of two rates: bytes copied a second, prompt tokens computed a second."""

    def __init__(self, bytes_per_block: int, block_size: int) -> None:
        self.bytes_per_block = bytes_per_block
        self.block_size = block_size
        self.copy_rate = COPY_BYTES_PER_S
        self.prefill_rate = PREFILL_TOKENS_PER_S
        self._measured_copy = False
        self._measured_prefill = False

    def saw_copy(self, size_bytes: int, seconds: float) -> None:
        """A step's KV operations moved so many bytes in so long."""
        if size_bytes > 0 and seconds > 0:
            self.copy_rate = _blend(self.copy_rate, size_bytes / seconds, first=not self._measured_copy)
            self._measured_copy = True

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """A step that was mostly prefill computed so many tokens in so long."""
        if tokens > 0 and seconds > 0:
            self.prefill_rate = _blend(self.prefill_rate, tokens / seconds, first=not self._measured_prefill)
            self._measured_prefill = True

    def copy_s(self, blocks: int) -> float:
        return blocks * self.bytes_per_block / self.copy_rate

    def compute_s(self, tokens: int) -> float:
        return tokens / self.prefill_rate

    def worth_keeping(self) -> bool:
        """Is a block, copied out and back in, cheaper than computing its tokens again?"""
        return self.copy_s(2) < self.compute_s(self.block_size)


def _blend(old: float, new: float, *, first: bool) -> float:
    return new if first else old + WEIGHT * (new - old)
