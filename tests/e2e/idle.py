"""Idle connections, by hand: `python -m tests.e2e.idle --connections 1000`.

Memory and processor time of the API process without and with them, and a live stream beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path

from server.bench.load import Target
from server.bench.workload import Workload, words_of
from tests.e2e.serving import Server, serving


def memory(pid: int) -> float:
    """MiB that are resident."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def cpu(pid: int) -> float:
    """Seconds that its threads have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def look(server: Server, target: Target, label: str, idle_s: float, streams: int) -> None:
    pid = server.process.pid
    begin = cpu(pid)
    await asyncio.sleep(idle_s)
    share = (cpu(pid) - begin) / idle_s
    workload = Workload("fixed", 1, words_of(""), input_len=64, output_len=32)
    done = [await target.send(workload.next()) for _ in range(streams)]
    assert all(o.ok for o in done), [o.error for o in done]
    first = statistics.median(o.ttft or 0.0 for o in done)
    gap = statistics.median(gap for o in done for gap in o.itl)
    print(
        f"{label}: {memory(pid):.0f} MiB, {share:.2%} of a core while idle; "
        f"a stream's first token after {1e3 * first:.1f} ms, then every {1e3 * gap:.2f} ms",
        flush=True,
    )


async def measure(server: Server, args: argparse.Namespace) -> int:
    target = Target(server.url)
    await target.find_model()
    await look(server, target, "warm-up", 0.1, 3)
    await look(server, target, "no other connection", args.idle, args.streams)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    held = []
    begin = time.monotonic()
    for _ in range(args.connections):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        await reader.readuntil(b"}")
        held.append(writer)
    print(f"{args.connections} connections, one request each: {time.monotonic() - begin:.2f} s")
    await look(server, target, f"{args.connections} idle connections", args.idle, args.streams)
    for writer in held:
        writer.close()
    await asyncio.sleep(1)
    await look(server, target, "closed again", 0.1, args.streams)
    target.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--idle", type=float, default=5, help="seconds of doing nothing")
    parser.add_argument("--streams", type=int, default=10, help="one after another")
    args = parser.parse_args()
    with serving() as server:
        return asyncio.run(measure(server, args))


if __name__ == "__main__":
    sys.exit(main())
