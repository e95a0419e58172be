"""Fixtures with start methods, engines and trainers, and the choice of start methods for the default run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observe import METHODS, Trainer
from sampling import sample_parameter

import vecenv

FOLDER = Path(__file__).parent
FILES_WITH_ALL_METHODS = ("test_lifetimes.py",)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Choose the start methods of the default run, and mark all other combinations as ``slow``.

    Tests in :data:`FILES_WITH_ALL_METHODS` run with every method, unless ``sampled`` names one. The cases of all other tests
    use ``fork`` and ``forkserver`` in turn. With ``spawn``, which starts an interpreter per worker, they would take minutes
    and cover nothing more.
    """
    items_here = [item for item in items if item.path.parent == FOLDER]
    sample_parameter([item for item in items_here if item.path.name in FILES_WITH_ALL_METHODS], "method")
    other_items = [item for item in items_here if item.path.name not in FILES_WITH_ALL_METHODS]
    sample_parameter(other_items, "method", left_out=["spawn"], all_values=False)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """Return the start method of the test."""
    return request.param


@pytest.fixture
def launch(method: str) -> Iterator[Callable[..., vecenv.AsyncVectorEnv]]:
    """Return a function that starts engines with the start method of the test; close them after the test."""
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
def start_trainer(method: str, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Return a function that starts ``trainer.py`` with a scenario; end the trainers after the test."""
    started: list[Trainer] = []

    def start(scenario: str, *, prefix: Iterable[str] = (), terminal: int | None = None) -> Trainer:
        started.append(Trainer(scenario, method, tmp_path, prefix=list(prefix), terminal=terminal))
        return started[-1]

    yield start
    for trainer in started:
        trainer.end()
