"""`octavo bench kernels`: this machine's ceilings, and what the kernels reach of them by kinds of weights and KV."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from engine.bench.kernels import PREFILL, Reached, measure
from engine.errors import ConfigError
from server.bench.steps import show_ceilings

KINDS = "none/bfloat16,none/int8,int8/bfloat16,gguf/bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2", help="name, directory, GGUF file or hub id (default: %(default)s)")
    add("--kinds", default=KINDS, help="quantization/kv-cache-dtype, with commas between (default: %(default)s)")
    add("--threads", type=int, default=0, help="0 = one a core (default)")
    add("--repeat", type=int, default=5, help="steps of each kind; medians are reported (default: 5)")
    add("--json", dest="result", default="", metavar="FILE", help="write all figures here")


def main(args: argparse.Namespace) -> int:
    document = []
    for kind in args.kinds.split(","):
        quantization, slash, kv_dtype = kind.partition("/")
        if not slash:
            raise ConfigError(f"--kinds {kind}: want QUANTIZATION/KV-CACHE-DTYPE, for example int8/bfloat16")
        lid, reached = measure(quantization, kv_dtype, max(1, args.repeat), model=args.model, threads=args.threads)
        show_ceilings(lid)
        show(reached)
        document.append({"ceilings": dataclasses.asdict(lid), **dataclasses.asdict(reached)})
    if args.result:
        Path(args.result).write_text(json.dumps(document, indent=1) + "\n")
    return 0


def show(r: Reached) -> None:
    print(f"  weights {r.quantization}, KV {r.kv_dtype}:")
    for name, seconds, tokens, share, of in (
        (f"prefill of {PREFILL} tokens", r.prefill_s, PREFILL, r.prefill_share, "the peak"),
        ("decode, batch 1", r.decode_s, 1, r.decode_share, "the bandwidth"),
        ("decode, batch 64 at 256", r.batch_s, 64, r.batch_share, "the roofline"),
    ):
        rate = tokens / seconds if seconds else 0.0
        print(f"    {name:24}{1e3 * seconds:8.2f} ms {rate:7.0f} tok/s {share:5.0%} of {of}")
    for keys, (rate, share) in r.attention.items():
        print(f"    attention, {keys} keys {rate / 1e9:18.1f} GB/s of KV   {share:5.0%} of the bandwidth")
