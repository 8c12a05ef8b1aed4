"""Percentiles, goodput, medians over repeats, tables and an SVG of one or two servers' runs."""

from __future__ import annotations

import math
import statistics
from typing import Any

from server.bench.load import Outcome
from server.plot import bars, document


def percentiles(values: list[float]) -> dict[str, float]:
    """mean, p50, p90, p95, p99, max in milliseconds; empty when there is nothing."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        place = (len(ordered) - 1) * share
        low, high = math.floor(place), math.ceil(place)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    named = {"mean": statistics.fmean(ordered), "p50": at(0.5), "p90": at(0.9), "p95": at(0.95), "p99": at(0.99)}
    return {k: round(v * 1e3, 3) for k, v in {**named, "max": ordered[-1]}.items()}


def meets(outcome: Outcome, slo_ms: dict[str, float]) -> bool:
    seen = {
        "ttft": outcome.ttft,
        "e2e": outcome.e2e,
        "tpot": max(outcome.tpot, default=0.0),
        "itl": max(outcome.itl, default=0.0),
    }
    return outcome.ok and all((v := seen[k]) is not None and v * 1e3 <= limit for k, limit in slo_ms.items())


def summarise(outcomes: list[Outcome], wall_s: float, slo_ms: dict[str, float]) -> dict[str, Any]:
    """One run as numbers. Rates are per second of wall time, over requests that succeeded."""
    good = [o for o in outcomes if o.ok]
    errors: dict[str, int] = {}
    for o in outcomes:
        if o.error:
            errors[o.error] = errors.get(o.error, 0) + 1
    output = sum(o.output_tokens for o in good)
    prompt = sum(o.prompt_tokens for o in good)
    run: dict[str, Any] = {
        "requests": len(outcomes),
        "ok": len(good),
        "errors": errors,
        "wall_s": round(wall_s, 3),
        "output_tokens": output,
        "prompt_tokens": prompt,
        "cached_tokens": sum(o.cached_tokens for o in good),
        "output_tok_s": round(output / wall_s, 2),
        "total_tok_s": round((output + prompt) / wall_s, 2),
        "request_s": round(len(good) / wall_s, 3),
        "ttft_ms": percentiles([o.ttft for o in good if o.ttft is not None]),
        "tpot_ms": percentiles([t for o in good for t in o.tpot]),
        "itl_ms": percentiles([t for o in good for t in o.itl]),
        "e2e_ms": percentiles([o.e2e for o in good]),
    }
    if slo_ms:
        met = sum(meets(o, slo_ms) for o in outcomes)
        run |= {"slo_ms": slo_ms, "slo_attainment": round(met / max(1, len(outcomes)), 4)}
        run["goodput_request_s"] = round(met / wall_s, 3)
    return run


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of every number over the repeats, with the same shape."""
    out: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [r[key] for r in runs if key in r]
        if isinstance(first, dict) and key.endswith("_ms") and key != "slo_ms":
            out[key] = {k: round(statistics.median([v[k] for v in values if k in v]), 3) for k in first}
        elif isinstance(first, int | float):
            out[key] = round(statistics.median(values), 3)
    return out


def line(label: str, run: dict[str, Any]) -> str:
    """One run in one line."""

    def ms(kind: str, p: str) -> str:
        value = run[kind].get(p)
        return "-" if value is None else f"{value:.1f}"

    return (
        f"{label}  ok {run['ok']}/{run['requests']}  {run['output_tok_s']:.1f} tok/s  {run['request_s']:.2f} req/s  "
        f"TTFT {ms('ttft_ms', 'p50')}/{ms('ttft_ms', 'p99')}  TPOT {ms('tpot_ms', 'p50')}/{ms('tpot_ms', 'p99')}  "
        f"ITL p99 {ms('itl_ms', 'p99')}  E2E {ms('e2e_ms', 'p50')} ms"
    )


RATIOS = (
    ("output tok/s", "output_tok_s", "", True),
    ("TTFT p50", "ttft_ms", "p50", False),
    ("TTFT p99", "ttft_ms", "p99", False),
    ("TPOT p50", "tpot_ms", "p50", False),
    ("TPOT p99", "tpot_ms", "p99", False),
    ("ITL p99", "itl_ms", "p99", False),
    ("E2E p50", "e2e_ms", "p50", False),
)


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """(what, first, second, how many times better the first is) of two servers' medians."""
    rows = []
    for name, key, part, more_is_better in RATIOS:
        a = first[key][part] if part and part in first[key] else first[key] if not part else None
        b = second[key][part] if part and part in second[key] else second[key] if not part else None
        if a and b:
            rows.append((name, float(a), float(b), round(a / b if more_is_better else b / a, 3)))
    return rows


def svg(title: str, labels: list[str], summaries: list[dict[str, Any]]) -> str:
    """Bars of each figure, one for each server, each figure scaled to its largest bar."""
    groups = [
        (name, [float((s[key].get(part) if part else s[key]) or 0.0) for s in summaries])
        for name, key, part, _ in RATIOS
    ]
    return document(bars(title, groups, legend=labels))
