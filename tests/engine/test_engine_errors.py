"""Section 1.11: what the caller hears of an exception in an environment, and what goes on afterwards."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from envs import CounterEnv, Options, RaisingEnv, ReturningEnv, counters, opened, raises_logged, started

from vecenv.errors import EnvFailed


class OddError(Exception):
    """Takes one argument and is no other exception's child."""


def raising(index: int, error: BaseException, method: str = "step", at: int = 2) -> Any:
    return functools.partial(RaisingEnv, index, error, method, at)


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("k"), OddError("odd"), ZeroDivisionError(), OSError(2, "no")], ids=repr
)
@pytest.mark.parametrize("method", ["step", "reset"])
def test_the_exception_of_an_environment_is_raised_as_what_it_is(
    every_engine: Options, error: Exception, method: str
) -> None:
    # A copy, because the exception that is raised here holds on to the frames it went through.
    with started([*counters(2), raising(2, copy.copy(error), method)], **every_engine) as envs:
        envs.step([0, 0, 0])
        with raises_logged(type(error)) as (caught, _):
            if method == "step":
                envs.step([0, 0, 0])
            else:
                envs.reset(seed=1)
        assert type(caught.value) is type(error)
        assert str(error) in str(caught.value)


@contextmanager
def just_failed(engine: Options) -> Iterator[tuple[Any, Exception, list[str]]]:
    """An engine whose third environment has just raised, what was raised, and what was logged."""
    with started([*counters(2, lengths=(9,)), raising(2, ValueError("x"))], **engine) as envs:
        envs.step([0, 0, 0])
        with raises_logged(ValueError) as (caught, texts):
            envs.step([0, 0, 0])
        yield envs, caught.value, texts


def test_one_failure_makes_exactly_three_warnings() -> None:
    with just_failed({}) as (_, _, texts):
        red, plain = "\x1b[31mERROR: ", "\x1b[0m"
        assert texts[0] == f"{red}Received the following error from Worker-2 - Shutting it down{plain}"
        assert texts[1].startswith(f"{red}Traceback (most recent call last):\n")
        assert "\nValueError: x\n" in texts[1]
        assert texts[1].endswith(f"\n{plain}")
        assert texts[2] == f"{red}Raising the last exception back to the main process.{plain}"


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "use_caller": True}], ids=str
)
def test_a_failure_is_told_once(options: Options) -> None:
    """By the exception that is raised, and by no lines before it that speak of another worker and an end."""
    with just_failed(options) as (_, error, texts):
        assert texts == []
        printed = "".join(traceback.format_exception(error))
        assert printed.count("in _maybe_raise") == 1, printed
        assert "env 2, " in printed


def test_two_failures_make_exactly_five_warnings_and_the_others_were_stepped() -> None:
    fns = [counters(4)[0], raising(1, ValueError("one")), counters(4)[2], raising(3, KeyError("three"))]
    with started(fns) as envs:
        envs.step([0] * 4)
        with raises_logged((ValueError, KeyError), failures=2) as (_, texts):
            envs.step([0] * 4)
        assert "Worker-1" in texts[0]
        assert "Worker-3" in texts[2]
        assert envs.exec_func(lambda env: env.steps, [0, 2]) == (2, None, 2, None)


class PercentEnv(CounterEnv):
    def reset(self, **kwargs: Any) -> Any:
        raise ValueError("100% wrong: %s %d")


def test_the_logged_traceback_shows_the_line_that_raised_and_the_text_as_it_is() -> None:
    with opened([PercentEnv]) as envs:
        with raises_logged(ValueError, match="100% wrong: %s %d") as (_, texts):
            envs.reset(seed=1)
        raised = 'raise ValueError("100% wrong: %s %d")'
        assert f"in reset\n    {raised}\nValueError: 100% wrong: %s %d" in texts[1]


def test_the_exception_says_which_environment_and_carries_the_remote_traceback(every_engine: Options) -> None:
    with just_failed(every_engine) as (_, error, _):
        notes = "\n".join(error.__notes__)
        assert "env 2" in notes
        assert "step" in notes
        assert "_maybe_raise" in str(error.__cause__) or error.__traceback__ is not None


def test_nothing_is_logged_while_nothing_fails(every_engine: Options, recwarn: pytest.WarningsRecorder) -> None:
    with started(counters(2), **every_engine) as envs:
        envs.step([0, 0])
        envs.call("env_id")
    # From Python 3.12 on, every fork beside another thread warns, and pytest-timeout has a thread of its own.
    assert [text for warning in recwarn if "multi-threaded" not in (text := str(warning.message))] == []


def test_a_reset_builds_a_failed_environment_anew_and_the_others_never_notice(every_engine: Options) -> None:
    with just_failed(every_engine) as (envs, *_):
        observations, _ = envs.reset(seed=5)
        # the others are the same objects, in their second episode; the third was built anew
        assert observations[:, 2:].tolist() == [[2, 5], [2, 6], [1, 7]]
        assert envs.step([0, 0, 0])[0][:, 1].tolist() == [1, 1, 1]


def test_stepping_a_failed_environment_says_so_and_moves_nobody(every_engine: Options) -> None:
    with just_failed(every_engine) as (envs, *_):
        before = envs.exec_func(lambda env: env.steps, [0, 1])
        with pytest.raises(EnvFailed, match="2"):
            envs.step([0, 0, 0])
        assert envs.exec_func(lambda env: env.steps, [0, 1]) == before


def test_a_masked_reset_of_the_failed_environment_alone_is_enough(every_engine: Options) -> None:
    with just_failed(every_engine) as (envs, *_):
        observations, _ = envs.reset(seed=1, options={"reset_mask": np.array([False, False, True])})
        assert observations[:, 1:3].tolist() == [[2, 1], [2, 1], [0, 1]]
        assert envs.step([0, 0, 0])[0][:, 1].tolist() == [3, 3, 1]


def test_nothing_of_a_step_that_failed_is_told_beside_its_restart(process_engine: Options) -> None:
    """Its reward is no number: that is noticed when its observation and its info are taken."""
    zeros = np.zeros(4, np.float32)
    good, bad = (zeros, 1.0, False, False, {}), (zeros + 9, object(), False, False, {"said": ["by pickle"], "number": 3})
    fns = [functools.partial(ReturningEnv, [(zeros, {})], [step]) for step in (good, bad)]
    with started(fns, on_failure="restart", **process_engine) as envs:
        observations, rewards, _, truncations, infos = envs.step([0, 0])
        assert {key.removeprefix("_") for key in infos} == {"restarted", "final_obs"}
        assert (observations == 0).all()
        assert (rewards.tolist(), truncations.tolist()) == ([1.0, 0.0], [False, True])


def test_a_failing_autoreset_is_reported_as_an_error_of_the_step(process_engine: Options) -> None:
    class FailsToResetAgain(CounterEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.episodes:
                raise ValueError("cannot reset again")
            return super().reset(**kwargs)

    for mode in ("NextStep", "SameStep"):
        fns = [counters(2)[0], functools.partial(FailsToResetAgain, 1, lengths=(1,))]
        with (
            started(fns, autoreset_mode=mode, **process_engine) as envs,
            raises_logged(ValueError, match="cannot reset again"),
        ):
            envs.step([0, 0])
            envs.step([0, 0])
