"""LoRA adapters at run time: vLLM's two routes. Off unless the operator names a directory that adapters may lie in."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.config import ADAPTER_NAME
from engine.errors import InvalidRequest, NotFound
from server.errors import HTTPError
from server.service import Service, json_response, service_of

log = logging.getLogger("octavo")


class LoadRequest(msgspec.Struct):
    """`lora_path`: absolute, or relative to the directory of adapters."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None  # replace an adapter of that name


class UnloadRequest(msgspec.Struct):
    lora_name: str


async def load_lora_adapter(request: Request) -> Response:
    """Serve a LoRA adapter from now on, as a model of that name."""
    service = service_of(request)
    wire, _ = await service.read(request, LoadRequest)
    root = _root(service)
    name = wire.lora_name
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequest("lora_name must have 1 to 128 of the characters A-Z a-z 0-9 . _ : / -", param="lora_name")
    if name in service.settings.served_model_names:
        raise InvalidRequest(f"the model itself is served as {name!r}; choose another name", param="lora_name")
    if name in service.client.adapters and not wire.load_inplace:
        raise InvalidRequest(f"an adapter {name!r} is loaded; load_inplace=true replaces it", param="lora_name")
    directory = _inside(root, wire.lora_path)
    await service.client.control("load_adapter", {"name": name, "path": str(directory)})
    log.info("adapter %s is served from %s", name, directory)
    return json_response({"message": f"adapter {name!r} is loaded"})


async def unload_lora_adapter(request: Request) -> Response:
    """Serve a LoRA adapter no longer, and free its memory."""
    service = service_of(request)
    wire, _ = await service.read(request, UnloadRequest)
    _root(service)
    name = wire.lora_name
    if name not in service.client.adapters:
        raise NotFound(f"no adapter {name[:100]!r} is loaded", param="lora_name", code="model_not_found")
    await service.client.control("unload_adapter", {"name": name})
    log.info("adapter %s is no longer served", name)
    return json_response({"message": f"adapter {name!r} is unloaded"})


def _root(service: Service) -> Path:
    if not service.settings.lora_dir:
        raise HTTPError(403, "adapters can't be changed over HTTP here; the server was started without --lora-dir")
    return Path(service.settings.lora_dir)


def _inside(root: Path, path: str) -> Path:
    """The directory that `path` names, links followed. Whatever lies elsewhere is refused, there or not."""
    try:
        found = (root / path).resolve()
        inside, exists = bool(path) and found.is_relative_to(root), found.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long, a zero byte, links in a circle
        raise InvalidRequest("lora_path is no path of a directory", param="lora_path") from None
    if not inside:
        raise InvalidRequest("lora_path must lie in the directory of --lora-dir", param="lora_path")
    if not exists:
        raise InvalidRequest(f"lora_path {path[:200]!r}: there is no such directory", param="lora_path")
    return found
