"""Tensor parallel: one executor over several ranks of this machine, each with its part of every layer.

Rank 0 is the engine's process; it starts the others and writes each of them every step's plan as msgpack, over the
pipe that is their stdin. All run the same step and draw the same tokens, so nothing comes back. A rank that ends takes
the engine with it, and the engine its ranks: the supervisor starts them all again and resumes what was in flight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from engine.core.plan import Geometry, Plan, Result
from engine.errors import OctavoError
from engine.model.sharded import Sharding, shard_spec
from engine.model.spec import DecoderSpec
from engine.worker.settings import ExecutorSettings
from engine.worker.torch_executor import TorchExecutor

log = logging.getLogger("octavo.engine")

TIMEOUT = timedelta(seconds=60)  # of a collective whose other side lives and doesn't come
STOP_S = 3.0
START_S = 1.0
LINE = 8  # counters are this many apart: a cache line each


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first message to a rank. `directory` is private to the group."""

    model: str
    spec: DecoderSpec
    settings: ExecutorSettings
    count: int
    directory: str


class Step(msgspec.Struct, frozen=True, tag="step"):
    plan: Plan


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    name: str


Message = Begin | Step | LoadAdapter | UnloadAdapter


class TensorParallelExecutor:
    """See `engine.core.plan.Executor`. Memory sizes in `settings` are a rank's."""

    def __init__(self, model_dir: Path, spec: DecoderSpec, settings: ExecutorSettings, count: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="octavo-ranks-"))
        self._begin = Begin(str(model_dir), spec, settings, count, str(self._directory))
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._telling = threading.Lock()  # adapters are loaded beside steps
        self._closing = False
        self._own: TorchExecutor | None = None

    def start(self) -> Geometry:
        """Start the ranks, load every part, wait for all. Raises ConfigError."""
        begin = self._begin
        shard_spec(begin.spec, begin.count)
        for rank in range(1, begin.count):
            command = [sys.executable, "-P", "-m", "engine.worker.tensor_parallel", str(rank)]
            path = str(Path(__file__).resolve().parent.parent.parent)
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environ)
            self._ranks.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}", daemon=True).start()
        self._tell(begin)
        self._own, geometry = join(begin, 0)
        shutil.rmtree(self._directory, ignore_errors=True)
        return geometry

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """A rank that ends by itself ends the engine: the others wait in a sum that never comes."""
        status = process.wait()
        if self._own is None:
            time.sleep(START_S)  # what keeps a rank from starting most often keeps rank 0 too, which says why
        if not self._closing:
            log.critical("rank %d ended (status %d), and the engine with it", rank, status)
            os._exit(1)

    def _tell(self, message: Message) -> None:
        frame = msgspec.msgpack.encode(message)
        with self._telling:
            for process in self._ranks:
                assert process.stdin is not None, "made with a pipe"
                process.stdin.write(struct.pack("<I", len(frame)) + frame)
                process.stdin.flush()

    def submit(self, plan: Plan) -> None:
        """See `Executor`."""
        self._tell(Step(plan))
        self._started().submit(plan)

    def collect(self) -> Result:
        """See `Executor`."""
        return self._started().collect()

    def load_adapter(self, name: str, directory: str) -> None:
        """See `Executor`. What rank 0 refuses, the others never hear of."""
        self._started().load_adapter(name, directory)
        self._tell(LoadAdapter(name, directory))

    def unload_adapter(self, name: str) -> None:
        """See `Executor`."""
        self._started().unload_adapter(name)
        self._tell(UnloadAdapter(name))

    def close(self) -> None:
        """See `Executor`."""
        self._closing = True
        if self._own is not None:
            self._own.close()
        for process in self._ranks:
            with contextlib.suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._ranks:
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _started(self) -> TorchExecutor:
        assert self._own is not None, "start() comes first"
        return self._own


