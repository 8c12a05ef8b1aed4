"""`octavo bench quality`: perplexity, KL against float32 and agreement, for kinds of weights and of KV."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from engine.bench.quality import KINDS, measure, text_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="name, directory or hub id; GGUF blocks need a GGUF file in it")
    add("--kinds", default="", help=f"some of: {'; '.join(k.name for k in KINDS)} (with ; between; default: all)")
    add("--text", default="", metavar="FILE", help="text to predict (default: the help topics of Python)")
    add("--tokens", type=int, default=5121, help="of the text's beginning (default: %(default)s)")
    add("--json", dest="result", default="", metavar="FILE", help="write all figures here")


def main(args: argparse.Namespace) -> int:
    asked = [name.strip() for name in args.kinds.split(";") if name.strip()]
    kinds = [kind for kind in KINDS if not asked or kind.name in asked]
    scores = measure(args.model, text_tokens(args.model, args.text, args.tokens), kinds)
    print(f"{scores[0].tokens} predictions\n{'':20}{'perplexity':>11}{'KL':>10}{'agreement':>11}{'KV bytes/token':>16}")
    for s in scores:
        print(
            f"{s.name:20}{s.perplexity:>11.3f}{s.kl / s.tokens:>10.5f}{s.agreed / s.tokens:>11.2%}"
            f"{s.kv_bytes_per_token:>16.0f}"
        )
    if args.result:
        Path(args.result).write_text(json.dumps([dataclasses.asdict(s) for s in scores], indent=1) + "\n")
    return 0
