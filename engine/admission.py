"""Who may join the queue: a bounded number of requests, of which each key has its share, and when to come again."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from engine.api import Stats
from engine.config import ScheduleConfig
from engine.errors import Overloaded

RATE_WINDOW_S = 30.0


class Admission:
    """Counts the live requests of each key."""

    def __init__(self, schedule: ScheduleConfig) -> None:
        self._places = schedule.max_num_seqs
        self._limit = schedule.max_waiting
        self._held: Counter[str] = Counter()
        self._total = 0
        self._rate = DrainRate()

    def check(self, key: str, stats: Stats) -> None:
        """Raise Overloaded when the queue is full for a request of `key`.

        A key below its share of the queue is let in all the same, so that no other key can fill it before; the queue
        is bounded by twice its limit.
        """
        running = stats.running if stats.waiting else self._places
        waiting = self._total - running
        if not self._total or waiting < self._limit:
            return
        if self._held[key] < self._limit // len(self._held.keys() | {key}):
            return
        raise Overloaded(
            f"{waiting} requests are waiting, at most {self._limit} may (--max-waiting); try again later",
            retry_after_s=self._rate.retry_after_s(waiting),
        )

    def enter(self, key: str) -> None:
        """A request was taken on."""
        self._held[key] += 1
        self._total += 1

    def leave(self, key: str) -> None:
        """It has ended."""
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        self._total -= 1
        self._rate.add(1)


class DrainRate:
    """How many requests ended a second, over the last half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[float] = deque()

    def add(self, count: int) -> None:
        now = self._clock()
        self._ended.extend([now] * count)
        self._forget(now)

    def retry_after_s(self, waiting: int) -> float:
        """When about half of `waiting` will have found a place: from 1 to 60 s."""
        now = self._clock()
        self._forget(now)
        if not self._ended:
            return 1.0
        rate = len(self._ended) / max(now - self._ended[0], 1.0)
        return min(max(waiting / 2 / rate, 1.0), 60.0)

    def _forget(self, now: float) -> None:
        while self._ended and self._ended[0] < now - RATE_WINDOW_S:
            self._ended.popleft()
