"""A device on the host whose streams run late and in any order that the events allow.

Work is queued and runs only when somebody waits, an operation of a random stream at a time. So whoever reads what was
not waited for, or writes what is still to be read, gets other values. A graph is the list of device operations that
its work called, with the very tensors: what the host decided once is decided for good, and an operation that a GPU
could not capture is an error.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from engine.attention.gpu_kernels import GpuKernels
from engine.worker.device import Bytes, Event, Stream, Work

GIB = 1 << 30
NOT_IN_A_GRAPH = ("_local_scalar_dense", "nonzero", "unique", "item")


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device, self.passed = device, False

    def wait(self) -> None:
        self._device.run_until(self)

    def done(self) -> bool:
        self._device.advance()
        return self.passed

    def seconds_since(self, earlier: Event) -> float:
        return 1e-3


class FakeStream:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.queue: deque[Work | FakeEvent | tuple[FakeEvent]] = deque()

    def run(self, work: Work) -> None:
        self.queue.append(work)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)
        self.queue.append(event)
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        if not self._device.deaf:
            self.queue.append((event,))

    def step(self) -> bool:
        """Run the first of the queue if it may run."""
        if not self.queue:
            return False
        first = self.queue[0]
        if isinstance(first, tuple) and not first[0].passed:
            return False
        self.queue.popleft()
        if isinstance(first, FakeEvent):
            first.passed = True
        elif not isinstance(first, tuple):
            with torch.inference_mode():
                first()
        return True


class FakeDevice:
    """deaf: streams don't wait for each other's events, as if a program had forgotten them."""

    def __init__(self, seed: int = 0, *, free: int = 8 * GIB, step_bytes: int = 0, deaf: bool = False) -> None:
        self.torch_device = torch.device("cpu")
        self.main: Stream = FakeStream(self)
        self.side: Stream = FakeStream(self)
        self.deaf = deaf
        self.captured = self.replayed = 0
        self._free, self._step_bytes = free, step_bytes
        self._random = random.Random(seed)
        self._streams = [self.main, self.side]
        self._library: RecordedLibrary | None = None

    def emulate(self, kernels: GpuKernels) -> GpuKernels:
        """Kernels whose calls graphs of this device hold."""
        self._library = RecordedLibrary(kernels._lib)
        kernels._lib = self._library  # type: ignore[assignment]
        return kernels

    def advance(self) -> bool:
        """One operation of some stream; False when none can run."""
        streams = list(self._streams)
        self._random.shuffle(streams)
        return any(stream.step() for stream in streams)  # type: ignore[attr-defined]

    def run_until(self, event: FakeEvent) -> None:
        while not event.passed:
            assert self.advance(), "a stream waits for an event that nobody records"
        while self._random.random() < 0.3 and self.advance():
            pass

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.full(shape, 0, dtype=dtype)
        memory.view(torch.uint8).fill_(0x7F)  # neither zero nor a token that is there
        return memory

    def pin(self, memory: Bytes) -> None:
        assert memory.flags.writeable or not memory.size

    def capture(self, work: Work) -> Work:
        self.run_until(self.main.record())  # type: ignore[arg-type]
        work()
        calls: list[Callable[[], None]] = []
        if self._library is not None:
            self._library.calls = calls
        with Recorder(calls), torch.inference_mode():
            work()
        if self._library is not None:
            self._library.calls = None
        self.captured += 1

        def repeat() -> None:
            self.replayed += 1
            for call in calls:
                call()

        return repeat

    def settle(self) -> None:
        while self.advance():
            pass

    def memory(self) -> tuple[int, int]:
        return self._free, 8 * GIB

    def peak(self, work: Work) -> int:
        work()
        return self._step_bytes


class Recorder(TorchDispatchMode):
    """Keeps every operation with its tensors; a repetition leaves its results in the same tensors."""

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in NOT_IN_A_GRAPH), f"{func} can't be captured"
        kwargs = kwargs or {}
        made = func(*args, **kwargs)

        def again() -> None:
            kept, new = tree_flatten(made)[0], tree_flatten(func(*args, **kwargs))[0]
            for old, value in zip(kept, new, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)

        self._calls.append(again)
        return made


class RecordedLibrary:
    """The kernels' C functions; while a graph is made, each call is kept with its arguments as they are."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.calls: list[Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name in ("octg_workspace", "octg_last_error", "octg_emulated_loads"):
            return function

        def call(*args: Any) -> int:
            if self.calls is not None:
                kept = [_copied(a) for a in args]

                def again() -> None:
                    assert function(*kept) == 0

                self.calls.append(again)
            return int(function(*args))

        return call


def _copied(argument: Any) -> Any:
    """A struct by reference is kept as it is now."""
    struct = getattr(argument, "_obj", None)
    return ctypes.byref(type(struct).from_buffer_copy(struct)) if struct is not None else argument


def random_bytes(shape: tuple[int, ...]) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)
