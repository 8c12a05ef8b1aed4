"""Snapshots for people: every KV block and its holders, every request and its story. JSON-able values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.api import Stats
from engine.core.ledger import Ledger
from engine.core.plan import Geometry
from engine.core.request import Request, Sequence, Status
from engine.kv import KVManager

FINISHED_SHOWN = 20  # of those that ended, on the page
_FREE = ord("f")
_MORE = bytes.maketrans(b"fcus", b"cuss")  # the letter of a block with one holder more; the index is the first


def memory(kv: KVManager, geometry: Geometry, ledger: Ledger) -> dict[str, Any]:
    """Blocks by id: state free | cached | used | shared, references, holders, tokens filled; and the tiers."""
    names: dict[int, Sequence] = {seq.id: seq for r in ledger.requests.values() for seq in r.sequences}
    filled: dict[int, int] = {}
    for seq in names.values():
        running = seq.status is Status.RUNNING
        for i, block in enumerate(_held_by(kv, seq), kv.behind(seq.id)) if running else ():
            tokens = max(0, min(geometry.block_size, seq.computed - i * geometry.block_size))
            filled[block] = max(filled.get(block, 0), tokens)
    blocks: list[dict[str, Any]] = [
        {"id": i, "state": "free", "refs": 0, "holders": [], "tokens": 0} for i in range(geometry.num_blocks)
    ]
    views = kv.blocks()
    cells = _cells(kv, [view.id for view in views])
    for view in views:
        holders = [{"request": names[s].request.add.id, "choice": names[s].choice} for s in view.holders]
        blocks[cells[view.id]] = {
            "id": cells[view.id],
            "state": ("cached", "used", "shared")[min(2, len(holders))],
            "refs": view.refs,
            "holders": holders,
            "tokens": filled.get(view.id, geometry.block_size if view.cached else 0),
        }
    return {**_pools(kv, geometry), "blocks": blocks}


def _pools(kv: KVManager, geometry: Geometry) -> dict[str, Any]:
    """How much of each tier there is and is used, in blocks."""
    usage = kv.usage()
    return {
        "block_size": geometry.block_size,
        "bytes_per_block": geometry.bytes_per_block,
        "total": usage.total,
        "free": usage.free,
        "cached": usage.cached,
        "shared": usage.shared,
        "saved_bytes": usage.saved * geometry.bytes_per_block,
        "host": {"total": usage.host_total, "used": usage.host_used},
        "disk": {"total": geometry.disk_blocks, "used": usage.disk_used},
    }


def live(kv: KVManager, geometry: Geometry, ledger: Ledger, stats: Stats, now: float) -> dict[str, Any]:
    """What the page shows twice a second, compact: a letter a block (f c u s) and the tables of the sequences."""
    states = bytearray(b"f") * geometry.num_blocks
    held = [*kv.held()]
    cells = _cells(kv, held)
    for id in held:
        states[cells[id]] = _MORE[_FREE]
    running = [s for r in ledger.requests.values() for s in r.sequences if s.status is Status.RUNNING]
    tables = {seq.id: [cells[id] for id in _held_by(kv, seq)] for seq in running}
    for table in tables.values():
        for cell in table:
            states[cell] = _MORE[states[cell]]
    return {
        "time": now,
        **_pools(kv, geometry),
        "states": states.decode(),
        "sequences": [
            {
                "request": seq.request.add.id,
                "choice": seq.choice,
                "table": tables.get(seq.id, []),
                "host_blocks": -(-seq.confirmed // geometry.block_size) - kv.behind(seq.id)
                if seq.status is Status.SWAPPED
                else 0,
            }
            for request in ledger.requests.values()
            for seq in request.sequences
            if seq.status in (Status.RUNNING, Status.SWAPPED)
        ],
        "alive": [_summary(r, now) for r in ledger.requests.values()],
        "finished": [_summary(r, now) for r in list(ledger.finished)[-FINISHED_SHOWN:]][::-1],
        "stats": {name: getattr(stats, name) for name in stats.__struct_fields__},
    }


def block(kv: KVManager, geometry: Geometry, ledger: Ledger, id: int) -> dict[str, Any] | None:
    """One block with the ids of the tokens whose KV it holds; None when there is no such block."""
    if not 0 <= id < geometry.num_blocks:
        return None
    views = kv.blocks()
    cells = _cells(kv, [view.id for view in views])
    view = next((v for v in views if cells[v.id] == id), None)
    if view is None:
        return {"id": id, "refs": 0, "holders": [], "tokens": []}
    names = {seq.id: seq for r in ledger.requests.values() for seq in r.sequences}
    holders = [names[s] for s in view.holders]
    tokens: tuple[int, ...] = kv.content(view.id)
    if not tokens and holders:
        table, behind = _held_by(kv, holders[0]), kv.behind(holders[0].id)
        known = view.id in table
        at = (behind + table.index(view.id)) * geometry.block_size if known else holders[0].computed
        tokens = tuple(holders[0].tokens[at : min(at + geometry.block_size, holders[0].computed)])
    return {
        "id": id,
        "refs": view.refs,
        "holders": [{"request": h.request.add.id, "choice": h.choice} for h in holders],
        "tokens": list(tokens),
    }


def _held_by(kv: KVManager, seq: Sequence) -> list[int]:
    """Its blocks, in the order of its tokens; those behind a window were given back."""
    return list(kv.table(seq.id)[kv.behind(seq.id) :])


def _cells(kv: KVManager, held: Iterable[int]) -> Mapping[int, int] | range:
    """Where each block in use is shown: at its id or, where ids are addresses, in the order of those."""
    if kv.ids_are_addresses:
        return {id: cell for cell, id in enumerate(sorted(held))}
    return range(kv.usage().total)


def requests(ledger: Ledger, now: float) -> dict[str, Any]:
    """What is alive, in order of arrival, and what ended lately, the newest first; without timelines."""
    alive = sorted(ledger.requests.values(), key=lambda r: r.add.arrival)
    return {
        "alive": [_summary(r, now) for r in alive],
        "finished": [_summary(r, now) for r in reversed(ledger.finished)],
    }


def request(ledger: Ledger, id: str, now: float) -> dict[str, Any] | None:
    """One request with its timeline; None when it is unknown or forgotten."""
    found = ledger.requests.get(id) or next((r for r in reversed(ledger.finished) if r.add.id == id), None)
    if found is None:
        return None
    return {**_summary(found, now), "timeline": found.timeline}


def _summary(request: Request, now: float) -> dict[str, Any]:
    add = request.add
    end = request.finished if request.finished is not None else now
    return {
        "id": add.id,
        "arrival": add.arrival,
        "priority": add.priority,
        "prompt_tokens": request.prompt_len,
        "max_tokens": request.end - request.prompt_len,
        "cached_tokens": max(0, request.cached),
        "queued_s": (request.admitted if request.admitted is not None else end) - add.arrival,
        "ttft_s": None if request.first_token is None else request.first_token - add.arrival,
        "total_s": end - add.arrival,
        "finished": request.finished is not None,
        "output_tokens": request.generated,
        "preemptions": request.preemptions,
        "choices_total": add.params.n,
        "reasons": {str(choice): reason for choice, reason in sorted(request.reasons.items())},
        "choices": [
            {
                "choice": seq.choice,
                "status": seq.status.value,
                "output_tokens": len(seq.tokens) - request.prompt_len,
                "computed": seq.computed,
                "preemptions": seq.preemptions,
            }
            for seq in request.sequences
        ],
    }
