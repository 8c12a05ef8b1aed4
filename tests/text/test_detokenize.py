"""Text comes out the same however it is cut on its way."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.text.detokenize import Detokenizer, StopChecker
from engine.text.tokenizer import Tokenizer
from tests.text.conftest import encodable


def cut(draw: Any, length: int) -> list[slice]:
    """Borders of a random way to hand over `length` things in pieces."""
    inner = draw(st.lists(st.integers(0, length), max_size=8))
    return [slice(a, b) for a, b in pairwise(sorted({0, length, *inner}))]


@settings(max_examples=200)
@given(text=encodable(), data=st.data())
def test_any_cut_of_the_tokens_gives_the_text(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[part]) for part in cut(data.draw, len(ids))]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@settings(max_examples=200)
@given(ids=st.lists(st.integers(17, 49151), max_size=30), data=st.data())
def test_any_tokens_give_what_decoding_them_at_once_gives(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids[part]) for part in cut(data.draw, len(ids))]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_holds_back_half_a_character_and_gives_up_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🎉", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.push(ids[-1:]) == "🎉"
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize(("skip", "expected"), [(True, "hi there"), (False, "hi<|im_end|> there")])
def test_shows_special_tokens_only_when_asked(tokenizer: Tokenizer, skip: bool, expected: str) -> None:
    ids = tokenizer.encode("hi<|im_end|> there", add_special_tokens=False)
    assert Detokenizer(tokenizer, skip_special_tokens=skip).push(ids) == expected


# ---------------------------------------------------------------- stop strings


def first_completed(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, plainly: the stop string that ends first; of those, the longest."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end - len(stop)], stop
    return text, None


alphabet = st.sampled_from("abc")


@settings(max_examples=500)
@given(
    text=st.text(alphabet, max_size=40),
    stops=st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
    data=st.data(),
)
def test_any_cut_of_the_text_stops_at_the_same_place(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    checker = StopChecker(stops, include_stop=include)
    shown = ""
    for part in cut(data.draw, len(text)):
        shown += checker.push(text[part])
        seen = text[: part.stop]
        if checker.matched is None:
            # Held back is just what may still become a stop string.
            held = seen[len(shown) :]
            longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
            assert shown + held == seen
            assert len(held) == longest
    shown += checker.flush()
    expected, matched = first_completed(text, stops)
    assert checker.matched == matched
    assert shown == expected + (matched or "" if include else "")


def test_shows_nothing_after_a_match() -> None:
    checker = StopChecker(["END"])
    assert checker.push("onE") == "on"
    assert checker.push("ND and more") == ""
    assert checker.matched == "END"
    assert checker.push("even more") == ""
    assert checker.flush() == ""
