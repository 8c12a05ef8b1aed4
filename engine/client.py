"""EngineClient: what the server knows of the engine. `ProcessClient` and `LocalClient` are the same supervisor over
an engine in a process of its own or on a thread.

It keeps every live request with the tokens that were delivered, and the LoRA adapters that were loaded. When the
engine dies, it starts another and hands them all over, so that a stream only pauses. A request that was on board of
two engines in a row which died before it got a further token is a suspect: suspects go first and alone, until they
get on or are proven guilty.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from engine.admission import Admission
from engine.api import (
    Abort,
    AddRequest,
    Control,
    Delta,
    Failed,
    FinishReason,
    FromEngine,
    Inspect,
    Ready,
    Snapshot,
    Stats,
    StepOut,
)
from engine.config import EngineConfig, adapters
from engine.errors import ConfigError, EngineDead, InvalidRequest, RequestFailed
from engine.streams import Live, Stream
from engine.transport import Exit, Handle, Launcher, ProcessLauncher, ThreadLauncher

log = logging.getLogger("octavo.engine")

FACTORY = "engine.build:build"
SUSPECT_AT = 2  # deaths in a row without progress
ANSWER_S = 30.0  # an inspection or a command is answered within so long
LOAD_S = 600.0  # the same of a command that reads files
READS_FILES = ("load_adapter", "export_kv", "import_kv")
STABLE_S = 60.0  # an idle engine that lived so long has got somewhere
BUSY_FACTOR = 10  # a step that keeps the processor busy may take so many times the watchdog's time
BACKOFF_S = (0.0, 0.1, 0.5, 2.0, 5.0)

State = Literal["loading", "ready", "degraded", "draining", "dead"]


class EngineClient(Protocol):
    """Submit requests, stream their deltas, restart the engine when it dies. Lives on one asyncio loop."""

    async def start(self) -> Ready:
        """Start the engine and wait until it is ready. Raises ConfigError."""

    def admit(self, key: str) -> None:
        """Raise what `submit` would raise of any request of this API key now: Overloaded, EngineDead.

        Costs nothing, so that what must be refused is refused before its body is read.
        """

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        """Queue a request; iterate its deltas until every choice has a terminal one.

        Deltas of a slow reader are merged in a one-slot mailbox per choice. Raises Overloaded or
        InvalidRequest (can never fit) at once, EngineDead when the engine is gone for good.
        Closing the iterator early (`aclose`) aborts the request.
        """

    def abort(self, request_id: str, choice: int = -1) -> None:
        """Idempotent."""

    @property
    def ready(self) -> Ready: ...

    @property
    def stats(self) -> Stats:
        """The latest snapshot, no round trip."""

    @property
    def replicas(self) -> Sequence[EngineClient]:
        """The clients behind this one, each with an engine of its own; empty where it is one itself."""

    def health(self) -> dict[str, Any]:
        """{"status": loading|ready|degraded|draining|dead, "engine": {pid, state, last_step_age_s, restarts}}"""

    @property
    def adapters(self) -> Mapping[str, str]:
        """Directories of the LoRA adapters that are served, by name."""

    async def inspect(self, what: str, request_id: str = "") -> Any:
        """The JSON value of an `Inspect` round trip."""

    async def control(self, command: str, argument: dict[str, str]) -> Any:
        """The JSON value of a `Control` round trip. Raises InvalidRequest for what can't be done."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests; wait until those in flight have ended, or abort them at the time limit."""

    async def close(self) -> None:
        """Stop the engine; leave no process and no file behind. Idempotent."""


