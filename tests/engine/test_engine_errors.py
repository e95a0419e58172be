"""Section 1.11: what the caller hears of an exception in an environment, and what goes on afterwards."""

from __future__ import annotations

import copy
import functools
import traceback
from typing import Any

import pytest
from envs import ENGINES, PROCESS_ENGINES, CounterEnv, RaisingEnv, counters, opened, raises_logged

engines = pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))


class OddError(Exception):
    """Takes one argument and is no other exception's child."""


class RaisesFromAFunctionWithAName(CounterEnv):
    def reset(self, **kwargs: Any) -> Any:
        raise ValueError("Error in reset")


class PercentEnv(CounterEnv):
    def step(self, action: Any) -> Any:
        raise ValueError("100% wrong: %s %d")


def raising(index: int, error: BaseException, method: str = "step", at: int = 2) -> Any:
    return functools.partial(RaisingEnv, index, error, method, at)


@engines
@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("k"), OddError("odd"), ZeroDivisionError(), OSError(2, "no")], ids=repr
)
@pytest.mark.parametrize("method", ["step", "reset"])
def test_the_exception_of_an_environment_is_raised_as_what_it_is(
    engine: dict[str, Any], error: Exception, method: str
) -> None:
    # A copy, because the exception that is raised here holds on to the frames it went through.
    with opened([*counters(2), raising(2, copy.copy(error), method)], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(type(error)) as (caught, _):
            if method == "step":
                envs.step([0, 0, 0])
            else:
                envs.reset(seed=1)
        assert type(caught.value) is type(error)
        assert str(error) in str(caught.value)


def test_one_failure_makes_exactly_three_warnings() -> None:
    with opened([*counters(2), raising(2, ValueError("x"))]) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError) as (_, texts):
            envs.step([0, 0, 0])
        red, plain = "\x1b[31mERROR: ", "\x1b[0m"
        assert texts[0] == f"{red}Received the following error from Worker-2 - Shutting it down{plain}"
        assert texts[1].startswith(f"{red}Traceback (most recent call last):\n")
        assert "\nValueError: x\n" in texts[1]
        assert texts[1].endswith(f"\n{plain}")
        assert texts[2] == f"{red}Raising the last exception back to the main process.{plain}"


@pytest.mark.parametrize("engine", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "use_caller": True}], ids=str)
def test_a_failure_is_told_once(engine: dict[str, Any]) -> None:
    """By the exception that is raised, and by no lines before it that speak of another worker and an end."""
    with opened([*counters(2), raising(2, ValueError("x"))], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError) as (caught, texts):
            envs.step([0, 0, 0])
        assert texts == []
        printed = "".join(traceback.format_exception(caught.value))
        assert printed.count("in _maybe_raise") == 1, printed
        assert "env 2, " in printed


def test_two_failures_make_exactly_five_warnings_and_the_others_were_stepped() -> None:
    fns = [counters(4)[0], raising(1, ValueError("one")), counters(4)[2], raising(3, KeyError("three"))]
    with opened(fns) as envs:
        envs.reset(seed=1)
        envs.step([0] * 4)
        with raises_logged((ValueError, KeyError), failures=2) as (_, texts):
            envs.step([0] * 4)
        assert "Worker-1" in texts[0]
        assert "Worker-3" in texts[2]
        assert envs.exec_func(lambda env: env.steps, [0, 2]) == (2, None, 2, None)


def test_the_logged_traceback_shows_the_line_that_raised() -> None:
    with opened([RaisesFromAFunctionWithAName]) as envs:
        with raises_logged(ValueError, match="Error in reset") as (_, texts):
            envs.reset(seed=1)
        assert 'in reset\n    raise ValueError("Error in reset")\nValueError: Error in reset' in texts[1]


