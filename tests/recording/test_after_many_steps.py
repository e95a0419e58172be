"""A failure after 50,000 steps is replayed quickly, because the replay begins at the latest snapshot or reset."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from history_envs import GlobalRandomEnv

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.tools.replay import replay

pytestmark = pytest.mark.timeout(590)

STEPS = 50_000


class FailingWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that raises after a number of steps, counted over all episodes."""

    def __init__(self, env: Any, steps: int) -> None:
        super().__init__(env)
        self.steps_left = steps

    def step(self, action: Any) -> Any:
        self.steps_left -= 1
        result = self.env.step(action)
        if not self.steps_left:
            raise ValueError(f"worn out, at {float(np.sum(result[0])):.6f}")
        return result


def make_failing_env(env_id: str) -> Any:
    return FailingWrapper(gym.make(env_id), STEPS)


def make_random_env() -> Any:
    return GlobalRandomEnv(fails_at=STEPS)


class FailingGame:
    """A multi-agent environment that raises after a number of steps, counted over all episodes."""

    def __init__(self, game: Any, steps: int) -> None:
        self.game, self.steps_left = game, steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.game, name)

    def step(self, actions: Any) -> Any:
        self.steps_left -= 1
        if not self.steps_left:
            raise ValueError(f"worn out, with {sorted(actions.items())}")
        return self.game.step(actions)


def make_failing_game() -> Any:
    from pettingzoo.classic import rps_v2

    return FailingGame(rps_v2.parallel_env(max_cycles=60), STEPS)


def step_until_error(envs: Any, actions: list[Any]) -> None:
    for step in range(STEPS + 60_000):
        envs.step(actions[step % len(actions)])


def check_replay(envs: Any, seconds: float, folder: Path, begin: str) -> None:
    """Step until the environment raises, and check that a replay from ``begin`` takes less than ``seconds``."""
    with contextlib.closing(envs):
        envs.reset(seed=3)
        envs.action_space.seed(3)
        actions = [envs.action_space.sample() for _ in range(97)]
        with pytest.raises(ValueError, match=r"worn out|the environment broke"):
            step_until_error(envs, actions)
    (file,) = folder.glob("*.vecenv")
    started_at = time.monotonic()
    result = replay(file, (begin,))
    assert result.status == "happened again", result.text
    assert time.monotonic() - started_at < seconds


@pytest.mark.parametrize(
    ("env_fn", "options", "begin"),
    [
        pytest.param(functools.partial(make_failing_env, "Ant-v5"), {}, "snapshot", id="Ant", marks=pytest.mark.slow),
        pytest.param(
            make_random_env, {"generators": "own"}, "latest", id="own generators", marks=pytest.mark.long
        ),  # without a snapshot, because replaying these fast steps takes less time than a snapshot
    ],
)
def test_replay_of_mujoco_and_python_environments_is_fast(
    env_fn: Any, options: dict[str, Any], begin: str, tmp_path: Path
) -> None:
    if "Ant" in str(env_fn):
        pytest.importorskip("mujoco")
    envs = vecenv.AsyncVectorEnv([env_fn], num_workers=1, record_failures=tmp_path, **options)
    check_replay(envs, 60.0, tmp_path, begin)


@pytest.mark.slow
def test_replay_of_an_atari_game_is_fast(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    env_fn = functools.partial(make_failing_env, "ALE/Pong-v5")
    envs = vecenv.AsyncVectorEnv([env_fn], num_workers=1, record_failures=tmp_path)
    check_replay(envs, 60.0, tmp_path, "snapshot")


@pytest.mark.slow
def test_replay_of_a_multi_agent_game_is_fast(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    check_replay(MultiAgentVecEnv([make_failing_game], num_workers=1, record_failures=tmp_path), 120.0, tmp_path, "latest")
