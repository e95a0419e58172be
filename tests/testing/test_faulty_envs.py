"""Environments of ``vecenv.testing.faulty`` in the test's own process."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from vecenv.testing.conformity import InputReportingEnv
from vecenv.testing.faulty import FaultyEnv, NestedEnv


def test_a_fault_occurs_in_the_step_that_a_numpy_integer_names() -> None:
    env = FaultyEnv(gymnasium.make("CartPole-v1"), "raises", step=np.int64(2), seed=np.int64(3))
    env.reset(seed=3)
    env.step(0)
    with pytest.raises(ValueError, match="out of order"):
        env.step(0)


def test_a_nested_environment_passes_its_options_on() -> None:
    env = NestedEnv(partial(SyncVectorEnv, [InputReportingEnv] * 2))
    env.reset(options={"given": 7})
    assert env.inner.get_attr("given") == (7, 7)
