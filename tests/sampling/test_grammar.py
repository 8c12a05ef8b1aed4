"""Masks of structured output, against independent oracles: jsonschema, re, and the constraint's own `advance`."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Grammar
from engine.errors import InvalidRequest
from engine.sampling.grammar import GrammarCompiler, GrammarConstraint
from engine.text.grammar import check_grammar

CORPUS = [
    '{"name": "Ada", "age": 36, "tags": ["red", "dark blue", "grün"], "ok": true, "none": null}',
    '{"room": "hall", "on": false, "next": {"x": -1.5e3, "y": [1, 2, 3]}, "text": "The quick brown fox"}',
    "The weather today is calm, and the sky over 日本 is 🦊 coloured.",
]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE with real merges and an end token: the shape of published tokenizers, in miniature."""
    built = tokenizers.Tokenizer(tokenizers.models.BPE())
    built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(CORPUS * 4, trainer)
    return built


@pytest.fixture(scope="module")
def compiler(tokenizer: tokenizers.Tokenizer) -> Iterator[GrammarCompiler]:
    # Wider than the vocabulary, as padded logits are, and no multiple of 32.
    made = GrammarCompiler(tokenizer.to_str(), [0, 1], tokenizer.get_vocab_size() + 5)
    yield made
    made.close()


def started(compiler: GrammarCompiler, kind: str, text: str) -> GrammarConstraint:
    constraint = compiler(Grammar(kind, text))  # type: ignore[arg-type]
    end = time.monotonic() + 10
    while not constraint.ready() and not constraint.failed() and time.monotonic() < end:
        time.sleep(0.001)
    assert constraint.failed() == ""
    return constraint


def allowed(constraint: GrammarConstraint) -> list[int]:
    mask = constraint.mask()
    assert mask is not None
    bits = int.from_bytes(mask, "little")
    return [i for i in range(len(mask) * 8) if bits >> i & 1]


def walk(constraint: GrammarConstraint, chance: random.Random, steps: int = 300) -> list[int] | None:
    """A random answer that keeps to the masks; None when it did not end within `steps`."""
    tokens: list[int] = []
    for _ in range(steps):
        options = allowed(constraint)
        assert options, "a state from which nothing is allowed"
        ends = [t for t in options if t <= 1]
        if ends and (len(ends) == len(options) or chance.random() < 0.4):
            assert constraint.advance(ends[0])
            return tokens
        token = chance.choice([t for t in options if t > 1])
        assert constraint.advance(token)
        tokens.append(token)
    return None


def closed(properties: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


SCHEMAS: dict[str, dict[str, object]] = {
    "enum": closed({"colour": {"enum": ["red", "dark blue", "grün"]}}),
    "const": closed({"v": {"const": 7}, "w": {"const": 'a"b\\c\n'}}),
    "int range": closed({"n": {"type": "integer", "minimum": 3, "maximum": 12}}),
    "number": {"type": "number", "exclusiveMinimum": -2, "maximum": 7.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    "one of": closed(
        {"x": {"oneOf": [closed({"k": {"const": "cat"}}), closed({"k": {"const": "dog"}, "n": {"enum": [1]}})]}}
    ),
    "array": closed({"xs": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}}),
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    "recursive": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": closed({"v": {"enum": [0, 1]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})
        },
    },
    "pattern": closed({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}}),
    "format": closed({"at": {"type": "string", "format": "ipv4"}, "id": {"type": "string", "format": "uuid"}}),
    "length": closed({"s": {"type": "string", "minLength": 2, "maxLength": 6}}),
    "open object": {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}}, "required": ["b"]},
    "all of": {"allOf": [{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]},
                         {"type": "object", "properties": {"b": {"enum": [2]}}, "required": ["b"]}]},
    "union next to properties": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
                                 "anyOf": [{"required": ["b"], "properties": {"b": {"enum": [2]}}}]},
    "odd keys": closed({"a b": {"enum": [1]}, "ключ": {"enum": [2]}, 'x"y': {"enum": [3]}}),
    "top enum": {"enum": ["yes", 1, None, [True]]},
    "nullable": closed({"s": {"type": ["boolean", "null"]}}),
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_that_keeps_to_the_masks_obeys_the_schema(
    name: str, compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer
) -> None:
    schema = SCHEMAS[name]
    grammar = Grammar("json_schema", json.dumps(schema))
    check_grammar(grammar)
    chance = random.Random(name)
    ended = 0
    for _ in range(25):
        tokens = walk(started(compiler, grammar.kind, grammar.text), chance)
        if tokens is not None:
            ended += 1
            jsonschema.validate(json.loads(tokenizer.decode(tokens)), schema, format_checker=jsonschema.FormatChecker())
    assert ended >= 5


