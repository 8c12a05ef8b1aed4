"""Cached prefixes from one server to another: export to a file, import from it. Off unless a directory is named."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.errors import HTTPError
from server.service import json_response, service_of

log = logging.getLogger("octavo")

FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class TransferRequest(msgspec.Struct):
    """`file`: a plain name in the directory of `--kv-transfer-dir`."""

    file: str


async def export_kv(request: Request) -> Response:
    """Write the cached prefixes to a file, for another replica."""
    return await _transfer(request, "export_kv")


async def import_kv(request: Request) -> Response:
    """Cache the prefixes that another replica of the same model exported."""
    return await _transfer(request, "import_kv")


async def _transfer(request: Request, command: str) -> Response:
    service = service_of(request)
    wire, _ = await service.read(request, TransferRequest)
    directory = service.settings.kv_transfer_dir
    if not directory:
        raise HTTPError(403, "prefixes can't be handed over here; the server was started without --kv-transfer-dir")
    if not FILE_NAME.fullmatch(wire.file):
        text = "file must be a name of up to 128 of A-Z a-z 0-9 . _ -, the first of them a letter, digit or _"
        raise InvalidRequest(text, param="file")
    path = Path(directory) / wire.file
    if path.is_symlink():
        raise InvalidRequest(f"{wire.file} is a link", param="file")
    answer = await service.client.control(command, {"path": str(path)})
    log.info("%s %s: %s", command, wire.file, answer)
    return json_response(answer)
