"""POST /v1/chat/completions, and the chat machinery that the responses and messages routes share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from engine.text.chat import ChatTemplate
from engine.validate import RANGES, check_field, check_range
from server import tools
from server.chunks import Chunks
from server.generate import Entry, Generation
from server.logprobs import LogprobsWriter
from server.output import OutputDelta, OutputParser, OutputPlan
from server.protocol import AssistantMessage, ChatRequest, Message, TextPart, UserMessage
from server.run import Run, begin
from server.sampling import check_stream_options, constraint_of, sampling_params, text_options, truncated
from server.service import Service, exchange_of, json_response, new_ids, service_of, usage_object
from server.sse import EventStream
from server.tools import plan_for_prompt

encode = msgspec.json.Encoder().encode

MAX_MESSAGES = 2048
METADATA_PAIRS, METADATA_KEY, METADATA_VALUE = 16, 64, 512  # entries, characters
QUICK_MESSAGES = 32  # rendered in well under a millisecond by any template of a model
NULL = b"null"


# ---------------------------------------------------------------- from the wire to a run


def check_messages(messages: list[Message], raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages for the template: checked by role, `developer` in the place of `system`."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must have 1 to {MAX_MESSAGES} entries, got {len(messages)}", param="messages")
    plain = []
    for i, (message, given) in enumerate(zip(messages, raw, strict=True)):
        if isinstance(message, AssistantMessage):
            has_more = message.tool_calls or message.function_call or message.refusal or message.audio
            if message.content is None and not has_more:
                raise InvalidRequest(
                    f"messages[{i}].content is required where there are no tool_calls", param=f"messages[{i}].content"
                )
        if isinstance(message, UserMessage) and isinstance(message.content, list):
            for part in message.content:
                if not isinstance(part, TextPart):
                    kind = type(part).__struct_config__.tag
                    raise InvalidRequest(
                        f"messages[{i}] has a part of type {kind}; this model reads text only", param=f"messages[{i}]"
                    )
        plain.append({**given, "role": "system"} if given["role"] == "developer" else given)
    return plain


EFFORT_SWITCHES = frozenset({"reasoning_effort", "enable_thinking"})  # of templates


def template_switches(template: ChatTemplate, wire: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. One that the template doesn't know is refused: it would do nothing."""
    known = template.template_variables()
    switches = dict(wire.chat_template_kwargs or {})
    for name in switches:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise InvalidRequest(
                f"chat_template_kwargs.{name[:64]} is no switch of this model's chat template (it has: {listed})",
                param="chat_template_kwargs",
            )
    if wire.reasoning_effort is not None:
        if "reasoning_effort" in known:
            switches.setdefault("reasoning_effort", wire.reasoning_effort)
        if "enable_thinking" in known:
            switches.setdefault("enable_thinking", wire.reasoning_effort != "none")
    return switches


def has_effort(service: Service) -> bool:
    """Whether the model's chat template has a switch for `reasoning_effort`."""
    return not EFFORT_SWITCHES.isdisjoint(service.template.template_variables())


async def render(
    service: Service,
    wire: ChatRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    fits: bool = True,
) -> list[int]:
    """Prompt tokens of a chat, which must fit the context where `fits` says so.

    What may take long is done on a thread: it must not hold up the streams.
    """
    if wire.continue_final_message and wire.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    template = service.template
    if wire.chat_template is not None:
        if not service.settings.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template in a request is not allowed here (--trust-request-chat-template)", param="chat_template"
            )
        template = await asyncio.to_thread(service.request_template, wire.chat_template)
    draw = partial(
        template.render,
        messages,
        tools,
        add_generation_prompt=wire.add_generation_prompt is not False,
        continue_final_message=bool(wire.continue_final_message),
        **template_switches(template, wire),
    )
    quick = len(messages) <= QUICK_MESSAGES and not tools and template is service.template
    text = draw() if quick else await asyncio.to_thread(draw)
    field = "messages" if fits and wire.truncate_prompt_tokens is None else ""
    return await service.encode(text, add_special_tokens=bool(wire.add_special_tokens), fits=field)


