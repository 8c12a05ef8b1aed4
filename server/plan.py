"""`octavo plan`: how many replicas a load needs, by running the real scheduler in virtual time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from engine.errors import ConfigError
from engine.simulate.capacity import LASTS_S, SHARE, Answer, Objective, estimate, replicas_for
from engine.simulate.cluster import Report, Routing, simulate
from engine.simulate.cost import DEVICES, CostModel, ModelSize, load_fit, roofline
from engine.simulate.setup import CoreSettings, Geometry, pool_of
from engine.simulate.trace import Arrival, at_rate, generate, load, within
from server.plot import bars, document

DESCRIPTION = """Replays a trace at a rate on simulated replicas: real scheduler, KV memory, prefix cache, preemption;
the time of a step comes from a fit to measured steps (octavo bench steps --json FILE) or a device's roofline."""

FEWEST = 200  # requests of a trial, however low its rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    add = parser.add_argument
    add("--trace", default="", metavar="FILE", help="Azure CSV or Mooncake JSONL, plain or gzipped (default: made up)")
    add("--requests", type=int, default=1500, help="of the trace's beginning (default: 1500)")
    add("--rate", type=float, help="requests a second (default: the trace's own)")
    add("--fit", default="", metavar="FILE", help="steps measured by octavo bench steps --json")
    add("--device", default="", help=f"or the roofline of {', '.join(DEVICES)}")
    add("--parameters", type=float, default=8.0, help="with --device: billions of parameters (default: 8)")
    add("--kv-bytes", type=float, default=131072, help="with --device: KV bytes a token (default: an 8B Llama's)")
    add("--max-model-len", type=int, default=131072, help="requests beyond it are left out of the trace")
    add("--max-num-seqs", type=int, default=256)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--target-itl", type=int, default=100, metavar="MS", help="as of octavo serve (default: 100)")
    add("--block-size", type=int, default=16)
    add("--kv-blocks", type=int, default=0, help="pool of a replica (default: what its memory holds)")
    add("--replicas", type=int, default=0, help="this many instead of searching")
    add("--routing", choices=get_args(Routing), default="prefix", help="among replicas (default: prefix)")
    add("--preemption", choices=("auto", "swap", "recompute"), default="auto")
    add("--slo-ttft-ms", type=float, default=0.0, help=f"objective for {SHARE:.0%}% of the requests")
    add("--slo-tpot-ms", type=float, default=0.0)
    add("--sweep", choices=("routing", "preemption", "kv-blocks", "block-size"), help="compare settings at --replicas")
    add("--json", dest="result", default="", metavar="FILE", help="write the figures here")
    add("--plot", default="", metavar="FILE.svg", help="with --sweep: draw them")


def main(args: argparse.Namespace) -> int:
    """0 when there is an answer, 1 when the objective can't be kept at any size."""
    trace = load(args.trace, args.requests) if args.trace else generate(args.requests, seed=0)
    whole, trace = len(trace), within(trace, args.max_model_len)
    if len(trace) < 2:
        raise ConfigError(f"--max-model-len {args.max_model_len}: no request of the trace fits")
    rate = args.rate or (len(trace) - 1) / ((trace[-1].time - trace[0].time) or 1.0)
    cost, geometry = _machine(args)
    print(f"trace     {args.trace or 'made up, as people chat'}: {len(trace)} requests, {rate:g} a second", end="")
    print(f" ({whole - len(trace)} beyond the context left out)" if whole > len(trace) else "")
    print(f"cost      {cost.origin}" + (f", {cost.error:.1%} off on them" if cost.error else ""))
    print(f"replica   {geometry.num_blocks} KV blocks of {geometry.block_size} tokens, {args.max_num_seqs} sequences")
    if args.sweep:
        return _sweep(args, trace, rate, cost, geometry)
    if args.replicas:
        report = _run(args, trace, rate, args.replicas, cost, geometry)
        _print([(f"{args.replicas} replicas", report)])
        return _write(args, {"replicas": args.replicas, **_figures(report)})
    objective = Objective(args.slo_ttft_ms / 1e3, args.slo_tpot_ms / 1e3)
    if not objective.ttft and not objective.tpot:
        raise ConfigError("say what to plan for: --slo-ttft-ms, --slo-tpot-ms or both; or give --replicas")

    def run(rate: float, replicas: int) -> Report:
        arrivals = trace[: max(FEWEST, round(LASTS_S * rate))]
        return _run(args, arrivals, rate, replicas, cost, geometry, objective)

    answer = replicas_for(rate, len(trace), objective, estimate(trace, cost, geometry), run)
    if answer is None:
        print("answer    none: even requests that hardly meet miss the objective")
        return 1
    return _tell(args, answer, rate)


def _machine(args: argparse.Namespace) -> tuple[CostModel, Geometry]:
    if bool(args.fit) == bool(args.device):
        raise ConfigError("give either --fit FILE (octavo bench steps --json) or --device NAME")
    if args.fit:
        cost, _, geometry = load_fit(Path(args.fit))
    else:
        size = ModelSize(args.parameters * 1e9, 2 * args.parameters * 1e9, args.kv_bytes)
        cost = roofline(args.device, size)
        geometry = pool_of(DEVICES[args.device], size, args.block_size)
    blocks = args.kv_blocks or geometry.num_blocks
    return cost, _geometry(geometry, args, blocks, args.block_size)


