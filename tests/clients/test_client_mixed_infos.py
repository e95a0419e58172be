"""``as_sb3``, ``as_tianshou`` and ``evaluate_sb3`` with infos that do not fit into arrays: results and types are equal."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
from envs import describe
from mixed_infos import ACTIONS, MixedInfosEnv, choose_action, play_episode, summarize_results

import vecenv

NUM_ENVS = 3
SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
MIXTURES = pytest.mark.parametrize("mixtures", [range(3), pytest.param(range(3, 203), marks=SLOW)], ids=str)


def make_env_fns(mixture: int) -> list[Any]:
    return [functools.partial(MixedInfosEnv, mixture + index) for index in range(NUM_ENVS)]


def make_envs(mixture: int, num_workers: int, mode: str) -> Any:
    return vecenv.AsyncVectorEnv(make_env_fns(mixture), num_workers=num_workers, context="forkserver", autoreset_mode=mode)


@MIXTURES
@pytest.mark.parametrize("reference_class", ["DummyVecEnv", "SubprocVecEnv"])
def test_as_sb3_equals_sb3s_vec_env(mixtures: Any, reference_class: str) -> None:
    pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")
    from stable_baselines3.common import vec_env

    from vecenv.adapters import as_sb3

    def describe_trajectory(venv: Any) -> str:
        try:
            venv.seed(7)
            texts = [describe(venv.reset()), describe(list(venv.reset_infos))]
            rng = np.random.default_rng(0)
            for _ in range(20):
                observations, rewards, dones, infos = venv.step(rng.integers(ACTIONS, size=NUM_ENVS))
                infos_of_rows = [list(infos), list(venv.reset_infos)]
                texts += [describe(part) for part in (observations, np.float32(rewards), dones, *infos_of_rows)]
            return "\n".join(texts)
        finally:
            venv.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mixture in mixtures:
            # with other start methods than fork, each process would import torch
            options = {} if reference_class == "DummyVecEnv" else {"start_method": "fork"}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about fork() in a process with threads
                expected = describe_trajectory(getattr(vec_env, reference_class)(make_env_fns(mixture), **options))
            for num_workers, mode in ((0, "SameStep"), (2, "SameStep"), (2, "NextStep"), (2, "Disabled")):
                actual = describe_trajectory(as_sb3(make_envs(mixture, num_workers, mode)))
                assert actual == expected, f"mixture {mixture}, {num_workers} workers, {mode}"


@MIXTURES
def test_as_tianshou_equals_dummy_vector_env(mixtures: Any) -> None:
    pytest.importorskip("tianshou", reason="needs Tianshou: pip install 'vecenv[clients]'")
    from tianshou.env import DummyVectorEnv

    from vecenv.adapters import as_tianshou

    def describe_trajectory(venv: Any) -> str:
        try:
            observations, infos = venv.reset(seed=3)
            texts = [describe(observations), describe(list(infos))]
            rng = np.random.default_rng(0)
            for _ in range(20):
                ids = rng.permutation(NUM_ENVS)[: rng.integers(1, NUM_ENVS + 1)]
                actions = rng.integers(ACTIONS, size=len(ids))
                observations, rewards, terminations, truncations, infos = venv.step(actions, ids)
                texts += [describe(part) for part in (observations, rewards, terminations, truncations, list(infos))]
                if len(over := ids[terminations | truncations]):
                    observations, infos = venv.reset(over)
                    texts += [describe(observations), describe(list(infos))]
            return "\n".join(texts)
        finally:
            venv.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mixture in mixtures:
            expected = describe_trajectory(DummyVectorEnv(make_env_fns(mixture)))
            for num_workers, mode in ((0, "Disabled"), (2, "Disabled"), (2, "NextStep")):
                actual = describe_trajectory(as_tianshou(make_envs(mixture, num_workers, mode)))
                assert actual == expected, f"mixture {mixture}, {num_workers} workers, {mode}"


class Model:
    """The part of a Stable-Baselines3 model that ``evaluate_sb3`` uses."""

    observation_space, action_space = MixedInfosEnv.observation_space, MixedInfosEnv.action_space

    def predict(self, observations: Any, **_: Any) -> Any:
        return np.array([choose_action(observation) for observation in observations]), None


@pytest.mark.parametrize("mixtures", [range(2), pytest.param(range(2, 202), marks=SLOW)], ids=str)
def test_evaluate_sb3_equals_single_episodes(mixtures: Any) -> None:
    pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")
    from vecenv.adapters import evaluate_sb3

    model: Any = Model()
    for mixture in mixtures:
        env_fn = functools.partial(MixedInfosEnv, mixture, none=True)
        expected = [play_episode(env_fn(), 5 + index, False) for index in range(9)]
        for num_workers in (0, 1, 2, 4, 8) if len(mixtures) > 2 else (0, 2):
            options: Any = {"num_workers": num_workers, "context": "forkserver"}
            envs = vecenv.AsyncVectorEnv([env_fn] * max(3, num_workers), **options)
            try:
                results = evaluate_sb3(model, envs, 9, seed=5)
            finally:
                envs.close()
            assert summarize_results(results) == expected, f"mixture {mixture}, {num_workers} workers"
