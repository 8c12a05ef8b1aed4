"""Limits: what can never be served is refused at once, with the numbers that say why."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import AddRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the loaded model and its pool."""

    max_model_len: int
    pool_tokens: int
    vocab_size: int

    def problem(self, add: AddRequest) -> str:
        """Why this request can't be served at all, or ""."""
        params, length = add.params, len(add.prompt)
        room = 0 if add.pooling else 1
        if length == 0:
            return "the prompt has no tokens"
        if length + room > self.max_model_len:
            return f"the prompt has {length} tokens; the context holds {self.max_model_len}, the answer included"
        if length + room > self.pool_tokens:
            return f"the prompt has {length} tokens; the KV pool holds {self.pool_tokens}, the answer included"
        if not all(0 <= token < self.vocab_size for token in add.prompt):
            return f"a prompt token is not in the vocabulary of {self.vocab_size}"
        if len(add.resume) > params.n:
            return f"{len(add.resume)} choices to resume; the request has {params.n}"
        if params.beam_width:
            return _beam_problem(add, self.vocab_size)
        return ""


def _beam_problem(add: AddRequest, vocab_size: int) -> str:
    """Beam search ranks raw logprobs: what changes the distribution has no meaning there."""
    params = add.params
    width = max(params.beam_width, params.n)
    if 2 * width > vocab_size:
        return f"{width} beams are too many for a vocabulary of {vocab_size}"
    given = {
        "grammar": params.grammar is not None,
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "bad_words": bool(params.bad_words),
        "repetition_penalty": params.repetition_penalty != 1.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
    }
    for name, used in given.items():
        if used:
            return f"{name} can't be combined with beam search"
    return ""
