"""What fewer bits cost: perplexity, KL divergence and agreement with float32 on one text, for weights and KV kinds.

The kernels compute all logits of a text in chunks, as prefill does, so that the KV dtype counts as it does in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine import native
from engine.build import choose, find_model
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import load_spec
from engine.text.tokenizer import Tokenizer
from engine.worker.native_blocks import NativeBlocks
from engine.worker.native_executor import load_model

Float32 = npt.NDArray[np.float32]

WINDOW, CHUNK = 1024, 256  # tokens: contexts begin anew after a window; a chunk's logits are in memory at once
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """Arithmetic, weights and KV."""

    name: str
    dtype: str
    quantization: str
    kv_dtype: str


REFERENCE = Kind("float32", "float32", "none", "float32")
KINDS = (
    Kind("bf16", "bfloat16", "none", "bfloat16"),
    Kind("int8 weights", "bfloat16", "int8", "bfloat16"),
    Kind("GGUF blocks", "bfloat16", "gguf", "bfloat16"),
    Kind("bf16, int8 KV", "bfloat16", "none", "int8"),
    Kind("bf16, fp8_e4m3 KV", "bfloat16", "none", "fp8_e4m3"),
    Kind("bf16, fp8_e5m2 KV", "bfloat16", "none", "fp8_e5m2"),
)


@dataclass(slots=True)
class Score:
    """Sums over `tokens` predictions."""

    name: str
    kv_bytes_per_token: float
    nll: float = 0.0
    kl: float = 0.0  # KL(float32 || this)
    agreed: int = 0  # the most likely token is the same
    tokens: int = 0

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.nll / self.tokens))


class Scorer:
    """One kind of model: gives log probabilities of a window's chunks, one after another."""

    def __init__(self, model: str, kind: Kind) -> None:
        """Raises ConfigError."""
        settings = {"dtype": kind.dtype, "quantization": kind.quantization, "kv_cache_dtype": kind.kv_dtype}
        config = EngineConfig.of(model, **settings)
        path = find_model(config)
        spec = load_spec(path)
        choice = choose(config, path, spec)
        kernels = native.load(choice.settings.isa, choice.settings.threads)
        self._model = load_model(kernels, path, spec, choice.settings)
        dtype = native.DTYPES[kind.kv_dtype]
        block_bytes = kernels.kv_block_bytes(spec, BLOCK, dtype)
        self._blocks = NativeBlocks(WINDOW // BLOCK, block_bytes, BLOCK, dtype, pages_per_slot=0)
        self._table = np.arange(WINDOW // BLOCK, dtype=np.int32)[None]
        self._logits = np.empty((CHUNK, spec.vocab_size), np.float32)
        self.score = Score(kind.name, block_bytes / BLOCK)

    def log_probs(self, tokens: Sequence[int], start: int) -> Float32:
        """[len(tokens), vocab] after each token of a chunk that begins at `start`; valid until the next call."""
        n = len(tokens)
        ids, rows = np.array(tokens, np.int32), np.arange(n, dtype=np.int32)
        ends, starts, line = np.array([0, n], np.int32), np.array([start], np.int32), np.zeros(1, np.int32)
        address = native.pointer
        batch = native.Batch(
            n_rows=n,
            n_seqs=1,
            tokens=address(ids),
            q_start=address(ends),
            pos_start=address(starts),
            tables=address(self._table),
            table_stride=self._table.shape[1],
            table_line=address(line),
            n_logits=n,
            logit_rows=address(rows),
            logits=address(self._logits),
        )
        self._model.step(self._blocks.kv, batch)
        logits = self._logits[:n]
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)).astype(np.float32)
        return logits

    def close(self) -> None:
        self._model.close()
        self._blocks.close()


def measure(model: str, tokens: Sequence[int], kinds: Sequence[Kind] = KINDS) -> list[Score]:
    """Scores of the reference and of every kind, on the same predictions."""
    reference, others = Scorer(model, REFERENCE), [Scorer(model, kind) for kind in kinds]
    for first in range(0, len(tokens) - 1, WINDOW):
        window = tokens[first : first + WINDOW + 1]
        for start in range(0, len(window) - 1, CHUNK):
            chunk = window[start : min(start + CHUNK, len(window) - 1)]
            targets = np.array(window[start + 1 : start + 1 + len(chunk)])
            true = reference.log_probs(chunk, start)
            weights, best = np.exp(true), true.argmax(axis=1)
            _add(reference.score, true, true, weights, best, targets)
            for other in others:
                _add(other.score, other.log_probs(chunk, start), true, weights, best, targets)
    for scorer in (reference, *others):
        scorer.close()
    return [scorer.score for scorer in (reference, *others)]


def _add(
    score: Score,
    got: Float32,
    true: Float32,
    weights: Float32,
    best: npt.NDArray[np.intp],
    targets: npt.NDArray[np.int_],
) -> None:
    score.nll -= float(got[np.arange(len(targets)), targets].sum(dtype=np.float64))
    score.kl += float(np.einsum("ij,ij->", weights, true - got, dtype=np.float64))
    score.agreed += int((got.argmax(axis=1) == best).sum())
    score.tokens += len(targets)


def text_tokens(model: str, text: str, count: int) -> list[int]:
    """The first `count` tokens of a file, or of the help that Python itself carries. Raises ConfigError."""
    if text:
        try:
            content = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {text}: {error}") from error
    else:
        from pydoc_data.topics import topics

        content = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    tokenizer = Tokenizer.load(find_model(EngineConfig.of(model)))
    tokens = tokenizer.encode(content[: 12 * count])[:count]
    if len(tokens) < 2:
        raise ConfigError(f"--text {text}: too short to predict anything")
    return tokens
