"""The application over a fake client, reached in-process; a real server on loopback where sockets matter."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import pytest

from engine.config import ServerConfig
from engine.model.pull import pull
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.app import create_app
from server.serve import HttpServer, http_config, loop_factory
from server.settings import ServerSettings
from tests.server.fake_client import FakeClient


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(pull("smollm2"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tokenizer: Tokenizer) -> AsyncIterator[Api]:
    async with serving(tokenizer) as api:
        yield api


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings(**{"served_model_names": ("m", "alias"), **changes})


class Api:
    """Calls the application; every answer is checked for what all answers have in common."""

    def __init__(self, http: httpx.AsyncClient, client: FakeClient) -> None:
        self.http = http
        self.client = client

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)

    async def ok(self, path: str, body: Any) -> Any:
        response = await self.post(path, body)
        assert response.status_code == 200, response.text
        return strict_json(response.text)

    async def refused(self, path: str, body: Any, status: int = 400) -> dict[str, Any]:
        response = await self.post(path, body)
        return error_of(response, status)

    async def chat(self, content: str = "Say hello.", **fields: Any) -> Any:
        return await self.ok("/v1/chat/completions", chat_body(content, **fields))

    async def complete(self, prompt: Any = "The sky is", **fields: Any) -> Any:
        return await self.ok("/v1/completions", complete_body(prompt, **fields))

    async def events(self, path: str, body: Any, **more: Any) -> list[Any]:
        """The JSON of all events of a stream that ends with [DONE]."""
        response = await self.post(path, {**body, "stream": True}, **more)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = parse_events(response.text)
        assert events[-1] == "[DONE]"
        return events[:-1]

    async def metric(self, name: str, **labels: str) -> float:
        text = (await self.http.get("/metrics")).text
        found = [line for line in text.splitlines() if line.split("{")[0] == name]
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [float(line.rsplit(" ", 1)[1]) for line in found if all(label in line for label in wanted)]
        assert values or labels, f"no metric {name}"
        return sum(values)


def chat_body(content: str = "Say hello.", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    return {key: value for key, value in body.items() if value is not ...}


def complete_body(prompt: Any = "The sky is", **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12, **fields}
    return {key: value for key, value in body.items() if value is not ...}


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block
        events.append("[DONE]" if block == "data: [DONE]" else strict_json(block[6:]))
    return events


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = strict_json(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    for leak in ("Traceback", "site-packages", '.py"', "<class", "object at 0x"):
        assert leak not in response.text
    return error


@asynccontextmanager
async def serving(tokenizer: Tokenizer, client: FakeClient | None = None, **changes: Any) -> AsyncIterator[Api]:
    """The application in this process."""
    client = client or FakeClient(tokenizer)
    app = create_app(client, tokenizer, ChatTemplate.of(tokenizer), settings(**changes), "1.2.3")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20) as http:
        yield Api(http, client)
    await client.close()


@contextmanager
def listening(
    tokenizer: Tokenizer, own: ServerConfig | None = None, **changes: Any
) -> Iterator[tuple[str, FakeClient]]:
    """The application behind the daemon's HTTP server on loopback, with its flags `own`: address and fake client."""
    own = own or ServerConfig()
    started = threading.Event()
    made: list[Any] = []

    async def main() -> None:
        client = FakeClient(tokenizer, delay_s=changes.pop("delay_s", 0.0))
        app = create_app(client, tokenizer, ChatTemplate.of(tokenizer), settings(**changes), "1.2.3")
        server = HttpServer(http_config(own, app))
        made.extend((server, client))
        started.set()
        await server.serve([sock])
        await client.close()

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        port = sock.getsockname()[1]

        def work() -> None:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(main())

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        try:
            yield f"{'https' if own.ssl_certfile else 'http'}://127.0.0.1:{port}", made[1]
        finally:
            made[0].should_exit = True
            thread.join()


def run(work: Any) -> Any:
    """The result of a coroutine, for tests that are no coroutines themselves."""
    return asyncio.run(work)
