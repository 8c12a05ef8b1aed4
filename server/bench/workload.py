"""Seeded workloads: the same (name, seed) gives the same bytes, for whatever server they are sent to."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# Common English words: with the space before them, one token each in practically every English BPE vocabulary.
_COMMON_WORDS = """
    the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
    one you were her all she there would their we him been has when who will more no if out so said what up its
    about into than them can only other new some could time these two may then do first any my now such like our
    over man me even most made after also did many before must through back years where much your way well down
    should because each just those people how too little state good very make world still own see men work long get
    here between both life being under never day same another know while last might us great old year off come since
    against go came right used take three small large place house water school number night point home hand high
    early system set end part fact public late head form best power car open told second family group during light
    word study question
"""
COMMON_WORDS = _COMMON_WORDS.split()

WORKLOADS = {
    "single": "one stream at a time: 32 tokens in, 128 out",
    "chat": "lognormal lengths as people chat: median 100 in (sigma 0.7), median 100 out (sigma 0.6)",
    "prefix": "one system prompt of 512 tokens for all, 32 of its own each, 64 out",
    "parallel": "100 in, n = 4 samples at temperature 0.8, 64 out each",
    "long": "1,500 in, 64 out",
    "mixed": "chat, with every 8th request a long one",
    "fixed": "--input-len in, --output-len out",
}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload. Lengths in tokens (words of one token each)."""

    user: str
    output_tokens: int
    system: str = ""
    n: int = 1
    temperature: float = 0.0
    kind: str = ""

    def body(self, model: str, *, ignore_eos: bool) -> dict[str, Any]:
        """The JSON of POST /v1/chat/completions."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.user})
        body: dict[str, Any] = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self.output_tokens,
            "temperature": self.temperature,
        }
        if self.n > 1:
            body["n"] = self.n
        if ignore_eos:
            body["ignore_eos"] = True
        return body


class Workload:
    """An endless, seeded stream of requests."""

    def __init__(
        self, name: str, seed: int, words: list[str], input_len: int | None = None, output_len: int | None = None
    ) -> None:
        self.name = name
        self._words = words
        self._input_len, self._output_len = input_len, output_len
        self._rng = random.Random(f"{name}/{seed}")
        self._shared = self._text(random.Random(f"shared/{seed}"), 512)
        self._made = 0

    def next(self) -> LoadRequest:
        self._made += 1
        kind = self.name
        if kind == "mixed":
            kind = "long" if self._made % 8 == 0 else "chat"
        if kind == "chat":
            inputs, outputs = self._lognormal(100, 0.7, 8, 1024), self._lognormal(100, 0.6, 8, 512)
        else:
            inputs, outputs = {
                "single": (32, 128),
                "prefix": (32, 64),
                "parallel": (100, 64),
                "long": (1500, 64),
                "fixed": (128, 128),
            }[kind]
        text = self._text(self._rng, self._input_len or inputs)
        outputs = self._output_len or outputs
        if kind == "prefix":
            return LoadRequest(text, outputs, system=self._shared, kind=kind)
        if kind == "parallel":
            return LoadRequest(text, outputs, n=4, temperature=0.8, kind=kind)
        return LoadRequest(text, outputs, kind=kind)

    def _lognormal(self, median: float, sigma: float, low: int, high: int) -> int:
        return max(low, min(high, round(self._rng.lognormvariate(math.log(median), sigma))))

    def _text(self, rng: random.Random, words: int) -> str:
        return " ".join(rng.choice(self._words) for _ in range(words))


def words_of(tokenizer: str) -> list[str]:
    """Lower-case words that are one token each in a tokenizer.json (or its directory); "" = a built-in list."""
    if not tokenizer:
        return COMMON_WORDS
    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        vocab = json.loads(path.read_text())["model"]["vocab"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: not a tokenizer.json ({error}); leave --tokenizer out") from error
    pieces = vocab if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    words = sorted(
        p[1:]
        for p in pieces
        if len(p) >= 4 and p[0] in "Ġ▁" and p[1:].isascii() and p[1:].isalpha() and p[1:].islower()
    )
    if len(words) < 500:
        raise ConfigError(f"{path}: only {len(words)} whole-word tokens; leave --tokenizer out")
    return words
