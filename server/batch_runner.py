"""Batches at work: each line of an input file is a request to a route of this server, below interactive traffic.

Progress is in the output files themselves: a line that has its answer is there, one that has not is done again
after a restart. What the server refuses for now (429, 503) is tried again later; any other answer is the line's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from server.body import parse_object
from server.errors import reply_to
from server.file_store import FileStore
from server.gate import Exchange
from server.settings import ApiKey, ServerSettings

logger = logging.getLogger("octavo.batches")

AT_ONCE = 16  # lines in the engine at once, over all batches
MAX_LINES = 50_000
MAX_ERRORS = 100  # of a bad input file
PRIORITY = 1_000  # added to each line's: lower runs first
RETRY_S = 1.0
RETRIED = (429, 499, 503)

Handler = Callable[[Request], Awaitable[Response]]


class BatchRunner:
    """One task per batch that is under way. `app` is what the handlers find as `request.app`."""

    def __init__(self, app: Any, store: FileStore, settings: ServerSettings, handlers: Mapping[str, Handler]) -> None:
        self._app = app
        self._store = store
        self._keys = {key.label: key for key in settings.api_keys}
        self._handlers = handlers
        self._places = asyncio.Semaphore(AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: dict[str, dict[str, Any]] = {}  # records under way, newer than on disk

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._handlers)

    def resume(self) -> None:
        """Take up what a restart interrupted. Needs a running loop."""
        for key, record in self._store.batches.everyones():
            if record["status"] in ("validating", "in_progress", "finalizing", "cancelling"):
                self.start(record, key)

    def start(self, record: dict[str, Any], key: str) -> None:
        if record["id"] not in self._tasks:
            self._live[record["id"]] = record
            self._tasks[record["id"]] = asyncio.ensure_future(self._run(record, key))

    def current(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with its progress up to now."""
        return self._live.get(record["id"], record)

    def cancel(self, record: dict[str, Any], key: str) -> dict[str, Any]:
        """Begin no further line; those in the engine end first."""
        record = self.current(record)
        if record["status"] in ("validating", "in_progress"):
            self._move(record, key, "cancelling")
            self.start(record, key)
        return record

    async def close(self) -> None:
        """Stop; what was under way is taken up by `resume` after a restart."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one batch

    async def _run(self, record: dict[str, Any], key: str) -> None:
        try:
            if record["status"] == "validating":
                await self._validate(record, key)
            if record["status"] in ("in_progress", "cancelling", "finalizing"):
                await self._work(record, key)
        except Exception as error:
            logger.error("batch %s failed", record["id"], exc_info=error)
            self._fail(record, key, [{"code": "server_error", "message": reply_to(error).message, "line": None}])
        self._live.pop(record["id"], None)
        self._tasks.pop(record["id"], None)

    def _move(self, record: dict[str, Any], key: str, status: str) -> None:
        record["status"] = status
        record[f"{status}_at"] = int(time.time())
        self._store.batches.put(record, key)

    def _fail(self, record: dict[str, Any], key: str, errors: list[dict[str, Any]]) -> None:
        data = [{"param": None, **error} for error in errors]
        record["errors"] = {"object": "list", "data": data}
        self._move(record, key, "failed")

    async def _validate(self, record: dict[str, Any], key: str) -> None:
        path = self._store.files.content(record["input_file_id"])
        if key and key not in self._keys:
            self._fail(record, key, [{"code": "invalid_key", "message": "its API key is gone", "line": None}])
            return
        total, errors = await asyncio.to_thread(_check_lines, path, record["endpoint"])
        if errors:
            self._fail(record, key, errors)
            return
        record["request_counts"]["total"] = total
        if record["status"] == "validating":
            self._move(record, key, "in_progress")

    async def _work(self, record: dict[str, Any], key: str) -> None:
        outputs = {name: self._store.batches.content(record["id"]).with_suffix(f".{name}") for name in ("out", "err")}
        handed_over = record["status"] == "finalizing" or record["output_file_id"] or record["error_file_id"]
        if not handed_over:
            await self._do_lines(record, key, outputs)
        self._finish(record, key, outputs)

    async def _do_lines(self, record: dict[str, Any], key: str, outputs: dict[str, Path]) -> None:
        """Every line that has no answer yet, as places become free."""
        done = {name: await asyncio.to_thread(_finished_ids, path) for name, path in outputs.items()}
        counts = record["request_counts"]
        counts["completed"], counts["failed"] = len(done["out"]), len(done["err"])
        finished = done["out"] | done["err"]
        lines = _lines(self._store.files.content(record["input_file_id"]))
        with outputs["out"].open("ab") as good, outputs["err"].open("ab") as bad:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    if line["custom_id"] in finished:
                        continue
                    await self._places.acquire()
                    if _is_over(record):
                        self._places.release()
                        break
                    task = group.create_task(self._line(record, line, self._keys.get(key), good, bad))
                    task.add_done_callback(lambda _: self._places.release())

    def _finish(self, record: dict[str, Any], key: str, outputs: dict[str, Path]) -> None:
        """Hand the outputs over as files. Each step may be the last before a crash: doing it again does no harm."""
        counts = record["request_counts"]
        cut = counts["completed"] + counts["failed"] < counts["total"]
        end = "completed" if not cut else "cancelled" if record["status"] == "cancelling" else "expired"
        for name, field in (("out", "output_file_id"), ("err", "error_file_id")):
            if record[field] is None and outputs[name].exists() and outputs[name].stat().st_size:
                record[field] = self._store.files.new_id()
        if end == "completed":
            self._move(record, key, "finalizing")
        else:
            self._store.batches.put(record, key)
        for name, field in (("out", "output_file_id"), ("err", "error_file_id")):
            id = record[field]
            if id is not None:
                if outputs[name].exists():
                    outputs[name].replace(self._store.files.content(id))
                kind = "output" if name == "out" else "error"
                self._store.add_file(id, f"{record['id']}_{kind}.jsonl", "batch_output", key)
            outputs[name].unlink(missing_ok=True)
        self._move(record, key, end)

    async def _line(
        self, record: dict[str, Any], line: dict[str, Any], key: ApiKey | None, good: Any, bad: Any
    ) -> None:
        status, id, body = await self._answer(record, line, key)
        if status is None:
            return  # cancelled or expired while it was being refused: it has no answer
        out = {
            "id": "batch_req_" + secrets.token_hex(12),
            "custom_id": line["custom_id"],
            "response": {"status_code": status, "request_id": id, "body": msgspec.Raw(body)},
            "error": None,
        }
        target, count = (good, "completed") if status < 400 else (bad, "failed")
        target.write(msgspec.json.encode(out) + b"\n")
        target.flush()
        record["request_counts"][count] += 1

    async def _answer(
        self, record: dict[str, Any], line: dict[str, Any], key: ApiKey | None
    ) -> tuple[int | None, str, bytes]:
        body = {**line["body"]}
        priority = body.get("priority")
        if priority is None or (isinstance(priority, int) and not isinstance(priority, bool)):
            body["priority"] = (priority or 0) + PRIORITY
        data = msgspec.json.encode(body)
        delay = RETRY_S
        while True:
            exchange = Exchange(secrets.token_hex(12))
            exchange.key = key
            status, answer = await self._call(record["endpoint"], data, exchange)
            if status not in RETRIED:
                return status, exchange.id, answer
            if _is_over(record):
                return None, exchange.id, answer
            await asyncio.sleep(delay)
            delay = min(2 * delay, 30.0)

    async def _call(self, endpoint: str, data: bytes, exchange: Exchange) -> tuple[int, bytes]:
        """The route's handler, as the gate would call it for this key."""
        messages: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()  # this client never leaves
            raise AssertionError("an event that nobody sets was set")

        scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._app,
            "octavo": exchange,
        }
        try:
            response = await self._handlers[endpoint](Request(scope, receive))
        except Exception as error:
            reply = reply_to(error)
            if reply.status == 500:
                logger.error("a line of a batch failed", exc_info=error)
            return reply.status, reply.body(endpoint)
        return response.status_code, bytes(response.body)


