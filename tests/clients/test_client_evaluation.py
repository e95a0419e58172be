"""``vecenv.evaluate`` with policies in torch, and ``evaluate_sb3`` with Stable-Baselines3's models."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from envs import SpaceEnv
from gymnasium import spaces

import vecenv

sb3 = pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")

from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    VecCheckNan,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from vecenv.adapters import as_sb3, evaluate_sb3  # noqa: E402

CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")


def make_envs(num_envs: int, num_workers: int = 0) -> Any:
    return vecenv.AsyncVectorEnv([CARTPOLE] * num_envs, num_workers=num_workers, context="forkserver")


def as_tuples(results: Any) -> list[Any]:
    return [(each.index, each.seed, each.episode_return, each.length) for each in results]


class RecurrentPolicy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 2)

    def forward(self, observations: Any, state: Any) -> Any:
        assert not torch.is_grad_enabled()
        hidden = self.cell(observations, state)
        return self.head(hidden).argmax(1), hidden


def test_results_of_a_recurrent_policy_do_not_depend_on_the_number_of_environments() -> None:
    results_by_size = []
    for num_envs, num_workers in ((1, 0), (3, 0), (4, 2)):
        envs = make_envs(num_envs, num_workers)
        results = vecenv.evaluate(envs, RecurrentPolicy(), 7, seed=1, initial_state=torch.zeros(8), batch="single")
        results_by_size.append(as_tuples(results))
        envs.close()
    assert results_by_size[0] == results_by_size[1] == results_by_size[2]


def test_policy_that_returns_tensors_may_have_a_numpy_array_as_initial_state() -> None:
    """In lockstep, the policy gets the first states of some episodes together with the returned states of others."""

    def act(observations: Any, state: Any) -> Any:
        counts = torch.as_tensor(state) + 1
        return (observations[:, 2] > 0).long() * (counts[:, 0] % 9 > 0), counts

    results_by_engine = []
    for envs in (make_envs(1), gymnasium.vector.SyncVectorEnv([CARTPOLE] * 3)):
        results = vecenv.evaluate(envs, act, 7, seed=1, arrays="torch", initial_state=np.zeros(2, np.float32))
        results_by_engine.append(as_tuples(results))
        envs.close()
    assert results_by_engine[0] == results_by_engine[1]


def test_text_stays_text_for_a_policy_with_tensors() -> None:
    seen: list[Any] = []

    def act(observations: Any) -> Any:
        seen.append(observations)
        return torch.zeros(2, dtype=torch.int64)

    space = spaces.Dict({"mission": spaces.Text(4), "number": spaces.Box(0, 1, (3,))})
    envs = vecenv.AsyncVectorEnv([functools.partial(SpaceEnv, space)] * 2, num_workers=0)
    vecenv.evaluate(envs, act, 2, seed=1, arrays="torch")
    envs.close()
    assert isinstance(seen[0]["number"], torch.Tensor)
    assert [type(text) for text in seen[0]["mission"]] == [str, str]


def test_actions_in_bfloat16_reach_environments_as_float32() -> None:
    def act(dtype: torch.dtype, observations: Any) -> Any:
        return (observations[:, 2:] / 8).bfloat16().to(dtype)

    returns = []
    make = functools.partial(gymnasium.make, "Pendulum-v1", max_episode_steps=5)
    for dtype in (torch.float32, torch.bfloat16):
        envs = vecenv.AsyncVectorEnv([make] * 2, num_workers=0)
        results = vecenv.evaluate(envs, functools.partial(act, dtype), 2, seed=1, arrays="torch")
        returns.append(results.returns.tolist())
        envs.close()
    assert returns[0] == returns[1]


def test_error_of_a_policy_with_another_dtype_has_a_note() -> None:
    envs = make_envs(1)
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        vecenv.evaluate(envs, torch.nn.Linear(4, 2).double(), 1, seed=1)
    assert "observation space's dtype" in "".join(caught.value.__notes__)
    envs.close()


def test_evaluate_sb3_equals_evaluate_policy() -> None:
    model = sb3.PPO("MlpPolicy", CARTPOLE(), n_steps=64, seed=0, device="cpu")
    model.learn(256)
    envs = make_envs(3)
    results = evaluate_sb3(model, envs, 5, seed=20)
    assert as_tuples(evaluate_sb3(model, as_sb3(envs), 5, seed=20)) == as_tuples(results)
    for each in results:
        single = DummyVecEnv([CARTPOLE])
        single.seed(each.seed)
        assert evaluate_policy(model, single, 1, warn=False) == (each.episode_return, 0.0)
    envs.close()


def test_observations_are_normalized_as_in_training_without_updating_the_statistics() -> None:
    normalizer = VecNormalize(DummyVecEnv([CARTPOLE]))
    model = sb3.PPO("MlpPolicy", normalizer, n_steps=64, seed=0, device="cpu")
    model.learn(256)
    received: list[Any] = []
    predict = model.predict

    def recording_predict(observations: Any, **kwargs: Any) -> Any:
        received.append(observations)
        return predict(observations, **kwargs)

    model.predict = recording_predict
    envs, mean = make_envs(2), normalizer.obs_rms.mean.copy()
    evaluate_sb3(model, envs, 3, seed=20)
    first, _ = envs.reset(seed=20)
    envs.close()
    np.testing.assert_array_equal(received[0], normalizer.normalize_obs(first))
    assert (normalizer.obs_rms.mean == mean).all()


class RecurrentModel:
    """A model with actions that depend on the number of steps. Its state is ``(layers, rows, size)``, like sb3-contrib's."""

    observation_space, action_space = CARTPOLE().observation_space, CARTPOLE().action_space

    def predict(self, observations: Any, state: Any, episode_start: Any, deterministic: bool) -> Any:
        count = len(observations)
        steps = np.zeros((1, count, 1)) if state is None else np.where(episode_start[None, :, None], 0, state[0])
        return (steps[0, :, 0] % 2).astype(int), (steps + 1,)


