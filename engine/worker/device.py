"""The one thin layer between the GPU executor and a device: streams, events, pinned memory, graphs, memory.

What is queued on a stream runs after what was queued there before; streams are ordered among each other by events
alone. `CudaDevice` is torch.cuda, which drives NVIDIA and AMD; `HostDevice` runs everything at once on the CPU, to try
the bench; the tests have one that runs queued work late and in any order that the events allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine import machine
from engine.errors import EngineDead

Bytes = npt.NDArray[np.uint8]
Work = Callable[[], None]
_cuda: Any = torch.cuda  # half of it has no types


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """The host waits until the stream has come here."""

    def done(self) -> bool:
        """Whether it has."""

    def seconds_since(self, earlier: Event) -> float:
        """Between two events that are both done."""


class Stream(Protocol):
    """Work in order."""

    def run(self, work: Work) -> None:
        """Queue tensor operations. They may run at any time until an event after them is waited for."""

    def record(self) -> Event:
        """An event after all that is queued so far."""

    def wait(self, event: Event) -> None:
        """What is queued from now on runs after the event; the host goes on."""


class Device(Protocol):
    """A GPU with two streams."""

    torch_device: torch.device
    main: Stream  # computes
    side: Stream  # moves blocks between device and host

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that streams can copy from and to."""

    def pin(self, memory: Bytes) -> None:
        """Makes memory that is there such memory."""

    def capture(self, work: Work) -> Work:
        """Runs work once, and returns what repeats its device operations, with the same tensors, when queued."""

    def settle(self) -> None:
        """Waits for everything that anybody queued, on these streams or on torch's own, as weights are loaded."""

    def memory(self) -> tuple[int, int]:
        """Bytes free, and bytes there are."""

    def peak(self, work: Work) -> int:
        """Bytes that tensors of the work take at most beside those that are there; they are free again after."""


class CudaDevice:
    """A GPU of torch."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        torch.cuda.set_device(device)
        self.main: Stream = _CudaStream(_cuda.Stream(device))
        self.side: Stream = _CudaStream(_cuda.Stream(device))
        self._pool: Any = None  # memory that the graphs share: one runs at a time

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pin(self, memory: Bytes) -> None:
        """See `Device`."""
        status = int(_cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) if memory.nbytes else 0
        if status:
            raise EngineDead(
                f"{memory.nbytes} bytes of swap space can't be pinned (status {status}): lower --swap-space"
            )

    def capture(self, work: Work) -> Work:
        """See `Device`."""
        main = self.main
        assert isinstance(main, _CudaStream)
        self.settle()
        main.run(work)  # libraries set themselves up on the first call, which a graph can't hold
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=main.stream):
            work()
        self._pool = graph.pool()
        replay: Work = graph.replay
        return replay

    def settle(self) -> None:
        """See `Device`."""
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return int(free), int(total)

    def peak(self, work: Work) -> int:
        """See `Device`."""
        self.settle()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        before = torch.cuda.memory_reserved(self.torch_device)
        self.main.run(work)
        self.settle()
        most = torch.cuda.max_memory_reserved(self.torch_device)
        torch.cuda.empty_cache()
        return int(most - before)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> Event:
        event = _cuda.Event(enable_timing=True)
        event.record(self.stream)
        return _CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _CudaEvent)
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class HostDevice:
    """The CPU in a GPU's place: what is queued runs at once, a graph is its work."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.main: Stream = _HostStream()
        self.side: Stream = _HostStream()

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(shape, dtype=dtype)

    def pin(self, memory: Bytes) -> None:
        """Every memory is the host's."""

    def capture(self, work: Work) -> Work:
        """See `Device`."""
        work()
        return work

    def settle(self) -> None:
        """Nothing is queued."""

    def memory(self) -> tuple[int, int]:
        """See `Device`."""
        return machine.available_memory(), machine.total_memory()

    def peak(self, work: Work) -> int:
        """Not measured on the CPU, which swaps rather than fails."""
        work()
        return 0


class _HostStream:
    def run(self, work: Work) -> None:
        work()

    def record(self) -> Event:
        return _HostEvent()

    def wait(self, event: Event) -> None:
        """It has passed."""


class _HostEvent:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def wait(self) -> None:
        """It has passed."""

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: Event) -> float:
        assert isinstance(earlier, _HostEvent)
        return self.at - earlier.at
