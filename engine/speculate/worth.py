"""When a guess is worth its time: measured step times against measured acceptance."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_GAIN = 1.1  # predicted speed-up below which nothing is guessed: it pays for the planning that no longer overlaps
FRESH_STEPS = 512  # what was measured longer ago is forgotten, so that it is tried again
WEIGHT = 0.1  # of a new measurement
CLOCK_S = 1e-9  # no step takes less
FREE_ROWS = 32  # up to which a step larger than all that were measured is taken to cost no more than they
OUTLIER = 2.0  # a step so many times slower than usual says no more than one that is this much slower


class Worth:
    """How many drafts of a sequence pay.

    A step's time is taken to depend on the tokens that it computes; it is measured by doublings of their number and
    interpolated between. A few rows more than were ever measured count as free, and are thereby measured; a step
    without any drafts comes first.
    """

    def __init__(self, most_drafts: int) -> None:
        self._most = most_drafts
        self._seen: dict[int, tuple[float, float, int]] = {}  # bits of the token count -> tokens, seconds, step
        self._steps = 0
        self._times: list[float] = []  # of the next step with n drafts a sequence; without any: 1. Empty: not known
        self._step_s = 0.0  # of the next step without any

    def saw_step(self, sequences: int, tokens: int, drafts: int, seconds: float) -> None:
        """A step of so many sequences took `seconds`; `tokens` includes the drafts."""
        self._steps += 1
        seconds = max(seconds, CLOCK_S)
        size = tokens.bit_length()
        if known := self._fresh(size):
            mean, usual, _ = known
            change = min(seconds, OUTLIER * usual) - usual
            self._seen[size] = (mean + WEIGHT * (tokens - mean), usual + WEIGHT * change, self._steps)
        else:
            self._seen[size] = (tokens, seconds, self._steps)
        plain = tokens - drafts
        if not self._fresh(plain.bit_length()):
            self._times = []
            return
        points = sorted(known[:2] for size in list(self._seen) if (known := self._fresh(size)))
        base = self._step_s = _interpolate(points, plain)
        self._times = [_interpolate(points, plain + n * sequences) / base for n in range(self._most + 1)]

    def drafts(self, chances: Sequence[float], each_s: float = 0.0, once_s: float = 0.0) -> int:
        """The number of drafts that gains most; 0 when none gains enough.

        `chances[i]`: that draft i is right, if all before it are. Guessing takes `once_s` and `each_s` a draft.
        """
        if not self._times:
            return 0
        each, once = each_s / self._step_s, once_s / self._step_s
        best, number = LEAST_GAIN, 0
        tokens = chance = 1.0
        for n, (right, time) in enumerate(zip(chances, self._times[1:], strict=False), 1):
            chance *= right
            tokens += chance
            gain = tokens / (time + once + n * each)
            if gain > best:
                best, number = gain, n
        return number

    def extra_s(self, drafts: int) -> float:
        """What so many drafts a sequence add to the next step, guessing not counted."""
        return (self._times[drafts] - 1.0) * self._step_s if self._times else 0.0

    def _fresh(self, size: int) -> tuple[float, float, int] | None:
        known = self._seen.get(size)
        return known if known and self._steps - known[2] <= FRESH_STEPS else None


def _interpolate(points: list[tuple[float, float]], tokens: float) -> float:
    """Seconds for so many tokens, never falling. Beyond what was measured: flat, then as many times as tokens."""
    low, seconds = points[0]
    for high, more in points[1:]:
        more = max(more, seconds)
        if tokens <= low:
            break
        if tokens < high:
            return seconds + (more - seconds) * (tokens - low) / (high - low)
        low, seconds = high, more
    return seconds * max(1.0, tokens / max(low, FREE_ROWS))
