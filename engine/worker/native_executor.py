"""The CPU executor: numpy and the C++ kernels, no torch. One native call computes a step, one samples it.

Both calls release the GIL, so the scheduler makes the next plan meanwhile.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from engine import machine, native
from engine.core.plan import Geometry, Plan, Result
from engine.errors import ConfigError
from engine.model.lora import LoraAdapter, MergingModel
from engine.model.spec import DecoderSpec
from engine.model.weights import load_native
from engine.worker.batch import Batch, Drawn, Draws, Float32, split_by_adapter
from engine.worker.fingerprint import fingerprint, identity
from engine.worker.native_blocks import NativeBlocks
from engine.worker.runner import Runner, StepThread
from engine.worker.settings import ExecutorSettings, device_blocks
from engine.worker.slots import Slots
from engine.worker.storage import KVStorage
from engine.worker.tiers import geometry_of, open_tiers

log = logging.getLogger(__name__)

GIB = 1 << 30


class NativeCompute:
    """Forward pass and sampling by the kernels.

    A step that scores a prompt gets a buffer of its own for its many logits; all others share one. `adapters` are
    merged models beside the base; rows of each run in a call of their own, so that none depends on the others.
    """

    def __init__(
        self, kernels: native.Kernels, model: native.Model, blocks: NativeBlocks, hidden_size: int, max_num_seqs: int
    ) -> None:
        self.adapters: dict[str, native.Model] = {}
        self._kernels = kernels
        self._model = model
        self._blocks = blocks
        self._hidden_size = hidden_size
        self._shared_rows = max_num_seqs
        self._shared: Float32 = np.zeros((0, 0), np.float32)  # [max_num_seqs, vocab]
        self._logits = self._shared  # of the last step

    def forward(self, batch: Batch, slots: Slots) -> Float32:
        """See `Compute`."""
        n_logits = len(batch.logit_rows)
        if not len(self._shared):
            self._shared = np.empty((self._shared_rows, slots.vocab_size), np.float32)
        alone = n_logits > self._shared_rows
        self._logits = np.empty((n_logits, slots.vocab_size), np.float32) if alone else self._shared
        hidden = np.empty((len(batch.hidden_rows), self._hidden_size), np.float32)
        if not self.adapters:
            self._step(self._model, batch, slots, self._logits, hidden)
            return hidden
        for adapter, part, logits_at, hidden_at in split_by_adapter(batch, slots):
            logits = np.empty((len(logits_at), slots.vocab_size), np.float32)
            states = np.empty((len(hidden_at), self._hidden_size), np.float32)
            self._step(self.adapters[adapter] if adapter else self._model, part, slots, logits, states)
            self._logits[logits_at], hidden[hidden_at] = logits, states
        return hidden

    def _step(self, model: native.Model, batch: Batch, slots: Slots, logits: Float32, hidden: Float32) -> None:
        address = native.pointer
        arguments = native.Batch(
            n_rows=len(batch.tokens),
            n_seqs=len(batch.pos_start),
            tokens=address(batch.tokens),
            q_start=address(batch.q_start),
            pos_start=address(batch.pos_start),
            tables=address(slots.tables),
            table_stride=slots.tables.shape[1],
            table_line=address(batch.slots),
            n_logits=len(batch.logit_rows),
            logit_rows=address(batch.logit_rows),
            logits=address(logits),
            n_hidden=len(batch.hidden_rows),
            hidden_rows=address(batch.hidden_rows),
            hidden=address(hidden),
        )
        model.step(self._blocks.kv, arguments)

    def sample(self, draws: Draws, slots: Slots) -> Drawn:
        """See `Compute`."""
        n, slot = len(draws.slot), draws.slot
        width = max(0, int(draws.n_top.max())) if n else 0
        drawn = Drawn(
            np.empty(n, np.int32),
            np.empty(n, np.float32),
            np.empty(n, np.int32),
            np.empty((n, width), np.int32),
            np.empty((n, width), np.float32),
        )
        if not n:
            return drawn
        columns = {name: getattr(slots, name)[slot] for name in _PER_SLOT}
        lists = _Pointers()
        if draws.seen is not None:
            lists.add("seen_ids", [None if s is None else s[0] for s in draws.seen], "n_seen")
            lists.add("seen_counts", [None if s is None else s[1] for s in draws.seen])
        if draws.bias is not None:
            lists.add("bias_ids", [None if b is None else b[0] for b in draws.bias], "n_bias")
            lists.add("bias_values", [None if b is None else b[1] for b in draws.bias])
        if draws.masks is not None:
            lists.add("masks", draws.masks)
        arrays: dict[str, npt.NDArray[Any] | None] = {
            **columns,
            **lists.columns,
            "choice": draws.choice,
            "position": draws.position,
            "n_top": draws.n_top,
            "forced": draws.forced,
            "logits": self._logits,
            "token": drawn.token,
            "logprob": drawn.logprob,
            "rank": drawn.rank,
            "top_ids": drawn.top_ids,
            "top_logprobs": drawn.top_logprobs,
        }
        addresses = {name: native.pointer(array) for name, array in arrays.items()}
        self._kernels.sample(native.Sampling(n=n, vocab=slots.vocab_size, top_stride=width, **addresses))
        return drawn


_PER_SLOT = (
    *("temperature", "top_p", "min_p", "top_k", "seed"),
    *("repetition", "presence", "frequency"),
)


class _Pointers:
    """Columns of addresses, one list of ids or words a draw; keeps what they point at alive."""

    __slots__ = ("_kept", "columns")

    def __init__(self) -> None:
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self._kept: list[list[Any]] = []

    def add(self, name: str, entries: list[Any], length: str = "") -> None:
        self._kept.append(entries)
        self.columns[name] = np.array([0 if e is None else e.ctypes.data for e in entries], np.uint64)
        if length:
            self.columns[length] = np.array([0 if e is None else len(e) for e in entries], np.int32)


@dataclass(frozen=True, slots=True)
class _Running:
    """What `start` makes."""

    kernels: native.Kernels
    model: native.Model
    blocks: NativeBlocks
    storage: KVStorage
    slots: Slots
    compute: NativeCompute
    thread: StepThread


class NativeExecutor:
    """Executes plans on the CPU. See `engine.core.plan.Executor`."""

    def __init__(self, model_dir: str | Path, spec: DecoderSpec, settings: ExecutorSettings) -> None:
        self._path = Path(model_dir)
        self._spec = spec
        self._settings = settings
        self._running: _Running | None = None

    def start(self) -> Geometry:
        """Load the model, from its packed image when there is one, and make the storage. Raises ConfigError."""
        spec, settings = self._spec, self._settings
        kernels = native.load(settings.isa, settings.threads)
        model = load_model(kernels, self._path, spec, settings)
        blocks = self._make_blocks(kernels)
        block_bytes = blocks.bytes_per_block
        host, disk = open_tiers(settings, block_bytes, self._kv_fingerprint(kernels))
        storage = KVStorage(blocks, host, disk)
        slots = Slots(settings, spec.vocab_size, blocks.num_blocks)
        compute = NativeCompute(kernels, model, blocks, spec.hidden_size, settings.max_num_seqs)
        thread = StepThread(Runner(compute, slots, storage).run)
        self._running = _Running(kernels, model, blocks, storage, slots, compute, thread)
        geometry = geometry_of(settings, spec, device_blocks(settings, block_bytes), block_bytes, host, disk)
        built = Path(native.library()._name).with_suffix(".fingerprint").read_text().strip()
        return msgspec.structs.replace(
            geometry, identity=identity(self._path, spec, settings, f"native {kernels.isa} {built}")
        )

    def _kv_fingerprint(self, kernels: native.Kernels) -> str:
        """What decides the bits of a KV block; other kernels may round otherwise, so their build counts too."""
        settings, built = self._settings, Path(native.library()._name).stat().st_mtime_ns
        how = (settings.dtype, settings.kv_dtype, settings.block_size, settings.quantization)
        return fingerprint(self._path, self._spec, kernels.isa, built, *how)

    def _make_blocks(self, kernels: native.Kernels) -> NativeBlocks:
        """Paged: as many blocks as the budget holds. Virtual: addresses for every slot's longest sequence."""
        spec, settings = self._spec, self._settings
        dtype = native.DTYPES[settings.kv_dtype]
        block_bytes = kernels.kv_block_bytes(spec, settings.block_size, dtype)
        blocks, pages = device_blocks(settings, block_bytes), 0
        if settings.kv_manager == "virtual":
            pages = -(-settings.max_model_len // settings.block_size)
            blocks = settings.max_num_seqs * pages
        return NativeBlocks(blocks, block_bytes, settings.block_size, dtype, pages_per_slot=pages)

    def submit(self, plan: Plan) -> None:
        """See `Executor`."""
        self._started().thread.submit(plan)

    def collect(self) -> Result:
        """See `Executor`."""
        return self._started().thread.collect()

    def read_block(self, block: int) -> bytes:
        """See `BlockAccess`."""
        return self._started().storage.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        """See `BlockAccess`."""
        self._started().storage.write_block(block, data)

    def load_adapter(self, name: str, directory: str) -> None:
        """See `Executor`. Takes the memory of another packed model, which must be free."""
        running, settings = self._started(), self._settings
        dtype = native_dtype(settings)
        size, free = running.model.size_bytes, machine.available_memory()
        if size > free:
            raise ConfigError(
                f"adapter {directory} takes another {size / GIB:.2f} GiB, the model with it merged in; "
                f"{free / GIB:.2f} GiB are free: unload another adapter, or lower the KV memory"
            )
        model = native.Model(running.kernels, self._spec, dtype)
        target = MergingModel(model, LoraAdapter(directory, self._spec))
        load_native(self._spec, self._path, target, quantization=settings.quantization, dtype=dtype)
        model.finish()
        running.compute.adapters[name] = model
        running.slots.adapters.add(name)

    def unload_adapter(self, name: str) -> None:
        """See `Executor`."""
        running = self._started()
        running.slots.adapters.discard(name)
        running.compute.adapters.pop(name, None)

    def close(self) -> None:
        """See `Executor`."""
        if self._running is not None:
            running = self._running
            running.thread.close()
            running.storage.close()
            running.blocks.close()
            for model in (running.model, *running.compute.adapters.values()):
                model.close()

    def _started(self) -> _Running:
        assert self._running is not None, "start() comes first"
        return self._running


def load_model(kernels: native.Kernels, path: Path, spec: DecoderSpec, settings: ExecutorSettings) -> native.Model:
    """The packed model: from the image beside it when that is of these very files, else packed now and kept."""
    dtype = native_dtype(settings)
    model = native.Model(kernels, spec, dtype)
    image = image_path(path, kernels.isa, settings)
    key = fingerprint(path, spec, kernels.isa, settings.dtype, settings.quantization)
    if settings.image_cache and image.exists():
        try:
            model.load_image(image, key)
            return model
        except ConfigError as error:
            log.info("packing the weights again: %s", error)
            model.close()
            model = native.Model(kernels, spec, dtype)
    load_native(spec, path, model, quantization=settings.quantization, dtype=dtype)
    model.finish()
    if settings.image_cache:
        try:
            image.parent.mkdir(exist_ok=True)
            model.save_image(image, key)
        except (OSError, ConfigError) as error:
            log.warning("the packed weights can't be kept for the next start: %s", error)
    return model


def native_dtype(settings: ExecutorSettings) -> Literal["float32", "bfloat16"]:
    """What the kernels compute in. Raises ConfigError."""
    if settings.dtype == "float16":
        raise ConfigError("the CPU kernels compute in bfloat16 or float32, not float16; choose one of them")
    return settings.dtype


def image_path(path: Path, isa: str, settings: ExecutorSettings) -> Path:
    """Where the packed weights of a choice are kept: in `.octavo` beside the model."""
    directory = path.parent if path.is_file() else path
    name = f"{path.stem}-" if path.is_file() else ""
    return directory / ".octavo" / f"{name}{isa}-{settings.dtype}-{settings.quantization}.packed"