@dataclass
class Chat:
    """A chat that was admitted: its run, and the parsers that split its text."""

    id: str
    run: Run
    generation: Generation
    parsers: list[OutputParser]
    plan: OutputPlan
    include_reasoning: bool
    calling: set[int] = field(default_factory=set)  # choices that have begun a call

    async def pieces(self) -> AsyncGenerator[ChatPiece, None]:
        """What becomes visible, until each choice has had its piece with `finish`."""
        async for _, piece in self.run.pieces():
            parser = self.parsers[piece.choice]
            deltas = parser.push(piece.text) if piece.text else []
            if piece.finish is not None:
                deltas += parser.finish()
            thinks = False
            for delta in deltas:
                if delta.reasoning:
                    thinks = True
                elif delta.call_index >= 0:
                    self.calling.add(piece.choice)
            if thinks:
                if not any(delta.content for delta in deltas):
                    self.generation.usage.reasoning_tokens += len(piece.tokens)
                if not self.include_reasoning:
                    deltas = [delta for delta in deltas if not delta.reasoning]
            finish = piece.finish
            if finish == "stop" and piece.choice in self.calling and not self.plan.named:
                finish = "tool_calls"
            yield ChatPiece(piece.choice, deltas, piece.tokens, piece.entries, finish, piece.stop_reason)


class ChatPiece(msgspec.Struct, gc=False):
    """A `generate.Piece` after the parser; `finish` is OpenAI's finish_reason."""

    choice: int
    deltas: list[OutputDelta]
    tokens: tuple[int, ...]
    entries: tuple[Entry, ...]
    finish: str | None
    stop_reason: str | int | None


async def prepare(service: Service, request: Request, wire: ChatRequest, raw: dict[str, Any], prefix: str) -> Chat:
    """Check `wire` (`raw` is the same as plain JSON), render, submit; what can be refused is refused here."""
    service.require_model(wire.model)
    _check_fields(wire)
    messages = check_messages(wire.messages, raw["messages"])
    plan = await plan_output(service, wire)
    name, limit = "max_tokens", wire.max_tokens
    if wire.max_completion_tokens is not None:
        name, limit = "max_completion_tokens", wire.max_completion_tokens
    if limit is not None:
        check_range(name, limit, *RANGES["max_completion_tokens"])
    if wire.top_logprobs is not None:
        check_field("top_logprobs", wire.top_logprobs)
    options = text_options(wire, service.limits)
    if plan.special_tokens:
        options = replace(options, skip_special_tokens=False)
    prompt = truncated(await render(service, wire, messages, plan.tools), wire, service.limits, limit)
    plan = plan_for_prompt(service.syntax, plan, service.tokenizer.decode(prompt[-8:]))
    params = sampling_params(
        wire,
        service.tokenizer,
        service.defaults,
        max_tokens=service.defaults.max_tokens if limit is None else limit,
        logprobs=(wire.top_logprobs or 0) if wire.logprobs else None,
        grammar=plan.grammar,
    )
    shown, (engine_id,) = new_ids(prefix, wire, 1)
    engine_request = service.add_request(
        exchange_of(request),
        wire,
        engine_id,
        prompt,
        params,
        prompt_field="messages",
        max_tokens_policy="clamp" if limit is None else service.settings.max_tokens_policy,
    )
    generation = service.generation(engine_request, options)
    parsers = [plan.parser() for _ in range(engine_request.params.n)]
    run = await begin(service, request, [generation])
    return Chat(shown, run, generation, parsers, plan, wire.include_reasoning is not False)