def join(begin: Begin, rank: int) -> tuple[TorchExecutor, Geometry]:
    """Become a rank of the group: its executor, started, once all are."""
    settings = own_settings(begin.settings, rank, begin.count)
    gpu = settings.device.startswith("cuda")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if gpu:
        torch.cuda.set_device(torch.device(settings.device))
    else:
        torch.set_num_threads(max(1, settings.threads // begin.count))
    meet = f"file://{Path(begin.directory).absolute()}/store"
    dist.init_process_group("nccl" if gpu else "gloo", meet, TIMEOUT, world_size=begin.count, rank=rank)
    total: Callable[[torch.Tensor], torch.Tensor] = gathered_sum
    if not gpu and platform.machine() == "x86_64":
        most = max(begin.settings.max_batched_tokens, 1) * begin.spec.hidden_size
        total = SharedSum(Path(begin.directory) / "sums", rank, begin.count, most)
    executor = TorchExecutor(begin.model, begin.spec, settings, Sharding(rank, begin.count, total), alone_or_none)
    geometry = executor.start()
    dist.barrier()
    return executor, geometry


def own_settings(settings: ExecutorSettings, rank: int, count: int) -> ExecutorSettings:
    """A rank's: a GPU and a disk tier of its own."""
    device, disk = settings.device, settings.disk_dir and str(Path(settings.disk_dir) / f"rank-{rank}-of-{count}")
    if device.startswith("cuda"):
        device = f"cuda:{int(device.partition(':')[2] or 0) + rank}"
    return dataclasses.replace(settings, device=device, disk_dir=disk)


def alone_or_none(run: Callable[[Plan], Result]) -> Callable[[Plan], Result]:
    """A step that one rank can't finish leaves the others in the middle of theirs: this rank ends, and so do all.

    What is refused before the arithmetic (an OctavoError) every rank refuses alike.
    """

    def guarded(plan: Plan) -> Result:
        try:
            return run(plan)
        except OctavoError:
            raise
        except BaseException:
            log.exception("step %d failed on a rank", plan.step)
            os._exit(1)

    return guarded


def gathered_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, added in the order of ranks: the same bits everywhere and whatever the shape."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class SharedSum:
    """`gathered_sum` in shared memory, for ranks on one x86 processor, which keeps the order of writes.

    A rank writes its part into one of two halves, raises its counter, and reads when all counters are there. It can't
    overtake: who writes a half again has seen all counters of the sum between, so the half has been read.
    """

    def __init__(self, path: Path, rank: int, count: int, most: int) -> None:
        """`most`: elements of a tensor at most."""
        header = count * LINE * 8
        size = header + 2 * count * most * 4
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(file, size)
        everything = np.frombuffer(mmap.mmap(file, size), np.uint8)
        os.close(file)
        self._counters = everything[:header].view(np.uint64)[::LINE]
        self._halves = torch.from_numpy(everything[header:].view(np.float32)).view(2, count, most)
        self._rank = rank
        self._done = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._done += 1
        half, n = self._halves[self._done % 2], x.numel()
        half[self._rank, :n] = x.reshape(-1)
        self._counters[self._rank] = self._done
        while (self._counters < self._done).any():
            os.sched_yield()
        total = half[0, :n].clone()
        for part in half[1:, :n]:
            total += part
        return total.view(x.shape)


def _read(pipe: BinaryIO) -> bytes:
    """A frame; b"" at the end."""
    head = pipe.read(4)
    return pipe.read(struct.unpack("<I", head)[0]) if len(head) == 4 else b""


def main(rank: int) -> int:
    """The life of a rank but 0: it ends with the pipe."""
    from engine.process import die_with_parent

    die_with_parent()
    pipe = sys.stdin.buffer
    decoder = msgspec.msgpack.Decoder(Message)
    if not (first := _read(pipe)):
        return 1  # the engine has gone already
    begin = decoder.decode(first)
    assert isinstance(begin, Begin), "the first message"
    executor, _ = join(begin, rank)
    while frame := _read(pipe):
        message = decoder.decode(frame)
        with contextlib.suppress(OctavoError):  # rank 0 has the same and tells of it
            if isinstance(message, Step):
                executor.submit(message.plan)
                executor.collect()
            elif isinstance(message, LoadAdapter):
                executor.load_adapter(message.name, message.path)
            elif isinstance(message, UnloadAdapter):
                executor.unload_adapter(message.name)
    executor.close()
    return 0


if __name__ == "__main__":
    from engine.worker.tensor_parallel import main as real_main

    sys.exit(real_main(int(sys.argv[1])))
