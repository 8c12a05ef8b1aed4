"""Request traces: published ones from their files, or made from lognormal lengths and Poisson arrivals."""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from engine.errors import ConfigError

UNIQUE = 1 << 29  # token ids from here on belong to one request alone
HASH_BLOCK = 512  # tokens that one hash id of a Mooncake trace stands for


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `blocks`: ids of its prompt's runs of HASH_BLOCK tokens; equal ids are equal text. () = all new."""

    time: float  # seconds from the beginning of the trace
    prompt: int  # tokens
    output: int
    blocks: tuple[int, ...] = ()

    def tokens(self, index: int) -> tuple[int, ...]:
        """Made-up token ids with the sharing that `blocks` says; `index` makes what isn't shared unique."""
        if not self.blocks:
            return (UNIQUE + index,) * self.prompt
        ids = [b + 1 for b in self.blocks for _ in range(HASH_BLOCK)]
        return tuple(ids[: self.prompt])


def load(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSONL, plain or gzipped."""
    file = Path(path)
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            rows = _azure(lines) if ".csv" in file.suffixes else _mooncake(lines)
            out = []
            for row in rows:
                out.append(row)
                if limit is not None and len(out) >= limit:
                    break
    except OSError as error:
        raise ConfigError(f"--trace {file}: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"--trace {file}: neither Azure's CSV nor Mooncake's JSONL ({error!r})") from error
    if len(out) < 2:
        raise ConfigError(f"--trace {file}: fewer than two requests")
    return out


def _azure(lines: Iterator[str]) -> Iterator[Arrival]:
    first: datetime | None = None
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or at
        yield Arrival((at - first).total_seconds(), int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        yield Arrival(
            row["timestamp"] / 1000, row["input_length"], max(1, row["output_length"]), tuple(row["hash_ids"])
        )


def generate(requests: int, seed: int, *, prompt: float = 100, output: float = 100) -> list[Arrival]:
    """Lognormal lengths with these medians (sigma 0.7 and 0.6), Poisson arrivals at one a second."""
    rng = random.Random(seed)
    out, now = [], 0.0
    for _ in range(requests):
        lengths = (rng.lognormvariate(math.log(m), s) for m, s in ((prompt, 0.7), (output, 0.6)))
        p, o = (max(8, round(n)) for n in lengths)
        out.append(Arrival(now, min(p, 1024), min(o, 512)))
        now += rng.expovariate(1.0)
    return out


def at_rate(trace: list[Arrival], rate: float) -> list[Arrival]:
    """The same requests with the gaps stretched or shrunk, so that `rate` requests arrive a second."""
    span = trace[-1].time - trace[0].time or 1.0
    scale = (len(trace) - 1) / span / rate
    return [Arrival((a.time - trace[0].time) * scale, a.prompt, a.output, a.blocks) for a in trace]


def within(trace: list[Arrival], context: int) -> list[Arrival]:
    """Those that a context of so many tokens can serve."""
    return [a for a in trace if a.prompt + a.output <= context]
