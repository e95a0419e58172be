"""Start-up: all workers at once, every failure with its cause, and nothing left running."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, Options, SpaceEnv, counters, opened
from gymnasium import spaces

import vecenv
from vecenv.errors import StartupTimeout, VecEnvError, WorkerDied


def only_in_a_worker(do: Any) -> Any:
    """A function that builds a :class:`CounterEnv` in this process, and elsewhere does what it is told."""
    here = os.getpid()

    def build() -> gymnasium.Env:
        if os.getpid() != here:
            do()
        return CounterEnv()

    return build


def explode() -> None:
    raise RuntimeError("no display")


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_env_fn_that_raises_in_a_worker_gives_its_own_exception_and_the_index(process_engine: Options, bad: int) -> None:
    fns = counters(3)
    fns[bad] = only_in_a_worker(explode)
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv(fns, **process_engine)
    assert f"env {bad}" in str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "explode" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_the_lowest_index_is_raised_when_several_env_fns_raise(process_engine: Options) -> None:
    def other() -> None:
        raise ValueError("another")

    fns = [*counters(1), only_in_a_worker(explode), only_in_a_worker(other)]
    with pytest.raises(RuntimeError, match="no display"):
        vecenv.AsyncVectorEnv(fns, **process_engine)


def test_an_env_fn_that_exits_is_an_error_and_not_the_end_of_the_program(process_engine: Options) -> None:
    with pytest.raises(VecEnvError, match=r"\b2\b"):
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: sys.exit(3))], **process_engine)
    with pytest.raises(VecEnvError):
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: os._exit(4))], **process_engine)
    assert multiprocessing.active_children() == []


def test_a_start_that_hangs_ends_at_start_timeout(process_engine: Options) -> None:
    begin = time.monotonic()
    with pytest.raises(StartupTimeout) as caught:
        vecenv.AsyncVectorEnv([*counters(2), only_in_a_worker(lambda: time.sleep(60))], start_timeout=0.5, **process_engine)
    assert time.monotonic() - begin < 70
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, multiprocessing.TimeoutError)
    assert multiprocessing.active_children() == []


@pytest.mark.long
def test_workers_start_side_by_side() -> None:
    begin = time.monotonic()
    with opened([only_in_a_worker(lambda: time.sleep(2.0))] * 4):
        assert time.monotonic() - begin < 7


def test_an_env_fn_that_returns_no_environment_is_an_error() -> None:
    with pytest.raises(Exception, match=r"metadata|int"):
        vecenv.AsyncVectorEnv([lambda: 3] * 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": -1}, ()),
        ({"num_workers": 1.5}, ()),
        ({"num_workers": "many"}, ("auto",)),
        ({"on_failure": "shrug"}, ("raise", "restart")),
        ({"on_failure": None}, ("raise", "restart")),
        ({"restart_limit": -1}, ()),
        ({"restart_period": -1.0}, ()),
        ({"restart_period": 0.0}, ()),
        ({"step_timeout": -1.0}, ()),
        ({"step_timeout": math.nan}, ()),
        ({"start_timeout": 0}, ()),
        ({"start_timeout": -1}, ()),
        ({"threads_per_worker": 0}, ()),
        ({"strict": "yes"}, ()),
        ({"dummy_env": "no"}, ()),
        ({"worker": print, "on_failure": "restart"}, ("on_failure",)),
    ],
    ids=str,
)
def test_an_option_without_a_meaning_is_refused_before_anything_is_built(options: Options, words: tuple[str, ...]) -> None:
    """By its name, and with what is accepted."""

    def never() -> gymnasium.Env:
        raise AssertionError("built too early")

    with pytest.raises((ValueError, TypeError)) as caught:
        vecenv.AsyncVectorEnv([never, never], **options)
    for word in (next(iter(options)), *words):
        assert word in str(caught.value)


# -- where spaces come from ---------------------------------------------------------------------------------------------


def not_here() -> gymnasium.Env:
    """An environment that must not be built where the tests run."""
    assert multiprocessing.parent_process() is not None, "built in the caller"
    return CounterEnv()


def of_size(size: int) -> Any:
    def build() -> gymnasium.Env:
        assert multiprocessing.parent_process() is not None, "built in the caller"
        return SpaceEnv(spaces.Box(0.0, float(size), (2,), np.float32))

    return build


class Unsendable(spaces.Discrete):
    def __reduce__(self) -> Any:
        raise TypeError("this space stays where it is")


def unsendable() -> gymnasium.Env:
    env = CounterEnv()
    env.action_space = Unsendable(5)
    return env


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_without_a_dummy_env_spaces_come_from_another_process(context: str) -> None:
    with opened([not_here] * 3, dummy_env=False, context=context, num_workers=2) as envs:
        here = CounterEnv()
        assert envs.single_observation_space == here.observation_space
        assert envs.single_action_space == here.action_space
        assert envs.observation_space.shape == (3, *here.observation_space.shape)
        assert envs.metadata == {**here.metadata, "autoreset_mode": envs.autoreset_mode}
        assert envs.render_mode == here.render_mode
        assert envs.reset(seed=1)[0] in envs.observation_space


def test_a_process_that_steps_one_env_anyway_tells_its_spaces_too() -> None:
    with opened([not_here] * 2, num_workers="auto", step_timeout=30.0) as envs:  # a timeout rules out steps in the caller
        assert envs.plan is not None
        assert envs.reset(seed=1)[0] in envs.observation_space


def test_without_a_dummy_env_different_spaces_are_gathered_elsewhere() -> None:
    with opened([of_size(1), of_size(2)], dummy_env=False, observation_mode="different") as envs:
        assert envs.observation_space.high.tolist() == [[1, 1], [2, 2]]


def test_what_building_elsewhere_raises_arrives_as_itself() -> None:
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv([only_in_a_worker(explode)], dummy_env=False)
    assert "explode" in str(caught.value.__cause__)
    with pytest.raises(WorkerDied, match="exit code 4"):
        vecenv.AsyncVectorEnv([only_in_a_worker(lambda: os._exit(4))], dummy_env=False)
    with pytest.raises(StartupTimeout):
        vecenv.AsyncVectorEnv([only_in_a_worker(lambda: time.sleep(60))], dummy_env=False, start_timeout=0.5)
    assert multiprocessing.active_children() == []


def test_spaces_that_cannot_travel_are_an_error_only_where_none_may_be_built_here() -> None:
    with pytest.raises(TypeError, match="stays where it is"):
        vecenv.AsyncVectorEnv([unsendable] * 2, dummy_env=False)
    # by fork, the default up to Python 3.13: whatever else starts a worker sends the spaces to it
    with opened([unsendable] * 2, num_workers="auto", step_timeout=30.0, context="fork") as envs:
        assert type(envs.single_action_space) is Unsendable
