"""Snapshots of Atari games contain the action that a sticky emulator repeats, which is not in the emulator's own state."""

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
    "repeats only": functools.partial(make_game, "Freeway", repeat_action_probability=1.0),
    "very sticky": functools.partial(make_game, "Freeway", repeat_action_probability=0.7),
    "random frame skip": functools.partial(make_game, "Breakout", frameskip=(2, 6)),
    "all actions": functools.partial(make_game, "Pong", full_action_space=True),
    "a paddle, continuous": functools.partial(make_game, "Breakout", continuous=True),
    "a joystick, continuous": functools.partial(make_game, "Freeway", continuous=True),
    "preprocessed": functools.partial(make_preprocessed, "Pong"),
}


def run_actions(env: Any, actions: list[Any]) -> list[Any]:
    """Return the results of the steps, and of a reset after each finished episode."""
    results: list[Any] = []
    for action in actions:
        step = env.step(action)
        results.append(step)
        if step[2] or step[3]:
            results.append(env.reset())
    return results


def count_differing(make: Callable[[], Any], count: int, steps: int = STEPS) -> int:
    """Return the number of snapshots that continue differently in an environment with another past."""
    one, other = make(), make()
    one.reset(seed=0)
    other.reset(seed=1)
    one.action_space.seed(2)
    other.action_space.seed(3)
    num_differing = 0
    for number in range(count):
        for env in (one, other):
            run_actions(env, [env.action_space.sample() for _ in range(3 + number % 5)])
        state = capture_state(one)
        actions = [one.action_space.sample() for _ in range(steps)]
        expected = run_actions(one, actions)
        prepare_restore(other, state)()
        try:
            assert_identical(run_actions(other, actions), expected)
        except AssertionError:
            num_differing += 1
    one.close()
    other.close()
    return num_differing


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 60, marks=pytest.mark.long) for name in GAMES),
        *(pytest.param(name, 200, marks=pytest.mark.slow) for name in GAMES),
    ],
)
def test_snapshots_of_sticky_games_continue_exactly(name: str, count: int) -> None:
    assert count_differing(functools.partial(make_game, name), count) == 0


def test_snapshots_contain_the_previous_action() -> None:
    assert count_differing(functools.partial(make_game, "Pong"), 25, steps=3) == 0  # without it, about 4 of 25


@pytest.mark.long
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SETTINGS.items()])
def test_snapshots_with_other_settings_continue_exactly(make: Callable[[], Any]) -> None:
    assert count_differing(make, 30) == 0


@pytest.mark.long
@pytest.mark.parametrize("make", [functools.partial(make_game, "Freeway"), SETTINGS["a paddle, continuous"]])
def test_saving_does_not_change_later_steps(make: Callable[[], Any], closes: Any) -> None:
    saved, reference = closes(make()), closes(make())
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
