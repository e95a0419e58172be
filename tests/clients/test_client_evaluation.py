"""``vecenv.evaluate`` with policies in torch, and with Stable-Baselines3's models."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import vecenv

sb3 = pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")

from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from vecenv.adapters import as_sb3, evaluate_sb3  # noqa: E402

CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")


def engine(num_envs: int, num_workers: int = 0) -> Any:
    return vecenv.AsyncVectorEnv([CARTPOLE] * num_envs, num_workers=num_workers, context="forkserver")


def plain(results: Any) -> list[Any]:
    return [(each.index, each.seed, each.episode_return, each.length) for each in results]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 2)

    def forward(self, observations: Any, state: Any) -> Any:
        assert not torch.is_grad_enabled()
        hidden = self.cell(observations, state)
        return self.head(hidden).argmax(1), hidden


def test_recurrent_module_gives_the_same_for_every_number_of_environments() -> None:
    found = []
    for num_envs, workers in ((1, 0), (3, 0), (4, 2)):
        envs = engine(num_envs, workers)
        results = vecenv.evaluate(envs, Net(), 7, seed=1, initial_state=torch.zeros(8), batch="single")
        found.append(plain(results))
        envs.close()
    assert found[0] == found[1] == found[2]


def test_model_gets_the_returns_of_its_own_evaluation() -> None:
    model = sb3.PPO("MlpPolicy", CARTPOLE(), n_steps=64, seed=0, device="cpu")
    model.learn(256)
    envs = engine(3)
    results = evaluate_sb3(model, envs, 5, seed=20)
    assert plain(evaluate_sb3(model, as_sb3(envs), 5, seed=20)) == plain(results)
    for each in results:
        alone = DummyVecEnv([CARTPOLE])
        alone.seed(each.seed)
        assert evaluate_policy(model, alone, 1, warn=False) == (each.episode_return, 0.0)
    envs.close()


def test_observations_are_normalised_as_in_training() -> None:
    normal = VecNormalize(DummyVecEnv([CARTPOLE]))
    model = sb3.PPO("MlpPolicy", normal, n_steps=64, seed=0, device="cpu")
    model.learn(256)
    seen: list[Any] = []
    predict = model.predict

    def watched(observations: Any, **kwargs: Any) -> Any:
        seen.append(observations)
        return predict(observations, **kwargs)

    model.predict = watched
    envs, mean = engine(2), normal.obs_rms.mean.copy()
    evaluate_sb3(model, envs, 3, seed=20)
    first, _ = envs.reset(seed=20)
    envs.close()
    np.testing.assert_array_equal(seen[0], normal.normalize_obs(first))
    assert (normal.obs_rms.mean == mean).all()


class Recurrent:
    """A model with an action that counts the steps of its episode: the state is ``(layers, rows, size)``, as sb3-contrib's.
    """

    observation_space, action_space = CARTPOLE().observation_space, CARTPOLE().action_space

    def predict(self, observations: Any, state: Any, episode_start: Any, deterministic: bool) -> Any:
        count = len(observations)
        steps = np.zeros((1, count, 1)) if state is None else np.where(episode_start[None, :, None], 0, state[0])
        return (steps[0, :, 0] % 2).astype(int), (steps + 1,)


def test_a_recurrent_model_keeps_its_state_for_each_row() -> None:
    found = []
    for num_envs in (1, 3):
        envs = engine(num_envs)
        found.append(plain(evaluate_sb3(Recurrent(), envs, 6, seed=4)))
        envs.close()
    assert found[0] == found[1]


def test_a_normalizer_around_environments_is_used_and_other_wrappers_are_refused() -> None:
    received = []

    class Model(Recurrent):
        def predict(self, observations: Any, **kwargs: Any) -> Any:
            received.append(np.abs(observations).max())
            return super().predict(observations, **kwargs)

    envs = as_sb3(engine(2))
    normalizer = VecNormalize(VecMonitor(envs), clip_obs=1e-3)
    found = plain(evaluate_sb3(Model(), normalizer, 4, seed=4))
    assert max(received) <= 1e-3
    assert found == plain(evaluate_sb3(Recurrent(), envs, 4, seed=4))
    with pytest.raises(TypeError, match="evaluate_sb3 does not apply VecFrameStack: wrap the single environments instead"):
        evaluate_sb3(Recurrent(), VecFrameStack(normalizer, 4), 4)
    envs.close()


class Images(gymnasium.Env[Any, Any]):
    """Images with channels last; the number of bright rows decides which action is rewarded."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 40, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self) -> Any:
        self.bright = int(self.np_random.integers(36))
        image = np.zeros((36, 40, 3), np.uint8)
        image[: self.bright, :, self.bright % 3] = 255
        return image

    def step(self, action: Any) -> Any:
        reward = float(self.bright * (action + 1))
        self.steps += 1
        return self.observe(), reward, False, self.steps == 5, {}


def test_images_with_channels_last_are_transposed_by_the_model() -> None:
    model = sb3.PPO("CnnPolicy", DummyVecEnv([Images]), n_steps=8, batch_size=8, seed=0, device="cpu")
    assert model.observation_space.shape == (3, 36, 40)
    envs = vecenv.AsyncVectorEnv([Images] * 2, num_workers=0)
    results = evaluate_sb3(model, envs, 3, seed=20)
    assert plain(evaluate_sb3(model, VecTransposeImage(VecMonitor(as_sb3(envs))), 3, seed=20)) == plain(results)
    for each in results:
        alone = VecMonitor(DummyVecEnv([Images]))
        alone.seed(each.seed)
        assert evaluate_policy(model, alone, 1) == (each.episode_return, 0.0)
    floats = gymnasium.spaces.Box(0, 255, (3, 36, 40), np.float32)  # predict would not transpose these
    model.observation_space = floats
    with pytest.raises(ValueError, match="the model's observations are Box"):
        evaluate_sb3(model, envs, 3, seed=20)
    envs.close()


def test_a_model_of_other_spaces_is_refused() -> None:
    envs = vecenv.AsyncVectorEnv([functools.partial(gymnasium.make, "MountainCar-v0")], num_workers=0)
    with pytest.raises(ValueError, match=r"the model's observations are .*, the environments' "):
        evaluate_sb3(Recurrent(), envs, 3)
    envs.close()


@pytest.mark.parametrize("adapted", [True, False])
def test_swapped_or_wrong_arguments_are_named_in_the_order_of_evaluate_sb3(adapted: bool) -> None:
    envs = engine(1)
    given = as_sb3(envs) if adapted else envs
    order = r"evaluate_sb3\(model, envs, episodes\): got model="
    with pytest.raises(TypeError, match=order + ".*AsyncVectorEnv.* and envs=.*Recurrent.*: are the first two swapped"):
        evaluate_sb3(given, Recurrent(), episodes=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=order + ".*Recurrent.* and envs=3: needs a model"):
        evaluate_sb3(Recurrent(), 3, episodes=3)  # type: ignore[arg-type]
    envs.close()
