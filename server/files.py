"""/v1/files: uploads for batches and what batches put out, in the data directory."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from engine.errors import InvalidRequest, NotFound
from server.errors import HTTPError
from server.file_store import FileStore
from server.paging import page
from server.service import exchange_of, json_response, service_of

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")


def store_of(request: Request) -> FileStore:
    """Raises NotFound where the server has no data directory."""
    store = service_of(request).store
    if store is None:
        raise NotFound("this server keeps no files and batches; start it with --data-dir DIR")
    return store


def key_of(request: Request) -> str:
    key = exchange_of(request).key
    return key.label if key is not None else ""


async def upload_file(request: Request) -> Response:
    """Store an uploaded file (multipart/form-data with `file` and `purpose`)."""
    store = store_of(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise HTTPError(415, f"the body must be multipart/form-data, not {kind[:100] or 'nothing'}")
    async with request.form(max_files=1, max_fields=16) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidRequest("file is required, as a part with a file name", param="file")
        if purpose not in PURPOSES:
            raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        id = store.files.new_id()
        await asyncio.to_thread(_write, file, store.files.content(id))
        name = (file.filename or "file").replace("\\", "/").rpartition("/")[2][:255]
        return json_response(store.add_file(id, name, str(purpose), key_of(request)))


def _write(file: UploadFile, path: Path) -> None:
    with path.open("wb") as out:
        shutil.copyfileobj(file.file, out)


async def list_files(request: Request) -> Response:
    """The files of this key, newest first, in pages; `?purpose=` filters."""
    records = store_of(request).files.all(key_of(request))
    purpose = request.query_params.get("purpose")
    if purpose is not None:
        records = [record for record in records if record["purpose"] == purpose]
    return json_response(page(records, request, limit=10_000))


async def get_file(request: Request) -> Response:
    """What is known of a file."""
    return json_response(store_of(request).files.get(request.path_params["id"], key_of(request)))


async def get_file_content(request: Request) -> Response:
    """The bytes of a file."""
    store = store_of(request)
    record = store.files.get(request.path_params["id"], key_of(request))
    return FileResponse(
        store.files.content(record["id"]), media_type="application/octet-stream", filename=record["filename"]
    )


async def delete_file(request: Request) -> Response:
    """Delete a file for good."""
    id = request.path_params["id"]
    store_of(request).files.delete(id, key_of(request))
    return json_response({"id": id, "object": "file", "deleted": True})
