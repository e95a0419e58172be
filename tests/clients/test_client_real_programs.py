"""Seeds, structured actions, options and statistics as real programs of Stable-Baselines3 and Tianshou use them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from client_envs import FullEnv
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from stable_baselines3.common.vec_env import DummyVecEnv
from tianshou.env import DummyVectorEnv

import vecenv
from vecenv.adapters import as_sb3, as_tianshou, as_torchrl

MODES = ["NextStep", "SameStep", "Disabled"]


def make_envs(env_fn: Any, count: int = 2, mode: str = "Disabled") -> Any:
    return vecenv.AsyncVectorEnv([env_fn] * count, num_workers=0, autoreset_mode=mode)


def make_flat_env() -> Any:
    return FullEnv(nested=False)


def test_tianshou_seed_equals_dummy_vector_env() -> None:
    ours, theirs = as_tianshou(make_envs(make_flat_env, 3)), DummyVectorEnv([make_flat_env] * 3)
    for seed in (4, [9, 7, 5]):
        assert ours.seed(seed) == theirs.seed(seed)
        np.testing.assert_array_equal(ours.reset()[0], theirs.reset()[0])
        np.testing.assert_array_equal(ours.reset([1])[0], theirs.reset([1])[0])
    ours.close()
    theirs.close()


class ActionEchoEnv(gym.Env[Any, Any]):
    """An environment that observes its action, so that a transposed batch is noticed. Episodes have two steps."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, action_space: Any) -> None:
        self.action_space = action_space
        self.options: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.options.append(options)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.time += 1
        kind, push = action.values() if isinstance(action, dict) else action
        return np.array([kind, push[0]], np.float32), 1.0, self.time == 2, False, {}


ACTION_PARTS: Any = {"kind": spaces.Discrete(9), "push": spaces.Box(-9, 9, (1,), np.float32)}


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("space", [spaces.Tuple(ACTION_PARTS.values()), spaces.Dict(ACTION_PARTS)], ids=["tuple", "dict"])
@pytest.mark.parametrize("wrap", [lambda envs: envs, VectorWrapper], ids=["bare", "wrapped"])
def test_sb3_sends_each_environment_its_structured_action(space: Any, count: int, wrap: Any) -> None:
    ours = as_sb3(wrap(make_envs(lambda: ActionEchoEnv(space), count)))
    theirs = DummyVecEnv([lambda: ActionEchoEnv(space)] * count)
    actions: list[Any] = [(i, np.array([-i - 1], np.float32)) for i in range(count)]
    if isinstance(space, spaces.Dict):
        actions = [dict(zip(ACTION_PARTS, action, strict=True)) for action in actions]
    for venv in (ours, theirs):
        venv.reset()
    np.testing.assert_array_equal(ours.step(actions)[0], theirs.step(actions)[0])
    assert ours.step(actions)[0].shape == (count, 2)
    with pytest.raises(ValueError, match=f"for each of {count} environments"):
        ours.step(actions[:1])
    ours.close()


@pytest.mark.parametrize("mode", MODES)
def test_sb3_resets_between_episodes_have_no_options(mode: str) -> None:
    envs = make_envs(lambda: ActionEchoEnv(spaces.Tuple(ACTION_PARTS.values())), mode=mode)
    venv = as_sb3(envs)
    venv.reset()
    for _ in range(4):
        venv.step([(0, np.zeros(1, np.float32))] * 2)
    assert envs.get_attr("options") == ([None] * 3,) * 2
    venv.close()


def test_sb3_passes_an_empty_dict_of_options_like_dummy_vec_env() -> None:
    def make_env() -> Any:
        return ActionEchoEnv(spaces.Tuple(ACTION_PARTS.values()))

    ours, theirs = as_sb3(make_envs(make_env)), DummyVecEnv([make_env] * 2)
    for venv in (ours, theirs):
        venv.set_options([{"start": 3}, {}])
        venv.reset()
    assert ours.get_attr("options") == theirs.get_attr("options") == [[{"start": 3}], [None]]
    ours.close()


def test_tianshou_resets_have_options_only_if_given() -> None:
    envs = make_envs(lambda: ActionEchoEnv(spaces.Tuple(ACTION_PARTS.values())))
    venv = as_tianshou(envs)
    venv.reset()
    venv.reset([1])
    venv.reset([0], options={"start": 3})
    assert envs.get_attr("options") == ([None, {"start": 3}], [None, None])
    venv.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrap", [lambda envs: envs, VectorWrapper], ids=["bare", "wrapped"])
def test_torchrl_resets_between_episodes_have_no_options(mode: str, wrap: Any) -> None:
    envs = make_envs(lambda: ActionEchoEnv(spaces.Tuple(ACTION_PARTS.values())), mode=mode)
    env = as_torchrl(wrap(envs))
    env.rollout(3, break_when_any_done=False)
    tensordict = env.reset()
    for _ in range(3):  # the third step is after the end of the episodes
        tensordict = env.step(env.rand_action(tensordict))
    assert all(options is None for row in envs.get_attr("options") for options in row)
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_only_the_last_info_of_an_episode_has_the_statistics_of_a_vector_wrapper(mode: str) -> None:
    envs = make_envs(make_flat_env, 3, mode)
    venv = as_sb3(RecordEpisodeStatistics(envs))
    venv.seed(1)
    venv.reset()
    lengths, episodes = np.zeros(3, int), 0
    for _ in range(40):
        *_, dones, infos = venv.step(np.zeros(3, int))
        lengths += 1
        for row in range(3):
            assert ("episode" in infos[row]) == bool(dones[row])
            assert "episode" not in venv.reset_infos[row]
            if dones[row]:
                assert infos[row]["episode"]["l"] == lengths[row]
                lengths[row], episodes = 0, episodes + 1
    assert episodes > 5
    venv.close()


class TorchConverter(VectorWrapper):  # type: ignore[type-arg]
    """A stand-in for Gymnasium's ``NumpyToTorch``, which needs another package."""

    _target_xp = torch


@pytest.mark.parametrize("adapter", [as_sb3, as_tianshou])
def test_adapter_refuses_a_wrapper_that_converts_to_torch(adapter: Any) -> None:
    envs = make_envs(make_flat_env)
    with pytest.raises(ValueError, match=r"needs numpy arrays, but a wrapper converts them to torch"):
        adapter(TorchConverter(envs))
    envs.close()


@pytest.mark.parametrize("adapter", [as_sb3, as_tianshou, as_torchrl])
def test_adapter_refuses_a_wrapper_without_masked_resets(adapter: Any) -> None:
    envs = NormalizeObservation(make_envs(make_flat_env, mode="NextStep"))
    with pytest.raises(ValueError, match=r"one by one, which NormalizeObservation refuses: remove it, and normalise with"):
        adapter(envs)
    envs.close()
    envs = NormalizeObservation(make_envs(make_flat_env, 1, mode="NextStep"))
    adapter(envs).close()  # a mask of one environment selects all of them


def test_adapters_need_reset_options_and_have_no_envs_or_workers() -> None:
    class WithoutOptions(ActionEchoEnv):
        def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
            return super().reset(seed=seed)

    venv = as_sb3(make_envs(lambda: WithoutOptions(spaces.Tuple(ACTION_PARTS.values()))))
    with pytest.raises(TypeError, match="options"):
        venv.reset()
    assert not hasattr(venv, "envs")
    venv.close()
    assert not hasattr(as_tianshou(SyncVectorEnv([make_flat_env], autoreset_mode="Disabled")), "workers")
