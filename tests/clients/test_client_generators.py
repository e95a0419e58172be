"""``generators="own"``: environments that draw from torch's default generator are what they are alone."""

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


class Draws(gymnasium.Env[Any, Any]):
    """Draws from torch in every call, and ends by chance; maybe it seeds torch by itself."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seeds: bool = False) -> None:
        self.seeds = seeds

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.seeds and seed is not None:
            torch.manual_seed(seed)
        return torch.randn(3).numpy(), {}

    def step(self, action: Any) -> Any:
        return torch.randn(3).numpy(), float(torch.rand(())), bool(torch.rand(()) < 0.2), False, {}


def alone(seed: int, steps: int, seeds: bool) -> Iterator[Any]:
    """What one environment says alone, in next-step mode; episode e starts at a seed that follows from the row's and e."""

    def begin(env: Any, episode: int, **how: Any) -> Any:
        words = np.random.SeedSequence(seed, spawn_key=(episode, 2)).generate_state(4).tobytes()
        torch.manual_seed(int.from_bytes(words, "little") >> 65)
        return env.reset(**how)[0], np.float64(0), np.False_

    env, episode, over = Draws(seeds), 0, False
    yield begin(env, 0, seed=seed)
    for _ in range(steps):
        if over:
            episode += 1
            yield begin(env, episode)
            over = False
            continue
        observation, reward, over, _, _ = env.step(0)
        yield observation, np.float64(reward), np.bool_(over)


def trajectory(envs: Any, steps: int, seed: int | None = 3) -> list[Any]:
    said = [] if seed is None else [(envs.reset(seed=seed)[0], np.zeros(envs.num_envs), np.zeros(envs.num_envs, bool))]
    for _ in range(steps):
        observations, rewards, over, _, _ = envs.step(np.zeros(envs.num_envs, int))
        said.append((observations, rewards, over))
    return said


def own(seeds: bool = False, **options: Any) -> Any:
    return vecenv.AsyncVectorEnv([functools.partial(Draws, seeds)] * 5, generators="own", **options)


WAYS = [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2}, {"num_workers": 2, "use_caller": True}]


@pytest.mark.parametrize("seeds", [False, True], ids=["drawn", "seeded"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_rows_say_what_each_environment_says_alone_and_the_programs_own_draws_stay(options: Any, seeds: bool) -> None:
    torch.manual_seed(11)
    wanted_next = torch.rand(4)
    torch.manual_seed(11)
    with closing(own(seeds, context="forkserver", **options)) as envs:
        said = trajectory(envs, 40)
    assert torch.equal(torch.rand(4), wanted_next)
    for row in range(5):
        assert_identical([tuple(part[row] for part in step) for step in said], list(alone(3 + row, 40, seeds)), f"row {row}")
    assert sum(step[2].sum() for step in said) > 10


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_states_are_saved_and_go_on_elsewhere(options: Any, mode: AutoresetMode) -> None:
    make = functools.partial(own, context="forkserver", autoreset_mode=mode)
    with closing(make(num_workers=1)) as envs, closing(make(**options)) as other:
        trajectory(envs, 7)
        other.reset(seed=50)
        other.load(envs.save())
        assert_identical(trajectory(other, 20, None), trajectory(envs, 20, None))


def test_where_they_are_shared_a_warning_names_the_environment() -> None:
    with closing(vecenv.AsyncVectorEnv([Draws] * 4, num_workers=2, context="forkserver")) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(4, int))
        with pytest.warns(UserWarning, match="torch"):
            trajectory(envs, 3, seed=2)
