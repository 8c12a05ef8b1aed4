"""What a connection may cost before it has sent a request, over real sockets."""

import asyncio
import contextlib
import json
import select
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import uvicorn

from engine.config import ServerConfig
from server import connection
from tests.server.conftest import listening


@pytest.fixture
def address(tokenizer) -> Iterator[tuple[str, int]]:
    with listening(tokenizer) as (url, _):
        yield address_of(url)


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def said(address: tuple[str, int], *parts: bytes) -> tuple[int, dict, int]:
    """Status and body of the answer to these bytes, and how many were sent before the server closed."""
    sent = 0
    with socket.create_connection(address, timeout=10) as s:
        try:
            for part in parts:
                s.sendall(part)
                sent += len(part)
        except OSError:
            pass
        answer = b""
        try:
            while data := s.recv(65536):
                answer += data
        except ConnectionResetError:
            pass  # it closed with bytes of ours unread
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, json.loads(body or b"{}"), sent


START = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "parts",
    [
        [START, *[b"X-%d: %b\r\n" % (i, b"a" * 60_000) for i in range(2000)]],
        [START, b"X: ", *[b"a" * 60_000] * 2000],
        [b"GET /", *[b"a" * 60_000] * 2000],
        [START, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"X: %b\r\n" % (b"a" * 60_000)] * 2000],
    ],
    ids=["many headers", "one header", "path", "trailers"],
)
def test_a_head_without_end_is_refused_before_it_costs_memory(address, parts):
    status, body, sent = said(address, *parts)
    assert status in (0, 400, 431)  # 0: the reset overtook the answer
    assert not body or body["error"]["type"] == "invalid_request_error"
    assert sent < 20_000_000  # the sockets' own buffers hold some


def test_a_long_head_within_the_limit_is_served(address):
    header = b"X-Long: " + b"a" * (connection.MAX_HEAD_BYTES - 1000) + b"\r\n"
    status, _, _ = said(address, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", header, b"\r\n")
    assert status == 200


@pytest.mark.parametrize("parts", [[b"\x16\x03\x01\x02\x00"], [b"NONSENSE\r\n\r\n"], [START, b"A B C\r\n\r\n"]])
def test_what_is_no_http_is_400_with_an_error_object(address, parts):
    status, body, _ = said(address, *parts)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("parts", [[], [b"GET /heal"], [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"]])
def test_a_connection_that_never_completes_a_request_is_closed(tokenizer, monkeypatch, parts):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    with listening(tokenizer) as (url, _), socket.create_connection(address_of(url), timeout=10) as s:
        for part in parts:
            s.sendall(part)
        answer = b""
        while data := s.recv(65536):
            answer += data
    assert b"408 Request Timeout" in answer
    assert answer.startswith(b"HTTP/1.1 200") == (len(parts) == 1 and b"\r\n\r\n" in parts[0])


@pytest.mark.anyio
async def test_a_client_that_takes_nothing_of_its_response_is_dropped(monkeypatch):
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.2)
    dropped = asyncio.Event()

    async def endless(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def pour() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)  # to a client that is gone, `send` returns at once

        pouring = asyncio.ensure_future(pour())
        while (await receive())["type"] != "http.disconnect":
            pass
        pouring.cancel()
        dropped.set()

    config = uvicorn.Config(endless, http=connection.BoundedProtocol, lifespan="off")
    config.load()
    state = uvicorn.server.ServerState()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: connection.BoundedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    with socket.create_connection(listener.sockets[0].getsockname(), timeout=10) as s:
        s.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(20):
            await dropped.wait()
    listener.close()


def until_closed(s: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while data := s.recv(65536):
            answer += data
    return answer


REQUEST = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("drip", [b"x", b"\r\n"], ids=["a body after its refusal", "empty lines"])
def test_a_connection_that_goes_on_after_its_response_is_closed_all_the_same(tokenizer, monkeypatch, drip):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    head = REQUEST if drip == b"\r\n" else START + b"Content-Length: 999999999999\r\n\r\n"
    with listening(tokenizer) as (url, _), socket.create_connection(address_of(url), timeout=10) as s:
        s.sendall(head)
        assert b"HTTP/1.1" in s.recv(65536)
        with contextlib.suppress(OSError):  # a reset
            while not select.select([s], [], [], 0.01)[0] or s.recv(65536):
                s.sendall(drip)


def test_requests_without_end_on_one_connection_do_not_pile_up(address):
    with socket.create_connection(address, timeout=10) as s:
        s.sendall(REQUEST * 1000)
        answer = until_closed(s)
    assert answer.count(b"HTTP/1.1 200") <= connection.MAX_PIPELINED + 2


def test_a_few_pipelined_requests_are_answered_in_turn(address):
    last = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(address, timeout=10) as s:
        s.sendall(REQUEST * 5 + last)
        answer = until_closed(s)
    assert answer.count(b"HTTP/1.1 200") == 6


def test_connections_beyond_the_limit_are_told_so_and_counted(tokenizer, monkeypatch):
    monkeypatch.setattr(connection, "CROWD", 2)
    with listening(tokenizer, ServerConfig(max_connections=2)) as (url, _):
        address = address_of(url)
        first = [socket.create_connection(address, timeout=10) for _ in range(2)]
        for s in first:
            s.sendall(REQUEST)
            assert s.recv(65536).startswith(b"HTTP/1.1 200")
        with socket.create_connection(address, timeout=10) as s:
            s.sendall(START + b"Content-Length: 2\r\n\r\n{}")
            head, _, body = until_closed(s).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        status, health, _ = said(address, REQUEST)
        assert status == 200, "a probe must not take a busy server for a dead one"
        assert health["status"] == "ready"
        waiting = [socket.create_connection(address, timeout=10) for _ in range(2)]
        with socket.create_connection(address, timeout=10) as s:
            assert until_closed(s) == b""
        first[0].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        metrics = until_closed(first[0]).decode()
        assert 'octavo_requests_refused_total{model_name="m",reason="unavailable"} 1' in metrics
        for s in (*first, *waiting):
            s.close()
