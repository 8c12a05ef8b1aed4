"""The limits of request fields as JSON Schema, from the tables and patterns that the requests are checked by."""

from __future__ import annotations

import math
from typing import Any

from engine.config import ADAPTER_NAME
from engine.validate import OPEN_RANGES, RANGES, Limits
from server.chat import MAX_MESSAGES, METADATA_KEY, METADATA_PAIRS, METADATA_VALUE
from server.completions import MAX_PROMPTS
from server.embeddings import MAX_INPUTS
from server.sampling import NAME
from server.service import REQUEST_ID
from server.tools import MAX_TOOLS

Schema = dict[str, Any]

_NUMBERS = ("integer", "number")
_NONE = {"type": "null"}  # fields that are known and refused
_STOP: dict[str, Schema] = {
    "string": {"minLength": 1, "maxLength": Limits.stop_characters},
    "array": {
        "maxItems": Limits.stop_strings,
        "items": {"type": "string", "minLength": 1, "maxLength": Limits.stop_characters},
    },
}
_NAME = {"string": {"pattern": f"^{NAME.pattern}$"}}
_TEXTS = {"string": {"minLength": 1}, "array": {"minItems": 1}}
_METADATA: dict[str, Schema] = {
    "object": {
        "maxProperties": METADATA_PAIRS,
        "propertyNames": {"maxLength": METADATA_KEY},
        "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE},
    }
}
_LOW, _HIGH = (-100, 100)

# Field -> JSON type -> keywords, in every request that has the field.
_EVERYWHERE: dict[str, dict[str, Schema]] = {
    "stop": _STOP,
    "bad_words": {
        "array": {"maxItems": Limits.token_ids, "items": {"type": "string", "minLength": 1, "maxLength": 256}}
    },
    "logit_bias": {
        "object": {
            "maxProperties": Limits.logit_bias,
            "propertyNames": {"pattern": "^[0-9]{1,12}$"},
            "additionalProperties": {"type": "number", "minimum": _LOW, "maximum": _HIGH},
        }
    },
    "cache_salt": {"string": {"maxLength": 256}},
    "request_id": {"string": {"pattern": f"^{REQUEST_ID.pattern}$"}},
    "lora_name": {"string": {"pattern": f"^{ADAPTER_NAME.pattern}$"}},
}
# The same for one request or part of one.
_OF_SCHEMA: dict[str, dict[str, dict[str, Schema]]] = {
    "ChatRequest": {
        "messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
        "tools": {"array": {"minItems": 1, "maxItems": MAX_TOOLS}},
        "max_tokens": {"integer": {"minimum": 1}},
        "modalities": {"array": {"items": {"const": "text"}}},
        "metadata": _METADATA,
    },
    "CompletionRequest": {"max_tokens": {"integer": {"minimum": 0}}, "prompt": {"array": {"maxItems": MAX_PROMPTS}}},
    "ResponsesRequest": {"metadata": _METADATA, "input": _TEXTS},
    "TokenizeRequest": {"messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}}},
    "BatchRequest": {"metadata": _METADATA, "completion_window": {"string": {"const": "24h"}}},
    "MessagesRequest": {"messages": {"array": {"minItems": 1}}, "max_tokens": {"integer": {"minimum": 1}}},
    "CountTokensRequest": {"messages": {"array": {"minItems": 1}}},
    "EmbeddingsRequest": {"input": {"string": {"minLength": 1}, "array": {"minItems": 1, "maxItems": MAX_INPUTS}}},
    "ScoreRequest": {"text_1": _TEXTS, "text_2": _TEXTS},
    "RerankRequest": {"query": _TEXTS, "documents": {"array": {"minItems": 1, "maxItems": MAX_INPUTS - 1}}},
    "FunctionDefinition": {"name": _NAME},
    "CustomDefinition": {"name": _NAME},
    "JsonSchema": {"name": _NAME},
}
_REFUSED = {
    "ChatRequest": ("functions", "function_call"),
    "CompletionRequest": ("suffix",),
    "ResponsesRequest": ("conversation", "prompt"),
    "BatchRequest": ("output_expires_after",),
}


_ONE_OF_BOTH = [  # of a request to tokenise
    {"required": [one], "properties": {one: {"not": _NONE}, other: _NONE}}
    for one, other in (("prompt", "messages"), ("messages", "prompt"))
]
_SAYS_OR_CALLS = [  # of an assistant's message
    {"required": ["content"], "properties": {"content": {"not": _NONE}}},
    {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    {"required": ["function_call"], "properties": {"function_call": {"not": _NONE}}},
]


def limit(components: dict[str, Schema], endpoints: list[str], vocab_size: int) -> None:
    """Write the limits into the schemas of the wire types. `endpoints`: what a batch may be of."""
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    ids: dict[str, dict[str, Schema]] = {
        "stop_token_ids": {"array": {"maxItems": Limits.token_ids, "items": token}},
        "allowed_token_ids": {"array": {"minItems": 1, "items": token}},
        "tokens": {"array": {"items": token}},
    }
    for title, schema in components.items():
        for name, field in schema.get("properties", {}).items():
            keywords = ids.get(name, {}) | _EVERYWHERE.get(name, {}) | _OF_SCHEMA.get(title, {}).get(name, {})
            for branch in field.get("anyOf", [field]):
                kind = branch.get("type")
                if kind in _NUMBERS:
                    branch.update(_range(name))
                branch.update(keywords.get(kind, {}))
        for name in _REFUSED.get(title, ()):
            schema["properties"][name] = _NONE
    components["BatchRequest"]["properties"]["endpoint"]["enum"] = endpoints
    components["TokenizeRequest"]["oneOf"] = _ONE_OF_BOTH
    components["AssistantMessage"]["anyOf"] = _SAYS_OR_CALLS


def _range(name: str) -> Schema:
    """minimum and maximum of a number; infinity is no limit."""
    if name in OPEN_RANGES:
        low, high = OPEN_RANGES[name]
        return {"exclusiveMinimum": low, "maximum": high}
    low, high = RANGES.get(name, (-math.inf, math.inf))
    found = {"minimum": low, "maximum": high}
    return {keyword: value for keyword, value in found.items() if math.isfinite(value)}
