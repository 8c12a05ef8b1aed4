"""The engine process: one inbox, one loop, one outbox. `run` is the loop, also of the thread of LocalClient.

Started as `python -m engine.process DIR` with a pipe to its parent as stdin; the sockets lie in DIR (0700, private).
The first message on the way in says what to build; the answer is `Ready` or `Failed`. No byte of any message can
end this process: what can't be decoded is logged and dropped.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

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
    Shutdown,
    Snapshot,
    Stats,
    StepOut,
    ToEngine,
)
from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequest, OctavoError
from engine.kv.events import Event
from engine.kv_events import Publisher
from engine.transfer import Source, export_kv, import_kv

log = logging.getLogger("octavo.engine")

LOG_FORMAT, LOG_TIME = "%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"
HEARTBEAT_S = 1.0  # a busy loop says so at least this often, also when nothing came of its steps
LOADING_S = 0.02  # how long an idle loop waits for a message before it looks whether an adapter has come
LOADING_NICE = 10  # of the thread that loads an adapter: steps go before
SWITCH_INTERVAL_S = 0.0005  # how long another thread of this process may hold the interpreter
PR_SET_PDEATHSIG = 1


class Core(Source, Protocol):
    """What the loop needs of `engine.core.engine.EngineCore`."""

    def add(self, request: AddRequest) -> None: ...
    def abort(self, request_id: str, choice: int = -1) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepOut: ...
    def stats(self) -> Stats: ...
    def inspect(self, what: str, request_id: str = "") -> Any: ...
    def control(self, command: str, argument: dict[str, str]) -> Any: ...
    def begin_load(self, argument: dict[str, str]) -> Callable[[], None]: ...
    def end_load(self, argument: dict[str, str], problem: Exception | None) -> dict[str, Any]: ...
    def take_kv_events(self) -> Sequence[Event]: ...
    def save(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Engine:
    """What a factory builds: the core, and what the client is told of it."""

    core: Core
    ready: Ready
    publisher: Publisher | None = None  # of KV events


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The first message. `factory` is "module:function", called with the config, and returns an `Engine`."""

    config: EngineConfig
    factory: str
    log_level: str
    cores: tuple[int, ...] = ()  # that the engine may use; () = all


Receive = Callable[[float | None], list[ToEngine]]
"""All messages there are, after waiting for the first at most so many seconds (None: as long as it takes)."""


def build_or_tell(factory: str, config: EngineConfig, send: Callable[[FromEngine], None]) -> Engine | None:
    """Call the factory ("module:function"); when that fails, say why and return None."""
    try:
        module, _, function = factory.partition(":")
        engine = getattr(importlib.import_module(module), function)(config)
        if not isinstance(engine, Engine):
            raise TypeError(f"{factory} gave {type(engine).__name__}, not an Engine")
        return engine
    except ConfigError as error:
        send(Failed(str(error)))
    except Exception as error:
        log.exception("the engine can't start")
        send(Failed(f"the engine can't start: {type(error).__name__}: {error}"))
    return None


def run(engine: Engine, receive: Receive, send: Callable[[FromEngine], None]) -> None:
    """Serve until `Shutdown`: take messages, step while there is work, one StepOut a step."""
    core, publisher = engine.core, engine.publisher
    loads = Loads(core, send)
    send(engine.ready)
    try:
        sent_at = 0.0
        while True:
            messages = receive(0.0 if core.has_work() else LOADING_S if loads.running else None)
            for message in messages:
                if isinstance(message, Shutdown):
                    core.save()
                    return
                handle(core, message, send, loads)
            loads.finish()
            out = core.step() if core.has_work() else StepOut((), core.stats())
            if publisher is not None:
                publisher.publish(core.take_kv_events())
            now = time.monotonic()
            if out.deltas or not core.has_work() or now - sent_at > HEARTBEAT_S:
                send(out)
                sent_at = now
    finally:
        if publisher is not None:
            publisher.close()
        core.close()


def handle(core: Core, message: ToEngine, send: Callable[[FromEngine], None], loads: Loads) -> None:
    """Act on one message. A request that can't be taken ends alone; questions are answered with what went wrong."""
    try:
        match message:
            case AddRequest():
                core.add(message)
            case Abort():
                core.abort(message.id, message.choice)
            case Inspect():
                send(Snapshot(message.token, msgspec.json.encode(core.inspect(message.what, message.id))))
            case Control(command="load_adapter"):
                loads.begin(message)
            case Control(command="export_kv" | "import_kv"):
                send(Snapshot(message.token, msgspec.json.encode(hand_over(core, message.command, message.argument))))
            case Control():
                send(Snapshot(message.token, msgspec.json.encode(core.control(message.command, message.argument))))
    except Exception as error:  # whatever a message does, it does to itself
        answer_failed(core, message, error, send)


