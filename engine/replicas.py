"""`--replicas N`: several engine processes behind one client, each with its own cores, KV pool and supervisor.

A request goes where most of its prompt is cached and least waits (`engine.routing`). When a replica dies, its requests
go on in the others with the tokens that they have, while its supervisor starts it again. What is suspected of having
ended engines stays: it is tried alone, on the replica that it ended last.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine import machine
from engine.api import AddRequest, Delta, Ready, Stats
from engine.client import FACTORY, EngineClient, Supervisor
from engine.config import EngineConfig
from engine.errors import EngineDead, InvalidRequest, OctavoError, Overloaded
from engine.routing import LIVE_TOKENS, Router
from engine.streams import Live, Stream
from engine.transport import ProcessLauncher

log = logging.getLogger("octavo.engine")


class Replicas:
    """`EngineClient` over `config.parallel.replicas` engine processes."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        watchdog_s: float = 60.0,
        max_restarts: int = 5,
        on_dead: Callable[[str], None] | None = None,
        log_level: str = "info",
        factory: str = FACTORY,
    ) -> None:
        count = config.parallel.replicas
        self._on_dead = on_dead
        self._router: Router | None = None
        self._clients: list[Supervisor] = []
        for i, (cores, gpu) in enumerate(zip(machine.core_shares(count), machine.gpu_shares(count), strict=True)):
            client = Supervisor(
                config_of(config, i),
                ProcessLauncher(factory, log_level, cores=cores, gpu=gpu),
                watchdog_s=watchdog_s,
                max_restarts=max_restarts,
                on_dead=self._one_is_gone,
                on_death=self._move_from(i),
            )
            self._clients.append(client)

    # ---- life

    async def start(self) -> Ready:
        outcomes = await asyncio.gather(*(c.start() for c in self._clients), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome
        readies = [client.ready for client in self._clients]
        self._router = Router([r.num_blocks for r in readies], readies[0].block_size)
        notes = (f"replicas {len(readies)} engine processes; each of them:", *readies[0].notes)
        return msgspec.structs.replace(self.ready, notes=notes)

    def _move_from(self, dead: int) -> Callable[[], None]:
        return lambda: self._move(dead)

    def _move(self, dead: int) -> None:
        """A replica has just died: others go on with its requests."""
        if self._router is None:
            return  # it is still starting
        self._router.forget(dead)
        if not any(client.up for client in self._clients):
            return  # whichever comes back first: its own
        moved = self._clients[dead].give_away()
        for live in moved:
            where = next(i for i in self._order(live.request) if self._clients[i].up)
            self._router.sent(where, live.request.prompt, _salt(live.request))
            self._clients[where].take_over(live)
        if moved:
            log.warning("replica %d died; %d of its requests go on in the others", dead, len(moved))

    def _one_is_gone(self, reason: str) -> None:
        if all(client.health()["status"] == "dead" for client in self._clients) and self._on_dead:
            self._on_dead(reason)

    # ---- requests

    def admit(self, key: str) -> None:
        refusal: OctavoError | None = None
        for client in sorted(self._clients, key=lambda client: not client.up):
            try:
                return client.admit(key)
            except (Overloaded, EngineDead) as error:
                refusal = refusal or error
        assert refusal is not None, "there is at least one replica"
        raise refusal

    def submit(self, request: AddRequest) -> AsyncIterator[Delta]:
        if self._router is None:
            raise EngineDead("the model is being loaded", retry_after_s=2.0)
        if any(client.holds(request.id) for client in self._clients):
            raise InvalidRequest(f"request id {request.id} is in use", param="request_id")
        refusal: OctavoError | None = None
        for i in self._order(request):
            try:
                live = self._clients[i].begin(request)
            except (Overloaded, EngineDead) as error:
                refusal = refusal or error
                continue
            self._router.sent(i, request.prompt, _salt(request))
            return Stream(live, self.abort)
        assert refusal is not None, "there is at least one replica"
        raise refusal

    def _order(self, request: AddRequest) -> list[int]:
        """Replicas, the best first; those that are not up come last."""
        assert self._router is not None, "routed after the start only"
        loads = [sum(map(_load, client.live)) for client in self._clients]
        order = self._router.order(request.prompt, _salt(request), loads)
        return sorted(order, key=lambda i: not self._clients[i].up)

    def abort(self, request_id: str, choice: int = -1) -> None:
        for client in self._clients:
            client.abort(request_id, choice)

    # ---- what the server asks

    @property
    def replicas(self) -> Sequence[EngineClient]:
        return self._clients

    @property
    def ready(self) -> Ready:
        """Of all: the shortest context, the blocks together."""
        readies = [client.ready for client in self._clients]
        return msgspec.structs.replace(
            readies[0],
            max_model_len=min(r.max_model_len for r in readies),
            num_blocks=sum(r.num_blocks for r in readies),
        )

    @property
    def stats(self) -> Stats:
        """Sums; what is no count (times, costs, rates) is that of the replica that stepped last."""
        every = sorted((client.stats for client in self._clients), key=lambda s: s.time)
        counts = {n: sum(getattr(s, n) for s in every) for n in Stats.__struct_fields__ if _is_count(n)}
        return msgspec.structs.replace(every[-1], **counts)

    def health(self) -> dict[str, Any]:
        """The best of the states: as long as one replica serves, requests should come. Each one's own below it."""
        every = [client.health() for client in self._clients]
        states = {one["status"] for one in every}
        status = next(s for s in ("ready", "draining", "degraded", "loading", "dead") if s in states)
        engine = dict(next(one["engine"] for one in every if one["status"] == status))
        engine["restarts"] = sum(one["engine"]["restarts"] for one in every)
        busy = [one["engine"]["last_step_age_s"] for one, c in zip(every, self._clients, strict=True) if c.live]
        ages = [age for age in busy if age is not None]
        engine["last_step_age_s"] = max(ages) if ages else engine["last_step_age_s"]
        return {"status": status, "engine": engine, "replicas": every}

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._clients[0].adapters

    async def inspect(self, what: str, request_id: str = "") -> Any:
        """Blocks of all replicas are numbered through; requests say which `replica` they run on."""
        if what == "block":
            return await self._block(int(request_id))
        up = [(i, client) for i, client in enumerate(self._clients) if client.up]
        if not up:
            raise EngineDead("no replica is ready", retry_after_s=2.0)
        parts = await asyncio.gather(*(client.inspect(what, request_id) for _, client in up))
        found = [(i, part) for (i, _), part in zip(up, parts, strict=True) if part is not None]
        if what == "request":
            return next(({**part, "replica": i} for i, part in found), None)
        firsts = self._first_blocks()
        return _joined([_labelled(part, i, firsts[i]) for i, part in found])

    def _first_blocks(self) -> list[int]:
        sizes = [client.ready.num_blocks for client in self._clients]
        return [sum(sizes[:i]) for i in range(len(sizes))]

    async def _block(self, number: int) -> Any:
        for first, client in zip(self._first_blocks(), self._clients, strict=True):
            if first <= number < first + client.ready.num_blocks:
                found = await client.inspect("block", str(number - first))
                return found and {**found, "id": number}
        return None

    async def control(self, command: str, argument: dict[str, str]) -> Any:
        """To all replicas, or to none: what one of them refuses is taken back from those that took it.

        Each exports to a file of its own, with its number behind the name; all of them import the same.
        """
        if not all(client.up for client in self._clients):
            raise EngineDead("a replica is being started again; try again soon", retry_after_s=2.0)
        if command == "reset_prefix_cache" and self._router:
            for i in range(len(self._clients)):
                self._router.forget(i)
        answers: list[Any] = []
        for i, client in enumerate(self._clients):
            own = {**argument, "path": f"{argument['path']}.{i}"} if command == "export_kv" else argument
            try:
                answers.append(await client.control(command, own))
            except OctavoError:
                if command == "load_adapter":
                    for other in self._clients[:i]:
                        await other.control("unload_adapter", {"name": argument["name"]})
                raise
        return {"replicas": answers} if command in ("export_kv", "import_kv") else answers[0]

    async def drain(self, timeout_s: float) -> None:
        await asyncio.gather(*(client.drain(timeout_s) for client in self._clients))

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))