def _geometry(geometry: Geometry, args: argparse.Namespace, blocks: int, block_size: int) -> Geometry:
    per_token = geometry.bytes_per_block / geometry.block_size
    return Geometry(
        num_blocks=blocks,
        block_size=block_size,
        host_blocks=blocks,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        vocab_size=1 << 31,
        bytes_per_block=round(per_token * block_size),
    )


def _run(
    args: argparse.Namespace,
    trace: list[Arrival],
    rate: float,
    replicas: int,
    cost: CostModel,
    geometry: Geometry,
    objective: Objective | None = None,
) -> Report:
    """With an objective: until it is missed."""
    settings = CoreSettings(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        preemption=args.preemption,
        stall_s=args.target_itl / 1000,
    )
    lost = objective.watch(len(trace)) if objective else lambda one: False
    return simulate(at_rate(trace, rate), replicas, geometry, settings, cost, args.routing, lost)


def _figures(report: Report) -> dict[str, Any]:
    return {
        "ttft_ms": {f"p{round(100 * s)}": round(1e3 * report.percentile("ttft", s), 1) for s in (0.5, 0.95, 0.99)},
        "tpot_ms": {f"p{round(100 * s)}": round(1e3 * report.percentile("tpot", s), 2) for s in (0.5, 0.95, 0.99)},
        "tokens_per_s": round(report.tokens_per_s, 1),
        "prefix_hit_ratio": round(report.hit_ratio, 4),
        "preemptions": report.preemptions,
        "refused": report.refused,
    }


def _print(rows: list[tuple[str, Report]]) -> None:
    columns = ("TTFT p50", "p95", "TPOT p50", "p95 ms", "tok/s")
    print(f"\n{'':22}" + "".join(f"{c:>10}" for c in columns) + f"{'hits':>7}{'swap':>7}{'recomp.':>8}")
    for name, report in rows:
        f = _figures(report)
        print(
            f"{name:22}{f['ttft_ms']['p50']:>10.0f}{f['ttft_ms']['p95']:>10.0f}{f['tpot_ms']['p50']:>10.1f}"
            f"{f['tpot_ms']['p95']:>10.1f}{f['tokens_per_s']:>10.0f}{f['prefix_hit_ratio']:>7.0%}"
            f"{f['preemptions']['swap']:>7}{f['preemptions']['recompute']:>8}"
        )


def _tell(args: argparse.Namespace, answer: Answer, rate: float) -> int:
    how = (
        ""
        if answer.shards == 1
        else f" (a shard of 1/{answer.shards:g} of the traffic with {answer.simulated}, scaled)"
    )
    print(f"answer    {answer.replicas} replicas for {rate:g} requests a second{how}")
    _print([(f"{answer.simulated} replicas", answer.report)])
    return _write(args, {"replicas": answer.replicas, "simulated": answer.simulated, **_figures(answer.report)})


def _sweep(args: argparse.Namespace, trace: list[Arrival], rate: float, cost: CostModel, geometry: Geometry) -> int:
    if not args.replicas:
        raise ConfigError("--sweep compares at a fixed size: give --replicas")
    rows: list[tuple[str, Report]] = []
    if args.sweep in ("routing", "preemption"):
        for value in get_args(Routing) if args.sweep == "routing" else ("auto", "swap", "recompute"):
            changed = argparse.Namespace(**{**vars(args), args.sweep: value})
            rows.append((value, _run(changed, trace, rate, args.replicas, cost, geometry)))
    elif args.sweep == "kv-blocks":
        for share in (0.125, 0.25, 0.5, 1.0, 2.0):
            blocks = max(1, round(geometry.num_blocks * share))
            changed_pool = _geometry(geometry, args, blocks, geometry.block_size)
            rows.append((f"{blocks} blocks", _run(args, trace, rate, args.replicas, cost, changed_pool)))
    else:
        for size in (16, 32, 64, 128, 256, 512):
            blocks = max(1, geometry.num_blocks * geometry.block_size // size)
            changed_pool = _geometry(geometry, args, blocks, size)
            rows.append((f"block size {size}", _run(args, trace, rate, args.replicas, cost, changed_pool)))
    _print(rows)
    if args.plot:
        late = [(name, 1e3 * report.percentile("ttft", SHARE)) for name, report in rows]
        panel = bars(
            f"TTFT p{round(100 * SHARE)} in ms by {args.sweep}",
            [(name, [value]) for name, value in late],
            top=max(value for _, value in late),
            shown="{:.0f}".format,
        )
        Path(args.plot).write_text(document(panel))
    return _write(args, {"sweep": args.sweep, "rows": {name: _figures(report) for name, report in rows}})


def _write(args: argparse.Namespace, figures: dict[str, Any]) -> int:
    if args.result:
        shown = {k: v for k, v in vars(args).items() if k != "result"}
        Path(args.result).write_text(json.dumps({"settings": shown, **figures}, indent=1) + "\n")
    return 0