def _check_fields(wire: ChatRequest) -> None:
    check_stream_options(wire)
    if wire.functions is not None or wire.function_call is not None:
        name = "functions" if wire.functions is not None else "function_call"
        raise InvalidRequest(f"{name} is deprecated and not supported; use tools and tool_choice", param=name)
    if wire.top_logprobs is not None and not wire.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if wire.modalities is not None and wire.modalities != ["text"]:
        raise InvalidRequest("modalities may only be ['text']: this model writes text", param="modalities")
    if wire.metadata is not None:
        check_metadata(wire.metadata)
    if wire.stream and wire.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs is not available with stream=true", param="prompt_logprobs")


def check_metadata(metadata: dict[str, str]) -> None:
    """Few and short pairs, as the hosted API has them."""
    if len(metadata) > METADATA_PAIRS or any(
        len(key) > METADATA_KEY or len(value) > METADATA_VALUE for key, value in metadata.items()
    ):
        raise InvalidRequest(
            f"metadata may have {METADATA_PAIRS} pairs, with keys of {METADATA_KEY} and values of {METADATA_VALUE} "
            "characters",
            param="metadata",
        )


async def plan_output(service: Service, wire: ChatRequest) -> OutputPlan:
    """What tools, response_format and the model's reasoning make of this chat."""
    return await tools.plan_output(
        service.syntax, wire.tools, wire.tool_choice, wire.parallel_tool_calls, constraint_of(wire)
    )


# ---------------------------------------------------------------- the route


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    service = service_of(request)
    wire, raw = await service.read(request, ChatRequest)
    if wire.reasoning_effort is not None and wire.chat_template is None and not has_effort(service):
        exchange_of(request).ignores("reasoning_effort")
    chat = await prepare(service, request, wire, raw, "chatcmpl-")
    writer = _Writer(service, wire, chat, _echoed(wire))
    if wire.stream:
        return EventStream(
            writer.events(),
            keep_alive_s=service.settings.keep_alive_s,
            on_close=chat.run.close,
            headers=chat.run.timing_headers(),
        )
    body = await chat.run.unless_disconnected(writer.whole())
    return json_response(body, chat.run.timing_headers())


def _echoed(wire: ChatRequest) -> str:
    """vLLM's `echo`: the text of the last message when it is the assistant's."""
    last = wire.messages[-1]
    if not wire.echo or not isinstance(last, AssistantMessage):
        return ""
    if isinstance(last.content, list):
        return "\n".join(part.text for part in last.content if isinstance(part, TextPart))
    return last.content or ""


