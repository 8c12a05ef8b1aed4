"""A chat as a response: output items that open, grow and close, each change an event with the next number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from server.chat import ChatPiece
from server.logprobs import LogprobsWriter
from server.output import OutputDelta
from server.responses_wire import new_item_id

Event = dict[str, Any]


def sse(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))


class ResponseWriter:
    """Grows `body["output"]`; every method gives the events that tell of it."""

    def __init__(self, body: dict[str, Any], logprobs: LogprobsWriter, top: int | None) -> None:
        self.body = body
        self._logprobs = logprobs
        self._top = top  # None: no logprobs
        self._number = 0
        self._item: dict[str, Any] | None = None
        self._call = -1
        self._pending: list[dict[str, Any]] = []  # logprobs whose text belongs to the next piece of a message

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return event

    def begin(self) -> Iterator[Event]:
        yield self._event("created", response=self._snapshot())
        self.body["status"] = "in_progress"
        yield self._event("in_progress", response=self._snapshot())

    def queued(self) -> Iterator[Event]:
        yield self._event("queued", response=self._snapshot())

    def piece(self, piece: ChatPiece) -> Iterator[Event]:
        if self._top is not None and piece.entries:
            self._pending += self._logprobs.chat(piece.entries, self._top)["content"]
        for delta in piece.deltas:
            yield from self._delta(delta)

    def end(self, status: str, **fields: Any) -> Iterator[Event]:
        """The last event: completed, incomplete, failed or cancelled. `fields` go into the response."""
        if not self.body["output"] and status in ("completed", "incomplete"):
            yield from self._open("message")
        yield from self._close("completed" if status == "completed" else "incomplete")
        self.body |= {"status": status, **fields}
        yield self._event("failed" if status == "cancelled" else status, response=self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        return {**self.body, "output": list(self.body["output"])}

    # ---- items

    @property
    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.body["output"]) - 1}

    def _delta(self, delta: OutputDelta) -> Iterator[Event]:
        if delta.content:
            if self._item is None or self._item["type"] != "message":
                yield from self._open("message")
            yield from self._text(delta.content)
        if delta.reasoning:
            if self._item is None or self._item["type"] != "reasoning":
                yield from self._open("reasoning")
            yield from self._reason(delta.reasoning)
        if delta.call_name:
            kind = "custom_tool_call" if delta.call_kind == "custom" else "function_call"
            yield from self._open(kind, call_id=delta.call_id, name=delta.call_name)
        if delta.arguments and self._item is not None:
            field, event = _CALL_TEXT[self._item["type"]]
            self._item[field] += delta.arguments
            yield self._event(f"{event}.delta", **self._place, delta=delta.arguments)

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        yield from self._close("completed")
        item: dict[str, Any] = {"id": new_item_id(kind), "type": kind, "status": "in_progress", **fields}
        match kind:
            case "message":
                item |= {"role": "assistant", "content": []}
            case "reasoning":
                item |= {"summary": [], "content": []}
            case _:
                item[_CALL_TEXT[kind][0]] = ""
        self._item = item
        self.body["output"].append(item)
        yield self._event("output_item.added", output_index=self._place["output_index"], item=_copy(item))
        if kind in ("message", "reasoning"):
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("content_part.added", **self._place, content_index=0, part=dict(part))

    def _text(self, text: str) -> Iterator[Event]:
        assert self._item is not None
        part = self._item["content"][0]
        part["text"] += text
        logprobs, self._pending = self._pending, []
        part["logprobs"] += logprobs
        yield self._event("output_text.delta", **self._place, content_index=0, delta=text, logprobs=logprobs)

    def _reason(self, text: str) -> Iterator[Event]:
        assert self._item is not None
        self._item["content"][0]["text"] += text
        self._pending.clear()
        yield self._event("reasoning_text.delta", **self._place, content_index=0, delta=text)

    def _close(self, status: str) -> Iterator[Event]:
        item = self._item
        if item is None:
            return
        if item["type"] in ("message", "reasoning"):
            part = item["content"][0]
            fields = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"{part['type']}.done", **self._place, content_index=0, text=part["text"], **fields)
            yield self._event("content_part.done", **self._place, content_index=0, part=dict(part))
        else:
            field, event = _CALL_TEXT[item["type"]]
            name = {"name": item["name"]} if field == "arguments" else {}
            yield self._event(f"{event}.done", **self._place, **name, **{field: item[field]})
        item["status"] = status
        yield self._event("output_item.done", output_index=self._place["output_index"], item=_copy(item))
        self._item = None


_CALL_TEXT = {
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: the item grows on."""
    if "content" in item:
        return {**item, "content": [dict(part) for part in item["content"]]}
    return dict(item)