class Supervisor:
    """The one implementation of `EngineClient`, over whatever `launcher` starts."""

    def __init__(
        self,
        config: EngineConfig,
        launcher: Launcher,
        *,
        watchdog_s: float = 0.0,
        max_restarts: int = 5,
        on_dead: Callable[[str], None] | None = None,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        """`on_dead` is called when the engine is gone for good; `on_death` after each death, before it is started
        again: then `give_away` may be called."""
        self._config = config
        self._launcher = launcher
        self._watchdog_s = watchdog_s
        self._max_restarts = max_restarts
        self._on_dead = on_dead
        self._on_death = on_death
        self._live: dict[str, Live] = {}
        self._admission = Admission(config.schedule)
        self._questions: dict[int, asyncio.Future[Snapshot]] = {}
        self._tokens = itertools.count()
        self._handle: Handle | None = None
        self._up = False  # the engine is ready for messages
        self._ready: Ready | None = None
        self._adapters = adapters(config.model.lora)
        self._stats = Stats()
        self._stepped_at: float | None = None  # when a step was last heard of
        self._heard_at = 0.0  # the same, or from when on a step is due
        self._born_at = 0.0  # start of this engine
        self._draining = False
        self._dead = ""  # why there will be no engine any more
        self._closing = False
        self._restarts = 0
        self._fruitless = 0  # deaths in a row in which nothing was got
        self._alone: Live | None = None  # the suspect under test; nothing else is on board
        self._outcome: asyncio.Future[Ready] | None = None
        self._exit: asyncio.Future[Exit] | None = None
        self._failed = ""  # the engine's own word on why it can't start
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    # ---- the life of the engine

    async def start(self) -> Ready:
        loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        self._tasks = [loop.create_task(self._supervise())]
        if self._watchdog_s > 0:
            self._tasks.append(loop.create_task(self._watch()))
        return await self._outcome

    async def _supervise(self) -> None:
        """Engine after engine, until one can't start, too many in a row got nowhere, or we close."""
        while True:
            ended = await self._one_engine()
            if self._closing:
                return
            if self._ready is None:
                self._give_up(self._failed or f"the engine ended while it was starting: {ended.reason}")
                return
            self._after_death(ended)
            if self._fruitless > self._max_restarts:
                times = "once" if self._fruitless == 1 else f"{self._fruitless} times in a row"
                self._give_up(f"the engine died {times} without getting anywhere; last: {self._failed or ended.reason}")
                return
            self._restarts += 1
            await asyncio.sleep(BACKOFF_S[min(self._fruitless, len(BACKOFF_S) - 1)])

    async def _one_engine(self) -> Exit:
        """Start an engine and wait for its end."""
        self._exit = asyncio.get_running_loop().create_future()
        self._born_at = time.monotonic()
        self._failed = ""
        self._handle = self._launcher.launch(self._config, self._on_message, self._on_exit)
        return await self._exit

    def _on_exit(self, ended: Exit) -> None:
        self._up = False
        if self._exit and not self._exit.done():
            self._exit.set_result(ended)

    def _after_death(self, ended: Exit) -> None:
        """Find out who did it, and make everyone else ready for the next engine."""
        reason = self._failed or ended.reason
        on_board = sum(live.sent for live in self._live.values())
        log.error("the engine died (%s) with %d requests on board; starting it again", reason, on_board)
        self._handle = None
        self._fruitless = 1 if time.monotonic() - self._born_at > STABLE_S else self._fruitless + 1
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineDead("the engine was restarted meanwhile; ask again"))
        self._questions.clear()
        for live in self._live.values():
            if not live.sent:
                continue
            live.sent = False
            live.deaths = 1 if live.progress > live.mark else live.deaths + 1
            live.mark = live.progress
            for choice in live.choices:
                choice.engine_died()
        suspect, self._alone = self._alone, None
        # A kill from outside may hit an innocent once; twice in a row, it is no accident.
        if suspect and suspect.deaths >= SUSPECT_AT + 1 + ended.outside:
            self._fruitless = 0
            identity = suspect.request.id
            log.error("request %s ended the engine again while it ran alone (%s); it is given up", identity, reason)
            text = f"request {identity} ended the engine {suspect.deaths} times ({reason}) and was given up"
            suspect.end(FinishReason.ERROR, error=text, kind="failed")
            self._finish(suspect)
        if self._on_death:
            self._on_death()

    def _give_up(self, reason: str) -> None:
        self._dead = reason
        if self._outcome and not self._outcome.done():
            self._outcome.set_exception(ConfigError(reason))
            return
        log.critical("giving up: %s", reason)
        if self._on_death:
            self._on_death()
        for live in list(self._live.values()):
            live.fail(EngineDead(f"the engine is gone: {reason}"))
        self._live.clear()
        self._changed.set()
        if self._on_dead:
            self._on_dead(reason)

    async def _watch(self) -> None:
        """Kill an engine that has work and doesn't step. A busy processor is taken as a long step, up to a limit."""
        tick = min(1.0, self._watchdog_s / 4)
        cpu = idle_since = 0.0
        while True:
            asked = time.monotonic()
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - asked > 2 * tick + 1.0:  # this loop was held up itself, and may not have read what came
                continue
            handle = self._handle
            if handle is None or not self._up or not any(live.sent for live in self._live.values()):
                self._heard_at = idle_since = now
                continue
            used = handle.cpu_seconds()
            if used is None or abs(used - cpu) > tick / 10 or idle_since < self._heard_at:
                idle_since = now
            cpu = used or 0.0
            silent = now - self._heard_at
            if silent > self._watchdog_s * BUSY_FACTOR or (
                silent > self._watchdog_s and now - idle_since > self._watchdog_s / 2
            ):
                handle.kill(f"no step for {silent:.1f} s with work waiting")

    # ---- messages from the engine

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepOut():
                self._on_step(message)
            case Snapshot():
                question = self._questions.pop(message.token, None)
                if question and not question.done():
                    question.set_result(message)
                elif message.error:
                    log.error("the restarted engine: %s", message.error)
            case Ready():
                self._on_ready(message)
            case Failed():
                self._failed = message.message

    def _on_ready(self, ready: Ready) -> None:
        if self._ready is None:
            # The next engine gets the pool under which requests were taken on; the context follows from it. It is
            # told of its adapters one by one, so that one whose files are gone holds up no other.
            kv = dataclasses.replace(self._config.kv, num_kv_blocks=ready.num_blocks)
            model = dataclasses.replace(self._config.model, lora=())
            self._config = dataclasses.replace(self._config, kv=kv, model=model)
        elif self._handle:
            for name, directory in self._adapters.items():
                argument = {"name": name, "path": directory}
                self._handle.send(Control(next(self._tokens), "load_adapter", argument))
        self._ready = ready
        self._stats = Stats(blocks_total=ready.num_blocks, blocks_free=ready.num_blocks)
        self._up = True
        self._heard_at = time.monotonic()
        if self._outcome and not self._outcome.done():
            self._outcome.set_result(ready)
        self._pump()

    def _on_step(self, out: StepOut) -> None:
        self._stats = out.stats
        self._stepped_at = self._heard_at = time.monotonic()
        if not out.deltas:
            return
        for delta in out.deltas:
            live = self._live.get(delta.id)
            if live and live.put(delta):
                if delta.finish is not None:
                    self._finish(live)
                if delta.tokens or delta.finish is not None:
                    self._fruitless = 0
        alone = self._alone
        if alone and (alone.progress > alone.mark or not alone.open):
            alone.deaths = 0
            self._alone = None
            self._pump()

    def _finish(self, live: Live) -> None:
        """A choice of `live` has just ended; forget the request when it was the last."""
        if live.open:
            return
        self._forget(live)
        if live is self._alone:
            self._alone = None
            self._pump()

    def _forget(self, live: Live) -> None:
        del self._live[live.request.id]
        self._admission.leave(live.request.key)
        if not self._live:
            self._changed.set()

    def _pump(self) -> None:
        """Hand over what the engine doesn't have yet: a suspect alone, or everyone."""
        if not self._up or self._alone or not self._handle:
            return
        waiting = [live for live in self._live.values() if not live.sent]
        suspect = min(waiting, key=lambda live: -live.deaths, default=None)
        if suspect and suspect.deaths >= SUSPECT_AT:
            self._alone = suspect
            waiting = [suspect]
        for live in waiting:
            self._send(live)

    def _send(self, live: Live) -> None:
        """Hand one request to the engine, with what was delivered of it."""
        assert self._handle is not None, "only an engine that is up is sent to"
        live.sent = True
        self._handle.send(live.resumed())
        for i, choice in enumerate(live.choices):
            if choice.done:
                self._handle.send(Abort(live.request.id, i))

    # ---- what the server calls

    def admit(self, key: str) -> None:
        if self._dead:
            raise EngineDead(f"the engine is gone: {self._dead}")
        if self._draining or self._closing:
            raise EngineDead("the server is shutting down", retry_after_s=10.0)
        if self._ready is None:
            raise EngineDead("the model is being loaded", retry_after_s=2.0)
        self._admission.check(key, self._stats)

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        return Stream(self.begin(request), self.abort)

    def begin(self, request: AddRequest) -> Live:
        """What `submit` does, for whoever makes the stream."""
        self.admit(request.key)
        if request.id in self._live:
            raise InvalidRequest(f"request id {request.id} is in use", param="request_id")
        room = self.ready.num_blocks * self.ready.block_size
        if len(request.prompt) + 1 > room:
            raise InvalidRequest(
                f"the prompt has {len(request.prompt)} tokens, but the KV pool holds {room - 1} and one to generate",
                param="prompt",
                code="context_length_exceeded",
            )
        live = Live(request)
        self._enter(live)
        return live

    def _enter(self, live: Live) -> None:
        self._live[live.request.id] = live
        self._admission.enter(live.request.key)
        self._changed.clear()
        if not any(other.sent for other in self._live.values()):
            self._heard_at = time.monotonic()  # a step is due from now on
        if self._up and not self._alone:
            self._send(live)

    def give_away(self) -> list[Live]:
        """The requests that no engine has on board, for another client to go on with: all but suspects."""
        given = [live for live in self._live.values() if not live.sent and live.deaths < SUSPECT_AT]
        for live in given:
            self._forget(live)
        return given

    def take_over(self, live: Live) -> None:
        """Go on with a request of another client, however many wait here: it was accepted."""
        self._enter(live)

    @property
    def live(self) -> Collection[Live]:
        """The requests in flight."""
        return self._live.values()

    @property
    def up(self) -> bool:
        """Is the engine there, for whatever request comes?"""
        return self._up and self._alone is None and not self._draining

    def holds(self, request_id: str) -> bool:
        """Is there a request of that id in flight?"""
        return request_id in self._live

    def abort(self, request_id: str, choice: int = -1) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        ended = live.end(FinishReason.ABORT, choice=choice)
        if ended and live.sent and self._up and self._handle:
            self._handle.send(Abort(request_id, choice))
        if ended:
            self._finish(live)

    @property
    def ready(self) -> Ready:
        if self._ready is None:
            raise EngineDead("the model is being loaded", retry_after_s=2.0)
        return self._ready

    @property
    def stats(self) -> Stats:
        return self._stats

    @property
    def replicas(self) -> Sequence[EngineClient]:
        return ()

    def health(self) -> dict[str, Any]:
        state = self._state()
        age = None if self._stepped_at is None else round(time.monotonic() - self._stepped_at, 3)
        return {
            "status": state,
            "engine": {
                "pid": self._handle.pid if self._handle else None,
                "state": "restarting" if state == "degraded" else "running" if self._up else state,
                "last_step_age_s": age,
                "restarts": self._restarts,
            },
        }

    def _state(self) -> State:
        if self._dead:
            return "dead"
        if self._draining or self._closing:
            return "draining"
        if self._ready is None:
            return "loading"
        return "ready" if self._up and not self._alone else "degraded"

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._adapters

    async def inspect(self, what: str, request_id: str = "") -> Any:
        return await self._ask({"type": "inspect", "token": next(self._tokens), "what": what, "id": request_id})

    async def control(self, command: str, argument: dict[str, str]) -> Any:
        token = next(self._tokens)
        fields = {"type": "control", "token": token, "command": command, "argument": argument}
        answer = await self._ask(fields, LOAD_S if command in READS_FILES else ANSWER_S)
        if command == "load_adapter":
            self._adapters[argument["name"]] = argument["path"]
        elif command == "unload_adapter":
            self._adapters.pop(argument["name"], None)
        return answer

    async def _ask(self, fields: dict[str, Any], within_s: float = ANSWER_S) -> Any:
        try:
            message = msgspec.convert(fields, Inspect | Control)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the engine can't be asked that: {error}") from None
        if not self._up or not self._handle:
            raise EngineDead("the engine isn't ready", retry_after_s=2.0)
        token = message.token
        question = self._questions[token] = asyncio.get_running_loop().create_future()
        self._handle.send(message)
        try:
            answer = await asyncio.wait_for(question, within_s)
        except TimeoutError:
            raise EngineDead(f"the engine gave no answer within {within_s:g} s") from None
        finally:
            self._questions.pop(token, None)
        if answer.invalid:
            raise InvalidRequest(answer.error)
        if answer.error:
            raise RequestFailed(answer.error)
        return msgspec.json.decode(answer.json)

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        if self._live:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                log.warning("%d requests were still running after %g s; aborting them", len(self._live), timeout_s)
        for request_id in list(self._live):
            self.abort(request_id)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        if self._outcome and not self._outcome.done():
            self._outcome.set_exception(EngineDead("the client was closed while the engine was starting"))
        for request_id in list(self._live):
            self.abort(request_id)
        if self._handle:
            await self._handle.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._launcher.close()
        self._handle = None
        self._up = False


class ProcessClient(Supervisor):
    """An engine in its own process. `on_dead` is called when it is gone for good, with the reason.

    `factory` names the function that builds the engine in the child, "module:function".
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        watchdog_s: float = 60.0,
        max_restarts: int = 5,
        on_dead: Callable[[str], None] | None = None,
        log_level: str = "info",
        factory: str = FACTORY,
    ) -> None:
        launcher = ProcessLauncher(factory, log_level)
        super().__init__(config, launcher, watchdog_s=watchdog_s, max_restarts=max_restarts, on_dead=on_dead)


class LocalClient(Supervisor):
    """An engine on a thread of this process."""

    def __init__(self, config: EngineConfig, *, factory: str = FACTORY) -> None:
        super().__init__(config, ThreadLauncher(factory))