def test_a_text_with_percent_signs_is_logged_as_it_is() -> None:
    with opened([PercentEnv]) as envs:
        envs.reset(seed=1)
        with raises_logged(ValueError, match="100% wrong: %s %d") as (_, texts):
            envs.step([0])
        assert "100% wrong: %s %d" in texts[1]


@engines
def test_the_exception_says_which_environment_and_carries_the_remote_traceback(engine: dict[str, Any]) -> None:
    with opened([*counters(2), raising(2, ValueError("x"))], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError) as (caught, _):
            envs.step([0, 0, 0])
        notes = "\n".join(caught.value.__notes__)
        assert "env 2" in notes
        assert "step" in notes
        assert "_maybe_raise" in str(caught.value.__cause__) or caught.value.__traceback__ is not None


@engines
def test_nothing_is_logged_while_nothing_fails(engine: dict[str, Any], recwarn: pytest.WarningsRecorder) -> None:
    with opened(counters(2), **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0])
        envs.call("env_id")
    # From Python 3.12 on, every fork beside another thread warns, and pytest-timeout has a thread of its own.
    assert [text for warning in recwarn if "multi-threaded" not in (text := str(warning.message))] == []


@engines
def test_a_reset_builds_a_failed_environment_anew_and_the_others_never_notice(engine: dict[str, Any]) -> None:
    with opened([*counters(2), raising(2, ValueError("x"))], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError):
            envs.step([0, 0, 0])
        observations, _ = envs.reset(seed=5)
        assert observations[:, 3].tolist() == [5, 6, 7]
        # The others are the same objects, in their second episode; the third was built anew.
        assert observations[:, 2].tolist() == [2, 2, 1]
        assert envs.step([0, 0, 0])[0][:, 1].tolist() == [1, 1, 1]


@engines
def test_stepping_a_failed_environment_says_so_and_moves_nobody(engine: dict[str, Any]) -> None:
    from vecenv.errors import EnvFailed

    with opened([*counters(2), raising(2, ValueError("x"))], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError):
            envs.step([0, 0, 0])
        before = envs.exec_func(lambda env: env.steps, [0, 1])
        with pytest.raises(EnvFailed, match="2"):
            envs.step([0, 0, 0])
        assert envs.exec_func(lambda env: env.steps, [0, 1]) == before
        envs.reset(seed=1)


@engines
def test_a_masked_reset_of_the_failed_environment_alone_is_enough(engine: dict[str, Any]) -> None:
    import numpy as np

    with opened([*counters(2, lengths=(9,)), raising(2, ValueError("x"))], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError):
            envs.step([0, 0, 0])
        observations, _ = envs.reset(seed=1, options={"reset_mask": np.array([False, False, True])})
        assert observations[:, 1:3].tolist() == [[2, 1], [2, 1], [0, 1]]
        assert envs.step([0, 0, 0])[0][:, 1].tolist() == [3, 3, 1]


@engines
def test_after_a_failure_close_needs_no_force(engine: dict[str, Any]) -> None:
    with opened([*counters(2), raising(2, ValueError("x"))], **engine) as envs:
        envs.reset(seed=1)
        envs.step([0, 0, 0])
        with raises_logged(ValueError):
            envs.step([0, 0, 0])
        envs.close()
        assert envs.closed


@pytest.mark.parametrize("engine", PROCESS_ENGINES.values(), ids=list(PROCESS_ENGINES))
def test_a_failing_autoreset_is_reported_as_an_error_of_the_step(engine: dict[str, Any]) -> None:
    class FailsToResetAgain(CounterEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.episodes:
                raise ValueError("cannot reset again")
            return super().reset(**kwargs)

    for mode in ("NextStep", "SameStep"):
        fns = [counters(2)[0], functools.partial(FailsToResetAgain, 1, lengths=(1,))]
        with opened(fns, autoreset_mode=mode, **engine) as envs:
            envs.reset(seed=1)
            with raises_logged(ValueError, match="cannot reset again"):
                envs.step([0, 0])
                envs.step([0, 0])
