"""fork, spawn and forkserver: the same answers, the same errors, and functions that exist only here
travel all the same.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, assert_as_sync, opened, raises_logged
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv

from vecenv.shm import Layout, fixed_tree
from vecenv.testing import assert_identical

methods = pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])


@methods
def test_one_environment_through_its_whole_life(context: str) -> None:
    """One start for many questions, because a start by spawn takes long."""

    class OnlyHere(CounterEnv):
        def step(self, action: Any) -> Any:
            if action == 4:
                raise ValueError("four")
            return super().step(action)

    offset = 5
    fns = [lambda i=i: OnlyHere(i + offset - 5, lengths=(2 + i,), render_mode="rgb_array") for i in range(3)]
    oracle = SyncVectorEnv(fns)
    with opened(fns, context=context, num_workers=2) as envs:
        assert envs.context == context
        assert os.getpid() not in envs.call("pid")
        assert_same_trajectory_of_legal_actions(envs, oracle)
        assert envs.call("add", 2) == (2, 3, 4)
        assert envs.exec_func(lambda env: env.env_id + offset, [2]) == (None, None, 7)
        envs.set_attr("note", ["a", "b", "c"])
        assert envs.get_attr("note") == ("a", "b", "c")
        assert len(envs.render()) == 3
        envs.reset(seed=1)
        with raises_logged(ValueError, match="four"):
            envs.step([0, 4, 0])
        assert envs.reset(seed=3)[0][:, 3].tolist() == [3, 4, 5]
    oracle.close()


def assert_same_trajectory_of_legal_actions(envs: Any, oracle: Any) -> None:
    rng = np.random.default_rng(0)
    assert_identical(envs.reset(seed=1), oracle.reset(seed=1))
    for t in range(8):
        actions = rng.integers(4, size=3)
        assert_identical(envs.step(actions), oracle.step(actions), f"step {t}")
    mask = np.array([True, False, True])
    assert_identical(*[one.reset(seed=3, options={"reset_mask": mask.copy()}) for one in (envs, oracle)])


@methods
def test_real_environments_give_the_trajectories_of_sync_vector_env(context: str) -> None:
    fns = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)] * 3
    assert_as_sync(fns, 30, autoreset_mode="SameStep", context=context, copy=False, num_workers=2)


def test_a_layout_that_travelled_has_the_dtype_objects_of_numpys_own_arrays() -> None:
    """The step loop compares dtypes with ``is``: with other, equal objects every observation took the slow way."""
    layout = Layout.of(fixed_tree(Box(-1, 1, (4,), np.float32)), fixed_tree(Discrete(2), "action"), 3, 1, final=False)
    travelled = pickle.loads(pickle.dumps(layout))
    assert travelled == layout
    for leaf in (*travelled.observations.leaves(), *travelled.actions.leaves()):
        assert leaf.dtype is np.zeros(1, leaf.dtype.type).dtype
    for field in travelled.fields.values():
        assert field.dtype is np.zeros(1, field.dtype.str).dtype