def test_recurrent_model_keeps_a_state_per_row() -> None:
    results_by_size = []
    for num_envs in (1, 3):
        envs = make_envs(num_envs)
        results_by_size.append(as_tuples(evaluate_sb3(RecurrentModel(), envs, 6, seed=4)))
        envs.close()
    assert results_by_size[0] == results_by_size[1]


def test_vec_normalize_is_applied_and_other_wrappers_are_refused() -> None:
    largest_observations = []

    class Model(RecurrentModel):
        def predict(self, observations: Any, **kwargs: Any) -> Any:
            largest_observations.append(np.abs(observations).max())
            return super().predict(observations, **kwargs)

    envs = as_sb3(make_envs(2))
    normalizer = VecNormalize(VecMonitor(envs), clip_obs=1e-3)
    results = as_tuples(evaluate_sb3(Model(), normalizer, 4, seed=4))
    assert max(largest_observations) <= 1e-3
    assert results == as_tuples(evaluate_sb3(RecurrentModel(), envs, 4, seed=4))
    advice = "wrap the single environments instead"
    with pytest.raises(TypeError, match=f"evaluate_sb3 does not apply VecCheckNan: {advice}$"):
        evaluate_sb3(RecurrentModel(), VecCheckNan(normalizer), 4)
    with pytest.raises(TypeError, match=f"evaluate_sb3 does not apply VecFrameStack: {advice}, as docs/clients.md shows$"):
        evaluate_sb3(RecurrentModel(), VecFrameStack(normalizer, 4), 4)
    envs.close()


