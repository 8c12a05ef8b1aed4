"""What the kernels reach of this machine's ceilings: products at many rows and at one, attention over long contexts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from engine.bench.ceilings import Ceilings, ceilings, roofline_s
from engine.bench.drive import Bench
from engine.bench.steps import Pool

PREFILL = 512  # rows
ATTENTION = (4096, 8100)  # keys


@dataclass(frozen=True, slots=True)
class Reached:
    """One way to keep weights and KV. Times in seconds; attention is the difference that its keys make."""

    quantization: str
    kv_dtype: str
    prefill_s: float  # PREFILL rows, forward pass
    prefill_share: float  # of the peak of the products' arithmetic
    decode_s: float  # one sequence, short context
    decode_share: float  # of the memory's bandwidth
    batch_s: float  # 64 sequences at 256 keys
    batch_share: float  # of the roofline
    attention: dict[int, tuple[float, float]]  # keys -> (bytes of KV a second, share of the bandwidth)


def measure(quantization: str, kv_dtype: str, repeats: int, **settings: Any) -> tuple[Ceilings, Reached]:
    """Ceilings and what is reached, in the same minute. Raises ConfigError."""
    asked = {"quantization": quantization, "kv_cache_dtype": kv_dtype, "max_num_seqs": 64, **settings}
    with Bench(max_num_batched_tokens=PREFILL, **asked) as bench:
        lid, size = ceilings(bench.settings.isa, bench.settings.threads), bench.model_size()
        head = bench.spec.vocab_size * bench.spec.hidden_size
        pool = Pool(bench)

        def forward(batch: int, tokens: int, context: int) -> float:
            """Median of the forward pass alone; 0 where the model or the pool can't hold it."""
            rows = pool.rows(batch, tokens, context)
            if rows is None:
                return 0.0
            return statistics.median([pool.run(rows)[1].compute_s for _ in range(repeats + 1)][1:])

        def share(seconds: float, batch: int, tokens: int, context: int) -> float:
            keys = batch * (context + tokens)
            limit = roofline_s(size, head, lid, bench.arithmetic, batch * tokens, batch, keys)
            return limit / seconds if seconds else 0.0

        prefill, one, many = forward(1, PREFILL, 0), forward(1, 1, 16), forward(64, 1, 256)
        attention = {}
        for keys in ATTENTION:
            if (longer := forward(1, 1, keys)) > one:
                rate = (keys - 16) * size.kv_bytes_per_token / (longer - one)
                attention[keys] = rate, rate / lid.bytes_per_s
        return lid, Reached(
            quantization,
            bench.settings.kv_dtype,
            prefill,
            share(prefill, 1, PREFILL, 0),
            one,
            share(one, 1, 1, 16),
            many,
            share(many, 64, 1, 256),
            attention,
        )
