"""An EngineClient without an engine: a deterministic model over a real tokenizer, scripted where a test wants it.

The next token is a function of the prompt, the tokens so far and (when sampling) seed and choice, so that the
same request gives the same answer, a shorter limit a prefix of it, and greedy choices are equal.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from engine.api import AddRequest, Delta, FinishReason, Ready, Stats, TokenLogprobs
from engine.errors import EngineDead, InvalidRequest, OctavoError, Overloaded
from engine.streams import Live, Stream
from engine.text.tokenizer import Tokenizer

Script = Callable[[AddRequest, int], Sequence[int]]

CORPUS = (
    "Once upon a time there was a small boat on a wide river, and the old man who owned it told everyone about the "
    "sea. The sky is blue because the light of the sun is scattered; the capital of France is Paris. Bread, water, "
    "salt and a little patience make a good morning. Nobody knew why the clock in the tower had stopped at noon, "
    "yet the children said that the wind had done it, or the birds, or perhaps the baker's clever grey cat."
)


class FakeClient:
    """`delay_s` between steps; `script(request, choice)` gives the output tokens (an end token ends them early)."""

    def __init__(self, tokenizer: Tokenizer, *, delay_s: float = 0.0, script: Script | None = None) -> None:
        self.tokenizer = tokenizer
        self.delay_s = delay_s
        self.script = script or self._walk
        self.refusal: OctavoError | None = None  # raised by submit
        self.first_delta: Delta | None = None  # sent instead of everything, its id filled in
        self.dies_after: int | None = None  # steps until a request ends with EngineDead
        self.times_out_after: int | None = None  # steps until a request ends by its deadline
        self.hold = asyncio.Event()  # nothing is computed until it is set
        self.hold.set()
        self.state = "ready"
        self.step_age_s: float | None = 0.1
        self.live: dict[str, Live] = {}
        self.adapters: dict[str, str] = {}
        self.replicas: tuple[Any, ...] = ()
        self.submitted: list[AddRequest] = []
        self.aborted: list[tuple[str, int]] = []
        self.stats = Stats(blocks_total=64, blocks_free=64, time=time.time())
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._corpus = tokenizer.encode(CORPUS, add_special_tokens=False)

    @property
    def ready(self) -> Ready:
        if self.state == "loading":
            raise EngineDead("the model is being loaded", retry_after_s=2)
        return Ready(
            pid=1,
            model="fake",
            max_model_len=512,
            vocab_size=self.tokenizer.vocab_size,
            block_size=16,
            num_blocks=64,
            kv_bytes_per_block=1024,
            dtype="float32",
            kv_dtype="float32",
            backend="fake",
        )

    def admit(self, key: str) -> None:
        if self.refusal is not None:
            raise self.refusal

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        self.admit(request.key)
        if len(request.prompt) > 1024:
            raise InvalidRequest("can never fit")
        if len(self.live) >= 100:
            raise Overloaded("too many")
        self.submitted.append(request)
        live = self.live[request.id] = Live(request)
        self._tasks[request.id] = asyncio.get_running_loop().create_task(self._generate(live))
        return Stream(live, self.abort)

    def abort(self, request_id: str, choice: int = -1) -> None:
        self.aborted.append((request_id, choice))
        live = self.live.get(request_id)
        if live is None:
            return
        live.end(FinishReason.ABORT, choice=choice)
        if not live.open:
            self._tasks.pop(request_id).cancel()
            del self.live[request_id]

    async def _generate(self, live: Live) -> None:
        request = live.request
        await self.hold.wait()
        if self.first_delta is not None:
            fields = {"id": request.id, "finish": self.first_delta.finish}
            delta = self.first_delta
            live.put(Delta(**fields, choice=0, tokens=(), error=delta.error, error_kind=delta.error_kind))
        elif request.pooling:
            live.put(self._embedding(request))
        else:
            await self._steps(live)
        if not live.open:
            self.live.pop(request.id, None)
            self._tasks.pop(request.id, None)

    async def _steps(self, live: Live) -> None:
        request = live.request
        limit = request.params.max_tokens or 0
        outputs = [list(self.script(request, choice))[:limit] for choice in range(request.params.n)]
        step = 0
        while live.open:
            if self.dies_after is not None and step >= self.dies_after:
                live.fail(EngineDead("the engine is gone"))
                live.end(FinishReason.ABORT)
                return
            for choice in range(request.params.n):
                if not live.choices[choice].done:
                    live.put(self._delta(request, choice, outputs[choice], step))
            step += 1
            await asyncio.sleep(self.delay_s)

    def _delta(self, request: AddRequest, choice: int, output: list[int], step: int) -> Delta:
        params = request.params
        limit = params.max_tokens or 0
        if step == self.times_out_after:
            return Delta(request.id, choice, (), finish=FinishReason.ABORT, error="too late", error_kind="deadline")
        tokens = tuple(output[step : step + 1])
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.tokenizer.eos_token_ids))
        stop = tokens[0] if tokens and tokens[0] in stops and step >= params.min_tokens else None
        finish = FinishReason.STOP if stop is not None else FinishReason.LENGTH if step + 1 >= limit else None
        first = step == 0
        return Delta(
            id=request.id,
            choice=choice,
            tokens=tokens,
            logprobs=() if params.logprobs is None else tuple(self._logprobs(t, params.logprobs) for t in tokens),
            finish=finish,
            stop_token=stop,
            cached_tokens=min(4, len(request.prompt) - 1) if first else -1,
            queued_s=0.001 if first else -1,
            prompt_logprobs=self._prompt_logprobs(request) if first else (),
        )

    def _prompt_logprobs(self, request: AddRequest) -> tuple[TokenLogprobs | None, ...]:
        wanted = request.params.prompt_logprobs
        if wanted is None:
            return ()
        return (None, *(self._logprobs(token, wanted) for token in request.prompt[1:]))

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        others = [(token + i) % self.tokenizer.vocab_size for i in range(top)]
        values = [-0.5 - i for i in range(top)]
        if values:
            values[-1] = -math.inf if top > 3 else values[-1]
        return TokenLogprobs(-0.5, 1, tuple(zip(others, values, strict=True)))

    def _walk(self, request: AddRequest, choice: int) -> list[int]:
        """The corpus from a place that depends on the prompt, and when sampling on seed and choice."""
        params = request.params
        forced = [token for token, bias in params.logit_bias.items() if bias >= 40]
        if forced:
            return [forced[0]] * (params.max_tokens or 0)
        key: tuple[Any, ...] = (request.prompt,)
        if params.temperature > 0 and params.top_p > 0 and params.top_k != 1:
            key = (request.prompt, params.seed, choice)
        start = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "little")
        corpus = self._corpus
        return [corpus[(start + i) % len(corpus)] for i in range(params.max_tokens or 0)]

    def _embedding(self, request: AddRequest) -> Delta:
        values = [math.sin(sum(request.prompt) + i) for i in range(16)]
        length = math.sqrt(sum(value * value for value in values))
        data = struct.pack("<16f", *(value / length for value in values))
        return Delta(request.id, 0, (), finish=FinishReason.STOP, cached_tokens=0, queued_s=0.0, embedding=data)

    def health(self) -> dict[str, Any]:
        engine = {"pid": 1, "state": "running", "last_step_age_s": self.step_age_s, "restarts": 0}
        return {"status": self.state, "engine": engine}

    async def inspect(self, what: str, request_id: str = "") -> Any:
        if what == "request":
            return {"id": request_id} if request_id in self.live else None
        if what == "block":
            return {"tokens": [5, 6, 7]} if int(request_id) < 64 else None
        return {"what": what, "ids": list(self.live)}

    async def control(self, command: str, argument: dict[str, str]) -> Any:
        if command == "load_adapter":
            self.adapters[argument["name"]] = argument["path"]
        elif command == "unload_adapter":
            del self.adapters[argument["name"]]
        return {"command": command, **argument}

    async def start(self) -> Ready:
        return self.ready

    async def drain(self, timeout_s: float) -> None:
        self.state = "draining"

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
