"""Overload, by hand: `python -m tests.e2e.overload --seconds 120`.

Capacity is what a closed loop with as many requests as run at once gets out of a real server. Then requests come
in an open loop at `--times` that rate: output tokens a second must stay, and who is refused must hear it at once.

Client and server share this machine, so three clocks are read: the client's, from writing a request to its answer;
the server's, from arrival to answer; and how late the client's own loop is, which the first one contains.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

from server.bench.load import Arrivals, Outcome, Target, run_load
from server.bench.workload import Workload, words_of
from tests.e2e.serving import Server, serving


async def figures(target: Target) -> dict[str, float]:
    text = b"".join([part async for part in target._exchange("GET", "/metrics", b"")]).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
    return {labels: float(value) for labels, _, value in lines}


@asynccontextmanager
async def lateness() -> AsyncIterator[list[float]]:
    """How late this loop wakes up, in seconds, again and again."""
    late: list[float] = []

    async def watch() -> None:
        while True:
            due = time.monotonic() + 0.005
            await asyncio.sleep(0.005)
            late.append(time.monotonic() - due)

    task = asyncio.ensure_future(watch())
    try:
        yield late
    finally:
        task.cancel()


def quantile(after: dict[str, float], before: dict[str, float], name: str, q: float) -> float:
    """The upper border, in seconds, of the bucket in which the quantile of what was added to a histogram lies."""
    buckets = [
        (float(labels.partition('le="')[2].partition('"')[0]), value - before.get(labels, 0))
        for labels, value in after.items()
        if labels.startswith(f"{name}_bucket")
    ]
    return next((bound for bound, count in buckets if count >= q * buckets[-1][1]), float("inf"))


def median_and_tail(seconds: list[float]) -> str:
    tail = statistics.quantiles(seconds, n=20)[18] if len(seconds) > 1 else 0.0
    return f"{1e3 * statistics.median(seconds or [0.0]):.1f} ms (median), {1e3 * tail:.1f} ms (95 %)"


async def rates(target: Target, load: Awaitable[object], warm_s: float, window_s: float) -> tuple[float, float, object]:
    """Output tokens and finished requests a second in a window under `load`, and what came of the load."""
    task = asyncio.ensure_future(load)
    await asyncio.sleep(warm_s)
    before, begin = await figures(target), time.monotonic()
    await asyncio.sleep(window_s)
    after, took = await figures(target), time.monotonic() - begin
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    done = sum(n for name, n in grown.items() if name.startswith("octavo_request_success_total"))
    tokens = sum(n for name, n in grown.items() if name.startswith("octavo_generation_tokens_total"))
    return tokens / took, done / took, await task


async def measure(server: Server, args: argparse.Namespace) -> int:
    target = Target(server.url)
    await target.find_model()
    words = words_of("")
    slots = args.slots
    closed = run_load(target, Workload("chat", 1, words), Arrivals(slots, requests=args.requests), seed=1)
    capacity, per_s, _ = await rates(target, closed, args.warm, args.window)
    rate = args.times * per_s
    print(f"capacity: {capacity:.0f} tokens/s, {per_s:.2f} requests/s; now {rate:.1f} requests/s come", flush=True)
    arrivals = Arrivals(rate=rate, requests=int(rate * args.seconds))
    opened = run_load(target, Workload("chat", 2, words), arrivals, seed=2)
    before = await figures(target)
    async with lateness() as late:
        kept, _, result = await rates(target, opened, args.warm, args.seconds - args.warm - 5)
    after = await figures(target)
    assert isinstance(result, tuple)
    outcomes: list[Outcome] = result[0]
    refused = [o.e2e for o in outcomes if "429" in o.error]
    other = Counter(o.error[:80] for o in outcomes if o.error and "429" not in o.error)
    print(f"overload: {kept:.0f} tokens/s = {kept / capacity:.0%} of capacity")
    print(
        f"{len(outcomes)} requests: {sum(o.ok for o in outcomes)} served, {len(refused)} refused, other {dict(other)}"
    )
    print(f"refused after {median_and_tail(refused)}; the client's loop was late by {median_and_tail(late)}")
    own = [quantile(after, before, "octavo_refusal_time_seconds", q) for q in (0.5, 0.95, 0.99)]
    print(
        "the server's own time: up to {:g} ms (median), {:g} ms (95 %), {:g} ms (99 %)".format(*(1e3 * s for s in own))
    )
    median = statistics.median(refused or [0.0])
    target.close()
    return 0 if kept >= 0.9 * capacity and median < 0.1 and not other else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--times", type=float, default=4, help="of capacity")
    parser.add_argument("--slots", type=int, default=64, help="requests at once in the closed loop")
    parser.add_argument("--max-waiting", type=int, default=64, help="the server's; what waits is served in the end")
    parser.add_argument("--requests", type=int, default=600, help="of the closed loop")
    parser.add_argument("--warm", type=float, default=10, help="seconds before a window")
    parser.add_argument("--window", type=float, default=20, help="seconds, of the closed loop")
    args = parser.parse_args()
    with serving("--max-waiting", str(args.max_waiting)) as server:
        return asyncio.run(measure(server, args))


if __name__ == "__main__":
    sys.exit(main())
