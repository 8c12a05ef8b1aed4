"""One real server with the default model, shared by the tests that need no flags of their own."""

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running
