"""Request bodies: bytes to a checked struct, with the names of what was not understood."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def renaming(names: dict[str, str]) -> Iterator[None]:
    """For a route that another one serves: its errors name the fields by `names`, {there: here}, and not as there.

    The entries of `messages` are counted with those that the route adds, so only the list itself is named.
    """
    try:
        yield
    except InvalidRequest as error:
        given = error.param or ""
        there = next((name for name in names if re.match(rf"{re.escape(name)}(?![a-z_])", given)), None)
        if there is None:
            raise
        here = names[there]
        if there == "messages":
            message = re.sub(r"\bmessages(\[\d+\]\.?)?", f"{here}: ", str(error)).replace(":  ", ": ")
            raise InvalidRequest(message, param=here, code=error.code) from None
        message = re.sub(rf"\b{re.escape(there)}\b", here, str(error))
        raise InvalidRequest(message, param=here + given[len(there) :], code=error.code) from None


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
    unknown = re.match(r"Object contains unknown field `(.+)`$", text)
    if unknown:
        name = f"{path}.{unknown[1][:64]}" if path else unknown[1][:64]
        return InvalidRequest(f"{name} is not supported by this server", param=name)
    return InvalidRequest(f"{path} {text}" if path else text, param=path or None)


def unknown_fields(value: dict[str, Any], kind: type[msgspec.Struct]) -> list[str]:
    """Top-level names that `kind` doesn't know."""
    known = kind.__struct_encode_fields__
    return [name for name in value if name not in known]


def ignored_fields(value: dict[str, Any], wire: msgspec.Struct, path: str = "") -> Iterator[str]:
    """Names in `value` that `wire`, made of it, doesn't know: its own and those of its options, as `stream_options.x`.

    Lists (messages, tools) are not looked into: what clients send back there has fields of other servers' answers.
    """
    tag = wire.__struct_config__.tag_field
    for name, part in value.items():
        if name not in wire.__struct_encode_fields__:
            if name != tag:
                yield path + name
        elif isinstance(inner := getattr(wire, name), msgspec.Struct):
            yield from ignored_fields(part, inner, f"{path}{name}.")
