"""The application: routes, what every request passes, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles

from engine.client import EngineClient
from engine.text.chat import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server import (
    adapters,
    batches,
    chat,
    completions,
    embeddings,
    files,
    kv_transfer,
    messages,
    messages_wire,
    protocol,
    responses,
    responses_wire,
    status,
    tokens,
)
from server.batch_runner import BatchRunner
from server.errors import HTTPError
from server.gate import Gate
from server.openapi import document
from server.service import Service
from server.settings import ServerSettings

STATIC = Path(__file__).parent / "static"

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One operation. `body` is the wire type of its request; `queued`: its work waits in the engine's queue."""

    method: str
    path: str
    handler: Handler
    body: type[msgspec.Struct] | None = None
    queued: bool = False
    streams: bool = False


ROUTES = (
    Route("GET", "/v1/models", status.list_models),
    Route("GET", "/v1/models/{model:path}", status.get_model),
    Route("POST", "/v1/load_lora_adapter", adapters.load_lora_adapter, adapters.LoadRequest),
    Route("POST", "/v1/unload_lora_adapter", adapters.unload_lora_adapter, adapters.UnloadRequest),
    Route("POST", "/v1/chat/completions", chat.chat_completions, protocol.ChatRequest, queued=True, streams=True),
    Route("POST", "/v1/completions", completions.completions, protocol.CompletionRequest, queued=True, streams=True),
    Route(
        "POST", "/v1/responses", responses.create_response, responses_wire.ResponsesRequest, queued=True, streams=True
    ),
    Route("GET", "/v1/responses/{id}", responses.get_response),
    Route("DELETE", "/v1/responses/{id}", responses.delete_response),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel_response),
    Route("GET", "/v1/responses/{id}/input_items", responses.list_input_items),
    Route("POST", "/v1/embeddings", embeddings.create_embeddings, embeddings.EmbeddingsRequest, queued=True),
    Route("POST", "/v1/score", embeddings.score, embeddings.ScoreRequest, queued=True),
    Route("POST", "/v1/rerank", embeddings.rerank, embeddings.RerankRequest, queued=True),
    Route("POST", "/v1/messages", messages.create_message, messages_wire.MessagesRequest, queued=True, streams=True),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, messages_wire.CountTokensRequest),
    Route("POST", "/v1/files", files.upload_file),
    Route("GET", "/v1/files", files.list_files),
    Route("GET", "/v1/files/{id}", files.get_file),
    Route("DELETE", "/v1/files/{id}", files.delete_file),
    Route("GET", "/v1/files/{id}/content", files.get_file_content),
    Route("POST", "/v1/batches", batches.create_batch, batches.BatchRequest),
    Route("GET", "/v1/batches", batches.list_batches),
    Route("GET", "/v1/batches/{id}", batches.get_batch),
    Route("POST", "/v1/batches/{id}/cancel", batches.cancel_batch),
    Route("POST", "/v1/kv/export", kv_transfer.export_kv, kv_transfer.TransferRequest),
    Route("POST", "/v1/kv/import", kv_transfer.import_kv, kv_transfer.TransferRequest),
    Route("POST", "/tokenize", tokens.tokenize, protocol.TokenizeRequest),
    Route("POST", "/detokenize", tokens.detokenize, protocol.DetokenizeRequest),
    Route("GET", "/health", status.health),
    Route("GET", "/health/live", status.health_live),
    Route("GET", "/health/ready", status.health_ready),
    Route("GET", "/version", status.version),
    Route("GET", "/metrics", status.metrics),
    Route("GET", "/debug/kv", status.debug_kv),
    Route("GET", "/debug/kv/{block}", status.debug_block),
    Route("GET", "/debug/live", status.debug_live),
    Route("GET", "/debug/requests", status.debug_requests),
    Route("GET", "/debug/requests/{id}", status.debug_request),
)

BATCH_ENDPOINTS = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/v1/embeddings": embeddings.create_embeddings,
    "/v1/responses": responses.create_response,
}


def create_app(
    client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate, settings: ServerSettings, version: str
) -> FastAPI:
    """The ASGI application over `client`, whose life (start, drain, close) is the caller's."""
    service = Service(client, tokenizer, template, settings, version)
    app = FastAPI(
        title="Octavo",
        version=service.version,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        root_path=settings.root_path,
    )
    app.state.service = service
    app.state.batches = None
    if service.store is not None:
        app.state.batches = BatchRunner(app, service.store, settings, BATCH_ENDPOINTS)
    for route in ROUTES:
        app.add_api_route(route.path, route.handler, methods=[route.method], response_model=None)
    _add_page(app)
    app.openapi = lambda: document(  # type: ignore[method-assign]
        ROUTES, service.version, service.model, BATCH_ENDPOINTS, tokenizer.vocab_size
    )
    app.add_exception_handler(HTTPException, _framework_error)
    queued = frozenset(route.path for route in ROUTES if route.queued)
    app.add_middleware(Gate, settings=settings, metrics=service.metrics, admit=service.admit, queued=queued)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    return app


async def _framework_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods go the way of all errors: to the gate's one table."""
    if not isinstance(error, HTTPException):
        raise error
    message = {
        404: f"there is no route {request.method} {request.url.path[:200]}",
        405: f"{request.method[:20]} is not allowed on {request.url.path[:200]}",
    }.get(error.status_code, str(error.detail))
    headers = {"allow": _allowed(request)} if error.status_code == 405 else {}
    raise HTTPError(error.status_code, message, headers=headers)


def _allowed(request: Request) -> str:
    """The methods of every route of this path: the framework names those of the first one only."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    routes = [route for route in request.app.routes if isinstance(route, APIRoute) and route.path_regex.match(path)]
    return ", ".join(sorted({method for route in routes for method in route.methods or ()}))


def _add_page(app: FastAPI) -> None:
    """The page at `/` and its files, where the package has them."""
    index = STATIC / "index.html"
    if not index.is_file():
        return

    async def page(request: Request) -> Any:
        return FileResponse(index)

    app.add_api_route("/", page, methods=["GET"], response_model=None, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))
