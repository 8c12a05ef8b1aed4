"""A script for the fake client that writes given texts, and proves that a constraint on them was met.

Where the request carries a grammar, the text is walked through llguidance token by token, as the engine would.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from engine.api import AddRequest
from engine.text.grammar import compiled_text, parser_limits
from engine.text.tokenizer import Tokenizer


@lru_cache(maxsize=1)
def _vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    return LLTokenizer(
        tokenizer.backend.to_str(), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_token_ids)
    )


def matcher(tokenizer: Tokenizer, request: AddRequest) -> LLMatcher:
    """The grammar of `request` as the engine compiles it."""
    assert request.params.grammar is not None
    text = compiled_text(request.params.grammar)
    made = LLMatcher(_vocabulary(tokenizer), text, log_level=0, limits=parser_limits())
    assert not made.is_error(), made.get_error()
    return made


def writes(tokenizer: Tokenizer, *texts: str) -> Callable[[AddRequest, int], Sequence[int]]:
    """Choice i of each request writes `texts[i % len]` and ends; it must obey the request's grammar."""

    def script(request: AddRequest, choice: int) -> list[int]:
        ids = tokenizer.encode(texts[choice % len(texts)], add_special_tokens=False)
        if request.params.grammar is not None:
            made = matcher(tokenizer, request)
            assert made.try_consume_tokens(ids) == len(ids), "the scripted text doesn't obey the grammar"
            assert made.is_accepting(), "the scripted text is no complete answer"
        return [*ids, tokenizer.eos_token_ids[0]]

    return script


def obeys(tokenizer: Tokenizer, seed: int = 0) -> Callable[[AddRequest, int], Sequence[int]]:
    """A model that knows nothing but its grammar: it chooses at random among what is allowed."""

    def script(request: AddRequest, choice: int) -> list[int]:
        made = matcher(tokenizer, request)
        chance = random.Random(f"{seed} {choice}")
        out: list[int] = []
        for _ in range(request.params.max_tokens or 0):
            bits = np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little")
            options = np.flatnonzero(bits[: tokenizer.vocab_size]).tolist()
            ends = [t for t in options if t in tokenizer.eos_token_ids]
            if ends and (len(ends) == len(options) or chance.random() < 0.5):
                return [*out, ends[0]]
            out.append(chance.choice([t for t in options if t not in tokenizer.eos_token_ids]))
            assert made.try_consume_tokens([out[-1]]) == 1
        return out

    return script
