"""The matrix: environments that people use, under the wrappers that people use, in every autoreset mode."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import (
    AtariPreprocessing,
    FrameStackObservation,
    NormalizeObservation,
    RecordEpisodeStatistics,
    TimeLimit,
)
from test_save_and_load import advanced

import vecenv
from vecenv.errors import NotRestorable
from vecenv.testing import assert_identical

STEPS = 300
ROWS = 2
MODES = ("NextStep", "SameStep", "Disabled")
VECTORS = ("Pendulum-v1", "Ant-v5", "Humanoid-v5", "HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Pusher-v5", "Reacher-v5")
PLAIN = ("CartPole-v1", "FrozenLake-v1", "Blackjack-v1", f"Taxi-v{4 if 'Taxi-v4' in gymnasium.registry else 3}")
ATARI = ("Pong", "Breakout", "SpaceInvaders", "Seaquest", "MsPacman")
GRIDS = ("MiniGrid-DoorKey-6x6-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0")
BOXES = ("LunarLander-v3", "BipedalWalker-v3")


def installed(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def plain(name: str) -> Any:
    return TimeLimit(RecordEpisodeStatistics(gymnasium.make(name)), 90)


def vector(name: str) -> Any:
    return FrameStackObservation(NormalizeObservation(plain(name)), 2)


def atari(name: str) -> Any:
    import ale_py

    gymnasium.register_envs(ale_py)
    env: Any = gymnasium.make(f"ALE/{name}-v5", frameskip=1, repeat_action_probability=0.25)
    env = FrameStackObservation(AtariPreprocessing(env, terminal_on_life_loss=True), 4)
    return TimeLimit(RecordEpisodeStatistics(env), 90)


def grid(name: str) -> Any:
    import minigrid
    from minigrid.wrappers import ImgObsWrapper

    gymnasium.register_envs(minigrid)
    return ImgObsWrapper(plain(name))


CASES: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(plain, name) for name in PLAIN},
    **{name: functools.partial(vector, name) for name in VECTORS if name == "Pendulum-v1" or installed("mujoco")},
    **{name: functools.partial(atari, name) for name in ATARI if installed("ale_py", "cv2")},
    **{name: functools.partial(grid, name) for name in GRIDS if installed("minigrid")},
}
QUICK = [name for name in ("Hopper-v5", "Pong") if name in CASES]
ELSEWHERE = """
import pickle, sys
sys.path.insert(0, {folder!r})
from test_exactness import run_elsewhere
run_elsewhere({path!r})
"""


def run_elsewhere(path: str) -> None:
    """In another interpreter: load, take the same actions, leave what came of them."""
    with open(path, "rb") as file:
        name, mode, kept, actions = pickle.load(file)
    with closing(vecenv.AsyncVectorEnv([CASES[name]] * ROWS, autoreset_mode=mode, num_workers=0)) as envs:
        envs.load(kept)
        said = [advanced(envs, mode, one) for one in actions]
    with open(path + ".out", "wb") as file:
        pickle.dump(said, file)


@pytest.mark.parametrize(
    ("name", "mode", "steps"),
    [
        *(pytest.param(name, "SameStep", 100, marks=pytest.mark.long) for name in QUICK),
        *(pytest.param(name, mode, STEPS, marks=pytest.mark.slow) for name in CASES for mode in MODES),
    ],
)
def test_it_goes_on_bit_for_bit_in_other_processes_another_engine_and_another_interpreter(
    name: str, mode: str, steps: int, tmp_path: Any
) -> None:
    make = functools.partial(vecenv.AsyncVectorEnv, [CASES[name]] * ROWS, autoreset_mode=mode)
    with closing(make(num_workers=2)) as envs, closing(make(num_workers=0)) as here, closing(make(num_workers=1)) as there:
        envs.reset(seed=5)
        envs.action_space.seed(5)
        for _ in range(40):
            advanced(envs, mode, envs.action_space.sample())
        kept = envs.save()
        actions = [envs.action_space.sample() for _ in range(steps)]
        here.load(kept)
        there.reset(seed=1)
        there.load(kept)
        path = str(tmp_path / "kept")
        if steps == STEPS:
            with open(path, "wb") as file:
                pickle.dump((name, mode, kept, actions), file)
            program = ELSEWHERE.format(folder=__file__.rpartition("/")[0], path=path)
            subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
        ended = 0
        said = []
        for number, action in enumerate(actions):
            wanted = advanced(envs, mode, action)
            for other in (here, there):
                assert_identical(advanced(other, mode, action), wanted, f"step {number}")
            ended += int(np.count_nonzero(wanted[0][2] | wanted[0][3] if len(wanted) == 2 else wanted[2] | wanted[3]))
            said.append(wanted)
        assert ended
        if steps == STEPS:
            with open(path + ".out", "rb") as file:
                assert_identical(pickle.load(file), said)


BOX2D = [name for name in BOXES if installed("Box2D")]


@pytest.mark.parametrize("name", BOX2D or ["no Box2D here"])
def test_what_cannot_be_exact_says_so(name: str) -> None:
    if not BOX2D:  # then the class that is refused is one of the same name
        world = type("b2World", (), {"__module__": "Box2D.Box2D"})
        env_fn: Callable[[], Any] = functools.partial(with_world, world)
    else:
        env_fn = functools.partial(plain, name)
    with closing(vecenv.AsyncVectorEnv([env_fn], num_workers=0)) as envs:
        envs.reset(seed=0)
        with pytest.raises(NotRestorable, match=r"\.world \(b2World\): .*joint impulses"):
            envs.save(verify=False)


def with_world(world: type) -> Any:
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.world = world()  # type: ignore[attr-defined]
    return env
