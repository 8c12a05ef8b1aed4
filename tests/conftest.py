"""Options of the whole suite."""

import pytest
from hypothesis import settings

# The same examples in every run. How long one takes says how busy the machine is, not whether the code is right.
settings.register_profile("octavo", deadline=None, derandomize=True)
settings.load_profile("octavo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        type=int,
        default=0,
        metavar="N",
        help="random scenarios of the scheduler and KV tests: N instead of the suite's fixed few, new ones each time",
    )
