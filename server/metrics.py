"""Prometheus metrics: the engine's latest Stats and what the server itself saw of each request.

Names are `octavo_` and vLLM's stem, label `model_name`; with aliases on, everything a second time as `vllm:`.
Books: every request that was received ends in exactly one of octavo_request_success_total{finished_reason}
and octavo_requests_refused_total{reason}.

The text is written here and not by prometheus_client: a router scrapes several times a second on the loop that
streams tokens, and 400 samples take 2 ms there and 0.2 ms here. A test reads it with prometheus_client's parser.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from engine.api import Ready, Stats
from engine.client import EngineClient

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHED = ("stop", "length", "abort", "error")

# vLLM's bucket borders, so that its dashboards work; between tokens finer ones below 10 ms.
_SECONDS = (1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *_SECONDS, 160, 640, 2560)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *_SECONDS)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
_COUNTS = (1, 2, 5, 10, 20)

_MOVES = {"out": "device_to_host", "in": "host_to_device", "disk_out": "host_to_disk", "disk_in": "disk_to_host"}


class Histogram:
    """Counts by bucket; `observe` is one bisection."""

    __slots__ = ("bounds", "counts", "help", "name", "sum")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.help = help
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def labels(self) -> list[str]:
        """The `le` labels, parallel to `counts`."""
        return [*(str(float(bound)) for bound in self.bounds), "+Inf"]


class RequestRecord:
    """The books of one engine request. `close` counts it once; later calls change nothing."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, choices: int, max_tokens: int) -> None:
        self._metrics = metrics
        self._open = True
        self.counted = False
        self.ended = ""  # why; one of FINISHED
        self.arrival = time.monotonic()
        self._first = 0.0
        self._last = [0.0] * choices
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self.generated = 0
        self.preemptions = 0
        self.queued_s = 0.0
        self.ttft_s = 0.0
        metrics.in_flight += 1
        metrics.params_n.observe(choices)
        metrics.params_max_tokens.observe(max_tokens)

    def tokens(self, choice: int, count: int) -> None:
        """`count` tokens of one choice came just now (0: the prompt alone is done, as in scoring)."""
        now = time.monotonic()
        metrics = self._metrics
        if not self._first:
            self._first = now
            self.ttft_s = now - self.arrival
            metrics.ttft.observe(self.ttft_s)
            metrics.queue_time.observe(self.queued_s)
            metrics.prefill_time.observe(max(0.0, self.ttft_s - self.queued_s))
            metrics.prompt_tokens += self.prompt_tokens
        elif count and self._last[choice]:
            metrics.itl.observe((now - self._last[choice]) / count, count)
        self._last[choice] = now
        self.generated += count
        metrics.generation_tokens += count

    def close(self, reason: str) -> None:
        """End in exactly one counter; `reason` is one of FINISHED."""
        if not self._open:
            return
        self._open = False
        self.counted = True
        self.ended = reason
        metrics = self._metrics
        metrics.in_flight -= 1
        metrics.finished[reason] += 1
        now = time.monotonic()
        metrics.e2e.observe(now - self.arrival)
        metrics.request_prompt_tokens.observe(self.prompt_tokens)
        metrics.request_generation_tokens.observe(self.generated)
        metrics.request_preemptions.observe(self.preemptions)
        if self._first:
            decode = max(self._last) - self._first
            metrics.decode_time.observe(decode)
            metrics.inference_time.observe(max(0.0, now - self.arrival - self.queued_s))
            per_choice = self.generated / self.choices
            if per_choice > 1:
                metrics.tpot.observe(decode / (per_choice - 1))

    def dismiss(self) -> None:
        """The engine refused it before its first token: it is counted as a refused HTTP request instead."""
        if self._open:
            self._open = False
            self._metrics.in_flight -= 1


