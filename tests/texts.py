"""Long English texts for prompts: the help topics that Python itself carries (no file of our own)."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics


@cache
def english(characters: int) -> str:
    """The same text every time: topics in alphabetical order, white space folded."""
    out: list[str] = []
    size = 0
    for name in sorted(topics):
        text = " ".join(topics[name].split())
        out.append(text)
        size += len(text) + 1
        if size >= characters:
            break
    return " ".join(out)[:characters]
