"""CoreSettings: the numbers that the scheduler uses, already resolved. Block size and pool come from Geometry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """One setting a line; counts are of tokens unless the name says otherwise."""

    max_num_seqs: int = 64  # sequences that run at once (at most Geometry.max_num_seqs)
    max_num_batched_tokens: int = 512  # computed in one step
    max_waiting: int = 0  # requests that may wait for a place; 0 = unlimited
    enable_prefix_caching: bool = True
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    kv_events: bool = False  # keep a log of what the prefix cache stores and removes
    kv_manager: Literal["paged", "virtual", "reserve"] = "paged"
    watermark: float = 0.01  # share of the pool that admission leaves free while something runs
    prefill_budget: int = 0  # prompt tokens a step while others decode; 0 = all that the step has left
    stall_s: float = 0.0  # longest step that prefill may cause while others decode (measured rate); 0 = no bound
    overlap: Literal[0, 1] = 0  # steps in flight while the next one is planned
    num_drafts: int = 0  # most draft tokens a sequence and step; needs a proposer