def answer_failed(core: Core, message: ToEngine, error: Exception, send: Callable[[FromEngine], None]) -> None:
    """Tell who sent a message that it failed."""
    known = isinstance(error, OctavoError)
    if not known:
        log.error("a message of kind %s failed", type(message).__name__, exc_info=error)
    text = str(error) if known else f"internal error ({type(error).__name__})"
    if isinstance(message, (Inspect, Control)):
        send(Snapshot(message.token, b"null", text, isinstance(error, InvalidRequest)))
    elif isinstance(message, AddRequest):
        send(StepOut(refusal(message, text), core.stats()))


class Loads:
    """Adapters on their way: their files are read on threads of their own, so that streams go on meanwhile."""

    def __init__(self, core: Core, send: Callable[[FromEngine], None]) -> None:
        self.running = 0
        self._core = core
        self._send = send
        self._done: queue.SimpleQueue[tuple[Control, Exception | None]] = queue.SimpleQueue()

    def begin(self, message: Control) -> None:
        """Start to load what the message names. Raises InvalidRequest."""
        load = self._core.begin_load(message.argument)

        def run() -> None:
            with contextlib.suppress(OSError, AttributeError):  # Linux: a thread's own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICE)
            try:
                load()
                self._done.put((message, None))
            except Exception as error:
                self._done.put((message, error))

        self.running += 1
        threading.Thread(target=run, name="load-adapter", daemon=True).start()

    def finish(self) -> None:
        """Serve what has been loaded since the last call, and answer for it."""
        while self.running and not self._done.empty():
            message, problem = self._done.get()
            self.running -= 1
            try:
                answer = self._core.end_load(message.argument, problem)
                self._send(Snapshot(message.token, msgspec.json.encode(answer)))
            except Exception as error:
                answer_failed(self._core, message, error, self._send)


def hand_over(core: Core, command: str, argument: dict[str, str]) -> dict[str, Any]:
    """Cached prefixes to a file, or from one. Raises InvalidRequest."""
    return (export_kv if command == "export_kv" else import_kv)(core, Path(argument["path"]))


def refusal(request: AddRequest, text: str) -> tuple[Delta, ...]:
    """Terminal deltas of a request that the core wouldn't take."""
    n = 1 if request.pooling else max(request.params.n, 1)
    return tuple(Delta(request.id, i, (), finish=FinishReason.ERROR, error=text, error_kind="failed") for i in range(n))


class Sockets:
    """The child's two ends of the private ipc path."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._in.bind(f"ipc://{directory / 'in'}")
        self._out.connect(f"ipc://{directory / 'out'}")
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder()

    def start(self) -> Start:
        """The first message."""
        return msgspec.msgpack.decode(self._in.recv(), type=Start)

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """See `Receive`. An undecodable frame is dropped."""
        messages: list[ToEngine] = []
        if timeout_s is None or timeout_s > 0:
            self._in.poll(None if timeout_s is None else int(timeout_s * 1000))
        while True:
            try:
                frame = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frame))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.error("dropped a message of %d bytes that can't be decoded: %s", len(frame), error)

    def send(self, message: FromEngine) -> None:
        self._out.send(self._encoder.encode(message))

    def close(self) -> None:
        """Hand over what was sent, at most for a second."""
        self._in.close(0)
        self._out.close(1000)
        self._context.term()


def follow_parent(directory: Path) -> None:
    """End with the parent, whatever ended it: its end of our stdin closes then."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def die_with_parent() -> None:
    """Linux: be killed with the thread that started us, even while a kernel runs that never returns."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # When memory runs out, the engine is the one to go: the API process restarts it and resumes its requests.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def main(directory: Path) -> int:
    """The child's life. The parent alone decides when it ends: signals of the terminal are not for us."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow_parent(directory)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sockets = Sockets(directory)
    try:
        start = sockets.start()
        if start.cores:
            os.sched_setaffinity(0, start.cores)
        logging.basicConfig(level=start.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
        engine = build_or_tell(start.factory, start.config, sockets.send)
        if engine is None:
            return 2
        die_with_parent()
        gc.collect()
        gc.freeze()  # what stands now stays: no collection has to walk it
        run(engine, sockets.receive, sockets.send)
        return 0
    finally:
        sockets.close()


if __name__ == "__main__":
    # Under its real name, so that factories import the same module and not a second copy of it.
    from engine.process import main as real_main

    sys.exit(real_main(Path(sys.argv[1])))
