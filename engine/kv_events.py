"""`--kv-events`: a ZeroMQ socket that publishes what the prefix cache holds, as vLLM does, so that its routers work.

A message is [topic, sequence number, payload]: the number 8 bytes big-endian from 0, the payload msgpack of
[seconds since 1970, events, data-parallel rank]. On `--kv-events-replay` a subscriber that missed some asks with the
first number that it lacks (DEALER; frames: empty, 8 bytes) and gets [empty, number, payload] each, then the number -1.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from engine.errors import ConfigError
from engine.kv.events import Event

log = logging.getLogger("octavo.engine")

KEPT = 10_000  # batches for those who missed some
WAITING = 100_000  # batches for a slow subscriber before it misses some
END = (2**64 - 1).to_bytes(8, "big")


class Publisher:
    """Sends batches from a thread of its own, which also answers those who missed some."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "", rank: int = 0) -> None:
        """Bind `endpoint`, and `replay` if given. Raises ConfigError."""
        self._topic = topic.encode()
        self._rank = rank
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._sequence = 0
        self._out = self._bound(zmq.PUB, endpoint, "--kv-events")
        self._replay = self._bound(zmq.ROUTER, replay, "--kv-events-replay") if replay else None
        way = f"inproc://{id(self)}"
        self._inner = self._context.socket(zmq.PULL)
        self._inner.bind(way)
        self._way_in = self._context.socket(zmq.PUSH)
        self._way_in.connect(way)
        self._thread = threading.Thread(target=self._work, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str, flag: str) -> zmq.Socket[bytes]:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.SNDHWM, WAITING)
        bound.setsockopt(zmq.LINGER, 0)
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{flag} {endpoint}: can't be bound ({error}); choose another") from None
        return bound

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch, if there is anything in it."""
        if events:
            self._way_in.send(self._encoder.encode((time.time(), events, self._rank)))

    def close(self) -> None:
        """Send what was published, and end."""
        self._way_in.send(b"")
        self._thread.join()
        self._way_in.close(0)
        self._context.term()

    def _work(self) -> None:
        poller = zmq.Poller()
        sockets = [self._inner, *filter(None, [self._replay])]
        for one in sockets:
            poller.register(one, zmq.POLLIN)
        open_ = True
        while open_:
            for ready, _ in poller.poll():
                while open_ and self._inner.poll(0):  # first: an answer tells of all that was published before it
                    open_ = self._pass_on(self._inner.recv())
                if open_ and ready is not self._inner:
                    self._answer(ready)
        for one in (self._out, *sockets):
            one.close()

    def _pass_on(self, payload: bytes) -> bool:
        if not payload:
            return False
        self._kept.append((self._sequence, payload))
        self._out.send_multipart((self._topic, self._sequence.to_bytes(8, "big"), payload))
        self._sequence += 1
        return True

    def _answer(self, router: zmq.Socket[bytes]) -> None:
        frames = router.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            log.warning("a question for KV events of %d frames was not understood", len(frames))
            return
        who, _, first = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                router.send_multipart((who, b"", number.to_bytes(8, "big"), payload))
        router.send_multipart((who, b"", END, b""))
