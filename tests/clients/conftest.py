"""A server on loopback whose model writes what a test wants; the environment keeps the libraries from calling home."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.text.tokenizer import Tokenizer
from tests.server.conftest import listening
from tests.server.conftest import tokenizer as tokenizer
from tests.server.fake_client import FakeClient
from tests.server.scripted import writes

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import waits for a download
os.environ["LANGSMITH_TRACING"] = "false"


class Server:
    """`says` sets what the model writes from now on; a constraint on it must be met by that text."""

    def __init__(self, url: str, client: FakeClient, tokenizer: Tokenizer) -> None:
        self.url = url
        self.client = client
        self.tokenizer = tokenizer
        self._walk = client.script

    def says(self, *texts: str) -> None:
        self.client.script = writes(self.tokenizer, *texts)

    def reset(self) -> None:
        self.client.script = self._walk


@pytest.fixture(scope="session")
def _server(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data: Path = tmp_path_factory.mktemp("data")
    with listening(tokenizer, data_dir=str(data)) as (url, client):
        yield Server(url, client, tokenizer)


@pytest.fixture
def server(_server: Server) -> Server:
    _server.reset()
    return _server
