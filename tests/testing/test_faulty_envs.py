"""Environments of ``vecenv.testing.faulty``, without workers."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from vecenv.testing.conformity import InputReportingEnv
from vecenv.testing.faulty import FaultyEnv, NestedEnv


def test_faulty_env_accepts_numpy_integers_as_step_and_seed() -> None:
    env = FaultyEnv(gymnasium.make("CartPole-v1"), "raises", step=np.int64(2), seed=np.int64(3))
    env.reset(seed=3)
    env.step(0)
    with pytest.raises(ValueError, match="out of order"):
        env.step(0)


def test_nested_env_passes_options_to_its_environments() -> None:
    env = NestedEnv(partial(SyncVectorEnv, [InputReportingEnv] * 2))
    env.reset(options={"given": 7})
    assert env.inner.get_attr("given") == (7, 7)
