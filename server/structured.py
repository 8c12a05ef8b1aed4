"""Constraints of an answer as text for the engine: checked at the door, put behind reasoning, joined with calls."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping

import msgspec

from engine.api import Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import check_grammar, close_objects, json_term

ANY_TEXT = "/(.|\\n)*/"


async def checked(grammar: Grammar, param: str) -> Grammar:
    """`grammar`, if it can be enforced; otherwise InvalidRequest with the reason. Off the event loop."""
    await asyncio.to_thread(check_grammar, grammar, param)
    return grammar


def literal(text: str, special: Mapping[str, int]) -> str:
    """`text` as terms of a lark rule; the control tokens in it are named by id, as they have no characters."""
    if not special:
        return json.dumps(text, ensure_ascii=False) if text else ""
    pieces = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(
        f"<[{special[piece]}]>" if piece in special else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )


def until(marker: str, special: Mapping[str, int], name: str) -> str:
    """Lark rules of `name`: any text up to the first `marker`, and the marker."""
    text = f"{name.upper()}_TEXT"
    lazy = "" if marker in special else "[lazy]"  # a control token ends the text by itself
    return f"{name}{lazy}: {text} {literal(marker, special)}\n{text}: {ANY_TEXT}\n"


def after_reasoning(grammar: Grammar, close_tag: str, special: Mapping[str, int], field: str = "") -> Grammar:
    """The answer obeys `grammar`, asked for by `field`, once the reasoning in which it begins has been closed."""
    rules = "start: reasoning AFTER_REASONING answer\nAFTER_REASONING: /[ \\n]{0,2}/\n"
    return Grammar("lark", rules + until(close_tag, special, "reasoning") + answer_rule(grammar, field))


def answer_rule(grammar: Grammar, field: str) -> str:
    """`grammar`, asked for by `field` of the request, as the lark rule `answer`."""
    match grammar.kind:
        case "json_object":
            return f"answer: {json_term({'type': 'object'})}\n"
        case "json_schema":
            schema = close_objects(msgspec.json.decode(grammar.text))
            if not isinstance(schema, dict):
                schema = {} if schema else {"not": {}}
            return f"answer: {json_term(schema)}\n"
        case "choice":
            return "answer: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, json.loads(grammar.text))) + "\n"
        case "lark" if "::=" not in grammar.text:
            # Rules only: names in strings and expressions stay as they are.
            return re.sub(r"(?m)^(\s*)start(\s*:)", r"\1answer\2", grammar.text) + "\n"
        case _:
            raise InvalidRequest(
                f"a {grammar.kind} can't be enforced behind reasoning or beside tools; use a JSON schema, or switch "
                "thinking off",
                param=field or None,
            )
