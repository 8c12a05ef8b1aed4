"""POST /v1/responses and what belongs to it: the response is made by the chat machinery and told in events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from engine.errors import InvalidRequest, OctavoError
from engine.validate import check_field
from server.body import convert, renaming
from server.chat import Chat, check_metadata, has_effort, prepare
from server.errors import reply_to
from server.logprobs import LogprobsWriter
from server.paging import page
from server.protocol import ChatRequest
from server.responses_events import Event, ResponseWriter, sse
from server.responses_store import Stored
from server.responses_wire import (
    CHAT_NAMES,
    EFFECTIVE,
    ResponsesRequest,
    chat_body,
    ignored_fields,
    input_items,
    messages_of,
)
from server.service import Service, exchange_of, json_response, service_of
from server.sse import EventStream

logger = logging.getLogger("octavo.http")

REFUSAL_WAIT_S = 0.25  # a background response that is refused within this time is refused with a status


async def create_response(request: Request) -> Response:
    """Answer an input, whole, as a stream of named events, or in the background."""
    service = service_of(request)
    wire, _ = await service.read(request, ResponsesRequest, EFFECTIVE)
    service.require_model(wire.model)
    _check(wire)
    exchange_of(request).ignores(*ignored_fields(wire, has_effort(service)))
    key = _key(request)
    items = input_items(wire.input)
    messages = _history(service, wire, key) + messages_of(items, lambda id: service.responses.find_item(id, key))
    raw = chat_body(wire, messages)
    with renaming(CHAT_NAMES):
        chat_wire = convert(raw, ChatRequest)
        if wire.background:
            return await _in_background(service, request, wire, chat_wire, raw, Stored({}, items, messages, key))
        chat = await prepare(service, request, chat_wire, raw, "resp_")
    work = _Work(service, wire, chat, Stored({}, items, messages, key))
    if wire.stream:
        return EventStream(
            work.events(),
            keep_alive_s=service.settings.keep_alive_s,
            on_close=chat.run.close,
            headers=chat.run.timing_headers(),
        )
    return json_response(await chat.run.unless_disconnected(work.whole()), chat.run.timing_headers())


def _check(wire: ResponsesRequest) -> None:
    if wire.conversation is not None:
        raise InvalidRequest("conversation is not supported; use previous_response_id", param="conversation")
    if wire.prompt is not None:
        raise InvalidRequest("prompt (a hosted template) is not supported; use instructions and input", param="prompt")
    if not wire.input:
        raise InvalidRequest("input is empty", param="input")
    if wire.stream_options is not None and not wire.stream:
        raise InvalidRequest("stream_options is only allowed with stream=true", param="stream_options")
    if wire.max_output_tokens is not None:
        check_field("max_output_tokens", wire.max_output_tokens)
    if wire.metadata is not None:
        check_metadata(wire.metadata)
    if wire.background and wire.store is False:
        raise InvalidRequest("a background response must be stored: store can't be false", param="store")


def _key(request: Request) -> str:
    key = exchange_of(request).key
    return key.label if key is not None else ""


def _history(service: Service, wire: ResponsesRequest, key: str) -> list[dict[str, Any]]:
    """The conversation that `previous_response_id` names."""
    if wire.previous_response_id is None:
        return []
    before = service.responses.get(wire.previous_response_id, key, "previous_response_id")
    if before.task is not None:
        raise InvalidRequest("the previous response is still in progress", param="previous_response_id")
    return before.messages


def _body(wire: ResponsesRequest, id: str, status: str) -> dict[str, Any]:
    """The response before anything was generated."""
    format = wire.text.format if wire.text is not None and wire.text.format is not None else {"type": "text"}
    reasoning = wire.reasoning
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "background": bool(wire.background),
        "error": None,
        "incomplete_details": None,
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "max_tool_calls": wire.max_tool_calls,
        "metadata": wire.metadata or {},
        "model": wire.model,
        "output": [],
        "parallel_tool_calls": wire.parallel_tool_calls is not False,
        "previous_response_id": wire.previous_response_id,
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "service_tier": "default",
        "store": wire.store is not False,
        "temperature": wire.temperature if wire.temperature is not None else 1.0,
        "text": {"format": format},
        "tool_choice": wire.tool_choice if wire.tool_choice is not None else "auto",
        "tools": wire.tools or [],
        "top_logprobs": wire.top_logprobs or 0,
        "top_p": wire.top_p if wire.top_p is not None else 1.0,
        "truncation": wire.truncation or "disabled",
        "usage": None,
        "user": wire.user,
    }


class _Work:
    """One response, from its first token to its place in the store."""

    def __init__(self, service: Service, wire: ResponsesRequest, chat: Chat, stored: Stored) -> None:
        self._service = service
        self._chat = chat
        self._stored = stored
        self._keep = wire.store is not False
        params = chat.generation.request.params
        body = stored.body or _body(wire, chat.id, "in_progress")
        if wire.temperature is None:
            body["temperature"] = params.temperature
        if wire.top_p is None:
            body["top_p"] = params.top_p
        stored.body = body
        self.writer = ResponseWriter(body, LogprobsWriter(service.tokenizer), params.logprobs)

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self._stored.body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. What goes wrong on the way is told by the last one, `response.failed`."""
        try:
            async for event in self._events():
                yield sse(event)
        except OctavoError as error:
            for event in self.fail(error):
                yield sse(event)

    async def _events(self) -> AsyncGenerator[Event, None]:
        for event in self.writer.begin():
            yield event
        finish: str | None = None
        async for piece in self._chat.pieces():
            for event in self.writer.piece(piece):
                yield event
            finish = piece.finish or finish
        cut = finish == "length"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {}
        last = list(self.writer.end("incomplete" if cut else "completed", usage=self._usage(), **details))
        self._save()
        for event in last:
            yield event

    def fail(self, error: BaseException) -> list[Event]:
        return list(self.writer.end("failed", error=_failure(error), usage=self._usage()))

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.run.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _save(self) -> None:
        stored = self._stored
        stored.messages = stored.messages + messages_of(stored.body["output"], lambda id: None)
        if self._keep:
            self._service.responses.put(stored)