@pytest.mark.parametrize("name", ["enum", "recursive", "length", "map"])
def test_a_token_is_in_the_mask_when_it_can_be_consumed_unless_the_text_is_forced(
    name: str, compiler: GrammarCompiler
) -> None:
    constraint = started(compiler, "json_schema", json.dumps(SCHEMAS[name]))
    chance = random.Random(5)
    for _ in range(12):
        options = set(allowed(constraint))
        consumable = {token for token in range(compiler.vocab_size) if constraint.fork().advance(token)}
        # Where the grammar leaves one text only, the mask names its canonical token alone.
        assert options == consumable or (len(options) == 1 and options < consumable)
        token = chance.choice(sorted(options))
        constraint.advance(token)
        if token <= 1:
            break


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_rollback_restores_the_mask_and_forks_are_independent(
    compiler: GrammarCompiler, chance: random.Random, back: int
) -> None:
    constraint = started(compiler, "json_schema", json.dumps(SCHEMAS["recursive"]))
    masks = [constraint.mask()]
    fork = constraint.fork()
    for _ in range(20):
        token = chance.choice(allowed(constraint))
        assert constraint.advance(token)
        masks.append(constraint.mask())
        if token <= 1:
            assert constraint.stopped()
            break
    back = min(back, len(masks) - 1)
    constraint.rollback(back)
    assert constraint.mask() == masks[-1 - back]
    assert fork.mask() == masks[0]


def test_a_rollback_over_the_end_token_reopens_the_answer(compiler: GrammarCompiler) -> None:
    constraint = started(compiler, "regex", "a{1,3}")
    first = allowed(constraint)
    assert constraint.advance(first[0])
    before = constraint.mask()
    assert constraint.advance(0)
    assert constraint.stopped()
    assert not constraint.advance(0)
    constraint.rollback(1)
    assert not constraint.stopped()
    assert constraint.mask() == before


@pytest.mark.parametrize("expression", ["[0-9]{3}-[a-f]{2}", "(yes|no)+", "[A-Za-z_]+ [0-9]", "é[^a-z]?"])
def test_regular_expressions_agree_with_re(
    expression: str, compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer
) -> None:
    chance = random.Random(1)
    for _ in range(20):
        tokens = walk(started(compiler, "regex", expression), chance)
        assert tokens is None or re.fullmatch(expression, tokenizer.decode(tokens))


def test_every_choice_can_be_made_and_nothing_else(compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer) -> None:
    choices = ["north", "south", "up & down", 'a "quoted"\\ one', "日本", "line\nbreak", "north-east", "%regex /x/"]
    text = json.dumps(choices)
    for choice in choices:
        constraint = started(compiler, "choice", text)
        for token in tokenizer.encode(choice).ids:
            assert constraint.advance(token)
        assert constraint.advance(0)
    chance = random.Random(3)
    made = [walk(started(compiler, "choice", text), chance) for _ in range(40)]
    assert {tokenizer.decode(m) for m in made if m is not None} <= set(choices)


@pytest.mark.parametrize("grammar", ['start: "a" b+\nb: "x" | /[0-9]/', 'root ::= "a" b+\nb ::= "x" | [0-9]'])
def test_lark_and_gbnf_grammars_are_enforced(
    grammar: str, compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer
) -> None:
    chance = random.Random(2)
    for _ in range(10):
        tokens = walk(started(compiler, "lark", grammar), chance)
        assert tokens is not None
        assert re.fullmatch("a[x0-9]+", tokenizer.decode(tokens))


def test_json_mode_has_no_room_for_blanks(compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer) -> None:
    constraint = started(compiler, "json_object", "")
    for token in tokenizer.encode('{"a": [1, {"b": ').ids:
        options = {tokenizer.id_to_token(t) for t in allowed(constraint) if t < tokenizer.get_vocab_size()}
        assert not any(o.startswith("Ċ") for o in options)  # a line break
        constraint.advance(token)
    assert not constraint.fork().advance(tokenizer.token_to_id("Ġ"))


def test_keys_come_in_the_order_of_the_schema(compiler: GrammarCompiler, tokenizer: tokenizers.Tokenizer) -> None:
    schema = closed({"zeta": {"enum": [1]}, "alpha": {"enum": [2]}, "mid": {"enum": [3]}})
    tokens = walk(started(compiler, "json_schema", json.dumps(schema)), random.Random(0))
    assert tokens is not None
    assert tokenizer.decode(tokens) == '{"zeta": 1, "alpha": 2, "mid": 3}'


def test_end_tokens_are_masked_until_the_answer_is_complete(compiler: GrammarCompiler) -> None:
    constraint = started(compiler, "regex", "abc")
    assert not constraint.fork().advance(0)
    while not constraint.stopped():
        options = allowed(constraint)
        assert not {0, 1} & set(options)
        constraint.advance(options[0])
    assert allowed(constraint) == [0, 1]


