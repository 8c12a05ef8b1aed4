"""`octavo` with an engine that dies of one seed: for tests only, and outside of what the product imports."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

import engine.build
import server.serve
from engine.client import ProcessClient
from engine.config import EngineConfig
from engine.process import Engine
from server.cli import main

POISON = 666_666


class Poisoned:
    """An executor that ends its process when a request of that seed is submitted."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, plan: Any) -> None:
        if any(params.seed == POISON for _, params in plan.slots):
            os.kill(os.getpid(), signal.SIGSEGV)
        self._executor.submit(plan)


def build(config: EngineConfig) -> Engine:
    """The engine of the product over the poisoned executor."""
    make = engine.build.make_executor
    engine.build.make_executor = lambda *args: Poisoned(make(*args))  # type: ignore[assignment,return-value]
    return engine.build.build(config)


if __name__ == "__main__":
    server.serve.ProcessClient = partial(ProcessClient, factory="tests.e2e.poisoned:build")  # type: ignore[misc]
    sys.exit(main())
