"""A fixture that builds vector environments over EnvPool and closes them after the test; importable without EnvPool."""

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
    """``make(num_envs, task_id, **options)`` builds a vector environment; CartPole by default."""
    from vecenv.backends import EnvPoolVectorEnv

    built: list[EnvPoolVectorEnv] = []

    def build(num_envs: int = 4, task_id: str = "CartPole-v1", **options: Any) -> EnvPoolVectorEnv:
        built.append(EnvPoolVectorEnv(task_id, num_envs, **{"num_threads": 1, "seed": 0, **options}))
        return built[-1]

    yield build
    for envs in built:
        envs.close()
