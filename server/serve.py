"""`octavo serve`: from settings to a listening server, and back to nothing.

The port answers from the first moment: 503 and "loading" until the model is there. SIGTERM drains, a second one ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvicorn

from engine.api import Ready
from engine.build import find_model
from engine.client import EngineClient, ProcessClient
from engine.config import ServerConfig, Settings, adapters, memory
from engine.errors import ConfigError, OctavoError
from engine.replicas import Replicas
from server.connection import BoundedProtocol
from server.settings import ApiKey, ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

    from server.batch_runner import BatchRunner
    from server.traces import Traces

log = logging.getLogger("octavo")

NICE = 5  # below the engine, whose steps wait for each of their threads; see docs/decisions.md, 21
KEEP_ALIVE_S = 75
HANDSHAKE_TIMEOUT_S = 10.0
FLUSH_S = 5  # for responses to reach their clients after the last token
KEY_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency", "priority")


class FrontDoor:
    """Answers 503 until the application is there; then it is the application."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        engine = {"pid": None, "state": "loading", "last_step_age_s": None, "restarts": 0}
        body: dict[str, object] = {"status": "loading", "engine": engine}
        if not scope["path"].startswith("/health"):
            text = "the model is being loaded; try again soon"
            body = {"error": {"message": text, "type": "server_error", "param": None, "code": "loading"}}
        headers = [(b"content-type", b"application/json"), (b"retry-after", b"2")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": msgspec.json.encode(body)})


class HttpServer(uvicorn.Server):
    """uvicorn without its own signals (`serve` decides what they mean), and with little patience for handshakes."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`."""
        config = self.config
        loop = asyncio.get_running_loop()

        def protocol() -> BoundedProtocol:
            return BoundedProtocol(config=config, server_state=self.server_state, app_state={})

        patience = HANDSHAKE_TIMEOUT_S if config.ssl else None
        self.servers = []
        for sock in sockets or ():
            server = await loop.create_server(
                protocol, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=patience
            )
            self.servers.append(server)
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class Daemon:
    """One run of `octavo serve`."""

    def __init__(self, settings: Settings, version: str) -> None:
        self._settings = settings
        self._version = version
        self._began = time.monotonic()
        self._api = server_settings(settings)
        self._socket = listen(settings.server.host, settings.server.port)
        self._door = FrontDoor()
        self._http = HttpServer(http_config(settings.server, self._door))
        self._failure: ConfigError | None = None
        self._status = 0
        self._stopping: asyncio.Task[None] | None = None
        self._batches: BatchRunner | None = None
        self._traces: Traces | None = None
        own = settings.server
        make = Replicas if settings.engine.parallel.replicas > 1 else ProcessClient
        self._client: EngineClient = make(
            settings.engine,
            watchdog_s=own.watchdog_timeout,
            max_restarts=own.max_restarts,
            on_dead=self._dead,
            log_level=own.log_level,
        )

    async def run(self) -> int:
        """Serve until a signal or the end of the engine; the exit code. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self._signal)
        opening = loop.create_task(self._open())
        try:
            await self._http.serve([self._socket])
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            if self._traces:
                await self._traces.close()
            await self._client.close()
        if self._failure:
            raise self._failure
        return self._status

    async def _open(self) -> None:
        """Load the model and open the door. What can't be served ends the server."""
        loop = asyncio.get_running_loop()
        starting: asyncio.Future[Ready] | None = None
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="opening") as helper:
                path = await loop.run_in_executor(helper, lambda: find_model(self._settings.engine, progress=True))
                starting = loop.create_task(self._client.start())
                app = await loop.run_in_executor(helper, self._application, path)
                self._door.app = app
            ready = await starting
        except Exception as error:
            if not isinstance(error, OctavoError):
                log.exception("the server can't start")
            self._failure = ConfigError(str(error) or type(error).__name__)
            if starting:
                starting.cancel()
            self._http.should_exit = True
            return
        # From here on below the engine. Its keeper thread goes on at the priority that we had, so that a restarted
        # engine has it too; threads that are made later are below like this one.
        with contextlib.suppress(OSError):
            os.nice(NICE)
        gc.collect()
        gc.freeze()
        self._batches = app.state.batches
        self._traces = app.state.service.traces
        if self._batches is not None:
            self._batches.resume()
        for note in ready.notes:
            log.info(note)
        own, names = self._settings.server, ", ".join(self._api.served_model_names)
        keys = f"{len(self._api.api_keys)} API keys" if self._api.api_keys else "no API key needed"
        scheme = "https" if own.ssl_certfile else "http"
        port = self._socket.getsockname()[1]
        host = f"[{own.host}]" if ":" in own.host else own.host
        took = time.monotonic() - self._began
        log.info(
            "octavo %s serves %s at %s://%s:%d (%s; ready in %.1f s)",
            self._version,
            names,
            scheme,
            host,
            port,
            keys,
            took,
        )

    def _application(self, path: Path) -> FastAPI:
        from engine.text.chat import ChatTemplate
        from engine.text.tokenizer import Tokenizer
        from server.app import create_app

        tokenizer = Tokenizer.load(path)
        override = self._settings.engine.model.chat_template
        template = ChatTemplate.of(tokenizer, read_text("--chat-template", override) if override else None)
        return create_app(self._client, tokenizer, template, self._api, self._version)

    def _signal(self) -> None:
        if self._stopping:
            log.warning("second signal: ending now")
            self._http.force_exit = True
            self._http.should_exit = True
            return
        self._stopping = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        timeout = self._settings.server.shutdown_timeout
        log.info("shutting down: no new requests; those that run have %g s", timeout)
        if self._batches is not None:
            await self._batches.close()  # they go on after a restart
        await self._client.drain(timeout)
        self._http.should_exit = True

    def _dead(self, reason: str) -> None:
        self._status = 1
        self._http.should_exit = True


