"""The matrix: environments, wrappers, games and simulators that people use, in every autoreset mode."""

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


def tictactoe() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return vecenv.multi_agent.from_aec(tictactoe_v3.env())


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=20)


def players(game: Callable[[], Any], mode: str, num_workers: int) -> Any:
    return vecenv.MultiAgentVecEnv([game] * ROWS, autoreset_mode=mode, num_workers=num_workers)


def processes(env_fn: Callable[[], Any], mode: str, num_workers: int) -> Any:
    return vecenv.AsyncVectorEnv([env_fn] * ROWS, autoreset_mode=mode, num_workers=num_workers)


def device(name: str, config: dict[str, Any], mode: str, num_workers: int) -> Any:
    from vecenv.backends import JaxVectorEnv

    return JaxVectorEnv(name, ROWS, autoreset_mode=mode, max_episode_steps=60, **config)


PYTHON: dict[str, Callable[[], Any]] = {
    **{name: functools.partial(plain, name) for name in PLAIN},
    **{name: functools.partial(vector, name) for name in VECTORS if name == "Pendulum-v1" or installed("mujoco")},
    **{name: functools.partial(atari, name) for name in ATARI if installed("ale_py", "cv2")},
    **{name: functools.partial(grid, name) for name in GRIDS if installed("minigrid")},
}
GAMES = {
    **({"tictactoe": tictactoe} if installed("pettingzoo", "pygame") else {}),
    **({"simple_spread": spread} if installed("mpe2") else {}),
}
DEVICES: dict[str, tuple[str, dict[str, Any]]] = {
    **({"brax": ("inverted_pendulum", {"backend": "spring"})} if installed("brax") else {}),
    **({"playground": ("CartpoleBalance", {"config_overrides": {"impl": "jax"}})} if installed("mujoco_playground") else {}),
}
CASES: dict[str, Callable[[str, int], Any]] = {  # what builds a vector environment of a mode, with so many workers
    **{name: functools.partial(processes, env_fn) for name, env_fn in PYTHON.items()},
    **{name: functools.partial(players, game) for name, game in GAMES.items()},
    **{name: functools.partial(device, *settings) for name, settings in DEVICES.items()},
}
QUICK = {"Hopper-v5": "SameStep", "Pong": "SameStep", "simple_spread": "NextStep"}
ELSEWHERE = """
import pickle, sys
sys.path.insert(0, {folder!r})
from test_exactness import run_elsewhere
run_elsewhere({path!r})
"""


def actions_for(envs: Any, infos: Any) -> Any:
    """Random ones, of those that are allowed."""
    if "action_mask" not in infos:
        return envs.action_space.sample()
    chance = envs.action_space.np_random.random(infos["action_mask"].shape)
    return np.argmax(chance * infos["action_mask"], axis=-1)


def latest_infos(said: Any) -> Any:
    """Those of a step, and of the reset after it."""
    step, again = said
    return step[4] if again is None else {**step[4], **again[1]}


def run_elsewhere(path: str) -> None:
    """In another interpreter: load, take the same actions, leave what came of them."""
    with open(path, "rb") as file:
        name, mode, kept, actions = pickle.load(file)
    with closing(CASES[name](mode, 0)) as envs:
        envs.load(kept)
        said = [advanced(envs, mode, one) for one in actions]
    with open(path + ".out", "wb") as file:
        pickle.dump(said, file)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "mode", "steps"),
    [
        *(pytest.param(name, mode, 100, marks=pytest.mark.long) for name, mode in QUICK.items() if name in CASES),
        *(pytest.param(name, mode, STEPS, marks=pytest.mark.slow) for name in CASES for mode in MODES),
    ],
)
def test_it_goes_on_bit_for_bit_in_other_processes_another_engine_and_another_interpreter(
    name: str, mode: str, steps: int, tmp_path: Any
) -> None:
    make = CASES[name]
    with closing(make(mode, 2)) as envs, closing(make(mode, 0)) as here, closing(make(mode, 1)) as there:
        _, infos = envs.reset(seed=5)
        envs.action_space.seed(5)
        for _ in range(40):
            infos = latest_infos(advanced(envs, mode, actions_for(envs, infos)))
        kept = envs.save()
        here.load(kept)
        there.reset(seed=1)
        there.load(kept)
        actions, said = [], []
        for number in range(steps):
            actions.append(actions_for(envs, infos))
            said.append(advanced(envs, mode, actions[-1]))
            for other in (here, there):
                assert_identical(advanced(other, mode, actions[-1]), said[-1], f"step {number}")
            infos = latest_infos(said[-1])
        assert any((step[2] | step[3]).any() for step, _ in said)
    path = str(tmp_path / "kept")
    with open(path, "wb") as file:
        pickle.dump((name, mode, kept, actions), file)
    program = ELSEWHERE.format(folder=__file__.rpartition("/")[0], path=path)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=900)
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
