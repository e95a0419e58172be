"""Fixtures of vector environments over EnvPool, closed at the end of the test. Importing this does not need EnvPool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from vecenv.backends import EnvPoolVectorEnv

Make = Callable[..., "EnvPoolVectorEnv"]


def zeros(n: int) -> np.ndarray:
    """Return actions."""
    return np.zeros(n, dtype=np.int64)


@pytest.fixture
def any_make() -> Iterator[Make]:
    """``any_make(num_envs, task_id, **options)`` builds a vector environment; CartPole by default."""
    from vecenv.backends import EnvPoolVectorEnv

    made: list[EnvPoolVectorEnv] = []

    def build(num_envs: int = 4, task_id: str = "CartPole-v1", **options: Any) -> EnvPoolVectorEnv:
        made.append(EnvPoolVectorEnv(task_id, num_envs, **{"num_threads": 1, "seed": 0, **options}))
        return made[-1]

    yield build
    for envs in made:
        envs.close()


@pytest.fixture
def make(any_make: Make) -> Make:
    """The factory of a file's tests; a file that needs other pools overrides it."""
    return any_make
