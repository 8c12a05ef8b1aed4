"""Grammars as text: from a request's constraint to what llguidance compiles, and whether it can be enforced.

Both processes use this file. The API process calls `check_grammar` before a request is accepted: what can't be
enforced is refused there, with the reason, and never silently dropped. The engine compiles the same text under
the same limits for the real vocabulary (`engine.sampling.grammar`).

A hostile schema or expression harms nobody: its size is limited, the work of the compiler and of each mask is
limited by fuel, and both run without the GIL on a thread whose stack is deep enough for any text of that size.
"""

from __future__ import annotations

import json
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from engine.api import Grammar
from engine.errors import InvalidRequest

MAX_BYTES = 256 * 1024
MAX_PROPERTIES = 1_000  # of one object: the compiler's work grows with their square
MAX_CHOICES = 5_000
MAX_BRANCHES = 1_000  # of all anyOf, oneOf and allOf as the root of their squares: the compiler's work grows faster
MAX_MULTIPLE = 10_000  # the automaton of "multipleOf" has this many states
MAX_ALTERNATIVES = 2_000  # "|" in a grammar
FORCED_PIECES = 100
STACK_BYTES = 256 << 20  # address space, touched only as far as a text is nested: MAX_BYTES of references fit

# A missing blank is bad for the model, a free one lets it print blanks for ever: the separators of json.dumps,
# which is what models saw most often, are the only white space outside of strings.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_OPTIONS = {**_JSON_STYLE, "lenient": False, "coerce_one_of": False}


def parser_limits() -> LLParserLimits:
    """Bounds on the compiler and on each mask: about 20 ms of work at the most, 40 MB of lexer states."""
    return LLParserLimits(
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=50_000,
        verbose_errors=False,
    )


def compiler_thread(name: str, workers: int = 1) -> ThreadPoolExecutor:
    """Threads for the compiler, which recurses as deep as a text is nested: with a stack of STACK_BYTES."""
    executor = ThreadPoolExecutor(workers, thread_name_prefix=name)
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            barrier = threading.Barrier(workers + 1)
            for _ in range(workers):
                executor.submit(barrier.wait)
            barrier.wait()
        finally:
            threading.stack_size(before)
    return executor


_stack_lock = threading.Lock()


def json_term(schema: dict[str, Any]) -> str:
    """`schema` as a term of a lark grammar, with the white space and the strictness of every other JSON here."""
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def compiled_text(grammar: Grammar) -> str:
    """llguidance's form of `grammar`. Raises InvalidRequest for what is no grammar or beyond the limits."""
    if len(grammar.text) > MAX_BYTES:
        raise InvalidRequest(f"the {_NAMES[grammar.kind]} has {len(grammar.text)} characters, the limit is {MAX_BYTES}")
    try:
        match grammar.kind:
            case "json_object":
                text = LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
            case "json_schema":
                schema = close_objects(_loads(grammar.text))
                _check_schema(schema)
                text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
            case "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            case "choice":
                text = LLMatcher.grammar_from_lark(_choice(_loads(grammar.text)))
            case "lark":
                text = LLMatcher.grammar_from_lark(_lark(grammar.text))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the {_NAMES[grammar.kind]} can't be read: {error}") from error
    return str(text)


def check_grammar(grammar: Grammar, param: str = "response_format") -> None:
    """Raise InvalidRequest, with the reason, when `grammar` can't be enforced. Milliseconds; waits without the GIL.

    Answers are remembered, so that a schema which comes with every request costs nothing.
    """
    reason = verdict(grammar)
    if reason:
        raise InvalidRequest(reason, param=param)


@lru_cache(maxsize=512)
def verdict(grammar: Grammar) -> str:
    """Why `grammar` can't be enforced, or ""."""
    return _checker().submit(_try_compile, grammar).result()


@lru_cache(maxsize=1)
def _checker() -> ThreadPoolExecutor:
    return compiler_thread("grammar-check")


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    """A vocabulary of the 256 bytes: enough to find out whether a grammar compiles and allows anything."""
    return LLTokenizer("byte")


def _try_compile(grammar: Grammar) -> str:
    try:
        text = compiled_text(grammar)
    except InvalidRequest as error:
        return str(error)
    matcher = LLMatcher(_byte_tokenizer(), text, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()  # an expression is expanded when its first mask is made
    for _ in range(FORCED_PIECES):
        # A schema that only endless text satisfies forces bytes without end, until the item limit stops it.
        forced = b"" if matcher.is_error() else matcher.compute_ff_bytes()
        if not forced:
            break
        matcher.consume_tokens(list(forced))
    return f"the {_NAMES[grammar.kind]} can't be enforced: {readable(matcher)}" if matcher.is_error() else ""


def readable(matcher: LLMatcher) -> str:
    """Why the matcher is in its error state, as one short line."""
    message = str(matcher.get_error()).replace("<non-verbose/>", "").strip()
    if "NoExtension" in message:
        message = "nothing can satisfy it"
    return " ".join(message.split())[:300]


_NAMES = {
    "json_object": "JSON object",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "lark": "grammar",
}


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError("it must be a list of one or more strings")
    if len(choices) > MAX_CHOICES:
        raise ValueError(f"it has {len(choices)} entries, the limit is {MAX_CHOICES}")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices)


