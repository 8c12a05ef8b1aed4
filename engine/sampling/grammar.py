"""Token masks for structured output: llguidance behind the scheduler's `Constraint`.

A grammar is compiled once, on a worker thread, and kept; each choice walks a copy of its own. Making a mask costs
some 20 microseconds at a vocabulary of 49,152 (tests/sampling has the measurement), so it is made where it is
needed, on the scheduler's thread.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from engine.api import Grammar
from engine.errors import InvalidRequest
from engine.text.grammar import compiled_text, compiler_thread, parser_limits, readable

MAX_CACHED = 128
COMPILE_TIMEOUT_S = 10.0
# Classes of tokens that are allowed or forbidden as one, beside llguidance's own (which are those of JSON strings):
# without the one of plain ASCII a mask of `[ -~]{2000}` takes 400 microseconds instead of 20.
SLICES = (r"[a-zA-Z ]{1,20}", r"[\x20-\x7e]{1,20}")


class GrammarCompiler:
    """The `ConstraintFactory` of one vocabulary.

    `tokenizer_json`: the text of tokenizer.json. `eos_ids`: the tokens that may end a complete answer.
    `vocab_size`: width of the logits; a mask has one bit for each, rounded up to 32-bit words.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer_json = tokenizer_json
        self._eos_ids = frozenset(eos_ids)
        self.vocab_size = vocab_size
        self.mask_bytes = (vocab_size + 31) // 32 * 4
        self._tokenizer: LLTokenizer | None = None
        self._executor: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Grammar, _Compilation] = OrderedDict()

    def __call__(self, grammar: Grammar) -> GrammarConstraint:
        found = self._compiled.get(grammar)
        if found is None:
            if self._executor is None:
                self._executor = compiler_thread("grammar")
            found = self._compiled[grammar] = _Compilation(self._executor.submit(self._compile, grammar))
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return GrammarConstraint(found, self.mask_bytes, self._eos_ids)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """On the worker thread, which drops the GIL while it compiles. Raises InvalidRequest."""
        if self._tokenizer is None:  # a third of a second: paid by the first constrained request, not by the start
            self._tokenizer = self._load_tokenizer()
        matcher = LLMatcher(self._tokenizer, compiled_text(grammar), log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequest(f"the grammar can't be enforced: {readable(matcher)}")
        return matcher

    def _load_tokenizer(self) -> LLTokenizer:
        eos, slices = sorted(self._eos_ids), [*LLTokenizer.general_slices(), *SLICES]
        try:
            return LLTokenizer(self._tokenizer_json, n_vocab=self.vocab_size, eos_token=eos, slices=slices)
        except ValueError:  # it has tokens that the model gives no logits for: their bits are cut off each mask
            return LLTokenizer(self._tokenizer_json, eos_token=eos, slices=slices)

    def close(self) -> None:
        """Stop the worker thread; grammars that wait to be compiled fail."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


class _Compilation:
    """A grammar that is being compiled, or was. Shared by all choices that use it."""

    def __init__(self, future: Future[LLMatcher]) -> None:
        self._future = future
        self._started = time.monotonic()

    def ready(self) -> bool:
        return self._future.done() and self.failed() == ""

    def failed(self) -> str:
        if not self._future.done():
            late = time.monotonic() - self._started > COMPILE_TIMEOUT_S
            return f"the grammar was not compiled within {COMPILE_TIMEOUT_S:g} s" if late else ""
        if self._future.cancelled():
            return "the engine stopped before the grammar was compiled"
        error = self._future.exception()
        return "" if error is None else str(error)

    def matcher(self) -> LLMatcher:
        return self._future.result().deep_copy()


class GrammarConstraint:
    """The state of one choice: where it stands in its grammar, and whether its end token came.

    The end token is kept out of the matcher, which forgets on a rollback that it had seen one.
    """

    def __init__(
        self, compilation: _Compilation, mask_bytes: int, eos_ids: frozenset[int], matcher: LLMatcher | None = None
    ) -> None:
        self._compilation = compilation
        self._mask_bytes = mask_bytes
        self._eos_ids = eos_ids
        self._own = matcher
        self._ended = False

    @property
    def _matcher(self) -> LLMatcher:
        if self._own is None:
            self._own = self._compilation.matcher()
        return self._own

    def ready(self) -> bool:
        return self._compilation.ready()

    def failed(self) -> str:
        if self._own is not None:
            return readable(self._own) if self._own.is_error() else ""
        return self._compilation.failed()

    def mask(self) -> bytes | None:
        """Little-endian 32-bit words over the logits; all zero when the grammar's limits were exceeded."""
        words = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return bytes(self._mask_bytes)
        return bytes(words[: self._mask_bytes].ljust(self._mask_bytes, b"\0"))

    def advance(self, token: int) -> bool:
        """False, and no change, when the grammar doesn't allow `token`."""
        if self._ended:
            return False
        if token in self._eos_ids:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def rollback(self, tokens: int) -> None:
        if tokens and self._ended:
            self._ended = False
            tokens -= 1
        if tokens:
            self._matcher.rollback(tokens)

    def stopped(self) -> bool:
        return self._ended or bool(self._matcher.is_stopped())

    def fork(self) -> GrammarConstraint:
        own = None if self._own is None else self._own.deep_copy()
        copy = GrammarConstraint(self._compilation, self._mask_bytes, self._eos_ids, own)
        copy._ended = self._ended
        return copy
