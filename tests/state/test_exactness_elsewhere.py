"""The matrix, where no :class:`~vecenv.AsyncVectorEnv` does it: games of several players, simulators on the device."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from test_save_and_load import without_clock

import vecenv
from vecenv.testing import assert_identical

STEPS = 300
ROWS = 2
MODES = ("NextStep", "SameStep", "Disabled")


def tictactoe() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return vecenv.multi_agent.from_aec(tictactoe_v3.env())


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=20)


def players(game: Callable[[], Any], mode: str, elsewhere: bool) -> Any:
    return vecenv.MultiAgentVecEnv([game] * ROWS, autoreset_mode=mode, num_workers=2 - elsewhere)


def device(library: str, name: str, config: dict[str, Any], mode: str, elsewhere: bool) -> Any:
    from vecenv.backends import JaxVectorEnv

    return JaxVectorEnv(name, ROWS, library=library, autoreset_mode=mode, max_episode_steps=60, **config)


brax = functools.partial(device, "brax", "inverted_pendulum", {"backend": "spring"})
playground = functools.partial(device, "playground", "CartpoleBalance", {"config_overrides": {"impl": "jax"}})


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


CASES: dict[str, Callable[[str, bool], Any]] = {
    **({"tictactoe": functools.partial(players, tictactoe)} if has("pettingzoo", "pygame") else {}),
    **({"simple_spread": functools.partial(players, spread)} if has("mpe2") else {}),
    **({"brax": brax} if has("brax") else {}),
    **({"playground": playground} if has("mujoco_playground") else {}),
}
ELSEWHERE = """
import pickle, sys
sys.path.insert(0, {folder!r})
from test_exactness_elsewhere import run_elsewhere
run_elsewhere({path!r})
"""


def actions_for(envs: Any, infos: Any) -> Any:
    """Random ones, of those that are allowed."""
    if "action_mask" not in infos:
        return envs.action_space.sample()
    chance = envs.action_space.np_random.random(infos["action_mask"].shape)
    return np.argmax(chance * infos["action_mask"], axis=-1)


def advanced(envs: Any, mode: str, actions: Any) -> tuple[Any, ...]:
    """A step, and in Disabled mode the reset of what ended."""
    step = envs.step(actions)
    over = step[4].get("env_done", step[2] | step[3])
    again = None
    if mode == "Disabled" and over.any():
        again = envs.reset(options={"reset_mask": over})
    return (*step[:4], without_clock(step[4])), again, bool(over.any())


def run_elsewhere(path: str) -> None:
    """In another interpreter: load, take the same actions, leave what came of them."""
    with open(path, "rb") as file:
        name, mode, kept, actions = pickle.load(file)
    with closing(CASES[name](mode, True)) as envs:
        envs.reset(seed=9)
        envs.load(kept)
        said = [advanced(envs, mode, one) for one in actions]
    with open(path + ".out", "wb") as file:
        pickle.dump(said, file)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "mode", "steps"),
    [
        *(pytest.param(name, "NextStep", 40, marks=pytest.mark.long) for name in CASES if name == "simple_spread"),
        *(pytest.param(name, mode, STEPS, marks=pytest.mark.slow) for name in CASES for mode in MODES),
    ],
)
def test_players_and_devices_go_on_bit_for_bit_in_another_engine_and_another_interpreter(
    name: str, mode: str, steps: int, tmp_path: Any
) -> None:
    with closing(CASES[name](mode, False)) as envs, closing(CASES[name](mode, True)) as other:
        _, infos = envs.reset(seed=5)
        envs.action_space.seed(5)
        for _ in range(13):
            (*_, infos), again, _ = advanced(envs, mode, actions_for(envs, infos))
            infos = infos if again is None else again[1]
        other.reset(seed=1)
        kept = envs.save()
        other.load(kept)
        actions, said, ended = [], [], 0
        for number in range(steps):
            actions.append(actions_for(envs, infos))
            wanted = advanced(envs, mode, actions[-1])
            assert_identical(advanced(other, mode, actions[-1]), wanted, f"step {number}")
            infos = wanted[0][4] if wanted[1] is None else {**wanted[0][4], **wanted[1][1]}
            said.append(wanted)
            ended += wanted[2]
        assert ended
        if steps == STEPS:
            path = str(tmp_path / "kept")
            with open(path, "wb") as file:
                pickle.dump((name, mode, kept, actions), file)
            program = ELSEWHERE.format(folder=__file__.rpartition("/")[0], path=path)
            subprocess.run([sys.executable, "-c", program], check=True, timeout=900)
            with open(path + ".out", "rb") as file:
                assert_identical(pickle.load(file), said)
