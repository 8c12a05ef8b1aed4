"""The wire types of /v1/responses, and their translation to and from the messages of a chat.

A response is a chat in other words: its input items become chat messages, and what the chat machinery makes of
the model's text becomes output items.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from engine.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
_HOSTED_INCLUDES = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_HOSTED_ONLY = frozenset({"max_tool_calls", "context_management"})  # beside those of chat
CHAT_NAMES = {  # what a chat calls it: what it is called here
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


class Reasoning(msgspec.Struct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextConfig(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    background: bool | None = None
    prompt: Any = None
    # hosted only
    max_tool_calls: int | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    context_management: Any = None
    user: str | None = None
    # as in chat
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None
    timeout_ttft_s: float | None = None


EFFECTIVE = frozenset({"store", "metadata"})  # that have no effect in chat

_AS_IN_CHAT = (
    "temperature top_p frequency_penalty presence_penalty seed stop top_k min_p repetition_penalty min_tokens "
    "ignore_eos priority cache_salt chat_template_kwargs timeout_s timeout_ttft_s parallel_tool_calls stream"
).split()


def chat_body(wire: ResponsesRequest, history: list[dict[str, Any]]) -> dict[str, Any]:
    """The same request as the JSON of a chat. `history` = messages of the responses before, without instructions."""
    body: dict[str, Any] = {"model": wire.model}
    for name in _AS_IN_CHAT:
        value = getattr(wire, name)
        if value is not None:
            body[name] = value
    messages = [] if wire.instructions is None else [{"role": "system", "content": wire.instructions}]
    body["messages"] = messages + history
    if wire.max_output_tokens is not None:
        body["max_completion_tokens"] = wire.max_output_tokens
    if LOGPROBS in (wire.include or ()) or wire.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": wire.top_logprobs or 0}
    if wire.text is not None and wire.text.format is not None:
        body["response_format"] = _response_format(wire.text.format)
    if wire.tools:
        body["tools"] = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(wire.tools)]
    if wire.tool_choice is not None:
        body["tool_choice"] = _chat_choice(wire.tool_choice)
    if wire.reasoning is not None and wire.reasoning.effort is not None:
        body["reasoning_effort"] = wire.reasoning.effort
    if wire.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    return body


def ignored_fields(wire: ResponsesRequest, has_effort: bool) -> list[str]:
    """What has no effect here, beside the fields that have none in a chat. Raises InvalidRequest.

    `has_effort`: the model's chat template has a switch for the effort of reasoning.
    """
    unknown = [name for name in wire.include or () if name != LOGPROBS and name not in _HOSTED_INCLUDES]
    if unknown:
        raise InvalidRequest(f"include has {unknown[0][:80]!r}, which is nothing that a response has", param="include")
    ignored = [name for name in sorted(_HOSTED_ONLY) if getattr(wire, name) is not None]
    ignored += [f"include.{name}" for name in wire.include or () if name in _HOSTED_INCLUDES]
    if wire.reasoning is not None:
        summaries = ("summary", "generate_summary")
        unused = summaries if has_effort else ("effort", *summaries)
        ignored += [f"reasoning.{name}" for name in unused if getattr(wire.reasoning, name) is not None]
    if wire.text is not None and wire.text.verbosity is not None:
        ignored.append("text.verbosity")
    return ignored


def _response_format(format: dict[str, Any]) -> dict[str, Any]:
    if format.get("type") != "json_schema":
        return format
    schema = {key: format[key] for key in ("name", "description", "schema", "strict") if key in format}
    return {"type": "json_schema", "json_schema": schema}


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    match tool.get("type"):
        case "function" | "custom" as kind:
            return {"type": kind, kind: {key: value for key, value in tool.items() if key != "type"}}
        case other:
            raise InvalidRequest(
                f"{where}.type {str(other)[:60]!r} is not available here: tools are functions or custom tools",
                param=where,
            )


def _chat_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    match choice:
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            return {"type": kind, kind: {"name": name}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            listed = [
                {"type": t["type"], t["type"]: {"name": t.get("name")}}
                if isinstance(t, dict) and t.get("type") in ("function", "custom")
                else t
                for t in tools
            ]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}
    return choice


# ---------------------------------------------------------------- items to messages


def input_items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as items with ids, as `GET .../input_items` lists them."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    items = []
    for item in given:
        kind = item.get("type") or ("message" if "role" in item else "unknown")
        content = item.get("content")
        if kind == "message" and isinstance(content, str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            item = {**item, "content": [{"type": part, "text": content}]}
        items.append({"id": new_item_id(kind), **item, "type": kind})
    return items


_PREFIX = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
}


def new_item_id(kind: str) -> str:
    return _PREFIX.get(kind, "item_") + secrets.token_hex(16)


def messages_of(items: list[dict[str, Any]], find: Callable[[str], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Chat messages of input or output items. `find` looks up the item that an `item_reference` names.

    Calls and the text before them are one assistant message. Reasoning is not sent back to the model.
    """
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        if item["type"] == "item_reference":
            found = find(str(item.get("id")))
            if found is None:
                raise InvalidRequest(
                    f"{where} names the item {str(item.get('id'))[:80]!r}, which is not stored", param=where
                )
            item = found
        match item["type"]:
            case "message":
                messages.append({"role": item.get("role"), "content": _text_of(item.get("content"), where)})
            case "function_call":
                call = {"name": item.get("name"), "arguments": item.get("arguments")}
                _add_call(messages, {"id": item.get("call_id"), "type": "function", "function": call})
            case "custom_tool_call":
                call = {"name": item.get("name"), "input": item.get("input")}
                _add_call(messages, {"id": item.get("call_id"), "type": "custom", "custom": call})
            case "function_call_output" | "custom_tool_call_output":
                content = _text_of(item.get("output"), where)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "reasoning":
                pass
            case other:
                raise InvalidRequest(f"{where}.type {str(other)[:60]!r} is not supported", param=f"{where}.type")
    return messages


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text_of(content: Any, where: str) -> Any:
    """Text parts as one string; anything else is left to the checks of chat messages."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        match part:
            case {"type": "input_text" | "output_text" | "text" | "reasoning_text", "text": str(text)}:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case {"type": "input_image" | "input_file" | "input_audio" as kind}:
                raise InvalidRequest(f"{where} has a part of type {kind}; this model reads text only", param=where)
            case _:
                raise InvalidRequest(f"{where} has a part that is no input_text or output_text", param=where)
    return "\n".join(texts)
