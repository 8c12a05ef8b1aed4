"""What a simulated replica is made of, for those that plan with it."""

from __future__ import annotations

from engine.core.plan import Geometry
from engine.core.settings import CoreSettings
from engine.simulate.cost import Device, ModelSize

__all__ = ["CoreSettings", "Geometry", "pool_of"]

USABLE = 0.9  # of a device's memory, for weights and KV


def pool_of(device: Device, model: ModelSize, block_size: int) -> Geometry:
    """The pool that the device's memory holds beside the weights."""
    per_block = model.kv_bytes_per_token * block_size
    blocks = int((device.memory * USABLE - model.weight_bytes) / per_block)
    return Geometry(
        num_blocks=max(1, blocks),
        block_size=block_size,
        max_model_len=1,
        max_num_seqs=1,
        vocab_size=1 << 31,
        bytes_per_block=round(per_block),
    )
