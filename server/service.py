"""What every route needs: the engine's client, the text tools, the limits and the books. One object per server."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from engine.api import AddRequest, SamplingParams
from engine.client import EngineClient
from engine.errors import ConfigError, InvalidRequest, NotFound
from engine.text.chat import ChatTemplate
from engine.text.generation import sampling_defaults
from engine.text.tokenizer import Tokenizer
from engine.validate import Limits, add_request
from server.auth import KeyLimits
from server.body import convert, ignored_fields, read_object, unknown_fields
from server.file_store import FileStore
from server.gate import Exchange
from server.generate import Generation, TextOptions, Usage
from server.metrics import Metrics
from server.parsers import OutputSyntax
from server.protocol import HOSTED_ONLY, GenerationRequest, refuse_unsupported
from server.responses_store import ResponseStore
from server.settings import ApiKey, ServerSettings
from server.traces import Traces

T = TypeVar("T", bound=msgspec.Struct)

_OFF_LOOP_CHARS = 20_000  # longer texts are tokenised on a thread: the loop has streams to serve
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Service:
    """Shared by all routes; `request.app.state.service`."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, template: ChatTemplate, settings: ServerSettings, version: str
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.settings = settings
        self.syntax = OutputSyntax.of(
            tokenizer, template, tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
        )
        self.defaults = sampling_defaults(tokenizer.generation_config if settings.generation_config else {})
        self.version = version
        self.created = int(time.time())
        self._fingerprint = ""
        self.model = settings.served_model_names[0]
        self.responses = ResponseStore()
        self.store = FileStore(settings.data_dir) if settings.data_dir else None
        self.key_limits = KeyLimits(settings.api_keys)
        self.traces = Traces(settings.otlp_endpoint, self.model, version, client) if settings.otlp_endpoint else None
        self.metrics = Metrics(client, self.model, {"version": version}, aliases=settings.vllm_metric_aliases)

    @property
    def limits(self) -> Limits:
        """Raises EngineDead while the model is being loaded."""
        return Limits.of(self.client.ready)

    @property
    def fingerprint(self) -> str:
        """Names what the output depends on beside the request: version, model, arithmetic and backend."""
        if not self._fingerprint:
            ready = self.client.ready
            text = f"{self.version} {ready.model} {ready.dtype} {ready.kv_dtype} {ready.backend}"
            self._fingerprint = "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._fingerprint

    def admit(self, key: ApiKey | None) -> None:
        """Raise what would refuse any request of `key` now (Overloaded, EngineDead), before its body is read."""
        self.client.admit(key.label if key else "")
        self.key_limits.check(key)

    def request_template(self, source: str) -> ChatTemplate:
        """A template that came with a request, where the operator allows that."""
        try:
            return ChatTemplate(source, special_tokens=self.tokenizer.special_tokens)
        except ConfigError as error:
            raise InvalidRequest(str(error), param="chat_template") from None

    def require_model(self, name: str) -> None:
        """Raise NotFound for a model that isn't served here."""
        if name not in self.settings.served_model_names and name not in self.client.adapters:
            raise NotFound(f"the model {name[:100]!r} is not served here", param="model", code="model_not_found")

    def adapter_of(self, name: str) -> str:
        """The LoRA adapter of that name, "" for the model itself."""
        return name if name in self.client.adapters else ""

    async def read(
        self, request: Request, kind: type[T], effective: frozenset[str] = frozenset()
    ) -> tuple[T, dict[str, Any]]:
        """The checked body and the same as plain JSON. Unknown and ineffective fields go to a response header.

        `effective`: names that have an effect here, though they have none in chat.
        """
        raw = await read_object(request)
        refuse_unsupported({name: raw[name] for name in unknown_fields(raw, kind)})
        wire = convert(raw, kind)
        without_effect = HOSTED_ONLY - effective
        ignored = [*ignored_fields(raw, wire), *(n for n in raw if n in without_effect and raw[n] is not None)]
        exchange_of(request).ignores(*ignored)
        return wire, raw

    async def encode(self, text: str, *, add_special_tokens: bool, fits: str = "") -> list[int]:
        """Token ids; long texts off the event loop.

        `fits`: the field that must fit the context. What can't is refused after the first part of the text: a
        tokenizer takes a hundred bytes of memory for each token of a body of many megabytes.
        """
        if len(text) < _OFF_LOOP_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self._encode_long, text, add_special_tokens, fits)

    async def encode_start(self, text: str, count: int) -> list[int]:
        """See `Tokenizer.encode_start`; long texts off the event loop."""
        if len(text) < _OFF_LOOP_CHARS:
            return self.tokenizer.encode_start(text, count)
        return await asyncio.to_thread(self.tokenizer.encode_start, text, count)

    def _encode_long(self, text: str, add_special_tokens: bool, fits: str) -> list[int]:
        context = self.limits.max_model_len
        size = 8 * context
        while fits and size < len(text):
            count = len(self.tokenizer.encode(text[:size], add_special_tokens=False))
            if count > context + 16:  # the cut may split the last few tokens
                raise InvalidRequest(
                    f"{fits} has more than {count - 16} tokens; the context has {context}",
                    param=fits,
                    code="context_length_exceeded",
                )
            size *= 2
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def add_request(
        self,
        exchange: Exchange,
        wire: GenerationRequest,
        id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        prompt_field: str,
        max_tokens_policy: Literal["clamp", "refuse"],
    ) -> AddRequest:
        """The valid engine request of `wire`; a limit that was cut to the context is reported in a header."""
        key = exchange.key
        salt = wire.cache_salt or ""
        request = add_request(
            self.limits,
            id=id,
            prompt=prompt,
            params=params,
            arrival=time.time(),
            max_tokens_policy=max_tokens_policy,
            prompt_field=prompt_field,
            priority=(wire.priority or 0) + (key.priority if key else 0),
            cache_salt=salt,
            adapter=self.adapter_of(wire.model),
            timeout_s=wire.timeout_s,
            timeout_ttft_s=wire.timeout_ttft_s,
            key=key.label if key else "",
        )
        if params.max_tokens is not None and request.params.max_tokens != params.max_tokens:
            exchange.headers["x-octavo-max-tokens"] = str(request.params.max_tokens)
        return request

    def generation(self, request: AddRequest, options: TextOptions) -> Generation:
        return Generation(self.client, self.tokenizer, self.metrics, request, options)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope["octavo"]
    return exchange


def new_ids(prefix: str, wire: GenerationRequest, count: int) -> tuple[str, list[str]]:
    """The id that the client sees, and one for each engine request. A client's own label never has to be unique."""
    if wire.request_id is not None and not REQUEST_ID.fullmatch(wire.request_id):
        raise InvalidRequest("request_id must have 1 to 128 of the characters A-Z a-z 0-9 . _ : -", param="request_id")
    shown = prefix + (wire.request_id or secrets.token_hex(12))
    base = f"{shown}-{secrets.token_hex(4)}" if wire.request_id else shown
    return shown, [base] if count == 1 else [f"{base}-{i}" for i in range(count)]


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` of chat and completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def json_response(body: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json", headers=headers)
