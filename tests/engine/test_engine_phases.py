"""Calls in the wrong phase: what is looked at first, what stays as it was. The whole table: ``faults/test_phases.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from envs import ENGINES, counters, opened
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError

CALLS = {
    "reset_async": lambda envs: envs.reset_async(),
    "reset_wait": lambda envs: envs.reset_wait(),
    "step_async": lambda envs: envs.step_async(np.zeros(3, dtype=np.int64)),
    "step_wait": lambda envs: envs.step_wait(),
    "call_async": lambda envs: envs.call_async("env_id"),
    "call_wait": lambda envs: envs.call_wait(),
    "set_attr": lambda envs: envs.set_attr("note", "x"),
}
BEGIN = {
    "default": lambda envs: None,
    "reset": lambda envs: envs.reset_async(seed=1),
    "step": lambda envs: envs.step_async(np.zeros(3, dtype=np.int64)),
    "call": lambda envs: envs.call_async("env_id"),
}
FINISH = {
    "default": lambda envs: None,
    "reset": lambda envs: envs.reset_wait(),
    "step": lambda envs: envs.step_wait(),
    "call": lambda envs: envs.call_wait(),
}
LEGAL = {
    ("default", "reset_async"),
    ("default", "step_async"),
    ("default", "call_async"),
    ("default", "set_attr"),
}
LEGAL |= {("reset", "reset_wait"), ("step", "step_wait"), ("call", "call_wait")}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_after_close_every_call_is_refused_by_name(engine: dict[str, Any]) -> None:
    with opened(counters(3), **engine) as envs:
        envs.reset(seed=1)
        envs.close()
        everything = CALLS | {
            "reset": lambda envs: envs.reset(seed=1),
            "step": lambda envs: envs.step([0, 0, 0]),
            "call": lambda envs: envs.call("env_id"),
            "get_attr": lambda envs: envs.get_attr("env_id"),
            "render": lambda envs: envs.render(),
            "np_random": lambda envs: envs.np_random,
            "np_random_seed": lambda envs: envs.np_random_seed,
            "reset_send": lambda envs: envs.reset_send(),
            "reset_fetch": lambda envs: envs.reset_fetch(),
            "step_send": lambda envs: envs.step_send([0, 0, 0]),
            "step_fetch": lambda envs: envs.step_fetch(),
            "call_send": lambda envs: envs.call_send("env_id"),
            "call_fetch": lambda envs: envs.call_fetch(),
            "exec_func": lambda envs: envs.exec_func(lambda env: 1),
        }
        for do in everything.values():
            with pytest.raises(ClosedEnvironmentError) as caught:
                do(envs)
            assert str(caught.value) == "Trying to operate on `AsyncVectorEnv`, after a call to `close()`."


def test_the_text_after_close_names_the_subclass() -> None:
    import vecenv

    class Mine(vecenv.AsyncVectorEnv):
        pass

    envs: Any = Mine(counters(1), num_workers=0)
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="`Mine`"):
        envs.reset()


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("phase", ["reset", "step", "call"])
def test_a_refused_call_leaves_the_pending_one_as_it_was(phase: str, engine: dict[str, Any]) -> None:
    with opened(counters(3), **engine) as envs, opened(counters(3), num_workers=0) as untouched:
        for one in (envs, untouched):
            one.reset(seed=1)
            BEGIN[phase](one)
        for call, do in CALLS.items():
            if (phase, call) not in LEGAL:
                with pytest.raises((AlreadyPendingCallError, NoAsyncCallError)):
                    do(envs)
        mine, theirs = FINISH[phase](envs), FINISH[phase](untouched)
        if phase == "call":
            assert mine == theirs == (0, 1, 2)
        else:
            np.testing.assert_array_equal(mine[0], theirs[0])


@pytest.mark.parametrize("shortcut", ["get_attr", "render", "np_random", "np_random_seed"])
def test_shortcuts_of_call_speak_of_call_async_when_something_is_pending(shortcut: str) -> None:
    shortcuts = {
        "get_attr": lambda envs: envs.get_attr("env_id"),
        "render": lambda envs: envs.render(),
        "np_random": lambda envs: envs.np_random,
        "np_random_seed": lambda envs: envs.np_random_seed,
    }
    with opened(counters(2)) as envs:
        envs.reset_async()
        with pytest.raises(AlreadyPendingCallError, match="Calling `call_async` while waiting") as caught:
            shortcuts[shortcut](envs)
        assert caught.value.name == "reset"
        envs.reset_wait()


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
