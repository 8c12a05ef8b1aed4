"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequest
from engine.validate import check_token_ids
from server.chat import check_messages, plan_output, render
from server.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from server.service import Service, json_response, service_of

MAX_CHARACTERS = 1 << 20  # the tokenizer takes about a hundred bytes of memory for each


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a chat, as a generation would see them."""
    service = service_of(request)
    wire, raw = await service.read(request, TokenizeRequest)
    if wire.model is not None:
        service.require_model(wire.model)
    if (wire.prompt is None) == (wire.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if wire.prompt is not None:
        if len(wire.prompt) > MAX_CHARACTERS:
            raise InvalidRequest(
                f"prompt has {len(wire.prompt)} characters, at most {MAX_CHARACTERS} are tokenised at once",
                param="prompt",
            )
        tokens = await service.encode(wire.prompt, add_special_tokens=wire.add_special_tokens is not False)
    else:
        tokens = await _chat_tokens(service, wire, raw)
    body: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": service.limits.max_model_len}
    if wire.return_token_strs:
        body["token_strs"] = [service.tokenizer.token_text(token) for token in tokens]
    return json_response(body)


async def _chat_tokens(service: Service, wire: TokenizeRequest, raw: dict[str, Any]) -> list[int]:
    chat = ChatRequest(
        model=service.model,
        messages=wire.messages or [],
        tools=wire.tools,
        add_special_tokens=wire.add_special_tokens,
        add_generation_prompt=wire.add_generation_prompt,
        continue_final_message=wire.continue_final_message,
        chat_template_kwargs=wire.chat_template_kwargs,
    )
    messages = check_messages(chat.messages, raw["messages"])
    return await render(service, chat, messages, (await plan_output(service, chat)).tools, fits=False)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = service_of(request)
    wire, _ = await service.read(request, DetokenizeRequest)
    if wire.model is not None:
        service.require_model(wire.model)
    check_token_ids("tokens", wire.tokens, service.tokenizer.vocab_size)
    data = b"".join([service.tokenizer.token_bytes(token) for token in wire.tokens])
    return json_response({"prompt": data.decode("utf-8", "replace")})
