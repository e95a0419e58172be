"""Start methods, engines and trainers for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observe import METHODS, Trainer
from sampling import sample_parameter

import vecenv

HERE = Path(__file__).parent
START_MATTERS = ("test_lifetimes.py",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every case of a test runs with one start method, and every method with one case at least.

    Where the start itself is not the subject, a new interpreter for every worker adds minutes, and nothing that those of a
    fork server did not show. The whole product is behind ``slow``.
    """
    here = [item for item in items if item.path.parent == HERE]
    sample_parameter([item for item in here if item.path.name in START_MATTERS], "method")
    sample_parameter([item for item in here if item.path.name not in START_MATTERS], "method", left_out=["spawn"])


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """A start method."""
    return request.param


@pytest.fixture
def launch(method: str) -> Iterator[Callable[..., vecenv.AsyncVectorEnv]]:
    """Start engines with this test's start method; what the test did not close is terminated."""
    opened: list[vecenv.AsyncVectorEnv] = []

    def start(env_fns: list[Callable[[], Any]], **options: Any) -> vecenv.AsyncVectorEnv:
        envs = vecenv.AsyncVectorEnv(env_fns, **{"context": method, **options})
        opened.append(envs)
        return envs

    yield start
    for envs in opened:
        if not envs.closed:
            envs.close(terminate=True)
    opened.clear()


@pytest.fixture
def trainer(method: str, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Start ``trainer.py`` with a scenario."""
    started: list[Trainer] = []

    def start(scenario: str, *, prefix: Iterable[str] = (), terminal: int | None = None) -> Trainer:
        started.append(Trainer(scenario, method, tmp_path, prefix=list(prefix), terminal=terminal))
        return started[-1]

    yield start
    for one in started:
        one.end()