def _failure(error: BaseException) -> dict[str, str]:
    reply = reply_to(error)
    return {"code": reply.code or "server_error", "message": reply.message}


# ---------------------------------------------------------------- in the background


async def _in_background(
    service: Service,
    request: Request,
    wire: ResponsesRequest,
    chat_wire: ChatRequest,
    raw: dict[str, Any],
    stored: Stored,
) -> Response:
    """Answer at once; the work goes on without the client. What is refused quickly is still refused."""
    detached = Request(request.scope, _never)
    preparing = asyncio.ensure_future(prepare(service, detached, chat_wire, raw, "resp_"))
    await asyncio.wait({preparing}, timeout=REFUSAL_WAIT_S)
    if preparing.done() and preparing.exception() is not None:
        preparing.result()
    id = preparing.result().id if preparing.done() else "resp_" + exchange_of(request).id
    stored.body = _body(wire, id, "queued")
    stored.task = asyncio.ensure_future(_work_on(service, wire, preparing, stored))
    service.responses.put(stored)
    await asyncio.sleep(0)  # a task that is cancelled before its first step never learns of it
    if wire.stream:
        return _follow(service, stored, -1)
    return json_response(stored.body)


async def _work_on(service: Service, wire: ResponsesRequest, preparing: asyncio.Future[Chat], stored: Stored) -> None:
    writer = ResponseWriter(stored.body, LogprobsWriter(service.tokenizer), None)
    chat: Chat | None = None
    try:
        with renaming(CHAT_NAMES):
            chat = await preparing
        work = _Work(service, wire, chat, stored)
        writer = work.writer
        async for event in work.events():
            stored.add_events([event])
    except asyncio.CancelledError:
        preparing.cancel()
        stored.add_events(map(sse, writer.end("cancelled")))
    except Exception as error:
        if not isinstance(error, OctavoError):
            logger.error("a background response failed", exc_info=error)
        stored.add_events(map(sse, writer.end("failed", error=_failure(error))))
    finally:
        stored.task = None
        stored.add_events(())
        if chat is not None:
            await chat.run.close()


async def _never() -> Message:
    """A client that doesn't leave."""
    await asyncio.Event().wait()
    raise AssertionError("an event that nobody sets was set")


def _follow(service: Service, stored: Stored, after: int) -> Response:
    return EventStream(stored.follow(after), keep_alive_s=service.settings.keep_alive_s, on_close=_nothing)


async def _nothing() -> None:
    """The work of a background response goes on without its readers."""


# ---------------------------------------------------------------- stored responses


async def get_response(request: Request) -> Response:
    """A stored response; `?stream=true&starting_after=N` follows one that was made in the background."""
    service = service_of(request)
    stored = service.responses.get(request.path_params["id"], _key(request))
    if request.query_params.get("stream") == "true":
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal():
            raise InvalidRequest(f"starting_after must be an integer, got {after[:40]!r}", param="starting_after")
        if not stored.body["background"]:
            raise InvalidRequest("only a background response can be streamed again", param="stream")
        return _follow(service, stored, max(int(after), -1))
    return json_response(stored.body)


async def delete_response(request: Request) -> Response:
    """Forget a stored response."""
    service = service_of(request)
    id = request.path_params["id"]
    service.responses.delete(id, _key(request))
    return json_response({"id": id, "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """End a background response; it keeps what it has."""
    service = service_of(request)
    stored = service.responses.get(request.path_params["id"], _key(request))
    if not stored.body["background"]:
        raise InvalidRequest("only a background response can be cancelled")
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.gather(stored.task, return_exceptions=True)
    return json_response(stored.body)


async def list_input_items(request: Request) -> Response:
    """The input items of a stored response, newest first unless `order=asc`, in pages."""
    service = service_of(request)
    items = service.responses.get(request.path_params["id"], _key(request)).input
    return json_response(page(items, request))