def config_of(config: EngineConfig, replica: int) -> EngineConfig:
    """One replica's: a disk tier of its own below the directory that was given."""
    disk = config.kv.kv_disk and str(Path(config.kv.kv_disk) / f"replica-{replica}")
    return dataclasses.replace(config, kv=dataclasses.replace(config.kv, kv_disk=disk), replica=replica)


def _salt(request: AddRequest) -> str:
    return f"{request.adapter}\0{request.cache_salt}"


def _load(live: Live) -> int:
    """Tokens that a request puts before a new one."""
    return LIVE_TOKENS + (0 if live.progress else len(live.request.prompt))


def _labelled(part: dict[str, Any], replica: int, first_block: int) -> dict[str, Any]:
    """A snapshot with its blocks renumbered and its requests labelled."""
    part = dict(part)
    for name in ("alive", "finished", "sequences", "blocks"):
        if name in part:
            part[name] = [{**item, "replica": replica} for item in part[name]]
    for item in part.get("blocks", ()):
        item["id"] += first_block
    for item in part.get("sequences", ()):
        item["table"] = [block + first_block for block in item["table"]]
    return part


def _is_count(name: str) -> bool:
    """Of `Stats`: does it add up over the replicas?"""
    return not (name == "time" or name.startswith("cost_") or name.endswith("_per_s"))


# Of a snapshot; other numbers are equal in all replicas.
_SUMMED = frozenset({"total", "free", "cached", "shared", "saved_bytes", "used"})


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists and texts one after another, counts added."""
    joined = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            if name == "stats":
                joined[name] = {k: joined[name][k] + v if _is_count(k) else v for k, v in value.items()}
            elif isinstance(value, dict):
                joined[name] = _joined([joined[name], value])
            elif isinstance(value, (list, str)) or name in _SUMMED:
                joined[name] = joined[name] + value
    return joined
