"""What the server says of itself: models, health, version, metrics, and the engine's inside as JSON."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest, NotFound, RequestFailed
from engine.text.generation import advised
from server.metrics import CONTENT_TYPE
from server.service import Service, json_response, service_of


def _model(service: Service, name: str) -> dict[str, Any]:
    adapter = service.client.adapters.get(name)
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": adapter or service.settings.model_root or service.model,
        "parent": service.model if adapter else None,
        "max_model_len": service.client.ready.max_model_len,
        "sampling_defaults": advised(service.defaults),
        "permission": [],
    }


async def list_models(request: Request) -> Response:
    """The served model, once under each of its names, and its adapters."""
    service = service_of(request)
    data = [_model(service, name) for name in (*service.settings.served_model_names, *service.client.adapters)]
    return json_response({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    """One model by name."""
    service = service_of(request)
    name = request.path_params["model"]
    service.require_model(name)
    return json_response(_model(service, name))


def _health(service: Service) -> tuple[dict[str, Any], bool]:
    """The client's health, and whether the engine makes progress: work that waits while no step ends is a hang."""
    health = service.client.health()
    stats = service.client.stats
    age = health["engine"].get("last_step_age_s")
    busy = stats.running + stats.waiting > 0
    stuck = busy and age is not None and age > service.settings.stuck_after_s
    return {**health, "stuck": stuck}, not stuck


async def health(request: Request) -> Response:
    """200 while requests are served, also during a restart of the engine; 503 when loading, draining, hung or dead."""
    body, moves = _health(service_of(request))
    serving = body["status"] in ("ready", "degraded") and moves
    return _status(body, serving)


async def health_live(request: Request) -> Response:
    """200 unless the process should be replaced: the engine is gone for good."""
    body, _ = _health(service_of(request))
    return _status(body, body["status"] != "dead")


async def health_ready(request: Request) -> Response:
    """200 when new requests should be sent here."""
    body, moves = _health(service_of(request))
    return _status(body, body["status"] == "ready" and moves)


def _status(body: dict[str, Any], good: bool) -> Response:
    response = json_response(body, None if good else {"retry-after": "5"})
    response.status_code = 200 if good else 503
    return response


async def version(request: Request) -> Response:
    """The version of the server."""
    return json_response({"version": service_of(request).version})


async def metrics(request: Request) -> Response:
    """Prometheus metrics in text format 0.0.4."""
    return Response(service_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


async def debug_kv(request: Request) -> Response:
    """Every KV block: free, whose, shared, cached, on the host."""
    return json_response(await service_of(request).client.inspect("kv"))


async def debug_block(request: Request) -> Response:
    """One KV block: its references, its holders, and the tokens whose KV it holds, as ids and as text."""
    service = service_of(request)
    name = request.path_params["block"]
    if not name.isdecimal() or len(name) > 10:
        raise InvalidRequest(f"a block is named by its number, not {name[:40]!r}", param="block")
    found = await service.client.inspect("block", name)
    if found is None:
        raise NotFound(f"there is no block {name}", param="block")
    return json_response({**found, "text": service.tokenizer.decode(found["tokens"], skip_special_tokens=False)})


async def debug_live(request: Request) -> Response:
    """What the page shows: the state of every block, the block tables, requests, counters. Compact."""
    service = service_of(request)
    live = await service.client.inspect("live")
    return json_response({"status": service.client.health()["status"], **live})


async def debug_requests(request: Request) -> Response:
    """Running and waiting requests, and those that ended a short while ago."""
    return json_response(await service_of(request).client.inspect("requests"))


async def debug_request(request: Request) -> Response:
    """The timeline of one request: queued, prefill chunks, decode, preemptions."""
    name = request.path_params["id"]
    if len(name) > 200:
        raise InvalidRequest("the request id is too long", param="id")
    try:
        found = await service_of(request).client.inspect("request", name)
    except RequestFailed as error:
        raise NotFound(str(error), param="id") from None
    if found is None:
        raise NotFound(f"no request {name!r} is running or remembered", param="id")
    return json_response(found)
