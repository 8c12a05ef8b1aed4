"""Adapters are loaded beside the loop: streams go on, and whoever asks for one too early waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from engine.api import (
    Abort,
    AddRequest,
    Control,
    FinishReason,
    FromEngine,
    Ready,
    SamplingParams,
    Shutdown,
    Snapshot,
    StepOut,
    ToEngine,
)
from engine.core.engine import EngineCore
from engine.core.plan import Geometry
from engine.core.settings import CoreSettings
from engine.errors import ConfigError
from engine.process import Engine, run
from tests.shadow import ShadowExecutor

GEOMETRY = Geometry(num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=4, vocab_size=50, bytes_per_block=1000)
READY = Ready(
    pid=1,
    model="shadow",
    max_model_len=64,
    vocab_size=50,
    block_size=4,
    num_blocks=64,
    kv_bytes_per_block=1000,
    dtype="float32",
    kv_dtype="float32",
    backend="shadow",
)


class SlowToLoad(ShadowExecutor):
    """Its adapters come when they are let in; "/broken" can't be read."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY)
        self.let_in = threading.Event()

    def load_adapter(self, name: str, directory: str) -> None:
        self.let_in.wait(60)
        if directory == "/broken":
            raise ConfigError("/broken is no LoRA adapter")


class Line:
    """The two ends of a running loop."""

    def __init__(self, executor: ShadowExecutor) -> None:
        self.inbox: queue.Queue[ToEngine] = queue.Queue()
        self.outbox: queue.Queue[FromEngine] = queue.Queue()
        core = EngineCore(executor, GEOMETRY, CoreSettings(max_num_seqs=4), frozenset(), None)
        self.loop = threading.Thread(target=run, args=(Engine(core, READY), self.receive, self.outbox.put))

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        try:
            return [self.inbox.get(timeout=timeout_s) if timeout_s != 0 else self.inbox.get_nowait()]
        except queue.Empty:
            return []

    def begin(self, id: str, adapter: str = "") -> None:
        params = SamplingParams(max_tokens=5)
        self.inbox.put(AddRequest(id=id, prompt=(1, 2, 3), params=params, arrival=0.0, adapter=adapter))

    def end(self) -> tuple[str, FinishReason, str]:
        """The next request that ends: its id, how, and the error if there is one."""
        while True:
            message = self.outbox.get(timeout=60)
            if isinstance(message, StepOut):
                for delta in message.deltas:
                    if delta.finish is not None:
                        return delta.id, delta.finish, delta.error

    def ask(self, id: str, adapter: str = "") -> str:
        self.begin(id, adapter)
        ended, _, error = self.end()
        assert ended == id
        return error

    def load(self, token: int, path: str) -> None:
        self.inbox.put(Control(token, "load_adapter", {"name": "a", "path": path}))

    def answer(self, token: int) -> Snapshot:
        while True:
            message = self.outbox.get(timeout=60)
            if isinstance(message, Snapshot) and message.token == token:
                return message


@contextmanager
def running(executor: ShadowExecutor) -> Iterator[Line]:
    line = Line(executor)
    line.loop.start()
    try:
        yield line
    finally:
        line.inbox.put(Shutdown())
        line.loop.join(60)
    assert not line.loop.is_alive()


def test_streams_go_on_while_an_adapter_is_loaded() -> None:
    executor = SlowToLoad()
    with running(executor) as line:
        line.load(1, "/a")
        assert line.ask("base") == ""
        line.load(2, "/b")
        assert "is being loaded" in line.answer(2).error
        executor.let_in.set()
        assert msgspec.json.decode(line.answer(1).json)["adapters"] == ["a"]
        assert line.ask("then", "a") == ""


def test_a_request_waits_for_the_adapter_that_it_names() -> None:
    executor = SlowToLoad()
    with running(executor) as line:
        line.load(1, "/a")
        line.begin("early", "a")
        line.begin("called back", "a")
        line.inbox.put(Abort("called back", -1))
        assert line.end() == ("called back", FinishReason.ABORT, "")
        assert line.ask("base") == ""
        executor.let_in.set()
        assert line.end() == ("early", FinishReason.LENGTH, "")


def test_who_waits_for_an_adapter_that_cant_be_read_is_told_so() -> None:
    executor = SlowToLoad()
    with running(executor) as line:
        line.load(1, "/broken")
        line.begin("early", "a")
        executor.let_in.set()
        assert line.end() == ("early", FinishReason.ERROR, "adapter 'a' is not loaded")


def test_an_adapter_that_cant_be_read_is_not_served() -> None:
    executor = SlowToLoad()
    executor.let_in.set()
    with running(executor) as line:
        line.load(1, "/broken")
        answer = line.answer(1)
        assert (answer.error, answer.invalid) == ("/broken is no LoRA adapter", True)
        assert "not loaded" in line.ask("x", "a")
