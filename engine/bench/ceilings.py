"""What this machine can do at most, measured now by the kernels' library, and the shortest step that it allows."""

from __future__ import annotations

from dataclasses import dataclass

from engine import native
from engine.simulate.cost import ModelSize

READ, FLOAT32, BFLOAT16, INT8 = range(4)  # what `Kernels.measure` knows


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of all threads together, a second."""

    isa: str
    threads: int
    bytes_per_s: float  # read from memory
    float32: float  # operations (a product and a sum are two)
    bfloat16: float
    int8: float

    def operations(self, kind: str) -> float:
        """Of the arithmetic that a dtype or quantisation is computed in."""
        return {"float32": self.float32, "bfloat16": self.bfloat16}.get(kind, self.int8)


def ceilings(isa: str = "", threads: int = 0) -> Ceilings:
    """The best of three, since neighbours can only slow it down. Raises ConfigError."""
    kernels = native.load(isa, threads)

    def best(what: int) -> float:
        return max(kernels.measure(what) for _ in range(3))

    return Ceilings(kernels.isa, kernels.threads, best(READ), best(FLOAT32), best(BFLOAT16), best(INT8))


def roofline_s(
    size: ModelSize, head: int, lid: Ceilings, arithmetic: str, tokens: int, sampled: int, keys: int
) -> float:
    """Time for the weights and the keys through memory, or for the products: whichever is longer.

    `head`: parameters of the output head, which only rows that are sampled go through. Attention's own products are
    left out: at usual contexts they are few beside the matrices'.
    """
    products = (size.parameters - head) * tokens + head * sampled
    memory = (size.weight_bytes + keys * size.kv_bytes_per_token) / lid.bytes_per_s
    return max(2 * products / lid.operations(arithmetic), memory)
