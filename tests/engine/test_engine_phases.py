"""Calls in the wrong phase: what is looked at first, what stays as it was. The whole table: ``faults/test_phases.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from envs import Options, counters, opened
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError

SHORTCUTS: dict[str, Callable[[Any], Any]] = {
    "call": lambda envs: envs.call("env_id"),
    "get_attr": lambda envs: envs.get_attr("env_id"),
    "render": lambda envs: envs.render(),
    "np_random": lambda envs: envs.np_random,
    "np_random_seed": lambda envs: envs.np_random_seed,
}


@pytest.mark.parametrize("shortcut", SHORTCUTS.values(), ids=list(SHORTCUTS))
def test_shortcuts_of_call_are_refused_as_call_async_is(every_engine: Options, shortcut: Callable[[Any], Any]) -> None:
    with opened(counters(2), **every_engine) as envs:
        envs.reset_async()
        with pytest.raises(AlreadyPendingCallError, match="Calling `call_async` while waiting") as caught:
            shortcut(envs)
        assert caught.value.name == "reset"
        envs.reset_wait()
        envs.close()
        for after in (shortcut, lambda envs: envs.exec_func(id)):
            with pytest.raises(ClosedEnvironmentError) as closed:
                after(envs)
            assert str(closed.value) == "Trying to operate on `AsyncVectorEnv`, after a call to `close()`."


def test_the_text_after_close_names_the_subclass() -> None:
    import vecenv

    class Mine(vecenv.AsyncVectorEnv):
        pass

    envs: Any = Mine(counters(1), num_workers=0)
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="`Mine`"):
        envs.reset()


def test_reset_and_step_speak_of_their_async_halves_when_something_is_pending() -> None:
    with opened(counters(2)) as envs:
        envs.call_async("env_id")
        with pytest.raises(AlreadyPendingCallError, match="Calling `reset_async`"):
            envs.reset()
        with pytest.raises(AlreadyPendingCallError, match="Calling `step_async`"):
            envs.step([0, 0])
        assert envs.call_wait() == (0, 1)


def test_a_seed_list_is_measured_before_the_phase_is_looked_at() -> None:
    with opened(counters(2)) as envs:
        envs.reset_async()
        with pytest.raises(ValueError, match="num_envs=2 but got length=1"):
            envs.reset_async(seed=[1])
        with pytest.raises(AlreadyPendingCallError):
            envs.reset_async(seed=[1, 2], options={"reset_mask": "not a mask"})
        envs.reset_wait()


def test_the_phase_is_looked_at_before_the_actions() -> None:
    with opened(counters(2)) as envs:
        envs.reset_async()
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async(3)
        envs.reset_wait()


def test_arguments_of_the_async_half_of_reset_may_be_given_by_position() -> None:
    with opened(counters(2)) as envs:
        envs.reset_async(5, {"a": 1})
        observations, infos = envs.reset_wait()
        assert observations[:, 3].tolist() == [5, 6]
        assert "'a'" in infos["reset_kwargs"][0]
