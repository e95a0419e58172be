"""Tests of snapshots of Atari games. Unlike the emulator's state, they contain the action that a sticky emulator repeats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.wrappers import AtariPreprocessing

from vecenv.errors import NotRestorable
from vecenv.state.capture import capture_state, prepare_restore
from vecenv.trajectories import assert_identical

ale_py = pytest.importorskip("ale_py")
gymnasium.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)

STEPS = 12  # the effect of a previous action ends after a few frames


def make_game(name: str, **settings: Any) -> Any:
    return gymnasium.make(f"ALE/{name}-v5", **settings)


def make_preprocessed(name: str) -> Any:
    return AtariPreprocessing(make_game(name, frameskip=1))


GAMES = ("Pong", "Freeway", "Breakout")
SETTINGS: dict[str, Callable[[], Any]] = {
    "not sticky": functools.partial(make_game, "Pong", repeat_action_probability=0.0),
    "always sticky": functools.partial(make_game, "Freeway", repeat_action_probability=1.0),
    "very sticky": functools.partial(make_game, "Freeway", repeat_action_probability=0.7),
    "random frame skip": functools.partial(make_game, "Breakout", frameskip=(2, 6)),
    "all actions": functools.partial(make_game, "Pong", full_action_space=True),
    "continuous paddle": functools.partial(make_game, "Breakout", continuous=True),
    "continuous joystick": functools.partial(make_game, "Freeway", continuous=True),
    "preprocessed": functools.partial(make_preprocessed, "Pong"),
}


def run_actions(env: Any, actions: list[Any]) -> list[Any]:
    """Return the results of the steps, and of a reset after each episode that ends."""
    results: list[Any] = []
    for action in actions:
        step = env.step(action)
        results.append(step)
        if step[2] or step[3]:
            results.append(env.reset())
    return results


def count_inexact_snapshots(env_fn: Callable[[], Any], count: int, steps: int = STEPS) -> int:
    """Make ``count`` snapshots. Return how many continue differently in an environment with another past."""
    saved, target = env_fn(), env_fn()
    saved.reset(seed=0)
    target.reset(seed=1)
    saved.action_space.seed(2)
    target.action_space.seed(3)
    num_inexact = 0
    for number in range(count):
        for env in (saved, target):
            run_actions(env, [env.action_space.sample() for _ in range(3 + number % 5)])
        state = capture_state(saved)
        actions = [saved.action_space.sample() for _ in range(steps)]
        expected = run_actions(saved, actions)
        prepare_restore(target, state)()
        try:
            assert_identical(run_actions(target, actions), expected)
        except AssertionError:
            num_inexact += 1
    saved.close()
    target.close()
    return num_inexact


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 60, marks=pytest.mark.long) for name in GAMES),
        *(pytest.param(name, 200, marks=pytest.mark.slow) for name in GAMES),
    ],
)
def test_snapshots_of_sticky_games_continue_exactly(name: str, count: int) -> None:
    assert count_inexact_snapshots(functools.partial(make_game, name), count) == 0


def test_snapshots_contain_the_previous_action() -> None:
    assert count_inexact_snapshots(functools.partial(make_game, "Pong"), 25, steps=3) == 0  # otherwise about 4


@pytest.mark.long
@pytest.mark.parametrize("env_fn", [pytest.param(env_fn, id=name) for name, env_fn in SETTINGS.items()])
def test_snapshots_with_other_settings_continue_exactly(env_fn: Callable[[], Any]) -> None:
    assert count_inexact_snapshots(env_fn, 30) == 0


@pytest.mark.long
@pytest.mark.parametrize("env_fn", [functools.partial(make_game, "Freeway"), SETTINGS["continuous paddle"]])
def test_saving_does_not_change_later_steps(env_fn: Callable[[], Any], closes: Any) -> None:
    saved, reference = closes(env_fn()), closes(env_fn())
    for env in (saved, reference):
        env.reset(seed=4)
    reference.action_space.seed(4)
    for _ in range(25):
        actions = [reference.action_space.sample() for _ in range(4)]
        assert_identical(run_actions(saved, actions), run_actions(reference, actions))
        capture_state(saved)


def test_capture_state_of_an_emulator_that_blends_frames_raises(closes: Any) -> None:
    env = closes(make_game("Pong"))
    env.reset(seed=0)
    env.unwrapped.ale.setBool("color_averaging", True)
    with pytest.raises(NotRestorable, match="color_averaging"):
        capture_state(env)
