"""``generators="own"``: rows that draw from torch's default generator draw the same numbers as single environments."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import vecenv
from vecenv.testing import assert_identical


class TorchRandomEnv(gymnasium.Env[Any, Any]):
    """An environment of random numbers from torch. With ``seeds_torch``, a reset with a seed calls ``torch.manual_seed``."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seeds_torch: bool = False) -> None:
        self.seeds_torch = seeds_torch

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.seeds_torch and seed is not None:
            torch.manual_seed(seed)
        return torch.randn(3).numpy(), {}

    def step(self, action: Any) -> Any:
        return torch.randn(3).numpy(), float(torch.rand(())), bool(torch.rand(()) < 0.2), False, {}


def single_env_results(seed: int, steps: int, seeds_torch: bool) -> Iterator[Any]:
    """Yield the results of a single environment in next-step mode.

    Each episode has its own seed for torch's generator, derived from the row's seed and the number of the episode.
    """

    def reset(env: Any, episode: int, **kwargs: Any) -> Any:
        state = np.random.SeedSequence(seed, spawn_key=(episode, 2)).generate_state(4).tobytes()
        torch.manual_seed(int.from_bytes(state, "little") >> 65)  # 63 of 128 bits
        return env.reset(**kwargs)[0], np.float64(0), np.False_

    env, episode, over = TorchRandomEnv(seeds_torch), 0, False
    yield reset(env, 0, seed=seed)
    for _ in range(steps):
        if over:
            episode += 1
            yield reset(env, episode)
            over = False
            continue
        observation, reward, over, _, _ = env.step(0)
        yield observation, np.float64(reward), np.bool_(over)


def collect_trajectory(envs: Any, steps: int, seed: int | None = 3) -> list[Any]:
    results = [] if seed is None else [(envs.reset(seed=seed)[0], np.zeros(envs.num_envs), np.zeros(envs.num_envs, bool))]
    for _ in range(steps):
        observations, rewards, over, _, _ = envs.step(np.zeros(envs.num_envs, int))
        results.append((observations, rewards, over))
    return results


def make_envs(seeds_torch: bool = False, **options: Any) -> Any:
    return vecenv.AsyncVectorEnv([functools.partial(TorchRandomEnv, seeds_torch)] * 5, generators="own", **options)


WORKER_OPTIONS = [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "use_caller": True}]


@pytest.mark.parametrize("seeds_torch", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("options", WORKER_OPTIONS, ids=str)
def test_rows_equal_single_environments_and_the_callers_generator_is_unaffected(options: Any, seeds_torch: bool) -> None:
    torch.manual_seed(11)
    expected_draws = torch.rand(4)
    torch.manual_seed(11)
    with closing(make_envs(seeds_torch, context="forkserver", **options)) as envs:
        results = collect_trajectory(envs, 40)
    assert torch.equal(torch.rand(4), expected_draws)
    for row in range(5):
        expected = list(single_env_results(3 + row, 40, seeds_torch))
        assert_identical([tuple(part[row] for part in step) for step in results], expected, f"row {row}")
    assert sum(over.sum() for *_, over in results) > 10


@pytest.mark.parametrize("options", WORKER_OPTIONS, ids=str)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_saved_states_continue_in_another_engine(options: Any, mode: AutoresetMode) -> None:
    make = functools.partial(make_envs, context="forkserver", autoreset_mode=mode)
    with closing(make(num_workers=1)) as envs, closing(make(**options)) as other:
        collect_trajectory(envs, 7)
        other.reset(seed=50)
        other.load(envs.save())
        assert_identical(collect_trajectory(other, 20, None), collect_trajectory(envs, 20, None))


def test_warning_of_a_shared_generator_names_the_environment() -> None:
    with pytest.warns(UserWarning, match="env 0 .*torch"):
        vecenv.AsyncVectorEnv([TorchRandomEnv] * 4, num_workers="auto", context="forkserver").close()
