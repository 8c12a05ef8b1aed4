"""TLS by --ssl-certfile and --ssl-keyfile: streams over it, and what is no TLS harms nobody."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from engine.config import ServerConfig
from engine.errors import ConfigError
from server import connection, serve
from tests.e2e.serving import Server
from tests.server.conftest import chat_body, listening, parse_events

SHORT_S = 1.5  # long enough for an honest handshake on a busy machine


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    """A certificate of our own for 127.0.0.1, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=octavo"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return ServerConfig(ssl_certfile=str(cert), ssl_keyfile=str(key))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HANDSHAKE_TIMEOUT_S", SHORT_S)
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", SHORT_S)


@pytest.fixture
def url(tokenizer, flags: ServerConfig, impatient: None) -> Iterator[str]:
    with listening(tokenizer, flags) as (url, _):
        yield url


def plain(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=20)


def trusting(flags: ServerConfig) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=flags.ssl_certfile)


def streamed(url: str, flags: ServerConfig, model: str = "m") -> list:
    with httpx.Client(verify=trusting(flags), base_url=url, timeout=60) as http:
        response = http.post("/v1/chat/completions", json={**chat_body(stream=True), "model": model})
    assert response.status_code == 200
    return parse_events(response.text)


def closed_with(s: socket.socket) -> bytes:
    """What the server said until it closed."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := s.recv(65536):
            said += part
    return said


def test_a_stream_over_tls_is_whole_and_its_certificate_verified(url, flags):
    events = streamed(url, flags)
    assert events[-1] == "[DONE]"
    assert len(events) > 3
    with httpx.Client(timeout=60) as stranger, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        stranger.get(f"{url}/health")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x40\x00\x01", b"\x00" * 4096, b"\x80\xff" * 50],
    ids=["nothing", "plain HTTP", "half a hello", "zeros", "SSLv2"],
)
def test_what_does_not_shake_hands_is_closed_and_others_are_served_meanwhile(url, flags, sent):
    with plain(url) as s:
        s.sendall(sent)
        assert streamed(url, flags)[-1] == "[DONE]"
        assert b"HTTP" not in closed_with(s)
    assert streamed(url, flags)[-1] == "[DONE]"


def test_a_client_that_breaks_off_in_the_handshake_or_after_it_harms_nobody(url, flags):
    for turn in range(20):
        s = plain(url)
        if turn % 2:
            s = trusting(flags).wrap_socket(s, server_hostname="127.0.0.1")
            s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost")
        else:
            s.sendall(b"\x16\x03\x01")
        s.close()
    assert streamed(url, flags)[-1] == "[DONE]"


def test_headers_that_never_end_are_given_up_also_over_tls(url, flags):
    with trusting(flags).wrap_socket(plain(url), server_hostname="127.0.0.1") as s:
        s.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        assert closed_with(s).startswith(b"HTTP/1.1 408")


def test_a_certificate_that_cannot_be_used_is_refused_in_one_line(flags, tmp_path: Path):
    for cert in (tmp_path / "none.pem", Path(flags.ssl_keyfile)):
        with pytest.raises(ConfigError, match="--ssl-certfile") as error:
            serve.http_config(ServerConfig(ssl_certfile=str(cert), ssl_keyfile=flags.ssl_keyfile), lambda *_: None)
        assert "\n" not in str(error.value)


def test_the_daemon_serves_tls_by_its_flags(flags):
    server = Server("--ssl-certfile", flags.ssl_certfile, "--ssl-keyfile", flags.ssl_keyfile, tls=trusting(flags))
    try:
        server.wait_until_ready()
        events = streamed(server.url, flags, model="smollm2")
        assert events[-1] == "[DONE]"
        assert "https://127.0.0.1" in server.said()
    finally:
        assert server.stop() == 0
