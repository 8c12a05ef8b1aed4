"""`octavo bench gpu`: build the GPU kernels, check them, and time decode attention against the copy bandwidth.

Made for one run of at most ten minutes on a machine with a GPU. Stages that can't run say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from engine.bench.gpu import run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="served on GPU and CPU to compare greedy answers (default: smollm2)")
    add("--minutes", type=float, default=9.0, help="no stage starts after this (default: 9)")
    add("--json", dest="result", default="", metavar="FILE", help="write all figures here")


def main(args: argparse.Namespace) -> int:
    """Exit status: 0 when every stage ran, else 1."""
    stages = run(args.model, args.minutes * 60)
    for stage in stages:
        cells = stage.found if isinstance(stage.found, list) else [stage.found]
        for cell in cells:
            print(f"{stage.name:<18}{'' if stage.ok else 'not run: '}{cell}")
    if args.result:
        Path(args.result).write_text(json.dumps([dataclasses.asdict(s) for s in stages], indent=1) + "\n")
    return 0 if all(stage.ok for stage in stages) else 1
