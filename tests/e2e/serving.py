"""Start the real server as a user does, on a free port, and stop it without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent
READY_WITHIN_S = 120.0


def free_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """One `octavo serve` process."""

    def __init__(
        self, *flags: str, model: str = "smollm2", module: str = "server", tls: ssl.SSLContext | None = None
    ) -> None:
        """`tls`: how to trust a server whose flags are of TLS."""
        self.port = free_port()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._trust = tls or True
        command = [sys.executable, "-m", module, "serve", model, "--port", str(self.port), *flags]
        self.log = tempfile.TemporaryFile("a+")  # noqa: SIM115  # a pipe that nobody reads would block it when full
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=self.log, stderr=subprocess.STDOUT, text=True, env={**os.environ}
        )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.said()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=2, verify=self._trust).status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the server was not ready within {READY_WITHIN_S:.0f} s")

    def said(self) -> str:
        """What the server has logged."""
        self.log.seek(0)
        return self.log.read()

    def health(self) -> dict:
        return httpx.get(f"{self.url}/health", timeout=5, verify=self._trust).json()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return int(self.process.returncode)


@contextlib.contextmanager
def serving(*flags: str, model: str = "smollm2", module: str = "server") -> Iterator[Server]:
    server = Server(*flags, model=model, module=module)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()
