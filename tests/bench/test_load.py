"""The load client against a server whose answers and delays are known."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.errors import ConfigError
from server.bench.load import Arrivals, Outcome, Target, run_load
from server.bench.report import compare, medians, meets, percentiles, summarise, svg
from server.bench.serve import slo_limits
from server.bench.workload import WORKLOADS, Workload, words_of

TOKENS = 5


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A stream of TOKENS chunks and a usage chunk; the model name says how it goes wrong."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        if body["model"] == "full":
            text = b'{"error": {"message": "full"}}'
            writer.write(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
            continue
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        events = [{"choices": [{"index": 0, "delta": {"content": "x"}}]}] * TOKENS
        events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": TOKENS}})
        lines = [b"data: " + json.dumps(e).encode() + b"\n\n" for e in events]
        if body["model"] != "cut":
            lines.append(b"data: [DONE]\n\n")
        for line in lines:
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def load(model: str, arrivals: Arrivals) -> list[Outcome]:
    async def run() -> list[Outcome]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", model=model)
        outcomes, _ = await run_load(target, Workload("chat", 0, words_of("")), arrivals)
        target.close()
        server.close()
        return outcomes

    return asyncio.run(run())


@pytest.mark.parametrize("rate", [None, 500.0])
def test_counts_every_request_and_token(rate: float | None) -> None:
    outcomes = load("good", Arrivals(4, rate, requests=10))
    assert [o.ok for o in outcomes] == [True] * 10
    assert {o.output_tokens for o in outcomes} == {TOKENS}
    assert all(o.ttft is not None and o.ttft <= o.e2e and len(o.itl) == TOKENS - 1 for o in outcomes)


@pytest.mark.parametrize(("model", "error"), [("full", "HTTPStatus: 429"), ("cut", "the stream ended without [DONE]")])
def test_a_failure_is_counted_with_its_reason(model: str, error: str) -> None:
    outcomes = load(model, Arrivals(2, requests=4))
    assert not any(o.ok for o in outcomes)
    assert all(o.error.startswith(error) for o in outcomes)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_function_of_its_seed(name: str) -> None:
    make = [Workload(name, seed, words_of("")) for seed in (1, 1, 2)]
    first, again, other = ([w.next() for _ in range(9)] for w in make)
    assert first == again
    assert first != other


def test_percentiles_interpolate() -> None:
    assert percentiles([0.001 * i for i in range(1, 101)]) == {
        "mean": 50.5,
        "p50": 50.5,
        "p90": 90.1,
        "p95": 95.05,
        "p99": 99.01,
        "max": 100.0,
    }


def test_goodput_counts_only_what_met_the_limits() -> None:
    quick = Outcome("chat", ok=True, ttft=0.1, e2e=1.0, tpot=[0.01], output_tokens=10)
    slow = Outcome("chat", ok=True, ttft=0.9, e2e=2.0, tpot=[0.01], output_tokens=10)
    assert meets(quick, {"ttft": 500})
    assert not meets(slow, {"ttft": 500})
    run = summarise([quick, slow], 2.0, {"ttft": 500.0})
    assert (run["goodput_request_s"], run["slo_attainment"], run["output_tok_s"]) == (0.5, 0.5, 10.0)


def test_a_comparison_says_how_many_times_better_the_first_is() -> None:
    fast = medians([summarise([Outcome("c", ok=True, ttft=0.1, e2e=1, tpot=[0.01], output_tokens=20)], 1.0, {})])
    slow = medians([summarise([Outcome("c", ok=True, ttft=0.3, e2e=1, tpot=[0.02], output_tokens=10)], 1.0, {})])
    ratios = {name: ratio for name, _, _, ratio in compare(fast, slow)}
    assert (ratios["output tok/s"], ratios["TTFT p50"], ratios["TPOT p50"]) == (2.0, 3.0, 2.0)
    assert svg("t", ["a", "b"], [fast, slow]).count("<rect") >= 2 * len(ratios)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "speed:1"])
def test_a_bad_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--slo"):
        slo_limits([text])
