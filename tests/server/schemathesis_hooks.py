"""Schemathesis counts 55.0 as an integer, as JSON Schema does. The API takes it for a number: such values are made
integers before they are sent."""

from __future__ import annotations

from typing import Any

import schemathesis


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    return _whole(body)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
