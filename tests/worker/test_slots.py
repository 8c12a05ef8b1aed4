"""What a slot allows when its constraints contradict each other: always something, so that no step fails for it."""

from __future__ import annotations

import numpy as np
import pytest

from engine.worker.slots import Constraints

VOCAB = 64


def bits(*tokens: int) -> np.ndarray:
    words = np.zeros(VOCAB // 32, np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words


@pytest.mark.parametrize(
    ("grammar", "allowed", "stops", "left"),
    [
        ((1, 40), (40, 50), (), (40,)),
        ((1, 40), (50,), (), (1, 40)),  # the grammar goes before allowed ids
        ((1, 2), None, (2,), (1,)),
        ((2,), None, (2,), (2,)),  # a grammar that is complete ends, whatever min_tokens says
        (None, (2, 3), (2,), (3,)),
        (None, (2,), (2,), (2,)),
    ],
)
def test_constraints_that_contradict_each_other_leave_something(grammar, allowed, stops, left) -> None:
    constraints = Constraints(
        prompt_len=1,
        min_tokens=5,
        stop_ids=stops,
        bad_words=(),
        allowed=None if allowed is None else bits(*allowed),
        bias=None,
        history=None,
    )
    mask = constraints.mask(1, None if grammar is None else bits(*grammar).tobytes(), VOCAB)
    assert mask is not None
    assert mask.tolist() == bits(*left).tolist()
