"""Failures after 50,000 steps: the latest snapshot, or the reset, is near enough for a replay of seconds."""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from history_envs import Drawing

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.tools.replay import replay

pytestmark = pytest.mark.timeout(590)

STEPS = 50_000


class FailsAfter(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper that counts steps over all episodes, and then raises."""

    def __init__(self, env: Any, steps: int) -> None:
        super().__init__(env)
        self.left = steps

    def step(self, action: Any) -> Any:
        self.left -= 1
        result = self.env.step(action)
        if not self.left:
            raise ValueError(f"too old, at {float(np.sum(result[0])):.6f}")
        return result


def made(env_id: str) -> Any:
    return FailsAfter(gym.make(env_id), STEPS)


def drawn() -> Any:
    return Drawing(fails_at=STEPS)


class FailsAfterAll:
    """The same wrapper for a game of several agents."""

    def __init__(self, game: Any, steps: int) -> None:
        self.game, self.left = game, steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.game, name)

    def step(self, actions: Any) -> Any:
        self.left -= 1
        if not self.left:
            raise ValueError(f"too old, with {sorted(actions.items())}")
        return self.game.step(actions)


def game() -> Any:
    from pettingzoo.classic import rps_v2

    return FailsAfterAll(rps_v2.parallel_env(max_cycles=60), STEPS)


def step_on(envs: Any, actions: list[Any]) -> None:
    for at in range(STEPS + 60_000):
        envs.step(actions[at % len(actions)])


def fails(envs: Any, seconds: float, folder: Path, begin: str) -> None:
    with contextlib.closing(envs):
        envs.reset(seed=3)
        envs.action_space.seed(3)
        actions = [envs.action_space.sample() for _ in range(97)]
        with pytest.raises(ValueError, match=r"too old|the pen broke"):
            step_on(envs, actions)
    (file,) = folder.glob("*.vecenv")
    began = time.monotonic()
    result = replay(file, (begin,))
    assert result.status == "happened again", result.text
    assert time.monotonic() - began < seconds


@pytest.mark.parametrize(
    ("kind", "options", "begin"),
    [
        pytest.param(functools.partial(made, "Ant-v5"), {}, "snapshot", id="Ant", marks=pytest.mark.slow),
        pytest.param(
            drawn, {"generators": "own"}, "latest", id="generators of its own", marks=pytest.mark.long
        ),  # takes less time than a snapshot would save
    ],
)
def test_simulated_and_pure_python(kind: Any, options: dict[str, Any], begin: str, tmp_path: Path) -> None:
    if "Ant" in str(kind):
        pytest.importorskip("mujoco")
    envs = vecenv.AsyncVectorEnv([kind], num_workers=1, record_failures=tmp_path, **options)
    fails(envs, 60.0, tmp_path, begin)


@pytest.mark.slow
def test_an_atari_game(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    envs = vecenv.AsyncVectorEnv([functools.partial(made, "ALE/Pong-v5")], num_workers=1, record_failures=tmp_path)
    fails(envs, 60.0, tmp_path, "snapshot")


@pytest.mark.slow
def test_a_game_of_several_agents(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    fails(MultiAgentVecEnv([game], num_workers=1, record_failures=tmp_path), 120.0, tmp_path, "latest")
