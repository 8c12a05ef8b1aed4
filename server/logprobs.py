"""Logprobs on the wire: OpenAI's two shapes, and vLLM's of a prompt. Values are raw and always finite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine.api import TokenLogprobs
from engine.text.tokenizer import Tokenizer
from server.generate import Entry, finite


class LogprobsWriter:
    """Tokens as strings, once per tokenizer and mode."""

    def __init__(self, tokenizer: Tokenizer, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def text(self, token: int) -> str:
        """The token as a string from which it can be told: a part of a character is written as its bytes."""
        if self._as_token_ids:
            return f"token_id:{token}"
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in data])

    def chat(self, entries: Iterable[Entry], top: int) -> dict[str, Any]:
        """`logprobs` of a chat choice or chunk."""
        return {"content": [self._chat_entry(entry.token, entry.logprobs, top) for entry in entries], "refusal": None}

    def _chat_entry(self, token: int, logprobs: TokenLogprobs, top: int) -> dict[str, Any]:
        alternatives = [self._chat_token(other, value) for other, value in logprobs.top[:top]]
        return {**self._chat_token(token, logprobs.logprob), "top_logprobs": alternatives}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": self.text(token), "logprob": finite(logprob), "bytes": list(data)}

    def completion(self, entries: Sequence[tuple[int, TokenLogprobs | None, int]], top: int) -> dict[str, list[Any]]:
        """`logprobs` of a completion: (token, logprobs or None at the very first position, text offset)."""
        tokens = [self.text(token) for token, _, _ in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [None if lp is None else finite(lp.logprob) for _, lp, _ in entries],
            "top_logprobs": [
                None if lp is None else self._top(text, lp, top)
                for text, (_, lp, _) in zip(tokens, entries, strict=True)
            ],
            "text_offset": [offset for _, _, offset in entries],
        }

    def _top(self, chosen: str, logprobs: TokenLogprobs, top: int) -> dict[str, float]:
        """The `top` most likely tokens and the chosen one: up to top + 1."""
        alternatives = {self.text(token): finite(value) for token, value in logprobs.top[:top]}
        alternatives.setdefault(chosen, finite(logprobs.logprob))
        return alternatives

    def prompt(self, prompt: Sequence[int], rows: Sequence[TokenLogprobs | None]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: token id -> {logprob, rank, decoded_token}, None at the first position."""
        return [None if row is None else self._prompt_row(token, row) for token, row in zip(prompt, rows, strict=False)]

    def _prompt_row(self, token: int, row: TokenLogprobs) -> dict[str, Any]:
        cells = {
            str(other): {"logprob": finite(value), "rank": rank, "decoded_token": self.text(other)}
            for rank, (other, value) in enumerate(row.top, 1)
        }
        own = {"logprob": finite(row.logprob), "rank": row.rank, "decoded_token": self.text(token)}
        return {str(token): own} | cells
