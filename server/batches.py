"""/v1/batches: many requests from a file, done below interactive traffic."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from server.batch_runner import BatchRunner
from server.chat import check_metadata
from server.files import key_of, store_of
from server.paging import page
from server.service import json_response, service_of

WINDOW_S = 24 * 3600


class BatchRequest(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: Any = None


def runner_of(request: Request) -> BatchRunner:
    store_of(request)
    runner: BatchRunner = request.app.state.batches
    return runner


async def create_batch(request: Request) -> Response:
    """Begin a batch over an uploaded file."""
    runner, store = runner_of(request), store_of(request)
    wire, _ = await service_of(request).read(request, BatchRequest, frozenset({"metadata"}))
    key = key_of(request)
    if wire.endpoint not in runner.endpoints:
        raise InvalidRequest(f"endpoint must be one of {', '.join(runner.endpoints)}", param="endpoint")
    if wire.completion_window != "24h":
        raise InvalidRequest("completion_window must be '24h'", param="completion_window")
    if wire.metadata is not None:
        check_metadata(wire.metadata)
    if wire.output_expires_after is not None:
        raise InvalidRequest(
            "output_expires_after is not supported: files stay until deleted", param="output_expires_after"
        )
    file = store.files.get(wire.input_file_id, key, "input_file_id")
    if file["purpose"] != "batch":
        raise InvalidRequest(f"the file's purpose is {file['purpose']}, it must be batch", param="input_file_id")
    now = int(time.time())
    stages = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    record = {
        "id": store.batches.new_id(),
        "object": "batch",
        "endpoint": wire.endpoint,
        "errors": None,
        "input_file_id": wire.input_file_id,
        "completion_window": wire.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **{f"{stage}_at": None for stage in stages},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": wire.metadata,
    }
    store.batches.put(record, key)
    runner.start(record, key)
    return json_response(record)


async def list_batches(request: Request) -> Response:
    """The batches of this key, newest first, in pages."""
    runner = runner_of(request)
    records = [runner.current(record) for record in store_of(request).batches.all(key_of(request))]
    return json_response(page(records, request))


async def get_batch(request: Request) -> Response:
    """A batch and its progress."""
    record = store_of(request).batches.get(request.path_params["id"], key_of(request))
    return json_response(runner_of(request).current(record))


async def cancel_batch(request: Request) -> Response:
    """Begin no further line of a batch."""
    key = key_of(request)
    record = store_of(request).batches.get(request.path_params["id"], key)
    if record["status"] in ("completed", "failed", "expired"):
        raise InvalidRequest(f"the batch is {record['status']} and can't be cancelled")
    return json_response(runner_of(request).cancel(record, key))
