"""`octavo bench paper`: the PagedAttention paper's claims, measured with the real model on this machine.

Waste of KV memory, throughput and latency of static batches, of reserved contexts and of pages in the same memory,
and what sharing saves for samples and beams.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from engine.bench.drive import Bench
from engine.bench.paper import Paper, reproduce
from engine.errors import ConfigError
from engine.simulate.trace import generate, load, within
from server.bench.steps import add_model_arguments, model_settings
from server.plot import bars, curves, document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--trace",
        default="",
        metavar="FILE",
        help="Azure CSV or Mooncake JSONL for lengths (default: made up, as chat)",
    )
    add("--requests", type=int, default=40, help="served for real, each way (default: 40)")
    add("--context", type=int, default=2048, help="tokens reserved for a sequence, as in the paper (default: 2048)")
    add("--rows", type=int, default=8, help="contexts that the KV memory holds (default: 8)")
    add("--json", dest="result", default="", metavar="FILE", help="write all figures here")
    add("--plot", default="", metavar="FILE.svg", help="draw waste, and latency by rate")


def main(args: argparse.Namespace) -> int:
    trace = load(args.trace, 400) if args.trace else generate(400, seed=0, prompt=1000, output=130)
    trace = within(trace, args.context)
    if len(trace) < args.requests:
        raise ConfigError(f"--trace {args.trace}: only {len(trace)} requests within --context {args.context}")
    settings = model_settings(args)
    with Bench(**settings, max_num_seqs=64, max_num_batched_tokens=512) as bench:
        held = bench.geometry.num_blocks * bench.geometry.block_size
        if held < args.rows * args.context:
            raise ConfigError(f"--rows {args.rows}: the KV pool holds {held} tokens, not {args.rows} x {args.context}")
        paper = reproduce(bench, trace, context=args.context, rows=args.rows, requests=args.requests)
    show(paper)
    if args.result:
        Path(args.result).write_text(json.dumps(dataclasses.asdict(paper), indent=1) + "\n")
    if args.plot:
        Path(args.plot).write_text(svg(paper))
    return 0


def show(paper: Paper) -> None:
    print(f"KV memory for {paper.pool_tokens} tokens; reserved contexts of {paper.context}\n")
    print(f"{'':10}{'wasted':>8}{'at once':>9}{'seconds':>9}{'tok/s':>8}{'req/s':>8}{'ms/token':>10}{'TPOT p50':>10}")
    for w in paper.ways:
        print(
            f"{w.name:10}{w.waste:>8.1%}{w.most_running:>9}{w.seconds:>9.1f}{w.tokens_per_s:>8.0f}"
            f"{w.requests_per_s:>8.2f}{1e3 * w.token_latency:>10.0f}{1e3 * w.tpot:>10.1f}"
        )
    ways = {w.name: w for w in paper.ways}
    static, reserved, paged = (ways[name].tokens_per_s for name in ("static", "reserved", "paged"))
    print(f"paged against reserved {paged / reserved:.2f} times the throughput, against static {paged / static:.2f}\n")
    limit = latency_limit(paper)
    rates = paper.at_latency(limit)
    print(f"rate at {1e3 * limit:.0f} ms a token, virtual time over these steps (fit {paper.fit_error:.1%} off):")
    for name, rate in rates.items():
        print(f"  {name:10}{rate:>7.2f} requests/s" + (f"  paged: {rates['paged'] / rate:.1f} times" if rate else ""))
    print("\nmemory saved by sharing")
    for s in paper.shared:
        print(f"  {s.name:10}{s.saved:>7.1%}  {s.copies:.0f} copies on write")


def latency_limit(paper: Paper) -> float:
    """Where curves are compared: twice what iteration-level scheduling takes when it has little to do."""
    return 2 * next(curve for curve in paper.curves if curve.name == "reserved").latencies[0]


def svg(paper: Paper) -> str:
    """Left: memory wasted. Right: normalised latency by rate."""
    names = [w.name for w in paper.ways]
    shares = [("", [w.waste for w in paper.ways])]
    waste = bars("KV memory without a token in it", shares, legend=names, top=1, shown="{:.1%}".format)
    top, last = 2 * latency_limit(paper), paper.curves[0].rates[-1]
    lines = [(curve.name, zip(curve.rates, curve.latencies, strict=True)) for curve in paper.curves]
    latency = curves(
        "latency by rate", lines, right=last, top=top, x=f"{last:.1f} requests/s", y=f"{1e3 * top:.0f} ms a token"
    )
    return document(waste, latency)