def _lark(text: str) -> str:
    """A lark grammar; GBNF ("root ::= ...") is translated. Schemas inside of it keep to the limits of schemas."""
    if re.search(r"^[ \t]*[\w-]+[ \t]*::=", text, re.MULTILINE):  # \s would walk all empty lines, for each
        try:
            # Without empty lines: the translator looks at all that follow one, for each.
            text = any_to_lark("\n".join([line for line in text.split("\n") if line.strip()]))
        except Exception as error:  # the translator raises whatever its parser stumbled over
            raise ValueError(f"it is neither lark nor GBNF: {error}") from error
    if text.count("|") > MAX_ALTERNATIVES:
        raise ValueError(f"it has {text.count('|')} alternatives, the limit is {MAX_ALTERNATIVES}")
    for found in re.finditer(r"%json\s*", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, found.end())
        except ValueError as error:
            raise ValueError(f"a schema after %json is not JSON ({error})") from error
        _check_schema(schema)
    return text


# ---------------------------------------------------------------- schemas

# Where a schema holds further schemas. Everything else in it is data, in which keywords have no meaning.
_SCHEMA_KEYS = frozenset({"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def _children(schema: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for key, value in schema.items():
        if key in _SCHEMA_LISTS and isinstance(value, list):
            found += value
        elif key in _SCHEMA_KEYS and isinstance(value, dict):
            found.append(value)
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            found += value.values()
    return found


def _objects(schema: Any) -> list[dict[str, Any]]:
    """Every schema inside of `schema`, itself first."""
    found = [schema] if isinstance(schema, dict) else []
    for one in found:
        found += [child for child in _children(one) if isinstance(child, dict)]
    return found


def _check_schema(schema: Any) -> None:
    """The bounds that llguidance doesn't have; what it can't enforce it says itself. Raises ValueError."""
    if not isinstance(schema, (dict, bool)):
        raise ValueError(f"a schema is a JSON object, got {json.dumps(schema)[:60]}")
    _check_numbers(schema)
    multiples: list[Decimal] = []
    branches = 0
    for one in _objects(schema):
        properties = one.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise ValueError(f"an object has {len(properties)} properties, the limit is {MAX_PROPERTIES}")
        lists = [one[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(one.get(name), list)]
        branches += sum([len(found) ** 2 for found in lists])
        enum = one.get("enum")
        if isinstance(enum, list) and len(enum) > MAX_CHOICES:
            raise ValueError(f"an enum has {len(enum)} entries, the limit is {MAX_CHOICES}")
        if "multipleOf" in one:
            multiples.append(_multiple(one["multipleOf"]))
    if branches > MAX_BRANCHES**2:
        raise ValueError(f"anyOf, oneOf and allOf have too many entries (limit {MAX_BRANCHES} in one list)")
    if multiples and _joint_multiple(multiples) > MAX_MULTIPLE:
        raise ValueError(f"the values of multipleOf are too many or too large to enforce (limit {MAX_MULTIPLE})")


def _check_numbers(schema: Any) -> None:
    """Every value of a schema may become a literal, and the compiler doesn't survive the lowest 64-bit ones."""
    values = [schema]
    for value in values:
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, int) and -(2**63) <= value < -(2**63) + 1024:
            raise ValueError(f"the number {value} is out of the range that can be enforced")


def _multiple(value: Any) -> Decimal:
    try:
        number = Decimal(str(value)).normalize()
        usable = not isinstance(value, bool) and number.is_finite() and number > 0
    except InvalidOperation:
        usable = False
    if not usable:
        raise ValueError(f"multipleOf must be a number above 0, got {json.dumps(value)[:60]}")
    if abs(number.adjusted()) > 30:
        raise ValueError(f"multipleOf {value} is out of the range that can be enforced")
    return number


def _joint_multiple(values: list[Decimal]) -> int:
    """States of an automaton that counts modulo all of `values` at once: an upper bound on what any of them needs."""
    shift = max(0, *(-int(v.as_tuple().exponent) for v in values))
    joint = math.lcm(*(int(v.scaleb(shift)) for v in values))
    while joint % 10 == 0:  # powers of ten are cut off by looking at the last digits
        joint //= 10
    return joint


_COMBINERS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if", "not"})
_OPENERS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"})


def close_objects(schema: Any) -> Any:
    """`schema` without keys that it doesn't name, where it says nothing about them.

    An answer still obeys the schema as it was given, and a model can't go on inventing keys. Schemas that
    combine others by intersection are left as they are: there one part may name what the other does not.
    """
    parts = _objects(schema)
    if any("allOf" in one or ("properties" in one and _COMBINERS & one.keys()) for one in parts):
        return schema
    if any("$ref" in one and "properties" not in one and len(one.keys() & _VALIDATING) > 0 for one in parts):
        return schema
    return _closed(schema)


_VALIDATING = frozenset({"required", "additionalProperties", "patternProperties"})


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMA_LISTS and isinstance(value, list):
            closed[key] = [_closed(one) for one in value]
        elif key in _SCHEMA_KEYS:
            closed[key] = _closed(value)
        elif key in _SCHEMA_MAPS and isinstance(value, dict):
            closed[key] = {name: _closed(one) for name, one in value.items()}
        else:
            closed[key] = value
    named = closed.get("properties")
    required = closed.get("required", [])
    if (
        isinstance(named, dict)
        and named
        and not _OPENERS & closed.keys()
        and isinstance(required, list)
        and all(r in named for r in required)
    ):
        closed["additionalProperties"] = False
    return closed
