"""The wire types of /v1/messages (Anthropic's form), and their translation to a chat."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest

Block = dict[str, Any]


class InputMessage(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolDefinition(msgspec.Struct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[InputMessage]
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def chat_body(wire: CountTokensRequest, thinking_switch: bool) -> dict[str, Any]:
    """The same request as the JSON of a chat. `thinking_switch`: the chat template can switch thinking."""
    messages: list[dict[str, Any]] = []
    if wire.system is not None:
        messages.append({"role": "system", "content": _texts(wire.system, "system")})
    for i, message in enumerate(wire.messages):
        messages += _chat_messages(message, f"messages[{i}].content")
    body: dict[str, Any] = {"model": wire.model, "messages": messages}
    if wire.tools:
        body["tools"] = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(wire.tools)]
    if wire.tool_choice is not None:
        body["tool_choice"] = _chat_choice(wire.tool_choice)
        body["parallel_tool_calls"] = not wire.tool_choice.disable_parallel_tool_use
    if wire.thinking is not None and thinking_switch:
        body["chat_template_kwargs"] = {"enable_thinking": wire.thinking.type != "disabled"}
    if isinstance(wire, MessagesRequest):
        body["max_tokens"] = wire.max_tokens
        for name in ("stream", "temperature", "top_k", "top_p"):
            if getattr(wire, name) is not None:
                body[name] = getattr(wire, name)
        if wire.stop_sequences:
            body["stop"] = wire.stop_sequences
    return body


def _chat_messages(message: InputMessage, where: str) -> list[dict[str, Any]]:
    """One message; results of calls become messages of their own, before the text next to them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(id), "name": str(name)} if message.role == "assistant":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case {"type": "tool_result", "tool_use_id": str(id)} if message.role == "user":
                content = _texts(block.get("content") or "", where)
                content = f"Error: {content}" if block.get("is_error") else content
                results.append({"role": "tool", "tool_call_id": id, "content": content})
            case {"type": "thinking" | "redacted_thinking"} if message.role == "assistant":
                pass  # what a model thought in earlier turns is not shown to it again
            case _:
                kind = str(block.get("type"))[:60]
                raise InvalidRequest(
                    f"{where} has a {message.role} block {kind!r} that can't be read here", param=where
                )
    if message.role == "assistant":
        said: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
        return [said | ({"tool_calls": calls} if calls else {})]
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [block.get("text") for block in content if isinstance(block, dict) and block.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    raise InvalidRequest(f"{where} must be a text or a list of text blocks; this model reads text only", param=where)


def _chat_tool(tool: ToolDefinition, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{where}.type {tool.type[:60]!r} is not available here", param=where)
    function: dict[str, Any] = {"name": tool.name}
    for name, value in (("description", tool.description), ("parameters", tool.input_schema), ("strict", tool.strict)):
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _chat_choice(choice: ToolChoice) -> str | dict[str, Any]:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise InvalidRequest("tool_choice of type 'tool' needs a name", param="tool_choice.name")
            return {"type": "function", "function": {"name": choice.name}}
        case other:
            return other