def _is_over(record: dict[str, Any]) -> bool:
    return bool(record["status"] == "cancelling" or time.time() > record["expires_at"])


# ---------------------------------------------------------------- lines


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield msgspec.json.decode(line)


def _check_lines(path: Path, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """(number of lines, what is wrong with them)."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    number = 0
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0, [{"code": "invalid_file", "message": "the input file is gone", "line": None}]
    with file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                problem = _problem(parse_object(line), endpoint, seen)
            except Exception as error:
                problem = ("invalid_json_line", reply_to(error).message)
            if problem is not None:
                errors.append({"code": problem[0], "message": problem[1], "line": number})
            if len(errors) >= MAX_ERRORS or number > MAX_LINES:
                break
    if number > MAX_LINES:
        errors.append({"code": "too_many_lines", "message": f"at most {MAX_LINES} lines are allowed", "line": None})
    if not seen and not errors:
        errors.append({"code": "empty_file", "message": "the input file has no requests", "line": None})
    return len(seen), errors


def _problem(line: dict[str, Any], endpoint: str, seen: set[str]) -> tuple[str, str] | None:
    id, body = line.get("custom_id"), line.get("body")
    if not isinstance(id, str) or not 1 <= len(id) <= 512:
        return "missing_required_parameter", "custom_id must be a string of 1 to 512 characters"
    if id in seen:
        return "duplicate_custom_id", f"the custom_id {id[:80]!r} comes twice"
    seen.add(id)
    if line.get("method") != "POST":
        return "invalid_method", "method must be POST"
    if line.get("url") != endpoint:
        return "mismatched_url", f"url must be the batch's endpoint, {endpoint}"
    if not isinstance(body, dict):
        return "invalid_request", "body must be an object"
    if body.get("stream") or body.get("background"):
        return "invalid_request", "a line of a batch can be neither streamed nor made in the background"
    return None


def _finished_ids(path: Path) -> set[str]:
    """custom_ids that have their line; a last line that a crash cut is cut off."""
    ids: set[str] = set()
    if not path.exists():
        return ids
    whole = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            ids.add(msgspec.json.decode(line)["custom_id"])
            whole += len(line)
    with path.open("ab") as file:
        file.truncate(whole)
    return ids
