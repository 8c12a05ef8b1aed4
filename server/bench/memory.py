"""`octavo bench memory`: preemption under pressure, the prefix cache on and off, and blocks shared by choices."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from engine.bench.drive import Bench, words
from engine.bench.memory import Cached, Pressed, Shared, beams, parallel, prefixes, pressure, samples
from server.bench.steps import add_model_arguments, model_settings

PARTS = ("pressure", "prefix", "parallel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--only", choices=PARTS, help="one part (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="runs each way, in turn; medians are shown (default: 3)")
    parser.add_argument("--json", dest="result", default="", metavar="FILE", help="write all figures here")


def main(args: argparse.Namespace) -> int:
    document: dict[str, Any] = {}
    parts, repeats = (args.only,) if args.only else PARTS, max(1, args.repeat)
    with Bench(**model_settings(args), max_num_seqs=64) as bench:
        if "pressure" in parts:
            wanted, blocks, pressed = pressure(bench, repeats)
            show_pressure(wanted, blocks, pressed)
            document["pressure"] = [dataclasses.asdict(row) for row in pressed]
        if "prefix" in parts:
            cached = prefixes(bench, repeats)
            show_prefixes(cached)
            document["prefix"] = [dataclasses.asdict(row) for row in cached]
        if "parallel" in parts:
            shared = choices(bench)
            show_shared(shared)
            document["parallel"] = [dataclasses.asdict(row) for row in shared]
    if args.result:
        Path(args.result).write_text(json.dumps(document, indent=1) + "\n")
    return 0


def choices(bench: Bench) -> list[Shared]:
    """100 tokens in and 64 out: four samples, and four beams."""
    rng = random.Random("parallel")
    prompts = [words(rng, 100, bench.geometry.vocab_size) for _ in range(32)]
    outputs = [64] * len(prompts)
    return [
        parallel(bench, samples(prompts, outputs, 4), "4 samples", 16),
        parallel(bench, beams(prompts[:16], outputs[:16], 4), "4 beams", 16),
    ]


def show_pressure(wanted: int, blocks: int, rows: list[Pressed]) -> None:
    print(f"pressure: 64 chat requests at once, {blocks} blocks where they want {wanted}; all finished")
    print(f"{'':12}{'seconds':>9}{'swaps':>8}{'recomputes':>12}{'blocks out':>12}{'tokens computed':>17}   runs")
    for r in rows:
        runs = " ".join(f"{s:.1f}" for s in r.runs)
        print(
            f"{r.mode:12}{r.seconds:>9.2f}{r.swaps:>8.0f}{r.recomputes:>12.0f}{r.swapped_blocks:>12.0f}"
            f"{r.computed_tokens:>17.0f}   {runs}"
        )
    forced = min(r.seconds for r in rows if r.mode != "auto")
    print(f"auto took {rows[0].seconds / forced:.2f} of the better forced mode's time\n")


def show_prefixes(rows: list[Cached]) -> None:
    print("prefix: 512 tokens for all and 32 of its own each, 64 out, 16 at a time")
    for r in rows:
        on = "on" if r.caching else "off"
        print(f"  cache {on:4} TTFT p50 {1e3 * r.ttft:7.1f} ms  {r.tokens_per_s:7.1f} tok/s  hits {r.hit_rate:.1%}")
    print(f"  with the cache TTFT is {rows[0].ttft / rows[1].ttft:.2f} of that without\n")


def show_shared(rows: list[Shared]) -> None:
    print("parallel: 100 tokens in, 64 out")
    for r in rows:
        print(
            f"  {r.name:10} {r.saved:6.1%} of the KV memory saved, {r.peak_shared_blocks} blocks shared at most, "
            f"{r.copies:.0f} copies on write, {r.tokens_per_s:.0f} tok/s"
        )
