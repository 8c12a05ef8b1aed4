"""`octavo bench steps`: how long steps take, by batch and context, beside the ceilings measured in the same run.

With --json it writes what `octavo plan --fit` reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec

from engine import machine, native
from engine.bench.ceilings import Ceilings
from engine.bench.drive import Bench
from engine.bench.steps import Check, Measured, Point, check, measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--repeat", type=int, default=5, help="steps of each kind; medians are reported (default: 5)")
    parser.add_argument("--phases", action="store_true", help="where the forward passes spend their time, too")
    parser.add_argument("--no-load", dest="load", action="store_false", help="leave the chat under load out")
    parser.add_argument(
        "--check",
        type=float,
        action="append",
        default=[],
        metavar="RATE",
        help="serve made-up chats at so many a second and set them beside what octavo plan foretells; repeatable",
    )
    parser.add_argument("--check-requests", type=int, default=60, help="of each --check (default: 60)")
    parser.add_argument("--json", dest="result", default="", metavar="FILE", help="write all figures here")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What to load, for all benches that load a model themselves."""
    add = parser.add_argument
    add("--model", default="smollm2", help="name, directory, GGUF file or hub id (default: %(default)s)")
    add("--quantization", default="auto", help="auto, none, int8 or gguf (default: auto)")
    add("--dtype", default="auto", help="auto, bfloat16 or float32 (default: auto)")
    add("--kv-cache-dtype", default="auto", help="auto, bfloat16, int8, fp8_e4m3 ... (default: auto)")
    add("--threads", type=int, default=0, help="0 = one a core (default)")


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `Bench` that these arguments come to."""
    names = ("quantization", "dtype", "kv_cache_dtype", "threads")
    return {"model": args.model, **{name: getattr(args, name) for name in names}}


def main(args: argparse.Namespace) -> int:
    with Bench(**model_settings(args)) as bench:
        measured = measure(bench, max(1, args.repeat), **({} if args.load else {"served": ()}))
        print(f"model     {args.model}, products in {bench.arithmetic}, KV in {bench.settings.kv_dtype}")
        show(measured)
        if args.phases:
            show_phases(measured.points)
        checks = [
            check(bench, measured.samples(), measured.copy_bytes_per_s, rate, args.check_requests)
            for rate in args.check
        ]
        show_checks(checks)
        if args.result:
            found = {**document(bench, measured), "checks": [dataclasses.asdict(c) for c in checks]}
            Path(args.result).write_text(json.dumps(found, indent=1) + "\n")
    return 0


def document(bench: Bench, measured: Measured) -> dict[str, Any]:
    """What `engine.simulate.cost.load_fit` reads, and the table."""
    return {
        "machine": f"{machine.processor()}, {measured.ceilings.threads} threads, {measured.ceilings.isa}",
        "copy_bytes_per_s": measured.copy_bytes_per_s,
        "model": dataclasses.asdict(bench.model_size()),
        "geometry": msgspec.to_builtins(msgspec.structs.replace(bench.geometry, disk_index=())),
        "steps": [dataclasses.asdict(sample) for sample in measured.samples()],
        "ceilings": dataclasses.asdict(measured.ceilings),
        "points": [{**dataclasses.asdict(point), "share": point.share} for point in measured.points],
    }


def show_ceilings(lid: Ceilings) -> None:
    print(
        f"ceilings  {lid.isa}, {lid.threads} threads, measured now: {lid.bytes_per_s / 1e9:.1f} GB/s read; products "
        f"in bf16 {lid.bfloat16 / 1e9:.0f}, int8 {lid.int8 / 1e9:.0f}, float32 {lid.float32 / 1e9:.0f} GFLOP/s"
    )


def show(measured: Measured) -> None:
    show_ceilings(measured.ceilings)
    for kind in ("decode", "prefill"):
        columns = ("context", "step ms", "tok/s", "forward", "sampler", "roofline", "share")
        print(f"\n{kind:8}" + "".join(f"{column:>9}" for column in columns))
        for p in measured.points:
            if p.kind == kind:
                print(_row(p))
    if measured.served:
        times = sorted(s.seconds for s in measured.served)
        print(f"\nunder load: {len(times)} steps of chat, median {1e3 * times[len(times) // 2]:.1f} ms")
    print(f"copies of KV blocks: {measured.copy_bytes_per_s / 1e9:.1f} GB/s")


def _row(p: Point) -> str:
    size = p.batch if p.kind == "decode" else p.tokens
    times = "".join(f"{1e3 * s:>9.2f}" for s in (p.forward_s, p.sample_s, p.roofline_s))
    return f"{size:>8}{p.context:>9}{1e3 * p.seconds:>9.2f}{p.tokens / p.seconds:>9.0f}{times}{p.share:>9.0%}"


def show_phases(points: list[Point]) -> None:
    print("\nphases of the forward pass, ms (waiting: for the other threads, a part of the others)")
    print(f"{'':8}{'tokens':>7}{'context':>9}" + "".join(f"{name:>10}" for name in native.PHASES))
    for p in points:
        times = "".join(f"{1e3 * p.phases[name]:>10.2f}" for name in native.PHASES)
        print(f"{p.kind:8}{p.tokens:>7}{p.context:>9}{times}")


def show_checks(checks: list[Check]) -> None:
    for c in checks:
        print(f"\n{c.rate:g} chats a second{'':10}served   foretold  ratio   own steps  ratio")
        for name, values, scale in (
            ("TTFT p50, ms", c.ttft, 1e3),
            ("TPOT p50, ms", c.tpot, 1e3),
            ("tok/s", c.tokens_per_s, 1.0),
        ):
            real, before, own = (value * scale for value in values)
            print(f"  {name:20}{real:>10.1f}{before:>11.1f}{before / real:>7.2f}{own:>12.1f}{own / real:>7.2f}")
