"""Vector environments over EnvPool that are closed at the end of the test. Nothing here needs EnvPool to be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from vecenv.backends import EnvPoolVectorEnv

Make = Callable[..., "EnvPoolVectorEnv"]


def zeros(n: int) -> np.ndarray:
    """Actions."""
    return np.zeros(n, dtype=np.int64)


@pytest.fixture
def any_make() -> Iterator[Make]:
    """``any_make(num_envs, task_id, **options)``: CartPole unless said otherwise."""
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
    """What a file's tests build with; one that wants other pools overrides it."""
    return any_make
