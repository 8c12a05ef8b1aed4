"""The sparse counts of seen tokens against counting from scratch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from engine.worker.history import History

tokens = st.lists(st.integers(0, 9), max_size=12)


@given(prompt=tokens, output=tokens, edits=st.lists(st.tuples(st.integers(0, 30), tokens), max_size=8))
def test_counts_are_those_of_the_tokens_whatever_was_appended_and_taken_back(
    prompt: list[int], output: list[int], edits: list[tuple[int, list[int]]]
) -> None:
    history = History(tuple(prompt), tuple(output))
    model = prompt + output
    for start, new in edits:
        start = min(start, len(model))
        model = model[:start] + new
        history.advance(start, new)

        ids, counts = history.seen()
        assert history.tokens == model
        assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == {
            token: Counter(model[len(prompt) :])[token] for token in set(model)
        }


def test_many_distinct_tokens_outgrow_the_first_arrays() -> None:
    history = History(tuple(range(500)), ())
    ids, counts = history.seen()
    assert ids.tolist() == list(range(500))
    assert not counts.any()


def test_the_end_of_the_history_is_compared_for_bad_words() -> None:
    history = History((1, 2), (3,))
    assert history.ends_with(())
    assert history.ends_with((2, 3))
    assert not history.ends_with((1, 3))
    assert not history.ends_with((0, 1, 2, 3))
