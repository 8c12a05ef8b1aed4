"""The OpenAPI document, made of the same wire types that check the requests."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from server.files import PURPOSES
from server.openapi_limits import limit
from server.paging import MAX_LIMIT

if TYPE_CHECKING:
    from server.app import Route

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}

_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": list(PURPOSES)},
    },
}

# Of routes that give a list. `after` has to name an entry of it.
_PAGING = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
]
_PAGED = ("/v1/files", "/v1/batches", "/v1/responses/{id}/input_items")

_GENERATING = ("400", "401", "404", "408", "413", "415", "429", "500", "503", "504")


_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 32, "temperature": 0},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 16, "seed": 1},
    "/v1/responses": {"input": "Say hello.", "max_output_tokens": 32},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 32},
    "/v1/messages/count_tokens": {"messages": _MESSAGES},
    "/v1/embeddings": {"input": ["A small boat", "A wide river"]},
    "/v1/score": {"text_1": "A small boat", "text_2": ["A wide river", "A clever cat"]},
    "/v1/rerank": {"query": "A small boat", "documents": ["A wide river", "A clever cat"]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def document(
    routes: Iterable[Route], version: str, model: str, endpoints: Iterable[str], vocab_size: int
) -> dict[str, Any]:
    """OpenAPI 3.1 of `routes`, with requests to `model` as examples. `endpoints`: what a batch may be of."""
    routes = list(routes)
    kinds = [route.body for route in routes if route.body is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    limit(components, list(endpoints), vocab_size)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        body = None if route.body is None else schema_of[route.body]
        path = route.path.replace(":path", "")
        operation = paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, body)
        if path in _EXAMPLES:
            operation["requestBody"]["content"]["application/json"]["example"] = {"model": model, **_EXAMPLES[path]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _operation(route: Route, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    doc = inspect.getdoc(route.handler) or ""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path.endswith("/content"):
        content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": doc.splitlines()[0] if doc else "",
        "description": doc,
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(route, path),
    }
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        schema = {"type": "integer", "minimum": 0, "maximum": 10**10 - 1} if name == "block" else {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if path in _PAGED and route.method == "GET":
        operation["parameters"] = [*operation.get("parameters", []), *_PAGING]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if path == "/v1/files" and route.method == "POST":
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    return operation


def _errors(route: Route, path: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    if path.startswith("/health"):
        return {"503": {"description": "Not now.", "content": {"application/json": {"schema": {"type": "object"}}}}}
    codes = _GENERATING if route.method == "POST" else ("400", "401", "404", "500", "503")
    if path.endswith("_lora_adapter") or path.startswith("/v1/kv/"):
        codes = (*codes, "403")  # without --lora-dir, --kv-transfer-dir
    return {code: {"description": "The request was not served.", "content": error} for code in sorted(codes)}
