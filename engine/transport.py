"""One engine, started and stopped: in a process of its own, or on a thread. Same messages, same end.

A handle reports everything through two callbacks on the client's loop: `on_message` for each message, and
`on_exit` once, with what ended it, after the last message was handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import zmq

from engine.api import FromEngine, Ready, Shutdown, ToEngine
from engine.config import EngineConfig
from engine.process import Start, build_or_tell, run

T = TypeVar("T")
log = logging.getLogger("octavo.engine")

STOP_S = 3.0  # from Shutdown to SIGKILL
MAX_SOCKET_PATH = 100  # bytes; the system's limit is 107


@dataclass(frozen=True)
class Exit:
    """How an engine ended. `outside`: by a SIGKILL that we didn't send (an operator, the out-of-memory killer)."""

    reason: str
    outside: bool = False


class Handle(Protocol):
    """A running engine."""

    pid: int

    def send(self, message: ToEngine) -> None:
        """Never blocks; a message to a dead engine is lost, like the engine."""

    def kill(self, reason: str) -> None:
        """End it at once; `on_exit` follows with this reason."""

    def cpu_seconds(self) -> float | None:
        """Processor time it has used; None = not known."""

    async def stop(self) -> None:
        """Ask it to end, insist after a while, and leave nothing behind."""


class Launcher(Protocol):
    """Starts one engine after another."""

    def launch(
        self, config: EngineConfig, on_message: Callable[[FromEngine], None], on_exit: Callable[[Exit], None]
    ) -> Handle:
        """Returns at once; what can't be started is reported by `on_exit`."""

    def close(self) -> None:
        """No more engines will be started."""


class Keeper:
    """The thread that starts engine processes and waits for their end.

    On Linux a process inherits the priority of the thread that starts it, and is killed with that thread if it asked
    for it (PR_SET_PDEATHSIG). So one thread lives as long as the client and keeps the priority that the client was
    made with, whatever the API threads do to theirs.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="engine-keeper", daemon=True).start()

    def _work(self) -> None:
        while job := self._jobs.get():
            job()

    def keep(
        self,
        command: list[str],
        environ: dict[str, str],
        started: Callable[[subprocess.Popen[bytes] | OSError], None],
        ended: Callable[[int], None],
    ) -> None:
        """Start `command`; both callbacks run on the keeper's thread."""

        def job() -> None:
            try:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ, bufsize=0)
            except OSError as error:
                started(error)
                return
            started(process)
            ended(process.wait())

        self._jobs.put(job)

    def close(self) -> None:
        self._jobs.put(None)


class ProcessLauncher:
    """Engines in processes of their own (`engine.process`), reached over ZeroMQ in a private directory."""

    def __init__(self, factory: str, log_level: str, *, cores: tuple[int, ...] = (), gpu: str = "") -> None:
        """`cores`, `gpu`: all that the engines may use of this machine's; empty = everything."""
        self._factory = factory
        self._log_level = log_level
        self._cores = cores
        self._environ = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        self._keeper = Keeper()

    def launch(
        self, config: EngineConfig, on_message: Callable[[FromEngine], None], on_exit: Callable[[Exit], None]
    ) -> Handle:
        first = Start(config, self._factory, self._log_level, self._cores)
        return ProcessHandle(self._keeper, first, self._environ, on_message, on_exit)

    def close(self) -> None:
        self._keeper.close()


