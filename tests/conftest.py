"""Options of the whole suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        type=int,
        default=0,
        metavar="N",
        help="random scenarios of the scheduler and KV tests: N instead of the suite's fixed few, new ones each time",
    )
