"""Offline use: the engine in the caller's thread, without server, socket or event loop.

from engine import LLM, SamplingParams

with LLM("smollm2") as llm:
    for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0)):
        print(answer.choices[0].text)
"""

from __future__ import annotations

import array
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from engine.api import AddRequest, Delta, FinishReason, Pooling, SamplingParams, Stats, TokenLogprobs
from engine.build import build, find_model
from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest, RequestFailed
from engine.text.chat import ChatTemplate
from engine.text.detokenize import Detokenizer, StopChecker
from engine.text.generation import sampling_defaults
from engine.text.tokenizer import Tokenizer
from engine.validate import Limits, add_request, pooling_request, stop_strings

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Choice:
    """One answer. `tokens` has the end token too; `text` doesn't, and it ends before a stop string."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: str | None = None  # "stop" or "length", when it has ended


@dataclass(slots=True)
class Answer:
    """What one prompt gave."""

    prompt_tokens: tuple[int, ...]
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached_tokens: int = 0


class LLM:
    """A model that is ready to generate. Keywords are settings of `EngineConfig` (see `octavo config show`)."""

    def __init__(self, model: str | EngineConfig = "smollm2", **settings: Any) -> None:
        config = model if isinstance(model, EngineConfig) else EngineConfig.of(model, **settings)
        if config.parallel.replicas > 1:
            raise ConfigError("replicas: `octavo serve` has several engines, an LLM is one")
        path = find_model(config, progress=True)
        self._engine = build(config)
        self._core = self._engine.core
        ready = self._engine.ready
        self._limits = Limits.of(ready)
        self.tokenizer = Tokenizer.load(path)
        self._template = ChatTemplate.of(self.tokenizer)
        defaults = sampling_defaults(self.tokenizer.generation_config)
        self._defaults = msgspec.structs.replace(defaults, max_tokens=None)
        self._count = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        progress: bool = True,
    ) -> list[Answer]:
        """Answers in the order of the prompts, which are texts or token ids. One `params` goes for all; without any
        those of the model's generation_config.json hold, but for a limit.

        Raises InvalidRequest for a prompt or parameter that can't be served, RequestFailed when the engine fails.
        """
        many = _as_list(prompts)
        one = params or self._defaults
        each = [one] * len(many) if isinstance(one, SamplingParams) else list(one)
        if len(each) != len(many):
            raise InvalidRequest(f"{len(many)} prompts, but {len(each)} sampling parameters; give one each, or one")
        runs = [self._run(p, s, stop) for p, s in zip(many, each, strict=True)]
        self._drive(runs, progress)
        return [run.answer for run in runs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        progress: bool = True,
    ) -> list[Answer]:
        """The same for chats in OpenAI's form: one list of messages, or a list of such lists."""
        first = messages[0] if messages else {}
        chats = [messages] if isinstance(first, Mapping) else messages
        return self.generate([self.render(c) for c in chats], params, stop=stop, progress=progress)  # type: ignore[arg-type]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, stop: str | Sequence[str] | None = None
    ) -> Iterator[str]:
        """The text of the first choice, piece by piece. Leaving the loop early aborts the request."""
        run = self._run(prompt, params or self._defaults, stop)
        own = {run.request.id: run}
        shown = 0
        try:
            self._core.add(run.request)
            while not run.done:
                self._step(own)
                text = run.answer.choices[0].text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)
        finally:
            if not run.done:
                self._core.abort(run.request.id)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, progress: bool = False
    ) -> list[list[float]]:
        """Hidden states of each prompt, pooled as the model does by default: lists of hidden_size floats."""
        runs = []
        for prompt in _as_list(prompts):
            request = pooling_request(
                self._limits, id=self._id(), prompt=self._tokens(prompt), pooling=pooling, arrival=time.time()
            )
            runs.append(_Run(request, self.tokenizer, ()))
        self._drive(runs, progress)
        return [list(array.array("f", run.embedding)) for run in runs]

    def render(self, messages: Messages) -> list[int]:
        """The token ids of a chat, ready for the answer."""
        return self.tokenizer.encode(self._template.render(list(messages)), add_special_tokens=False)

    def within_context(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """`params` with max_tokens cut to the room that the prompt leaves."""
        room = max(self._limits.max_model_len - len(prompt), 1)
        return msgspec.structs.replace(params, max_tokens=min(params.max_tokens or room, room))

    def stats(self) -> Stats:
        """The engine's counters."""
        return self._core.stats()

    def close(self) -> None:
        """Free the model. Idempotent."""
        self._core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _id(self) -> str:
        self._count += 1
        return f"offline-{self._count}"

    def _tokens(self, prompt: Prompt) -> Sequence[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _run(self, prompt: Prompt, params: SamplingParams, stop: str | Sequence[str] | None) -> _Run:
        request = add_request(
            self._limits, id=self._id(), prompt=self._tokens(prompt), params=params, arrival=time.time()
        )
        return _Run(request, self.tokenizer, stop_strings(stop, self._limits))

    def _drive(self, runs: list[_Run], progress: bool) -> None:
        """Step until every run has ended; abort what still runs when something raises."""
        from tqdm import tqdm

        by_id = {run.request.id: run for run in runs}
        bar = tqdm(total=len(runs), desc="generating", unit="prompt", disable=not progress or not sys.stderr.isatty())
        try:
            for run in runs:
                self._core.add(run.request)
            left = len(runs)
            while left:
                self._step(by_id)
                now = sum(not run.done for run in runs)
                bar.update(left - now)
                left = now
        finally:
            bar.close()
            for run in runs:
                if not run.done:
                    self._core.abort(run.request.id)

    def _step(self, runs: Mapping[str, _Run]) -> None:
        for delta in self._core.step().deltas:
            run = runs.get(delta.id)
            if run and run.take(delta):
                self._core.abort(delta.id, delta.choice)


class _Run:
    """One request on its way, and its texts."""

    def __init__(self, request: AddRequest, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.request = request
        n = request.params.n
        self.answer = Answer(request.prompt, [Choice() for _ in range(n)])
        self.embedding = b""
        self._texts = [Detokenizer(tokenizer) for _ in range(n)]
        self._stops = [StopChecker(stop) for _ in range(n)]

    @property
    def done(self) -> bool:
        return all(c.finish is not None for c in self.answer.choices)

    def take(self, delta: Delta) -> bool:
        """Add a delta; True when a stop string was found, so that the choice is to be aborted."""
        choice = self.answer.choices[delta.choice]
        if choice.finish is not None:
            return False
        if delta.finish is FinishReason.ERROR:
            raise (InvalidRequest if delta.error_kind == "invalid" else RequestFailed)(delta.error)
        self.answer.cached_tokens = max(self.answer.cached_tokens, delta.cached_tokens)
        self.answer.prompt_logprobs = delta.prompt_logprobs or self.answer.prompt_logprobs
        self.embedding = delta.embedding or self.embedding
        detokenizer, stops = self._texts[delta.choice], self._stops[delta.choice]
        for i, token in enumerate(delta.tokens):
            choice.tokens += (token,)
            choice.logprobs += delta.logprobs[i : i + 1]
            if token == delta.stop_token and i == len(delta.tokens) - 1:
                continue
            choice.text += stops.push(detokenizer.push((token,)))
            if stops.matched is not None:
                choice.finish = "stop"
                return delta.finish is None
        if delta.finish is not None:
            choice.text += stops.push(detokenizer.flush()) + stops.flush()
            choice.finish = "stop" if stops.matched is not None or delta.finish is FinishReason.STOP else "length"
        return False


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt is a text or a sequence of ids; anything else is a sequence of prompts."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
