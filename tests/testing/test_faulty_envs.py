"""Environments of ``vecenv.testing.faulty``, without workers."""

from __future__ import annotations

from functools import partial
from typing import Any

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


def test_faulty_env_compares_the_entries_of_dict_and_tuple_actions() -> None:
    class StillEnv(gymnasium.Env):
        def reset(self, **options: Any) -> Any:
            return 0, {}

        def step(self, action: Any) -> Any:
            return 0, 0.0, False, False, {}

    for pack in (lambda arm, gripper: {"arm": arm, "gripper": gripper}, lambda arm, gripper: (arm, gripper)):
        env = FaultyEnv(StillEnv(), "raises", action=pack(np.ones(2), np.zeros(3)))
        env.reset()
        env.step(pack(np.ones(2), np.ones(3)))
        with pytest.raises(ValueError, match="out of order"):
            env.step(pack(np.ones(2), np.zeros(3)))


def test_nested_env_passes_options_to_its_environments() -> None:
    env = NestedEnv(partial(SyncVectorEnv, [InputReportingEnv] * 2))
    env.reset(options={"given": 7})
    assert env.inner.get_attr("given") == (7, 7)
