"""OpenAI's list object: pages of things that have ids."""

from __future__ import annotations

from typing import Any, Literal

from starlette.requests import Request

from engine.errors import InvalidRequest

MAX_LIMIT = 10_000


def page(
    items: list[dict[str, Any]], request: Request, *, order: Literal["asc", "desc"] = "desc", limit: int = 20
) -> dict[str, Any]:
    """The page of `items` (oldest first) that the query's limit, order and after ask for. Raises InvalidRequest."""
    query = request.query_params
    asked = query.get("order", order)
    if asked not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {asked[:40]!r}", param="order")
    given = query.get("limit", str(limit))
    if not (given.isascii() and given.isdecimal() and len(given) <= 5 and 1 <= int(given) <= MAX_LIMIT):
        raise InvalidRequest(f"limit must be from 1 to {MAX_LIMIT}, got {given[:40]!r}", param="limit")
    ordered = items if asked == "asc" else items[::-1]
    after = query.get("after")
    if after is not None:
        places = [i for i, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise InvalidRequest(f"after names {after[:80]!r}, which is not in the list", param="after")
        ordered = ordered[places[0] + 1 :]
    data = ordered[: int(given)]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > len(data),
    }
