"""A sticky emulator repeats an action that is not in its own state: snapshots contain it all the same."""

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

STEPS = 12  # nothing is left of a previous action after a few frames


def game(name: str, **settings: Any) -> Any:
    return gymnasium.make(f"ALE/{name}-v5", **settings)


def preprocessed(name: str) -> Any:
    return AtariPreprocessing(game(name, frameskip=1))


GAMES = ("Pong", "Freeway", "Breakout")
SETTINGS: dict[str, Callable[[], Any]] = {
    "not sticky": functools.partial(game, "Pong", repeat_action_probability=0.0),
    "repeats only": functools.partial(game, "Freeway", repeat_action_probability=1.0),
    "very sticky": functools.partial(game, "Freeway", repeat_action_probability=0.7),
    "random frame skip": functools.partial(game, "Breakout", frameskip=(2, 6)),
    "all actions": functools.partial(game, "Pong", full_action_space=True),
    "a paddle, continuous": functools.partial(game, "Breakout", continuous=True),
    "a joystick, continuous": functools.partial(game, "Freeway", continuous=True),
    "preprocessed": functools.partial(preprocessed, "Pong"),
}


def trajectory(env: Any, actions: list[Any]) -> list[Any]:
    results: list[Any] = []
    for action in actions:
        step = env.step(action)
        results.append(step)
        if step[2] or step[3]:
            results.append(env.reset())
    return results


def count_differing(make: Callable[[], Any], count: int, steps: int = STEPS) -> int:
    """Return how many snapshots continue differently in an environment that did something else before."""
    one, other = make(), make()
    one.reset(seed=0)
    other.reset(seed=1)
    one.action_space.seed(2)
    other.action_space.seed(3)
    differ = 0
    for number in range(count):
        for env in (one, other):
            trajectory(env, [env.action_space.sample() for _ in range(3 + number % 5)])
        state = capture_state(one)
        actions = [one.action_space.sample() for _ in range(steps)]
        wanted = trajectory(one, actions)
        prepare_restore(other, state)()
        try:
            assert_identical(trajectory(other, actions), wanted)
        except AssertionError:
            differ += 1
    one.close()
    other.close()
    return differ


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 60, marks=pytest.mark.long) for name in GAMES),
        *(pytest.param(name, 200, marks=pytest.mark.slow) for name in GAMES),
    ],
)
def test_every_snapshot_of_a_sticky_game_is_exact(name: str, count: int) -> None:
    assert count_differing(functools.partial(game, name), count) == 0


def test_snapshot_contains_the_repeated_action() -> None:
    assert count_differing(functools.partial(game, "Pong"), 25, steps=3) == 0  # without it, about 4 of 25


@pytest.mark.long
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in SETTINGS.items()])
def test_every_snapshot_under_other_settings_is_exact(make: Callable[[], Any]) -> None:
    assert count_differing(make, 30) == 0


@pytest.mark.long
@pytest.mark.parametrize("make", [functools.partial(game, "Freeway"), SETTINGS["a paddle, continuous"]])
def test_saving_does_not_change_later_steps(make: Callable[[], Any], closes: Any) -> None:
    saved, left = closes(make()), closes(make())
    for env in (saved, left):
        env.reset(seed=4)
    left.action_space.seed(4)
    for _ in range(25):
        actions = [left.action_space.sample() for _ in range(4)]
        assert_identical(trajectory(saved, actions), trajectory(left, actions))
        capture_state(saved)


def test_an_emulator_that_blends_frames_is_refused(closes: Any) -> None:
    env = closes(game("Pong"))
    env.reset(seed=0)
    env.unwrapped.ale.setBool("color_averaging", True)
    with pytest.raises(NotRestorable, match="color_averaging"):
        capture_state(env)
