"""How an engine may run its environments: a test that takes one of these arguments runs in each of these ways."""

from __future__ import annotations

import pytest
from envs import ENGINES, PROCESS_ENGINES, VALUE_ENGINES, Options


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def every_engine(request: pytest.FixtureRequest) -> Options:
    """For what depends on processes."""
    return request.param


@pytest.fixture(params=PROCESS_ENGINES.values(), ids=list(PROCESS_ENGINES))
def process_engine(request: pytest.FixtureRequest) -> Options:
    """For what only processes can do."""
    return request.param


@pytest.fixture(params=VALUE_ENGINES.values(), ids=list(VALUE_ENGINES))
def engine(request: pytest.FixtureRequest) -> Options:
    """For what depends on values: fewer, because a process takes long to start."""
    return request.param


@pytest.fixture(params=[True, False], ids=["shared", "pickled"])
def shared_memory(request: pytest.FixtureRequest) -> bool:
    return request.param
