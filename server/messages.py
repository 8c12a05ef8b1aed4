"""POST /v1/messages: a chat in Anthropic's form, which agent programs speak."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.validate import check_range
from server.body import convert, renaming
from server.chat import Chat, ChatPiece, check_messages, plan_output, prepare, render
from server.errors import reply_to
from server.messages_wire import CountTokensRequest, MessagesRequest, chat_body
from server.output import OutputDelta
from server.protocol import ChatRequest
from server.service import Service, exchange_of, json_response, service_of
from server.sse import EventStream

PING = b'event: ping\ndata: {"type":"ping"}\n\n'

Event = dict[str, Any]


async def create_message(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of named events."""
    service = service_of(request)
    wire, _ = await service.read(request, MessagesRequest)
    service.require_model(wire.model)
    check_range("max_tokens", wire.max_tokens, 1, float("inf"))
    raw, chat_wire = _as_chat(service, request, wire)
    with renaming({"stop": "stop_sequences"}):
        chat = await prepare(service, request, chat_wire, raw, "msg_")
    message = _Message(wire.model, chat)
    if wire.stream:
        return EventStream(
            message.stream(),
            keep_alive_s=service.settings.keep_alive_s,
            on_close=chat.run.close,
            headers=chat.run.timing_headers(),
            error_event=_error_event,
            ping=PING,
        )
    return json_response(await chat.run.unless_disconnected(message.whole()), chat.run.timing_headers())


async def count_tokens(request: Request) -> Response:
    """How many tokens a message's prompt has."""
    service = service_of(request)
    wire, _ = await service.read(request, CountTokensRequest)
    service.require_model(wire.model)
    raw, chat = _as_chat(service, request, wire)
    messages = check_messages(chat.messages, raw["messages"])
    tools = (await plan_output(service, chat)).tools
    return json_response({"input_tokens": len(await render(service, chat, messages, tools))})


def _as_chat(service: Service, request: Request, wire: CountTokensRequest) -> tuple[dict[str, Any], ChatRequest]:
    switch = "enable_thinking" in service.template.template_variables()
    if wire.thinking is not None and not switch:
        exchange_of(request).ignores("thinking")
    raw = chat_body(wire, switch)
    return raw, convert(raw, ChatRequest)


def _error_event(error: BaseException) -> bytes:
    return b"event: error\ndata: " + reply_to(error).body("/v1/messages") + b"\n\n"


class _Message:
    """The answer as content blocks that open, grow and close one after the other."""

    def __init__(self, model: str, chat: Chat) -> None:
        self._chat = chat
        self._open: dict[str, Any] | None = None
        self._arguments = ""
        self.body: dict[str, Any] = {
            "id": chat.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }

    async def whole(self) -> dict[str, Any]:
        async for _ in self._events():
            pass
        return self.body

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async for event in self._events():
            yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))

    async def _events(self) -> AsyncGenerator[Event, None]:
        self.body["usage"] = self._usage()
        yield {"type": "message_start", "message": {**self.body, "content": []}}
        async for piece in self._chat.pieces():
            for delta in piece.deltas:
                for event in self._delta(delta):
                    yield event
            if piece.finish is not None:
                self._end(piece)
        for event in self._close():
            yield event
        self.body["usage"] = self._usage()
        reason = {"stop_reason": self.body["stop_reason"], "stop_sequence": self.body["stop_sequence"]}
        yield {"type": "message_delta", "delta": reason, "usage": self.body["usage"]}
        yield {"type": "message_stop"}

    def _usage(self) -> dict[str, int]:
        """Anthropic counts the prompt tokens that came from a cache apart."""
        usage = self._chat.run.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _end(self, piece: ChatPiece) -> None:
        stopped_by = piece.stop_reason if isinstance(piece.stop_reason, str) else None
        if piece.finish == "length":
            reason = "max_tokens"
        elif self._chat.calling:
            reason = "tool_use"
        else:
            reason = "end_turn" if stopped_by is None else "stop_sequence"
        self.body["stop_reason"] = reason
        self.body["stop_sequence"] = stopped_by if reason == "stop_sequence" else None

    # ---- blocks

    def _delta(self, delta: OutputDelta) -> Iterator[Event]:
        if delta.content:
            yield from self._grow("text", "text", "text_delta", delta.content)
        if delta.reasoning:
            yield from self._grow("thinking", "thinking", "thinking_delta", delta.reasoning)
        if delta.call_name:
            yield from self._begin({"type": "tool_use", "id": delta.call_id, "name": delta.call_name, "input": {}})
        if delta.arguments:
            self._arguments += delta.arguments
            yield self._event(
                "content_block_delta", delta={"type": "input_json_delta", "partial_json": delta.arguments}
            )

    def _grow(self, kind: str, field: str, event: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin({"type": kind, field: ""} | ({"signature": ""} if kind == "thinking" else {}))
        assert self._open is not None
        self._open[field] += text
        yield self._event("content_block_delta", delta={"type": event, field: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.body["content"].append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def _close(self) -> Iterator[Event]:
        if self._open is None:
            return
        if self._open["type"] == "tool_use":
            self._open["input"] = _object(self._arguments)
            self._arguments = ""
        yield self._event("content_block_stop")
        self._open = None

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.body["content"]) - 1, **fields}


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; a call that the limit cut has none that could be read."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
