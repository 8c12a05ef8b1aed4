"""A client that leaves, over real sockets: its request is aborted at once, whatever it was doing."""

import asyncio
import contextlib

import httpx
import pytest

from tests.server.conftest import chat_body, complete_body, listening

pytestmark = pytest.mark.anyio


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def server(tokenizer):
    with listening(tokenizer, delay_s=0.005) as running:
        yield running


@pytest.fixture
def client(server):
    client = server[1]
    client.aborted.clear()
    client.submitted.clear()
    return client


@pytest.fixture
async def http(server):
    async with httpx.AsyncClient(base_url=server[0], timeout=10) as http:
        yield http


LONG = {"max_tokens": 450, "logit_bias": {"30": 50}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_dropped_stream_is_aborted(http, client, path):
    body = chat_body(stream=True, **LONG) if "chat" in path else complete_body(stream=True, **LONG)
    async with http.stream("POST", path, json=body) as response:
        async for _ in response.aiter_lines():
            break
    await until(lambda: not client.live)
    assert client.aborted == [(client.submitted[0].id, -1)]


@pytest.mark.parametrize("prompt", ["alone", ["one", "two", "three"]])
async def test_a_dropped_plain_request_is_aborted(http, client, prompt):
    with contextlib.suppress(httpx.ReadTimeout):
        await http.post("/v1/completions", json=complete_body(prompt, **LONG), timeout=0.2)
    await until(lambda: client.submitted and not client.live)
    assert len(client.aborted) == len(client.submitted)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_dropped_while_it_waits_is_aborted(http, client, stream):
    client.hold.clear()
    with contextlib.suppress(httpx.ReadTimeout):
        await http.post("/v1/completions", json=complete_body(stream=stream, **LONG), timeout=0.2)
    await until(lambda: client.submitted and not client.live)
    client.hold.set()
    assert (await http.post("/v1/completions", json=complete_body())).status_code == 200


async def test_dropped_requests_are_counted_as_aborted_and_nothing_stays_in_flight(http, client):
    text = (await http.get("/metrics")).text
    counts = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(counts['octavo_requests_in_flight{model_name="m"}']) == 0
    assert float(counts['octavo_request_success_total{model_name="m",finished_reason="abort"}']) >= 6


async def test_a_slow_reader_gets_everything_and_holds_nobody_up(http, client):
    async with http.stream("POST", "/v1/chat/completions", json=chat_body(stream=True, **LONG)) as slow:
        lines = slow.aiter_lines()
        await anext(lines)
        quick = await http.post("/v1/chat/completions", json=chat_body(max_tokens=3))
        assert quick.status_code == 200
        await asyncio.sleep(0.5)
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]


async def test_a_connection_serves_one_request_after_another(http, client):
    for i in range(5):
        assert (await http.post("/v1/completions", json=complete_body(max_tokens=1 + i))).status_code == 200
        assert (await http.post("/v1/completions", json=complete_body(temperature=-1))).status_code == 400
        async with http.stream("POST", "/v1/completions", json=complete_body(stream=True)) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
