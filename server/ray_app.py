"""Octavo on Ray Serve, for those who run Ray already: `python -m server.ray_app replicas=4 model=smollm2 port=8000`.

`Front` passes each request on to an `Engine`: all of Octavo's routes in one process. Requests that begin alike go to
one engine while it has room. A stream whose engine dies ends with an error event. Ray's ports run code for whoever
reaches them: token authentication must be on, the dashboard stays off. A RayService names `server.ray_app:app`.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from ray import init, serve
from ray.exceptions import RayError

from engine.build import find_model
from engine.client import ProcessClient
from engine.config import Given, Settings, from_environment, memory
from engine.errors import ConfigError, EngineDead
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.app import create_app
from server.asgi_call import read_body, respond
from server.cli import program_version
from server.errors import event, reply_to
from server.serve import server_settings

OWN = {"replicas": 2, "max_replicas": 0, "ongoing": 64, "gpus": 0.0, "cpus": 1.0}  # what is no setting of Octavo's
PREFIX_CHARS = 512  # requests that have so many in common go to the same engine
DIED = EngineDead("the replica that served this request died; send it again")
api = FastAPI(openapi_url=None)  # frozen where it is used: all that its routes name stands before


@serve.deployment(health_check_period_s=1, health_check_timeout_s=10, graceful_shutdown_timeout_s=120)
class Engine:
    """One engine and all of Octavo's routes."""

    async def __init__(self, given: dict[str, Any]) -> None:  # type: ignore[misc]
        settings = settings_of(given)
        path = await asyncio.to_thread(find_model, settings.engine)
        self.client = ProcessClient(settings.engine, max_restarts=settings.server.max_restarts)
        await self.client.start()
        tokenizer, own = Tokenizer.load(path), server_settings(settings)
        self.app = create_app(self.client, tokenizer, ChatTemplate.of(tokenizer, None), own, program_version())

    @serve.multiplexed(max_num_models_per_replica=4096)  # type: ignore[untyped-decorator]
    async def prefix(self, name: str) -> str:
        """Ray sends what has this name to the engines that have seen it."""
        return name

    async def call(self, scope: dict[str, Any], body: bytes, prefix: str) -> AsyncGenerator[Any, None]:
        """Run one request: (status, headers) first, then the parts of the body."""
        if prefix:
            await self.prefix(prefix)
        async for part in respond(self.app, scope, body):
            yield part

    def check_health(self) -> None:
        """Raises when this engine should be replaced."""
        if self.client.health()["status"] == "dead":
            raise EngineDead("the engine is gone")


async def rest(answer: Any, headers: dict[bytes, bytes]) -> AsyncGenerator[bytes, None]:
    """The body. Only a stream of events can tell that its engine died; any other is cut."""
    try:
        async for part in answer:
            yield part
    except RayError:
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise
        yield event(DIED)


def prefix_of(body: bytes) -> str:
    """A name of how the prompt of a request begins; "" when there is none."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        wire = json.loads(body)
        if prompt := wire.get("messages") or wire.get("prompt") or wire.get("input"):
            return hashlib.sha256(json.dumps(prompt)[:PREFIX_CHARS].encode()).hexdigest()[:16]
    return ""


@serve.deployment(health_check_period_s=1)
@serve.ingress(api)
class Front:
    """HTTP in, HTTP out."""

    def __init__(self, engine: Any, max_body: int) -> None:
        self.engine, self.max_body = engine, max_body

    @api.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def forward(self, request: Request) -> Response:
        """Any route of Octavo's."""
        if (body := await read_body(request, self.max_body)) is None:
            return Response(f"the body has more than {self.max_body} bytes", 413)
        prefix = prefix_of(body)
        scope = {key: request.scope[key] for key in ("method", "path", "query_string", "headers", "scheme")}
        answer = self.engine.options(stream=True, multiplexed_model_id=prefix).call.remote(scope, body, prefix)
        try:
            status, headers = await anext(answer)
        except RayError:
            reply = reply_to(DIED)
            return Response(reply.body(request.url.path), reply.status, reply.headers, "application/json")
        response = StreamingResponse(rest(answer, dict(headers)), status)
        response.raw_headers = headers
        return response


def settings_of(given: dict[str, Any]) -> Settings:
    """Octavo's settings: its environment variables, then what was given. Raises ConfigError."""
    values = [Given("argument", name, name, value) for name, value in given.items() if name not in OWN]
    return Settings.resolve([*from_environment(os.environ), *values])


def app(given: dict[str, Any]) -> serve.Application:
    """The application. Raises ConfigError."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError("set RAY_AUTH_MODE=token: whoever reaches Ray's ports without it runs code in the cluster")
    few, most, busy, gpus, cpus = (type(default)(given.get(name, default)) for name, default in OWN.items())
    scaling = {"min_replicas": few, "max_replicas": max(few, most), "target_ongoing_requests": busy / 2}
    resources = {"num_gpus": gpus, "num_cpus": cpus}
    deployments: tuple[Any, Any] = Engine, Front  # what Ray's decorators made of the classes
    engine = deployments[0].options(max_ongoing_requests=busy, autoscaling_config=scaling, ray_actor_options=resources)
    return deployments[1].bind(engine.bind(given), memory(settings_of(given).server.max_body_size, 0))


def main(words: list[str]) -> None:
    """A cluster of this machine alone, until it is interrupted. Raises ConfigError."""
    given = dict(word.split("=", 1) for word in words)
    own = settings_of(given).server
    init(include_dashboard=False)
    serve.start(http_options={"host": own.host, "port": own.port})
    serve.run(app(given), blocking=True)


if __name__ == "__main__":
    # Anew: Ray reads its mode when it is imported, and finds in this module what it ships by the module's real name.
    program = "import sys; from server.ray_app import main; main(sys.argv[1:])"
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)}
    os.execve(sys.executable, [sys.executable, "-c", program, *sys.argv[1:]], {**os.environ, **own})
