"""The fixture ``make``, which builds vector environments over EnvPool. EnvPool is imported only when a test uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from vecenv.backends import EnvPoolVectorEnv

Make = Callable[..., "EnvPoolVectorEnv"]


def zeros(n: int) -> np.ndarray:
    """Return action 0 for each environment."""
    return np.zeros(n, dtype=np.int64)


@pytest.fixture
def make() -> Iterator[Make]:
    """Yield a function that builds a vector environment, by default of four CartPoles. All are closed after the test."""
    from vecenv.backends import EnvPoolVectorEnv

    built: list[EnvPoolVectorEnv] = []

    def build(num_envs: int = 4, task_id: str = "CartPole-v1", **options: Any) -> EnvPoolVectorEnv:
        built.append(EnvPoolVectorEnv(task_id, num_envs, **{"num_threads": 1, "seed": 0, **options}))
        return built[-1]

    yield build
    for envs in built:
        envs.close()
