"""Request bodies: bytes to a checked struct, with the names of what was not understood."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.errors import InvalidRequest
from server.errors import CLIENT_CLOSED, HTTPError

BODY_TIMEOUT_S = 60.0

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `\$\.?(.*?)`$")
_NAMES = {"array": "a list", "object": "an object", "str": "a string", "int": "an integer", "float": "a number"}
_NAMES |= {"bool": "a boolean", "null": "null"}


async def read_bytes(request: Request) -> bytes:
    """The whole body. The gate has bounded its size; a client that stops sending is not waited for."""
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.body()
    except TimeoutError:
        raise HTTPError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise HTTPError(CLIENT_CLOSED, "the client went away") from None


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Its type must not be declared as something else than JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise HTTPError(415, f"the body must be application/json, not {kind[:100]}")
    return parse_object(await read_bytes(request))


def parse_object(data: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no unpaired surrogate, no invalid UTF-8, bounded depth."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def convert(value: dict[str, Any], kind: type[T]) -> T:
    """Check types strictly (no booleans or strings for numbers). Raises InvalidRequest that names the field."""
    try:
        return msgspec.convert(value, kind)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None


def _invalid(message: str) -> InvalidRequest:
    found = _PATH.search(message)
    path = found[1] if found else ""
    text = message[: found.start()] if found else message
    missing = re.match(r"Object missing required field `(\w+)`", text)
    if missing:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{name} is required", param=name)
    wrong = re.match(r"Expected `(.+?)`, got `(\w+)`$", text)
    if wrong:
        wanted = " or ".join(_NAMES.get(part, part) for part in wrong[1].split(" | "))
        text = f"must be {wanted}, got {_NAMES.get(wrong[2], wrong[2])}"
    return InvalidRequest(f"{path} {text}" if path else text, param=path or None)


def unknown_fields(value: dict[str, Any], kind: type[msgspec.Struct]) -> list[str]:
    """Top-level names that `kind` doesn't know, for the header x-octavo-ignored-fields."""
    known = kind.__struct_encode_fields__
    return [name for name in value if name not in known]
