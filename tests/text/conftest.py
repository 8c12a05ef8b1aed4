from pathlib import Path

import pytest
from hypothesis import strategies as st

from engine.model.pull import pull
from engine.text.tokenizer import Tokenizer


def encodable() -> st.SearchStrategy[str]:
    """Texts of all characters that the default model has tokens for: its vocabulary lacks a few bytes."""
    lacking = "\x04\x06\x13\x14\x16\x1d"  # and bytes that no text has, or that start the planes from 4 on
    return st.text(st.characters(codec="utf-8", exclude_characters=lacking, max_codepoint=0x3FFFF))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return pull("smollm2")


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)