REFUSED: dict[str, object] = {
    "unknown type": {"type": "banana"},
    "dangling reference": {"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}, "required": ["a"]},
    "remote reference": {"$ref": "http://127.0.0.1:9/schema.json"},
    "broken pattern": closed({"a": {"type": "string", "pattern": "(unclosed["}}),
    "look-ahead": {"type": "string", "pattern": "^(?=a)b"},
    "empty range": closed({"a": {"type": "integer", "minimum": 9, "maximum": 3}}),
    "empty enum": closed({"a": {"enum": []}}),
    "not": {"type": "string", "not": {"const": "a"}},
    "unique items": {"type": "array", "uniqueItems": True},
    "conditional": {"if": {"const": 1}, "then": {"const": 1}},
    "unknown format": {"type": "string", "format": "banana"},
    "overlapping oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "false": False,
    "a string": "not a schema",
    "only endless answers": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "itself": {"$ref": "#"},
    "leniency asked for": {"x-guidance": {"lenient": True}, "type": "array", "uniqueItems": True},
    "huge multiple": {"type": "integer", "multipleOf": 999_983},
    "huge joint multiple": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 997}], "type": "integer"},
    "too many properties": {"properties": {f"k{i}": {} for i in range(5_000)}},
    "product of unions": {
        "allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": i}}} for j in range(6)]} for i in range(9)]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_with_a_reason(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_grammar(Grammar("json_schema", json.dumps(REFUSED[name])))
    assert 10 < len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"array","items":' * 5_000 + "true" + "}" * 5_000),
        ("json_schema", "{"),
        ("json_schema", " " * 300_000),
        ("json_schema", json.dumps({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9000}}, "$ref": "#/$defs/a"})),
        ("json_schema", '{"const": -9223372036854775808}'),
        ("json_schema", '{"enum": [[{"a": -9223372036854775807}]]}'),
        ("lark", 'start: %json {"const": -9223372036854775808}'),
        ("regex", "(a{1000}){1000}"),
        ("regex", "(" * 5_000 + "a" + ")" * 5_000),
        ("regex", "(a)\\1"),
        ("regex", "[z-a]"),
        ("choice", "[]"),
        ("choice", "[1]"),
        ("choice", json.dumps([str(i) for i in range(20_000)])),
        ("lark", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
        ("lark", "start: missing"),
        ("lark", "begin: "),
        ("lark", "\n" * 250_000),
        ("lark", 'root ::= "a' + "\n" * 250_000),
        ("lark", 'start: %json {"type": "integer", "multipleOf": 999983}'),
        ("lark", "start: " + " | ".join(f'"{i}"' for i in range(9_000))),
    ],
)
def test_a_hostile_text_is_refused_with_a_reason(kind: str, text: str) -> None:
    with pytest.raises(InvalidRequest):
        check_grammar(Grammar(kind, text))  # type: ignore[arg-type]


def test_references_nested_as_deep_as_the_size_limit_allows_do_not_end_the_process() -> None:
    chain = 4_000
    definitions: dict[str, Any] = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(chain)
    }
    definitions[f"a{chain}"] = {"type": "null"}
    check_grammar(Grammar("json_schema", json.dumps({"$ref": "#/$defs/a0", "$defs": definitions})))


def test_a_grammar_that_fails_to_compile_says_why_and_harms_no_other(compiler: GrammarCompiler) -> None:
    bad = compiler(Grammar("regex", "(a"))
    good = started(compiler, "regex", "ab")
    end = time.monotonic() + 10
    while not bad.failed() and time.monotonic() < end:
        time.sleep(0.001)
    assert "can't be enforced" in bad.failed()
    assert not bad.ready()
    assert allowed(good)


def test_a_constraint_that_exceeds_its_limits_on_the_way_allows_nothing_more_and_says_why(
    compiler: GrammarCompiler,
) -> None:
    constraint = started(compiler, "regex", "(a{1000}){1000}")
    token = allowed(constraint)[0]
    for _ in range(3):
        constraint.advance(token)
        constraint.mask()
    assert constraint.failed()
    assert allowed(constraint) == []


def test_a_vocabulary_with_more_tokens_than_logits_gives_masks_of_the_logits(
    tokenizer: tokenizers.Tokenizer,
) -> None:
    narrow = GrammarCompiler(tokenizer.to_str(), [0], tokenizer.get_vocab_size() - 100)
    constraint = started(narrow, "json_schema", json.dumps(SCHEMAS["nullable"]))
    assert allowed(constraint)
    assert max(allowed(constraint)) < narrow.mask_bytes * 8
    narrow.close()
