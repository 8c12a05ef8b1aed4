"""Traces of real requests, as a collector gets them: OTLP over HTTP, read with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.e2e.serving import Server, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Collector:
    """A tiny OTLP receiver: spans by the id of the response that they are about, once their root has come."""

    def __init__(self) -> None:
        self.spans: dict[bytes, Span] = {}
        self.resource: dict[str, Any] = {}
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if self.path == "/v1/traces":
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def take(self, message: ExportTraceServiceRequest) -> None:
        with self._changed:
            for resource in message.resource_spans:
                self.resource = values(resource.resource.attributes)
                for scope in resource.scope_spans:
                    self.spans |= {span.span_id: span for span in scope.spans}
            self._changed.notify_all()

    def root(self, response_id: str) -> Span:
        """The span of that request; waits until it has come."""

        def found() -> Span | None:
            every = self.spans.values()
            return next((s for s in every if values(s.attributes).get("gen_ai.response.id") == response_id), None)

        with self._changed:
            assert self._changed.wait_for(found, 60), f"no span of {response_id}"
            span = found()
            assert span is not None
            return span

    def below(self, root: Span) -> list[Span]:
        """Its children, in order of time. They ended before it and so came before it."""
        return sorted(
            (s for s in self.spans.values() if s.parent_span_id == root.span_id), key=lambda s: s.end_time_unix_nano
        )


def values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {a.key: plain(a.value) for a in attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.http.serve_forever, daemon=True)
    thread.start()
    yield collector
    collector.http.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Server]:
    # A small pool: a handful of requests makes it preempt.
    with serving("--num-kv-blocks", "40", "--preemption", "recompute", "--otlp-endpoint", collector.url) as running:
        yield running


def complete(server: Server, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "prompt": "The sea is", "max_tokens": 5, "ignore_eos": True, **body}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_request_is_a_span_of_the_clients_trace_with_queue_prefill_and_decode_below(
    server: Server, collector: Collector
) -> None:
    before = time.time_ns()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    answer = complete(server, headers, temperature=0, max_tokens=5)
    after = time.time_ns()
    root = collector.root(answer["id"])
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "vendor=1")
    assert (root.name, root.kind) == ("text_completion smollm2", Span.SPAN_KIND_SERVER)
    assert before <= root.start_time_unix_nano < root.end_time_unix_nano <= after
    attributes = values(root.attributes)
    assert (
        attributes.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "octavo",
            "gen_ai.request.model": "smollm2",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.response.model": "smollm2",
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": 5,
            "http.route": "/v1/completions",
            "octavo.preemptions": 0,
        }.items()
    )
    assert collector.resource["service.name"] == "octavo"
    queue, prefill, decode = collector.below(root)
    assert [queue.name, prefill.name, decode.name] == ["queue", "prefill", "decode"]
    assert {span.trace_id for span in (queue, prefill, decode)} == {root.trace_id}
    assert queue.start_time_unix_nano == root.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.end_time_unix_nano == root.end_time_unix_nano
    assert [event.name for event in prefill.events] == ["admitted", "prefill"]


def test_a_preemption_is_an_event_with_its_reason(server: Server, collector: Collector) -> None:
    # Four answers of one request run together, and the pool holds three of them.
    root = collector.root(complete(server, n=4, max_tokens=200)["id"])
    spans = collector.below(root)
    events = [event for span in spans for event in span.events]
    preempted = [values(event.attributes) for event in events if event.name == "preempted"]
    assert len(preempted) == values(root.attributes)["octavo.preemptions"] > 0
    assert {(event["how"], event["why"]) for event in preempted} == {("recompute", "no free block")}
    for span in spans:
        assert all(span.start_time_unix_nano <= e.time_unix_nano <= span.end_time_unix_nano for e in span.events)


def test_a_client_that_leaves_and_several_answers(server: Server, collector: Collector) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 400, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "ignore_eos": True}, timeout=60
    ) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("data: {"))
    identity = httpx.Response(200, content=first.removeprefix("data: ")).json()["id"]
    left = collector.root(identity)
    assert left.name == "chat smollm2"
    assert values(left.attributes)["error.type"] == "abort"
    assert left.status.code == Status.STATUS_CODE_UNSET  # the client's choice is no failure of the server
    both = complete(server, n=2, temperature=1)
    attributes = values(collector.root(both["id"]).attributes)
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert attributes["gen_ai.usage.output_tokens"] == 10


def test_what_the_client_does_not_sample_is_not_sent(server: Server, collector: Collector) -> None:
    unsampled = complete(server, {"traceparent": f"00-{TRACE}-{PARENT}-00"})["id"]
    later = collector.root(complete(server)["id"])
    assert later.parent_span_id == b""
    assert all(values(s.attributes).get("gen_ai.response.id") != unsampled for s in collector.spans.values())


def test_spans_are_sent_before_the_server_ends(collector: Collector) -> None:
    with serving("--num-kv-blocks", "40", "--otlp-endpoint", collector.url) as running:
        answer = complete(running)
        assert running.stop() == 0
        assert answer["id"] in {values(s.attributes).get("gen_ai.response.id") for s in collector.spans.values()}
