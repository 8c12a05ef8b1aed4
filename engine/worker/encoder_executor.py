"""Executes plans with an encoder: a text is computed as a whole once all of its tokens have come.

The texts of a step are packed into groups, one a thread, and what a text gets doesn't depend on the others in its
group: that is checked at the start, and where it doesn't hold every text is a group of its own. There is no KV: a
block of the pool is a seat for one text, and none is ever copied, swapped or shared.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from engine.attention.encoding import STORAGE_DTYPES
from engine.core.plan import Geometry, Plan, Result, Row, RowResult
from engine.errors import ConfigError, RequestFailed
from engine.model.encoder import Encoder
from engine.model.encoder_config import EncoderSpec
from engine.worker.runner import StepThread
from engine.worker.settings import ExecutorSettings
from engine.worker.torch_executor import torch_device

PACKED_ROWS = 256  # tokens of a group; a longer text is alone in its own

Whole = tuple[int, Row, list[int]]  # place in the plan, the row that ended a text, its tokens

log = logging.getLogger("octavo.engine")


class EncoderExecutor:
    """See `engine.core.plan.Executor`. A plan's rows all pool; their slots hold the tokens so far."""

    def __init__(self, path: Path, spec: EncoderSpec, settings: ExecutorSettings) -> None:
        self._path = path
        self._spec = spec
        self._settings = settings
        self._texts: dict[int, list[int]] = {}  # slot -> tokens so far
        self._lengths: dict[int, int] = {}  # slot -> tokens of the whole text
        self._encoder: Encoder | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._steps: StepThread | None = None
        self._threads_before = 0
        self._packs = False

    def start(self) -> Geometry:
        """Load the model. Raises ConfigError."""
        settings, spec = self._settings, self._spec
        self._encoder = Encoder(spec, self._path, STORAGE_DTYPES[settings.dtype], torch_device(settings.device))
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(1)  # of each of ours
        self._packs = self._encoder.packs_without_trace(PACKED_ROWS)
        if not self._packs:
            log.warning("matrix products of this machine depend on the batch: texts are computed one by one, slower")
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="octavo-encode")
        self._steps = StepThread(self._run)
        return Geometry(
            num_blocks=settings.num_blocks,
            block_size=settings.max_model_len,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            vocab_size=spec.vocab_size,
            bytes_per_block=4 * settings.max_model_len,
            hidden_size=spec.hidden_size,
        )

    def submit(self, plan: Plan) -> None:
        """See `Executor`."""
        assert self._steps is not None, "start() comes first"
        self._steps.submit(plan)

    def collect(self) -> Result:
        """See `Executor`."""
        assert self._steps is not None, "start() comes first"
        return self._steps.collect()

    def load_adapter(self, name: str, directory: str) -> None:
        """See `Executor`."""
        raise ConfigError("adapters are served on models that write text, not on encoders")

    def unload_adapter(self, name: str) -> None:
        """See `Executor`."""

    def close(self) -> None:
        """See `Executor`."""
        if self._steps is not None and self._threads is not None:
            self._steps.close()
            self._threads.shutdown()
            torch.set_num_threads(self._threads_before)
            self._steps = None

    def _run(self, plan: Plan) -> Result:
        """One step. Raises RequestFailed for what an encoder can't run."""
        assert self._threads is not None
        started = time.perf_counter()
        for slot, params in plan.slots:
            self._lengths[slot] = params.prompt_len
        whole = [text for i, row in enumerate(plan.rows) if (text := self._gather(i, row)) is not None]
        states: dict[int, bytes] = {}
        for group in self._threads.map(self._encode, self._groups(whole)):
            states.update(group)
        rows = tuple(RowResult(hidden=states.get(i, b"")) for i in range(len(plan.rows)))
        return Result(rows, time.perf_counter() - started)

    def _gather(self, place: int, row: Row) -> Whole | None:
        """Keep a row's tokens; the whole text when they were its last."""
        if row.pooling not in ("mean", "cls"):
            raise RequestFailed("an encoder gives vectors; it can't write or score text")
        if row.start == 0:
            self._texts[row.slot] = []
        text = self._texts[row.slot]
        text[row.start :] = row.tokens
        return (place, row, text) if len(text) == self._lengths[row.slot] else None

    def _groups(self, texts: list[Whole]) -> list[list[Whole]]:
        """What is computed together, the longest first: as many groups for each thread, of about equal size."""
        total = sum(len(tokens) for _, _, tokens in texts)
        threads = self._settings.threads
        most = math.ceil(total / threads / max(1, math.ceil(total / threads / PACKED_ROWS)))
        groups: list[list[Whole]] = []
        room = 0
        for text in sorted(texts, key=lambda text: -len(text[2])):
            if not self._packs or len(text[2]) > room:
                groups.append([])
                room = most
            groups[-1].append(text)
            room -= len(text[2])
        return groups

    def _encode(self, texts: list[Whole]) -> list[tuple[int, bytes]]:
        """The first token's state, or the sum of all: whoever asked divides by their number. float32 bytes."""
        assert self._encoder is not None
        states = []
        for (place, row, _), hidden in zip(texts, self._encoder.forward([text[2] for text in texts]), strict=True):
            pooled = hidden[0] if row.pooling == "cls" else hidden.double().sum(0)
            states.append((place, pooled.float().cpu().numpy().astype("<f4").tobytes()))
        return states
