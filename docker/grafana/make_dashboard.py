"""Write dashboards/octavo.json: `python docker/grafana/make_dashboard.py`. The panels are the table below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "dashboards" / "octavo.json"
WHERE = '{model_name=~"$model_name"}'


def quantile(stem: str, share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(octavo_{stem}_bucket{WHERE}[$__rate_interval])))"


def rate(stem: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(octavo_{stem}{WHERE}[$__rate_interval]))"


LATENCIES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))

# title, unit, [(legend, query)]
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Time to first token", "s", [(n, quantile("time_to_first_token_seconds", q)) for n, q in LATENCIES]),
    ("Inter-token latency", "s", [(n, quantile("inter_token_latency_seconds", q)) for n, q in LATENCIES]),
    ("Request latency, end to end", "s", [(n, quantile("e2e_request_latency_seconds", q)) for n, q in LATENCIES]),
    ("Time in the queue", "s", [(n, quantile("request_queue_time_seconds", q)) for n, q in LATENCIES]),
    (
        "Tokens a second",
        "short",
        [("generated", rate("generation_tokens_total")), ("prompt", rate("prompt_tokens_total"))],
    ),
    (
        "Requests",
        "short",
        [
            ("running", f"octavo_num_requests_running{WHERE}"),
            ("waiting", f"octavo_num_requests_waiting{WHERE}"),
        ],
    ),
    ("Ended requests a second", "short", [("{{finished_reason}}", rate("request_success_total", "finished_reason"))]),
    ("KV blocks", "short", [("{{state}}", f"octavo_kv_blocks{WHERE}")]),
    ("KV pool in use", "percentunit", [("in use", f"octavo_kv_cache_usage_perc{WHERE}")]),
    ("Saved by sharing", "bytes", [("saved", f"octavo_kv_bytes_saved{WHERE}")]),
    (
        "Prefix cache hits by tier, tokens a second",
        "short",
        [("{{tier}}", rate("prefix_cache_hits_by_tier_total", "tier")), ("asked", rate("prefix_cache_queries_total"))],
    ),
    ("Preemptions a second", "short", [("{{kind}}", rate("num_preemptions_total", "kind"))]),
    ("Costs at the last preemption", "s", [("{{kind}}", f"octavo_preemption_cost_seconds{WHERE}")]),
    ("Swapped a second", "Bps", [("{{direction}}", rate("swap_bytes_total", "direction"))]),
    ("Tokens in a step", "short", [("tokens", f"{rate('step_tokens_total')} / {rate('steps_total')}")]),
    ("Restarts of the engine", "short", [("restarts", f"octavo_engine_restarts_total{WHERE}")]),
    ("Refused requests a second", "short", [("{{reason}}", rate("requests_refused_total", "reason"))]),
    ("HTTP answers a second", "short", [("{{code}}", rate("http_requests_total", "code"))]),
]


def panel(index: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (index % 3), "y": 8 * (index // 3)},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(65 + i), "datasource": source, "expr": expr, "legendFormat": legend}
            for i, (legend, expr) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    return {
        "uid": "octavo",
        "title": "Octavo",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "model_name",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "prometheus"},
                    "query": "label_values(octavo_build_info, model_name)",
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                    "allValue": ".*",
                    "refresh": 2,
                }
            ]
        },
        "panels": [panel(i, *p) for i, p in enumerate(PANELS)],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
