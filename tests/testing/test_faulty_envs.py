"""Tests of the environments in ``vecenv.testing.faulty``, without workers."""

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
    class ConstantEnv(gymnasium.Env):
        def reset(self, **options: Any) -> Any:
            return 0, {}

        def step(self, action: Any) -> Any:
            return 0, 0.0, False, False, {}

    def make_dict(arm: Any, gripper: Any) -> Any:
        return {"arm": arm, "gripper": gripper}

    def make_tuple(arm: Any, gripper: Any) -> Any:
        return arm, gripper

    for make_action in (make_dict, make_tuple):
        env = FaultyEnv(ConstantEnv(), "raises", action=make_action(np.ones(2), np.zeros(3)))
        env.reset()
        env.step(make_action(np.ones(2), np.ones(3)))
        with pytest.raises(ValueError, match="out of order"):
            env.step(make_action(np.ones(2), np.zeros(3)))
        with pytest.raises(ValueError, match="out of order"):
            env.step(make_action([1, 1], np.zeros(3, np.float32)))


def test_nested_env_passes_options_to_its_environments() -> None:
    env = NestedEnv(partial(SyncVectorEnv, [InputReportingEnv] * 2))
    env.reset(options={"given": 7})
    assert env.inner.get_attr("given") == (7, 7)