class ProcessHandle:
    """One engine process, its two sockets, and the pipe whose end tells it that we are gone."""

    pid = 0  # until it is started

    def __init__(
        self,
        keeper: Keeper,
        first: Start,
        environ: dict[str, str],
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._directory = _private_directory()
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._in = self._context.socket(zmq.PULL)
        self._out.setsockopt(zmq.SNDHWM, 0)
        self._in.setsockopt(zmq.RCVHWM, 0)
        self._out.setsockopt(zmq.RECONNECT_IVL, 5)
        # The child binds its way in: what is sent to a socket that only connects waits for the other side.
        self._out.connect(f"ipc://{self._directory / 'in'}")
        self._in.bind(f"ipc://{self._directory / 'out'}")
        self._fd = int(self._in.getsockopt(zmq.FD))
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = ""
        self._ended = asyncio.Event()
        self._open = True
        self._loop.add_reader(self._fd, self._readable)
        self._out.send(self._encoder.encode(first))
        keeper.keep(
            # -P: what lies in the current directory is no part of the program.
            [sys.executable, "-P", "-m", "engine.process", str(self._directory)],
            {**os.environ, **environ, "PYTHONPATH": _python_path()},
            lambda process: self._from_thread(self._started, process),
            lambda status: self._from_thread(self._exited, status),
        )

    def _started(self, process: subprocess.Popen[bytes] | OSError) -> None:
        if isinstance(process, OSError):
            self._exited(f"its process can't be started: {process}")
            return
        self._process = process
        self.pid = process.pid
        if self._killed:
            process.kill()

    def _from_thread(self, call: Callable[[T], object], value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to hear of it
            self._loop.call_soon_threadsafe(call, value)

    def send(self, message: ToEngine) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._out.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _readable(self) -> None:
        # The descriptor tells of changes, not of states: read until nothing is there.
        while self._open:
            try:
                frame = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(frame)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                # A lost message would be a lost token: this engine can't be trusted with a stream any more.
                log.error("the engine sent %d bytes that can't be decoded: %s", len(frame), error)
                self.kill("it sent a message that can't be decoded")
                return
            if isinstance(message, Ready):
                # Both connections stand, and outlive their names: nothing is left behind from here on.
                shutil.rmtree(self._directory, ignore_errors=True)
            try:
                self._on_message(message)
            except Exception:
                log.exception("a message of kind %s was not understood", type(message).__name__)

    def _exited(self, status: int | str) -> None:
        self._readable()
        self._release()
        self._ended.set()
        reason = status if isinstance(status, str) else _status(status)
        self._on_exit(Exit(self._killed or reason, not self._killed and status == -signal.SIGKILL))

    def _release(self) -> None:
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        self._in.close(0)
        self._out.close(0)
        self._context.term()
        if self._process and self._process.stdin:
            self._process.stdin.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self, reason: str) -> None:
        if self._ended.is_set():
            return
        self._killed = reason
        if self._process:
            self._process.kill()

    def cpu_seconds(self) -> float | None:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stop(self) -> None:
        if self._ended.is_set():
            return
        self.send(Shutdown())
        try:
            await asyncio.wait_for(self._ended.wait(), STOP_S)
        except TimeoutError:
            self.kill("it didn't end in time")
            await self._ended.wait()


class ThreadLauncher:
    """Engines on a thread of this process: for tests, notebooks, and machines where a process is too much."""

    def __init__(self, factory: str) -> None:
        self._factory = factory

    def launch(
        self, config: EngineConfig, on_message: Callable[[FromEngine], None], on_exit: Callable[[Exit], None]
    ) -> Handle:
        return ThreadHandle(self._factory, config, on_message, on_exit)

    def close(self) -> None:
        pass


class ThreadHandle:
    """One engine on a thread. It can't be killed from outside, so there is no watchdog over it."""

    pid = os.getpid()

    def __init__(
        self,
        factory: str,
        config: EngineConfig,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[Exit], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._on_message = on_message
        self._on_exit = on_exit
        threading.Thread(target=self._work, args=(factory, config), name="engine", daemon=True).start()

    def _work(self, factory: str, config: EngineConfig) -> None:
        reason = "it ended"
        try:
            engine = build_or_tell(factory, config, self._send)
            if engine:
                run(engine, self._receive, self._send)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            log.exception("the engine's thread ended")
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._exited, reason)

    def _receive(self, timeout_s: float | None) -> list[ToEngine]:
        messages: list[ToEngine] = []
        with contextlib.suppress(queue.Empty):
            if timeout_s is None or timeout_s > 0:
                messages.append(self._inbox.get(timeout=timeout_s))
            while True:
                messages.append(self._inbox.get_nowait())
        return messages

    def _send(self, message: FromEngine) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_message, message)

    def _exited(self, reason: str) -> None:
        self._ended.set()
        self._on_exit(Exit(reason))

    def send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def kill(self, reason: str) -> None:
        self._inbox.put(Shutdown())

    def cpu_seconds(self) -> float | None:
        return None

    async def stop(self) -> None:
        if not self._ended.is_set():
            self._inbox.put(Shutdown())
            await self._ended.wait()


def _private_directory() -> Path:
    """A directory of our own with mode 0700, short enough for a socket's path."""
    base = tempfile.gettempdir()
    return Path(
        tempfile.mkdtemp(prefix="octavo-", dir=base if len(os.fsencode(base)) < MAX_SOCKET_PATH - 30 else "/tmp")
    )


def _python_path() -> str:
    """Where the child finds this package: beside this one, and where we were told to look."""
    own = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join([own, *filter(None, [os.environ.get("PYTHONPATH")])])


def _status(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