class _Writer:
    """A chat as one object or as chunks."""

    def __init__(self, service: Service, wire: ChatRequest, chat: Chat, echo: str) -> None:
        self._wire = wire
        self._chat = chat
        self._echo = echo
        self._top = wire.top_logprobs or 0
        self._logprobs = LogprobsWriter(service.tokenizer, as_token_ids=bool(wire.return_tokens_as_token_ids))
        self._head = {
            "id": chat.id,
            "object": "chat.completion.chunk" if wire.stream else "chat.completion",
            "created": int(time.time()),
            "model": wire.model,
            "system_fingerprint": service.fingerprint,
        }

    # ---- streamed

    async def events(self) -> AsyncGenerator[bytes, None]:
        chunks = Chunks(self._head, self._wire.stream_options, self._chat.run)
        started = False
        async for piece in self._chat.pieces():
            bodies = self._piece(piece)
            if not started:  # the roles of all choices come with the first token
                started = True
                bodies = self._roles() + bodies
            if bodies:
                yield b"".join([chunks.choice(body) for body in bodies])
        yield chunks.end()

    def _roles(self) -> list[bytes]:
        n = len(self._chat.parsers)
        extra = b""
        if self._wire.return_token_ids:
            extra = b',"prompt_token_ids":' + encode(self._chat.generation.request.prompt)
        bodies = [_body(i, b'{"role":"assistant","content":""}', extra=extra) for i in range(n)]
        if self._echo:
            bodies += [_body(i, b'{"content":' + encode(self._echo) + b"}") for i in range(n)]
        return bodies

    def _piece(self, piece: ChatPiece) -> list[bytes]:
        logprobs = encode(self._logprobs.chat(piece.entries, self._top)) if piece.entries else NULL
        extra = b""
        if self._wire.return_token_ids and piece.tokens:
            extra = b',"token_ids":' + encode(piece.tokens)
        bodies = []
        for delta in piece.deltas:
            bodies.append(_body(piece.choice, _delta(delta), logprobs, extra=extra))
            logprobs, extra = NULL, b""
        if not piece.deltas and (logprobs is not NULL or extra):
            bodies.append(_body(piece.choice, b'{"content":""}', logprobs, extra=extra))
        if piece.finish is not None:
            reason = b',"stop_reason":' + encode(piece.stop_reason)
            bodies.append(_body(piece.choice, b"{}", finish=encode(piece.finish), extra=reason))
        return bodies

    # ---- whole

    async def whole(self) -> dict[str, Any]:
        n = len(self._chat.parsers)
        answers = [_Answer(self._echo) for _ in range(n)]
        async for piece in self._chat.pieces():
            answers[piece.choice].add(piece)
        body: dict[str, Any] = {**self._head, "choices": [self._choice(i, answer) for i, answer in enumerate(answers)]}
        body["usage"] = usage_object(self._chat.run.usage)
        generation = self._chat.generation
        if self._wire.return_token_ids:
            body["prompt_token_ids"] = generation.request.prompt
        if self._wire.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._logprobs.prompt(generation.request.prompt, generation.prompt_logprobs)
        return body

    def _choice(self, index: int, answer: _Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": answer.message(),
            "logprobs": self._logprobs.chat(answer.entries, self._top) if self._wire.logprobs else None,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
        }
        if self._wire.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice


def _body(index: int, delta: bytes, logprobs: bytes = NULL, finish: bytes = NULL, extra: bytes = b"") -> bytes:
    """The JSON of one chunk's choice."""
    return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}' % (index, delta, logprobs, finish, extra)


def _delta(delta: OutputDelta) -> bytes:
    if delta.content:
        return b'{"content":' + encode(delta.content) + b"}"
    if delta.reasoning:
        return b'{"reasoning_content":' + encode(delta.reasoning) + b"}"
    return b'{"tool_calls":[' + encode(call_delta(delta)) + b"]}"


def call_delta(delta: OutputDelta) -> dict[str, Any]:
    """One entry of `delta.tool_calls`: id, type and name only in the first of each call."""
    name, text = ("name", "input" if delta.call_kind == "custom" else "arguments")
    body: dict[str, Any] = {"index": delta.call_index}
    if delta.call_name:
        body |= {"id": delta.call_id, "type": delta.call_kind, delta.call_kind: {name: delta.call_name, text: ""}}
        body[delta.call_kind][text] = delta.arguments
    else:
        body[delta.call_kind] = {text: delta.arguments}
    return body


class _Answer:
    """One choice, put together."""

    def __init__(self, echo: str) -> None:
        self._content = [echo] if echo else []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}
        self.entries: list[Entry] = []
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, piece: ChatPiece) -> None:
        self.entries += piece.entries
        self.tokens += piece.tokens
        for delta in piece.deltas:
            if delta.content:
                self._content.append(delta.content)
            if delta.reasoning:
                self._reasoning.append(delta.reasoning)
            if delta.call_index >= 0:
                self._add_call(delta)
        if piece.finish is not None:
            self.finish, self.stop_reason = piece.finish, piece.stop_reason

    def _add_call(self, delta: OutputDelta) -> None:
        text = "input" if delta.call_kind == "custom" else "arguments"
        call = self._calls.get(delta.call_index)
        if call is None:
            call = {"id": delta.call_id, "type": delta.call_kind, delta.call_kind: {"name": delta.call_name, text: ""}}
            self._calls[delta.call_index] = call
        call[call["type"]][text] += delta.arguments

    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [self._calls[i] for i in sorted(self._calls)]
        return message