class _Page:
    """Lines of the text format 0.0.4 by metric, so that several engines' samples of one metric stand together.

    `labels` are those that every sample has.
    """

    def __init__(self, prefix: str, labels: str) -> None:
        self._prefix = prefix
        self.labels = labels
        self._metrics: dict[str, list[str]] = {}

    @property
    def lines(self) -> list[str]:
        return [line for metric in self._metrics.values() for line in metric]

    def head(self, name: str, kind: str, help: str) -> tuple[str, list[str]]:
        """Start or continue a metric; its full name, and its lines."""
        full = self._prefix + name
        return full, self._metrics.setdefault(full, [f"# HELP {full} {help}\n# TYPE {full} {kind}"])

    def one(self, kind: str, name: str, help: str, value: float) -> None:
        """A metric with one sample."""
        full, lines = self.head(name, kind, help)
        lines.append(f"{full}{{{self.labels}}} {value}")

    def by(self, kind: str, name: str, help: str, label: str, values: Mapping[str, float]) -> None:
        """A metric with one sample per value of `label`."""
        full, lines = self.head(name, kind, help)
        lines += [f'{full}{{{self.labels},{label}="{_escaped(key)}"}} {v}' for key, v in values.items()]

    def info(self, name: str, help: str, values: Mapping[str, str]) -> None:
        """A gauge of 1 whose labels are the information."""
        full, lines = self.head(name, "gauge", help)
        text = "".join([f',{key}="{_escaped(value)}"' for key, value in values.items()])
        lines.append(f"{full}{{{self.labels}{text}}} 1")

    def histogram(self, h: Histogram) -> None:
        full, lines = self.head(h.name, "histogram", h.help)
        total = 0
        for le, count in zip(h.labels, h.counts, strict=True):
            total += count
            lines.append(f'{full}_bucket{{{self.labels},le="{le}"}} {total}')
        lines.append(f"{full}_sum{{{self.labels}}} {h.sum}\n{full}_count{{{self.labels}}} {total}")


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Metrics:
    """All metrics of one server; `render` is the body of /metrics."""

    def __init__(self, client: EngineClient, model_name: str, build: dict[str, str], *, aliases: bool) -> None:
        self._client = client
        self._model = model_name
        self._build = build
        self._aliases = aliases
        self.in_flight = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISHED, 0))
        self.refused: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, int]] = Counter()  # method, route, status
        self.ttft = Histogram("time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.itl = Histogram("inter_token_latency_seconds", "Between two tokens of a choice.", _ITL)
        self.tpot = Histogram("request_time_per_output_token_seconds", "Mean time per output token of a request.", _ITL)
        self.e2e = Histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self.queue_time = Histogram("request_queue_time_seconds", "From arrival until first scheduled.", _LATENCY)
        self.prefill_time = Histogram("request_prefill_time_seconds", "From scheduled to the first token.", _LATENCY)
        self.decode_time = Histogram("request_decode_time_seconds", "From the first to the last token.", _LATENCY)
        self.inference_time = Histogram("request_inference_time_seconds", "From first scheduled to the end.", _LATENCY)
        self.refusal_time = Histogram("refusal_time_seconds", "From arrival to the answer 429 or 503.", _TTFT)
        self.request_prompt_tokens = Histogram("request_prompt_tokens", "Prompt tokens of a request.", _SIZES)
        self.request_generation_tokens = Histogram("request_generation_tokens", "Output tokens of a request.", _SIZES)
        self.request_preemptions = Histogram("request_num_preemptions", "Preemptions of a request.", _COUNTS)
        self.params_n = Histogram("request_params_n", "The n of a request.", _COUNTS)
        self.params_max_tokens = Histogram("request_params_max_tokens", "The max_tokens of a request.", _SIZES)

    def render(self) -> bytes:
        """Text format 0.0.4, whatever the scraper accepts: the OpenMetrics form would rename `vllm:` samples."""
        model = f'model_name="{_escaped(self._model)}"'
        pages = [_Page("octavo_", model)]
        if self._aliases:
            pages.append(_Page("vllm:", f'{model},engine="0"'))
        for page in pages:
            self._write_engines(page)
            self._write_requests(page)
            page.info("build_info", "Version of the server.", self._build)
        return ("\n".join([line for page in pages for line in page.lines]) + "\n").encode()

    def _write_engines(self, page: _Page) -> None:
        """Of one engine as it is; several have a label `replica`, under vLLM's names another `engine`."""
        common = page.labels
        for i, client in enumerate(self._client.replicas):
            page.labels = common.replace('engine="0"', f'engine="{i}"') + f',replica="{i}"'
            self._write_engine(page, client)
        page.labels = common
        if not self._client.replicas:
            self._write_engine(page, self._client)

    def _write_engine(self, page: _Page, client: EngineClient) -> None:
        s = client.stats
        health = client.health()
        used = s.blocks_total - s.blocks_free
        page.one("gauge", "num_requests_running", "Requests in the running batch.", s.running)
        page.one("gauge", "num_requests_waiting", "Requests that wait to be scheduled.", s.waiting)
        page.one("gauge", "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used / max(1, s.blocks_total))
        blocks = {"free": s.blocks_free - s.blocks_cached, "used": used, "shared": s.blocks_shared}
        blocks |= {"cached": s.blocks_cached, "host": s.host_blocks_used, "disk": s.disk_blocks_used}
        page.by("gauge", "kv_blocks", "KV blocks by state; shared ones are used ones too.", "state", blocks)
        page.one("gauge", "kv_bytes_saved", "Bytes of KV that sharing saves now.", s.bytes_saved)
        page.one("gauge", "last_step_timestamp_seconds", "Unix time of the last step of the engine.", s.time)
        restarts = health["engine"]["restarts"]
        page.one("counter", "engine_restarts_total", "Restarts of the engine process.", restarts)
        self._write_cache(page, s)
        ready = client.ready if health["status"] != "loading" else None
        phases = {"schedule": s.schedule_s, "sample": s.sample_s, "guess": s.guess_s}
        phases["forward"] = max(0.0, s.step_s - sum(phases.values()))
        page.by("counter", "step_seconds_total", "Wall time of engine steps, by phase.", "phase", phases)
        page.one("counter", "steps_total", "Engine steps.", s.step)
        page.one("counter", "step_tokens_total", "Tokens computed by steps, prompt and output.", s.step_tokens)
        page.one("counter", "spec_decode_num_draft_tokens_total", "Tokens proposed by speculation.", s.spec_proposed)
        page.one("counter", "spec_decode_num_accepted_tokens_total", "Proposed tokens accepted.", s.spec_accepted)
        if ready is not None:
            page.info("cache_config_info", "Shape of the KV cache.", _cache_config(ready))
            size = ready.kv_bytes_per_block
            moved = {"out": s.swap_out_blocks * size, "in": s.swap_in_blocks * size}
            page.by("counter", "swap_bytes_total", "Bytes of KV moved.", "direction", moved)

    def _write_cache(self, page: _Page, s: Stats) -> None:
        page.one("counter", "prefix_cache_queries_total", "Tokens looked up in the prefix cache.", s.prefix_queries)
        hits = s.prefix_hits + s.prefix_hits_host + s.prefix_hits_disk
        page.one("counter", "prefix_cache_hits_total", "Tokens found in the prefix cache.", hits)
        tiers = {"device": s.prefix_hits, "host": s.prefix_hits_host, "disk": s.prefix_hits_disk}
        page.by("counter", "prefix_cache_hits_by_tier_total", "Tokens found, by tier.", "tier", tiers)
        kinds = {"swap": s.preemptions_swap, "recompute": s.preemptions_recompute}
        page.by("counter", "num_preemptions_total", "Preemptions of running requests.", "kind", kinds)
        cost = {"swap": s.cost_swap_s, "recompute": s.cost_recompute_s}
        page.by("gauge", "preemption_cost_seconds", "Both costs at the last preemption.", "kind", cost)
        hit = {"bring": s.cost_bring_s, "compute": s.cost_compute_s}
        page.by("gauge", "promotion_cost_seconds", "Both costs at the last hit below the device.", "kind", hit)
        rates = {_MOVES[kind]: rate for kind, rate in s.copy_bytes_per_s.items()}
        page.by("gauge", "kv_copy_bytes_per_second", "Measured rates of KV moves between tiers.", "move", rates)
        page.one("gauge", "prefill_tokens_per_second", "Measured rate of computing prompts.", s.prefill_tokens_per_s)
        moved = {"out": s.swap_out_blocks, "in": s.swap_in_blocks}
        page.by("counter", "swap_blocks_total", "KV blocks moved between device and host.", "direction", moved)
        page.one("counter", "cow_copies_total", "Blocks copied on write.", s.cow_copies)

    def _write_requests(self, page: _Page) -> None:
        page.one("counter", "prompt_tokens_total", "Prompt tokens of served requests.", self.prompt_tokens)
        page.one("counter", "generation_tokens_total", "Output tokens of served requests.", self.generation_tokens)
        page.one("counter", "prompt_tokens_cached_total", "Prompt tokens found cached.", self.cached_tokens)
        received = self.in_flight + sum(self.finished.values()) + sum(self.refused.values())
        page.one("counter", "requests_received_total", "Requests that came in.", received)
        page.one("gauge", "requests_in_flight", "Requests received and not yet ended.", self.in_flight)
        page.by("counter", "request_success_total", "Requests that ended.", "finished_reason", self.finished)
        page.by("counter", "requests_refused_total", "Requests refused before they ran.", "reason", self.refused)
        for value in vars(self).values():
            if isinstance(value, Histogram):
                page.histogram(value)
        full, lines = page.head("http_requests_total", "counter", "HTTP responses.")
        lines += [
            f'{full}{{method="{method}",route="{_escaped(route)}",code="{code}"}} {count}'
            for (method, route, code), count in self.http.items()
        ]


def _cache_config(ready: Ready) -> dict[str, str]:
    return {
        "block_size": str(ready.block_size),
        "num_gpu_blocks": str(ready.num_blocks),
        "bytes_per_block": str(ready.kv_bytes_per_block),
        "cache_dtype": ready.kv_dtype,
        "dtype": ready.dtype,
        "backend": ready.backend,
    }
