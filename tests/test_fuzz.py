"""A small, repeatable part of `tests.fuzz`."""

import pytest

from tests.fuzz import TARGETS, fuzz

INPUTS = {"gguf": 300, "safetensors": 300, "adapter": 150, "template": 25, "grammar": 200, "ipc": 100, "http": 150}


@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_answered_or_refused(name: str) -> None:
    came, faults = fuzz(name, seed=7, inputs=INPUTS[name])
    assert not faults
    assert sum(came.values()) == INPUTS[name]
    assert len(came) >= 2 or name == "template"
