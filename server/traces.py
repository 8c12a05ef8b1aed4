"""OpenTelemetry traces (the extra `octavo[otel]`): a span for each engine request; below it queue, prefill and decode.

A request's spans are made when it has ended, from its own record and the engine's timeline, so that one that runs
costs nothing; a thread of the SDK sends them as OTLP over HTTP. The parent is the client's `traceparent` header, whose
flag also says whether the request is traced at all. Attributes are those of the gen_ai semantic conventions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from starlette.requests import Request as HttpRequest

from engine.client import EngineClient
from engine.errors import ConfigError, OctavoError
from server.generate import Generation
from server.metrics import RequestRecord

OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}  # all others: chat
PHASES = ("queue", "prefill", "decode")
SPANS = frozenset({"queued", "first token", "finished"})  # what the borders of spans say needs no event
NS = 1_000_000_000


class Traces:
    """Makes spans of requests that have ended. Raises ConfigError where OpenTelemetry isn't installed."""

    def __init__(self, endpoint: str, model: str, version: str, client: EngineClient) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError("--otlp-endpoint needs OpenTelemetry: pip install 'octavo[otel]'") from None
        resource = Resource.create({"service.name": "octavo", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix("/v1/traces") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo", version)
        self._propagator = TraceContextTextMapPropagator()
        self._api = trace
        self._model = model
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def ended(self, http: HttpRequest, generations: Sequence[Generation]) -> None:
        """Trace, from tasks of their own, those of an HTTP request's generations that ran and have ended."""
        parent = self._propagator.extract(dict(http.headers))
        context = self._api.get_current_span(parent).get_span_context()
        if context.is_valid and not context.trace_flags.sampled:
            return
        for generation in generations:
            if generation.record is not None and generation.record.counted:
                work = self._trace(http.url.path, parent, generation, generation.record, time.time())
                task = asyncio.create_task(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _trace(self, route: str, parent: Any, generation: Generation, record: RequestRecord, end: float) -> None:
        request = generation.request
        try:
            story: dict[str, Any] = await self._client.inspect("request", request.id) or {}
        except OctavoError:  # an engine that has just died remembers nothing
            story = {}
        operation = OPERATIONS.get(route, "chat")
        model = request.adapter or self._model
        root = self._tracer.start_span(
            f"{operation} {model}",
            context=parent,
            kind=self._api.SpanKind.SERVER,
            start_time=_ns(request.arrival),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "octavo",
                "http.route": route,
                **_asked(generation, model),
                **_answered(generation, record, model),
            },
        )
        if record.ended in ("error", "abort"):
            root.set_attribute("error.type", record.ended)
        if record.ended == "error":
            root.set_status(self._api.StatusCode.ERROR)
        below = self._api.set_span_in_context(root)
        # The engine knows how long a request was queued that ended before it was told a token.
        queued = record.queued_s if record.ttft_s else story.get("queued_s", end - request.arrival)
        admitted = request.arrival + queued
        events = list(_events(story.get("timeline", ()), admitted))
        for name, start, until in _phases(generation, record, admitted, end):
            span = self._tracer.start_span(name, context=below, start_time=_ns(start))
            for t, event in events:
                if start <= t < until:
                    details = {k: v for k, v in event.items() if k not in ("t", "event") and v is not None}
                    span.add_event(event["event"], details, _ns(t))
            span.end(_ns(until))
        root.end(_ns(end))

    async def close(self) -> None:
        """Send what is left. Takes as long as one attempt to reach the collector."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._provider.shutdown)


def _ns(t: float) -> int:
    """Nanoseconds of a time in seconds."""
    return int(t * NS)


def _events(timeline: Iterable[dict[str, Any]], admitted: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """The engine's events with their times, those from the admission on not before it: a step's have its start's."""
    earliest = 0.0
    for event in timeline:
        if event["event"] == "admitted":
            earliest = admitted
        if event["event"] not in SPANS:
            yield max(event["t"], earliest), event


def _asked(generation: Generation, model: str) -> dict[str, Any]:
    request, params = generation.request, generation.request.params
    if request.pooling:
        return {"gen_ai.request.model": model}
    asked = {
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
    }
    if params.max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = params.max_tokens
    if params.top_k:
        asked["gen_ai.request.top_k"] = params.top_k
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(params, name):
            asked[f"gen_ai.request.{name}"] = value
    return asked


def _answered(generation: Generation, record: RequestRecord, model: str) -> dict[str, Any]:
    usage = generation.usage
    answered: dict[str, Any] = {
        "gen_ai.response.id": generation.request.id,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": len(generation.request.prompt),
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "octavo.preemptions": record.preemptions,
    }
    if generation.reasons:
        answered["gen_ai.response.finish_reasons"] = [reason for _, reason in sorted(generation.reasons.items())]
    if record.ttft_s:
        answered["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    return answered


def _phases(
    generation: Generation, record: RequestRecord, admitted: float, end: float
) -> Iterator[tuple[str, float, float]]:
    """(name, start, end) of what the request went through, one after the other; the last one lasts until the end."""
    borders = [generation.request.arrival, min(end, admitted)]
    if record.ttft_s and not generation.request.pooling:
        first = record.arrival + record.ttft_s + time.time() - time.monotonic()
        borders.append(min(end, max(borders[-1], first)))
    if borders[-1] < end:
        borders.append(end)
    for name, (since, until) in zip(PHASES, pairwise(borders), strict=False):
        yield name, since, until
