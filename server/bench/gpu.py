"""`octavo bench gpu`: build the GPU kernels, check them, and time them against the bandwidth measured in the same run.

Made for one run of at most ten minutes on a machine with a GPU. Stages that can't run say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from engine.bench.gpu import Stage, run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="served on GPU and CPU to compare greedy answers (default: smollm2)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: try every stage at tiny sizes, without a GPU")
    add("--minutes", type=float, default=9.0, help="all of it; a stage that doesn't fit in is left out (default: 9)")
    add("--json", dest="result", default="", metavar="FILE", help="write all figures here, after each stage")


def main(args: argparse.Namespace) -> int:
    """Exit status: 0 when every stage ran, else 1."""
    done: list[Stage] = []

    def report(stage: Stage) -> None:
        done.append(stage)
        for cell in stage.found if isinstance(stage.found, list) else [stage.found]:
            print(
                f"{stage.name:<20}{stage.seconds:6.1f} s  {'' if stage.ok else 'not run: '}{_words(cell)}", flush=True
            )
        if args.result:
            Path(args.result).write_text(json.dumps([dataclasses.asdict(s) for s in done], indent=1) + "\n")

    stages = run(args.model, args.device, args.minutes * 60, report)
    return 0 if all(stage.ok for stage in stages) else 1


def _words(found: object) -> str:
    if not isinstance(found, dict):
        return str(found)
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items() if k != "answers")
