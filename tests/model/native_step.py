"""One sequence through the native step: paged, in chunks, logits of every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engine import native
from engine.model.spec import DecoderSpec
from engine.model.weights import Quantization, load_native


class NativeStep:
    """A loaded model with a small KV pool whose blocks are handed out in a shuffled order."""

    def __init__(
        self,
        spec: DecoderSpec,
        path: Path,
        dtype: Literal["float32", "bfloat16"] = "float32",
        quantization: Quantization = "none",
        block_size: int = 5,
        isa: str = "",
    ) -> None:
        self._spec = spec
        kernels = native.load(isa, 1)
        self._model = native.Model(kernels, spec, dtype)
        load_native(spec, path, self._model, quantization=quantization, dtype=dtype)
        self._model.finish()
        kv_dtype = native.DTYPES[dtype]
        n_blocks = 64
        self._size = n_blocks * kernels.kv_block_bytes(spec, block_size, kv_dtype)
        self._kernels, self._data = kernels, kernels.alloc(self._size)
        self._kv = native.KV(data=self._data, num_blocks=n_blocks, block_size=block_size, dtype=kv_dtype)
        self._table = np.random.default_rng(0).permutation(n_blocks).astype(np.int32)[None].copy()

    def logits(self, tokens: list[int], chunks: list[int]) -> npt.NDArray[np.float32]:
        """[tokens, vocab] of one sequence from position 0, computed in pieces of the given sizes."""
        out, at = [], 0
        for size in chunks:
            out.append(self._step(np.array(tokens[at : at + size], np.int32), at))
            at += size
        assert at == len(tokens)
        return np.concatenate(out)

    def _step(self, tokens: npt.NDArray[np.int32], position: int) -> npt.NDArray[np.float32]:
        n = len(tokens)
        logits = np.empty((n, self._spec.vocab_size), np.float32)
        arrays: dict[str, Any] = {
            "tokens": tokens,
            "q_start": np.array([0, n], np.int32),
            "pos_start": np.array([position], np.int32),
            "tables": self._table,
            "table_line": np.zeros(1, np.int32),
            "logit_rows": np.arange(n, dtype=np.int32),
            "logits": logits,
        }
        pointers = {name: native.pointer(array) for name, array in arrays.items()}
        stride = self._table.shape[1]
        batch = native.Batch(n_rows=n, n_seqs=1, table_stride=stride, n_logits=n, n_hidden=0, **pointers)
        self._model.step(self._kv, batch)
        return logits

    def close(self) -> None:
        self._model.close()
        self._kernels.free(self._data, self._size)
