"""Tests of the wrong rows that ``RowChecker`` (``faulty_envs.py``) must detect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from faulty_envs import EchoEnv, RowChecker
from gymnasium.vector import VectorEnv

LENGTH = 5


def combine_results(results: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Combine the results of single environments into that of a vector environment."""
    envs: Any = VectorEnv()
    envs.num_envs, infos = len(results), {}
    for row, result in enumerate(results):
        infos = envs._add_info(infos, result[-1], row)
    columns = [np.array(column) for column in list(zip(*results, strict=True))[1:-1]]
    return (np.stack([result[0] for result in results]), *columns, infos)


def test_shifted_torn_repeated_and_swapped_rows_are_detected() -> None:
    envs = [EchoEnv(index, length=LENGTH) for index in range(2)]
    reset_result = combine_results([env.reset(seed=1) for env in envs])
    first, second = (combine_results([env.step(action) for env in envs]) for action in (1, 2))
    torn = second[0].copy()
    torn[0, 20:] = first[0][0, 20:]
    wrong_results = {
        "shifted": second,
        "swapped": (first[0][::-1], *first[1:]),
        "old observation": (first[0], *second[1:]),
        "infos of another step": (*first[:-1], second[-1]),
        "torn": (torn, *second[1:]),
    }
    for result in wrong_results.values():
        checker = RowChecker(2, length=LENGTH)
        checker.check_reset(reset_result)
        with pytest.raises(AssertionError):
            checker.check_step([1, 1], result)
    checker = RowChecker(2, length=LENGTH)
    checker.check_reset(reset_result)
    checker.check_step([1, 1], first)
    with pytest.raises(AssertionError):
        checker.check_step([1, 1], first)  # repeated