def serve(settings: Settings, version: str) -> int:
    """Run the daemon; its exit code. Raises ConfigError."""
    logging.basicConfig(
        level=settings.server.log_level.upper(),
        format="%(asctime)s %(levelname)-7s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(settings, version))


async def _run(settings: Settings, version: str) -> int:
    return await Daemon(settings, version).run()


def loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's loop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop  # type: ignore[no-any-return]


def server_settings(settings: Settings) -> ServerSettings:
    """The HTTP side's share of the settings. Raises ConfigError."""
    own, model = settings.server, settings.engine.model
    names = model.served_model_name or default_names(model.model)
    if taken := set(names) & set(adapters(model.lora)):
        raise ConfigError(f"--lora {min(taken)}=...: the model itself is served under this name")
    return ServerSettings(
        served_model_names=names,
        model_root=model.model,
        api_keys=api_keys(own.api_key, own.api_key_file),
        public_metrics=own.public_metrics,
        otlp_endpoint=own.otlp_endpoint,
        vllm_metric_aliases=own.metrics_vllm_aliases,
        max_body_bytes=memory(own.max_body_size, 0),
        max_tokens_policy="refuse" if own.max_tokens_policy == "refuse" else "clamp",
        generation_config=own.generation_config == "auto",
        trust_request_chat_template=own.trust_request_chat_template,
        tool_parser=own.tool_parser,
        reasoning_parser=own.reasoning_parser,
        cors_origins=own.cors_origin,
        root_path=own.root_path,
        lora_dir=directory("--lora-dir", own.lora_dir),
        kv_transfer_dir=directory("--kv-transfer-dir", own.kv_transfer_dir),
        data_dir=own.data_dir,
        log_prompts=own.log_prompts,
    )


def default_names(model: str) -> tuple[str, ...]:
    """A path is served under its last part, and under itself as an alias."""
    path = Path(model)
    if not path.exists() or path.name in ("", ".", ".."):
        return (model,)
    return tuple(dict.fromkeys((path.name.removesuffix(".gguf"), model)))


def directory(flag: str, given: str) -> str:
    """A directory that exists, links followed. Raises ConfigError."""
    if given and not Path(given).is_dir():
        raise ConfigError(f"{flag} {given}: there is no such directory")
    return str(Path(given).resolve()) if given else ""


def api_keys(given: tuple[str, ...], file: str) -> tuple[ApiKey, ...]:
    """Keys of the flags and of the file. No message ever shows a key. Raises ConfigError."""
    keys = [ApiKey.of(key) for key in given]
    lines = read_text("--api-key-file", file).splitlines() if file else []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        limits: dict[str, int] = {}
        labels = [word for word in words[1:] if "=" not in word]
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if equals and (name not in KEY_LIMITS or not value.isascii() or not value.isdigit()):
                raise ConfigError(f"{file}:{number}: {name}=...: give whole numbers for {', '.join(KEY_LIMITS)}")
            if equals:
                limits[name] = int(value)
        if len(labels) > 1:
            raise ConfigError(f"{file}:{number}: more than one label; a line is KEY [LABEL] [name=value ...]")
        keys.append(ApiKey.of(words[0], labels[0] if labels else "", **limits))
    if file and not keys:
        raise ConfigError(f"--api-key-file {file}: it holds no key")
    return tuple(keys)


def read_text(flag: str, path: str) -> str:
    """A file that a flag names. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path}: can't be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that doesn't accept yet. Raises ConfigError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host} port {port}: {error.strerror or error}; choose another --port"
        ) from None
    listener.setblocking(False)
    return listener


def http_config(own: ServerConfig, app: ASGIApp) -> uvicorn.Config:
    """uvicorn's configuration: bare ASGI, no access log of its own. Raises ConfigError for a bad certificate."""
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
        limit_concurrency=own.max_connections,
        ssl_certfile=own.ssl_certfile or None,
        ssl_keyfile=own.ssl_keyfile or None,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile {own.ssl_certfile}: {error}") from None
    return config
