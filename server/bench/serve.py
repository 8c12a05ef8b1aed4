"""`octavo bench serve`: a workload on one server, or on two in turn for a comparison in the same run."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.bench.load import Arrivals, Target, run_load
from server.bench.report import compare, line, medians, summarise, svg
from server.bench.workload import WORKLOADS, Workload, words_of

SLO_KINDS = ("ttft", "tpot", "itl", "e2e")
WARMUP_SEED = 1_000_003  # no measured repeat uses it, so no prompt of the warm-up is in a prefix cache later


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "workloads:\n" + "\n".join(f"  {name:<9} {about}" for name, about in WORKLOADS.items())
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", help="server under load (default: %(default)s)")
    add("--compare", default="", metavar="URL", help="a second server, measured in turn with the first")
    add("--model", default="", help="model name (default: the server's first)")
    add("--compare-model", default="", metavar="MODEL", help="model name at the second server")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="bearer token (default: $OPENAI_API_KEY)")
    add("--workload", choices=list(WORKLOADS), default="chat", help="see below")
    add("--concurrency", type=int, default=16, help="requests in flight, closed loop (default: 16)")
    add("--rate", type=float, help="open loop instead: Poisson arrivals a second")
    add("--num-requests", type=int, help="requests a repeat (default: 4 x concurrency, at least 8)")
    add("--warmup", type=int, default=4, help="unmeasured requests first (default: 4)")
    add("--repeat", type=int, default=3, help="measured repeats; medians are reported (default: 3)")
    add("--seed", type=int, default=0, help="repeat i uses seed + i")
    add("--input-len", type=int, help="prompt length in tokens instead of the workload's")
    add("--output-len", type=int, help="output length in tokens instead of the workload's")
    add("--tokenizer", default="", metavar="PATH", help="tokenizer.json: words of exactly one token each")
    add("--slo", action="append", default=[], metavar="KIND:MS", help="ttft, tpot, itl or e2e limit; repeatable")
    add("--abort-fraction", type=float, default=0.0, help="share of streams that the client leaves early")
    add("--no-ignore-eos", dest="ignore_eos", action="store_false", help="let the model end its answers")
    add("--json", dest="result", default="", metavar="FILE", help="write all figures here")
    add("--plot", default="", metavar="FILE.svg", help="draw the medians")


def slo_limits(texts: list[str]) -> dict[str, float]:
    limits: dict[str, float] = {}
    for text in texts:
        kind, _, value = text.partition(":")
        try:
            limits[kind] = float(value)
        except ValueError as error:
            raise ConfigError(f"--slo {text}: want KIND:MILLISECONDS, for example ttft:500") from error
        if kind not in SLO_KINDS:
            raise ConfigError(f"--slo {text}: the kind is one of {', '.join(SLO_KINDS)}")
    return limits


def main(args: argparse.Namespace) -> int:
    """Exit status: 0 when every request succeeded, else 1."""
    return asyncio.run(_bench(args))


async def _bench(args: argparse.Namespace) -> int:
    slo, words = slo_limits(args.slo), words_of(args.tokenizer)
    concurrency = 1 if args.workload == "single" else args.concurrency
    arrivals = Arrivals(
        concurrency, args.rate, args.num_requests or max(8, 4 * concurrency), abort_fraction=args.abort_fraction
    )
    targets = [Target(args.base_url, model=args.model, api_key=args.api_key)]
    if args.compare:
        targets.append(Target(args.compare, model=args.compare_model, api_key=args.api_key))
    runs: list[list[dict[str, Any]]] = [[] for _ in targets]
    for target in targets:
        try:
            await target.find_model()
        except (OSError, EOFError) as error:
            raise ConfigError(f"no server answers at {target.label}: {error}") from error
        if args.warmup:
            warm = Workload(args.workload, WARMUP_SEED, words, args.input_len, args.output_len)
            await run_load(target, warm, Arrivals(min(concurrency, args.warmup), requests=args.warmup))
    for repeat in range(args.repeat):
        seed = args.seed + repeat
        for i, target in enumerate(targets):  # in turn, so that both see the same noise
            workload = Workload(args.workload, seed, words, args.input_len, args.output_len)
            outcomes, wall = await run_load(target, workload, arrivals, seed=seed, ignore_eos=args.ignore_eos)
            runs[i].append(summarise(outcomes, wall, slo))
            print(line(f"[{args.workload} c={concurrency} {repeat + 1}/{args.repeat}] {target.label}", runs[i][-1]))
            for text, count in runs[i][-1]["errors"].items():
                print(f"    {count} x {text}")
    for target in targets:
        target.close()
    _report(args, targets, runs)
    return 0 if all(not run["errors"] for server in runs for run in server) else 1


def _report(args: argparse.Namespace, targets: list[Target], runs: list[list[dict[str, Any]]]) -> None:
    summaries = [medians(r) for r in runs]
    for target, summary in zip(targets, summaries, strict=True):
        print(line(f"median      {target.label}", summary))
        if "goodput_request_s" in summary:
            print(
                f"    goodput {summary['goodput_request_s']:.2f} req/s, {summary['slo_attainment']:.0%} meet {args.slo}"
            )
    report: dict[str, Any] = {
        "workload": args.workload,
        "arrivals": {"rate": args.rate} if args.rate else {"concurrency": args.concurrency},
        "servers": [
            {"url": t.label, "model": t.model, "runs": r, "median": s}
            for t, r, s in zip(targets, runs, summaries, strict=True)
        ],
    }
    if len(summaries) == 2:
        report["ratios"] = compare(summaries[0], summaries[1])
        print(f"\n{'':14}{'first':>10}{'second':>10}   times better")
        for name, a, b, ratio in report["ratios"]:
            print(f"{name:14}{a:>10.1f}{b:>10.1f}{ratio:>10.2f}")
    if args.result:
        Path(args.result).write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        title = f"{args.workload}, {'open' if args.rate else 'closed'} loop (ms; tok/s)"
        Path(args.plot).write_text(svg(title, [t.label for t in targets], summaries))
