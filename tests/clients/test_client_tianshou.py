"""``as_tianshou`` returns the same results as Tianshou's ``DummyVectorEnv``, also to collectors."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from client_envs import assert_equal as assert_equal_with_types
from client_envs import make_cartpole, make_full_env_fns
from envs import FixedBatchSize, SpaceEnv
from programs import run_python

pytest.importorskip("tianshou", reason="needs Tianshou: pip install 'vecenv[clients]'")

import torch
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.data import Batch, Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, VectorEnvNormObs
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor

import vecenv
from vecenv.adapters import as_tianshou

assert_equal = functools.partial(assert_equal_with_types, types=False)  # vecenv returns NumPy scalars for plain numbers
EXAMPLE = Path(__file__).parents[2] / "examples" / "tianshou_ppo.py"


def make_venv(env_fns: list[Any], num_workers: int = 2, mode: str = "Disabled") -> Any:
    envs: Any = vecenv.AsyncVectorEnv(env_fns, num_workers=num_workers, context="forkserver", autoreset_mode=mode)
    return as_tianshou(envs)


@pytest.mark.parametrize("nested", [True, False], ids=["Dict", "Box"])
@pytest.mark.parametrize(("num_workers", "mode"), [(0, "Disabled"), (2, "Disabled"), (2, "NextStep")])
def test_steps_and_resets_of_subsets_equal_dummy_vector_env(nested: bool, num_workers: int, mode: str) -> None:
    ours = make_venv(make_full_env_fns(4, nested=nested), num_workers, mode)
    theirs = DummyVectorEnv(make_full_env_fns(4, nested=nested))
    assert len(ours) == len(theirs) == 4
    assert_equal(ours.reset(seed=3), theirs.reset(seed=3))  # each environment gets seed 3, as in Tianshou
    assert_equal(ours.reset([2, 0], options={"start": 4}), theirs.reset([2, 0], options={"start": 4}))
    rng = np.random.default_rng(0)
    resets = 0
    for _ in range(80):
        ids = rng.permutation(4)[: rng.integers(1, 5)]
        actions = rng.integers(4, size=len(ids))
        actual, expected = ours.step(actions, ids), theirs.step(actions, ids)
        assert_equal(actual, expected)
        over = ids[expected[2] | expected[3]]
        resets += len(over)
        if len(over):
            assert_equal(ours.reset(over), theirs.reset(over))
    assert resets > 10
    ours.close()
    theirs.close()


@pytest.mark.parametrize("batch_size", [None, 1])
def test_subsets_are_stepped_with_every_batch_size(batch_size: int | None) -> None:
    envs: Any = FixedBatchSize(make_full_env_fns(4), num_workers=0, autoreset_mode="Disabled", batch_size=batch_size)
    ours, theirs = as_tianshou(envs), DummyVectorEnv(make_full_env_fns(4))
    assert_equal(ours.reset(seed=3), theirs.reset(seed=3))
    for ids in ([2, 0], [3], [0, 1, 3]):
        assert_equal(ours.step(np.zeros(len(ids), int), ids), theirs.step(np.zeros(len(ids), int), ids))
    ours.close()
    theirs.close()


class NestedActionEnv(gym.Env[Any, Any]):
    """An environment that returns its action as text in its infos."""

    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, **kwargs: Any) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert action in self.action_space
        return np.zeros(2, np.float32), 1.0, False, False, {"action": repr(action)}


LEAVES: list[gym.Space[Any]] = [gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))]


@pytest.mark.parametrize("space", [gym.spaces.Dict(x=LEAVES[0], y=LEAVES[1]), gym.spaces.Tuple(LEAVES)])
def test_nested_actions_equal_dummy_vector_env(space: gym.Space[Any]) -> None:
    env_fns = [functools.partial(NestedActionEnv, space)] * 4
    ours, theirs = make_venv(env_fns), DummyVectorEnv(env_fns)
    asynchronous = as_tianshou(vecenv.AsyncVectorEnv(env_fns, num_workers=2), wait_num=3)
    for venv in (ours, theirs, asynchronous):
        venv.reset()
    for ids in (None, [2, 0], [3, 1, 0, 2]):
        actions = [space.sample() for _ in ids or range(4)]
        assert_equal(ours.step(actions, ids), theirs.step(actions, ids))
    infos = [*asynchronous.step(actions)[4], *asynchronous.step(None)[4]]
    assert [info["action"] for info in sorted(infos, key=lambda info: info["env_id"])] == [*map(repr, actions)]
    for venv in (ours, theirs, asynchronous):
        venv.close()


def make_policy(space: gym.Space[Any]) -> DiscreteActorPolicy:
    torch.manual_seed(0)
    actor = DiscreteActor(preprocess_net=Net(state_shape=(4,), hidden_sizes=[16]), action_shape=2, softmax_output=False)
    return DiscreteActorPolicy(actor=actor, action_space=space)


@pytest.mark.parametrize("amount", [{"n_step": 200}, {"n_episode": 7}], ids=str)
@pytest.mark.parametrize("normalized", [False, True])
def test_collector_returns_the_same_data_as_over_dummy_vector_env(amount: dict[str, int], normalized: bool) -> None:
    def collect_data(venv: Any) -> tuple[Batch, Any]:
        wrapped = VectorEnvNormObs(venv) if normalized else venv
        buffer = VectorReplayBuffer(1000, 4)
        collector = Collector(make_policy(venv.action_space[0]), wrapped, buffer)
        collector.reset(gym_reset_kwargs={"seed": 5})
        torch.manual_seed(1)
        statistics = collector.collect(**amount)
        batch, _ = buffer.sample(0)
        collector.close()
        return batch, statistics

    env_fns = [functools.partial(make_cartpole, 25)] * 4
    (ours, statistics), (theirs, expected) = collect_data(make_venv(env_fns)), collect_data(DummyVectorEnv(env_fns))
    for key in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
        np.testing.assert_array_equal(ours[key], theirs[key], err_msg=key)
    np.testing.assert_array_equal(statistics.lens, expected.lens)
    assert statistics.n_collected_episodes == expected.n_collected_episodes >= 7


def test_random_actions_equal_those_of_dummy_vector_env() -> None:
    def collect_data(venv: Any) -> Any:
        venv.seed(11)
        buffer = VectorReplayBuffer(1000, 4)
        collector = Collector(make_policy(venv.action_space[0]), venv, buffer)
        collector.reset(gym_reset_kwargs={"seed": 5})
        collector.collect(n_step=100, random=True)
        collector.close()
        return buffer.sample(0)[0].act

    ours = collect_data(make_venv([make_cartpole] * 4))
    np.testing.assert_array_equal(ours, collect_data(DummyVectorEnv([make_cartpole] * 4)))


def test_text_observations_equal_dummy_vector_env() -> None:
    env_fn = functools.partial(SpaceEnv, gym.spaces.Text(5))
    ours, theirs = make_venv([env_fn] * 2, num_workers=0), DummyVectorEnv([env_fn] * 2)
    assert_equal(ours.reset(seed=3), theirs.reset(seed=3))
    assert_equal(ours.step([0, 1])[:4], theirs.step([0, 1])[:4])
    assert_equal(ours.step([1], [1])[:4], theirs.step([1], [1])[:4])


def test_calls_with_indices_reach_single_environments() -> None:
    venv = make_venv(make_full_env_fns(3, wrapped=True, render_mode="rgb_array"))
    venv.reset()
    venv.set_env_attr("level", 5, [2])
    venv.set_env_attr("level", 3, 0)
    assert venv.get_env_attr("level") == [3, 0, 5]
    assert venv.get_env_attr("level", [2]) == [5]
    assert venv.get_env_attr("level", (2, 0)) == [5, 3]
    assert len(venv.reset((1,))[0]) == 1
    assert [space.n for space in venv.action_space] == [4] * 3
    assert [frame.shape for frame in venv.render()] == [(4, 6, 3)] * 3
    venv.close()


@pytest.mark.parametrize("frames", [None, np.zeros((1, 4, 6, 3), np.uint8)])
def test_render_accepts_none_and_one_array_of_all_frames(frames: Any) -> None:
    envs = vecenv.make_vec("CartPole-v1", 1, "native", render_mode="rgb_array")
    envs.library.render = lambda: frames
    expected = [None] if frames is None else [(4, 6, 3)]
    assert [None if frame is None else frame.shape for frame in as_tianshou(envs).render()] == expected
    envs.close()


def test_repeated_indices_are_refused_and_step_and_reset_nothing() -> None:
    venv = make_venv(make_full_env_fns(2), num_workers=0)
    venv.reset()
    for call in (lambda: venv.step(np.zeros(2, int), [0, 0]), lambda: venv.reset([0, 0])):
        with pytest.raises(ValueError, match=r"must not contain duplicates, got \[0, 0\]"):
            call()
    assert (venv.vector_env.stats()["steps"], venv.vector_env.stats()["resets"]) == (0, 2)
    venv.close()


def test_invalid_input_raises() -> None:
    envs = vecenv.make_vec("CartPole-v1", 2, "serial", vector_kwargs={"autoreset_mode": "SameStep"})
    with pytest.raises(ValueError, match=r"Tianshou needs autoreset_mode='Disabled' or 'NextStep', got 'SameStep'"):
        as_tianshou(envs)
    envs.close()
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="vector_entry_point")
    with pytest.raises(ValueError, match="CartPoleVectorEnv has no resets with a reset_mask: it needs another backend"):
        as_tianshou(envs)
    envs.close()
    venv = make_venv(make_full_env_fns(2), num_workers=0)
    with pytest.raises(TypeError, match=r"accepts only .*'sede'"):
        venv.reset(sede=1)
    with pytest.raises(ValueError, match="3 seeds for 2"):
        venv.reset(seed=[1, 2, 3])
    venv.reset()
    with pytest.raises(ValueError, match="one action for each of 2"):
        venv.step(np.zeros(3, int))
    venv.close()
    with pytest.raises(AssertionError):
        venv.reset()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ppo_learns_cartpole() -> None:
    result = run_python(EXAMPLE, timeout=280)
    match = re.search(r"^return (\d+) \+- ", result.stdout, re.MULTILINE)
    assert match, result.stderr[-3000:]
    assert int(match[1]) >= 475