class GreyEnv(gymnasium.Env[Any, Any]):
    """An environment of random images with one channel, in episodes of six steps."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 40, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.integers(0, 256, (36, 40, 1), np.uint8), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.np_random.integers(0, 256, (36, 40, 1), np.uint8), 0.0, self.steps == 6, False, {}


def make_stacked_grey_env() -> Any:
    stacked = gymnasium.wrappers.FrameStackObservation(GreyEnv(), 4, padding_type="zero")
    return gymnasium.wrappers.ReshapeObservation(stacked, (4, 36, 40))


def test_frames_stacked_in_each_environment_equal_those_of_vec_frame_stack() -> None:
    stacked_outside = VecTransposeImage(VecFrameStack(DummyVecEnv([GreyEnv] * 2), 4))
    stacked_inside = as_sb3(vecenv.AsyncVectorEnv([make_stacked_grey_env] * 2, num_workers=0, autoreset_mode="SameStep"))
    stacked_outside.seed(3)
    stacked_inside.seed(3)
    np.testing.assert_array_equal(stacked_inside.reset(), stacked_outside.reset())
    for _ in range(15):
        results, expected = stacked_inside.step(np.zeros(2, int)), stacked_outside.step(np.zeros(2, int))
        np.testing.assert_array_equal(results[0], expected[0])
        for info, expected_info in zip(results[3], expected[3], strict=True):
            np.testing.assert_array_equal(info.get("terminal_observation"), expected_info.get("terminal_observation"))
    stacked_inside.close()


class ImageEnv(gymnasium.Env[Any, Any]):
    """An environment of images with channels last. The reward depends on the number of bright rows and on the action."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 40, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def _observe(self) -> Any:
        self.bright = int(self.np_random.integers(36))
        image = np.zeros((36, 40, 3), np.uint8)
        image[: self.bright, :, self.bright % 3] = 255
        return image

    def step(self, action: Any) -> Any:
        reward = float(self.bright * (action + 1))
        self.steps += 1
        return self._observe(), reward, False, self.steps == 5, {}


def test_images_with_channels_last_are_transposed_by_the_model() -> None:
    model = sb3.PPO("CnnPolicy", DummyVecEnv([ImageEnv]), n_steps=8, batch_size=8, seed=0, device="cpu")
    assert model.observation_space.shape == (3, 36, 40)
    envs = vecenv.AsyncVectorEnv([ImageEnv] * 2, num_workers=0)
    results = evaluate_sb3(model, envs, 3, seed=20)
    assert as_tuples(evaluate_sb3(model, VecTransposeImage(VecMonitor(as_sb3(envs))), 3, seed=20)) == as_tuples(results)
    for each in results:
        single = VecMonitor(DummyVecEnv([ImageEnv]))
        single.seed(each.seed)
        assert evaluate_policy(model, single, 1) == (each.episode_return, 0.0)
    model.observation_space = gymnasium.spaces.Box(0, 255, (3, 36, 40), np.float32)  # `predict` does not transpose floats
    with pytest.raises(ValueError, match="the model's observations are Box"):
        evaluate_sb3(model, envs, 3, seed=20)
    envs.close()


def test_model_with_other_spaces_is_refused() -> None:
    envs = vecenv.AsyncVectorEnv([functools.partial(gymnasium.make, "MountainCar-v0")], num_workers=0)
    with pytest.raises(ValueError, match=r"the model's observations are .*, the environments' "):
        evaluate_sb3(RecurrentModel(), envs, 3)
    envs.close()


@pytest.mark.parametrize(
    ("env_space", "model_space"),
    [
        (spaces.Discrete(2), spaces.Discrete(4)),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([3, 2])),
        (spaces.Dict(a=spaces.Discrete(2)), spaces.Dict(b=spaces.Discrete(2))),
        (spaces.Dict(a=spaces.Box(0, 1, (2,))), spaces.Dict(a=spaces.Box(0, 1, (3,)))),
    ],
)
def test_model_with_a_space_that_differs_in_a_part_is_refused(env_space: Any, model_space: Any) -> None:
    model = RecurrentModel()
    for name in ("observation", "action"):
        envs = vecenv.AsyncVectorEnv([functools.partial(SpaceEnv, env_space, env_space)], num_workers=0)
        model.observation_space = model.action_space = env_space
        setattr(model, f"{name}_space", model_space)
        with pytest.raises(ValueError, match=rf"the model's {name}s are .*, the environments' "):
            evaluate_sb3(model, envs, 3)
        envs.close()


@pytest.mark.parametrize("adapted", [True, False])
def test_swapped_or_invalid_arguments_raise_with_the_order_of_arguments(adapted: bool) -> None:
    envs = make_envs(1)
    envs_argument = as_sb3(envs) if adapted else envs
    start = r"evaluate_sb3\(model, envs, episodes\): got model="
    with pytest.raises(TypeError, match=start + ".*AsyncVectorEnv.* and envs=.*RecurrentModel.*: are the first two swapped"):
        evaluate_sb3(envs_argument, RecurrentModel(), episodes=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=start + ".*RecurrentModel.* and envs=3: needs a model"):
        evaluate_sb3(RecurrentModel(), 3, episodes=3)  # type: ignore[arg-type]
    envs.close()
