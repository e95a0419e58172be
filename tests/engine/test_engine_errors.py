"""Closing, errors, timeouts, and calls in the wrong phase."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import math
import multiprocessing
import re
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import psutil
import pytest
from envs import (
    CounterEnv,
    Options,
    RaisingEnv,
    ReturningEnv,
    SameLengthSpace,
    SleepingEnv,
    counters,
    open_engine,
    raises_and_warns,
    ready_engine,
)
from gymnasium import spaces
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, ResetNeeded

import vecenv
from vecenv.engine import worker_process
from vecenv.errors import EnvError, EnvFailed, ObservationError, RestartsExhausted, StepTimeout, WorkerDied
from vecenv.link.messages import notes_about_others

# --- close: repeated, with a pending call, with ``terminate``, and by the garbage collector -------


class CloseLoggingEnv(CounterEnv):
    """An environment that appends its number to ``file`` when it is closed."""

    def __init__(self, file: Path, env_id: int = 0) -> None:
        super().__init__(env_id)
        self.closed_file = file


def make_close_logging_env_fns(file: Path, n: int) -> list[Any]:
    return [functools.partial(CloseLoggingEnv, file, index) for index in range(n)]


def test_close_closes_every_environment_once(every_engine: Options, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    with ready_engine(make_close_logging_env_fns(file, 3), **every_engine) as envs:
        file.unlink(missing_ok=True)  # written by the environment that was built to read its spaces
        envs.close()
        assert envs.closed is True
        envs.close()
        envs.close(timeout=1)
        envs.close(terminate=True)
    assert sorted(file.read_text().split()) == ["0", "1", "2"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kwargs", [{"terminate": True}, {"timeout": 0.2}, {}], ids=str)
def test_close_after_a_timeout_does_not_wait_for_environments(process_engine: Options, kwargs: Options) -> None:
    with ready_engine([SleepingEnv] * 2, **process_engine) as envs:
        envs.step_async([30.0, 0.0])
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.05)
        begin = time.monotonic()
        with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `step` to complete"):
            envs.close(**kwargs)
        assert time.monotonic() - begin < 10
        assert envs.closed is True


class SlowCloseEnv(SleepingEnv):
    """A :class:`SleepingEnv` with a ``close`` that takes 0.6 seconds and then writes to ``file``, if it was stepped."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def close(self) -> None:
        if self.steps:
            time.sleep(0.6)
            self.file.write_text("closed")


@pytest.mark.parametrize("method", ["step_async", "send"])
def test_close_waits_for_a_pending_step_no_longer_than_step_timeout(method: str) -> None:
    with ready_engine([SleepingEnv] * 2, num_workers=2, step_timeout=0.2, on_failure="restart") as envs:
        if method == "send":
            envs.send(np.array([30.0]), [1])
        else:
            envs.step_async([0.0, 30.0])
        begin = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a call is pending
            envs.close()
        assert 0.15 < time.monotonic() - begin < 10
        assert envs.closed is True


def test_step_timeout_is_the_limit_of_step_and_recv() -> None:
    actions = np.array([0.0, 1.5])  # seconds
    with ready_engine([SleepingEnv] * 2, num_workers=2, step_timeout=1.0) as envs:
        with pytest.raises(StepTimeout):
            envs.step(actions)
        envs.step_wait(timeout=30)
        envs.send(actions)
        with pytest.raises(StepTimeout):
            envs.recv(count=2)


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting for a pending call:UserWarning")
def test_step_timeout_does_not_limit_the_close_of_an_environment(tmp_path: Path) -> None:
    file = tmp_path / "closed"
    with ready_engine([functools.partial(SlowCloseEnv, file)], num_workers=1, step_timeout=0.3) as envs:
        envs.step_async([0.1])
        envs.close()
    assert file.read_text() == "closed"


class LargeObservationEnv(SleepingEnv):
    """A :class:`SleepingEnv` with observations larger than a pipe, and with a ``close`` that creates ``file``."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.observation_space = spaces.Box(-1, 2**40, (50_000,), np.int64)

    def _observe(self) -> np.ndarray:
        return np.full(50_000, self.steps, np.int64)

    def close(self) -> None:
        self.file.touch()


@pytest.mark.parametrize("options", [{}, pytest.param({"step_timeout": 3.0}, marks=pytest.mark.long)], ids=str)
@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting for a pending call:UserWarning")
def test_close_closes_an_environment_with_a_large_reply_while_another_one_hangs(options: Options, tmp_path: Path) -> None:
    files = [tmp_path / "0", tmp_path / "1"]
    env_fns = [functools.partial(LargeObservationEnv, file) for file in files]
    with ready_engine(env_fns, num_workers=2, shared_memory=False, **options) as envs:
        assert not files[1].exists()
        envs.step_async([30.0, 0.0])
        envs.close(timeout=3.0)
    assert files[1].exists()


def test_close_with_an_infinite_timeout_waits_for_the_close_of_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vecenv.engine.vector_env.CLOSE_TIMEOUT", 0.1)
    file = tmp_path / "closed"
    with ready_engine([functools.partial(SlowCloseEnv, file)], num_workers=1) as envs:
        envs.step([0.0])
        envs.close(timeout=math.inf)
    assert file.read_text() == "closed"


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting for a pending call:UserWarning")
def test_close_that_waits_logs_the_environment_and_its_position(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "REPORT_CLOSE_SECONDS", 0.2)
    with ready_engine([SleepingEnv] * 4, num_workers=2) as envs:
        envs.step_async([0.0, 1.0, 0.0, 1.0])
        envs.close()
    (line,) = caplog.messages
    pattern = r"close\(\) is waiting for env 1, of envs 0-1, at envs.py:\d+ in step \(worker 0, pid \d+\) and 1 more worker;"
    assert re.match(pattern, line), line


@pytest.mark.parametrize("pending", ["reset", "step", "call"])
def test_close_during_a_pending_call_warns_and_waits(every_engine: Options, pending: str) -> None:
    begin_call = {
        "reset": lambda envs: envs.reset_async(seed=1),
        "step": lambda envs: envs.step_async([0.05, 0.05]),
        "call": lambda envs: envs.call_async("sleep", 0.05),
    }
    with ready_engine([SleepingEnv] * 2, **every_engine) as envs:
        begin_call[pending](envs)
        text = f"Calling `close` while waiting for a pending call to `{pending}` to complete."
        with pytest.warns(UserWarning, match=text):
            envs.close()
        assert envs.closed is True


def test_close_does_not_raise_the_error_of_a_pending_call(process_engine: Options) -> None:
    with ready_engine(counters(2), **process_engine) as envs:
        envs.call_async("fail", ValueError("x"))
        with pytest.warns(UserWarning):  # noqa: PT030 - the failure may be logged as well
            envs.close()
        assert envs.closed is True


def test_close_extras_accepts_the_arguments_of_close(every_engine: Options) -> None:
    with ready_engine(counters(2), **every_engine) as envs:
        envs.close_extras(timeout=5, terminate=False)
        envs.close()


def test_unreferenced_engine_is_closed(every_engine: Options) -> None:
    envs: Any = vecenv.AsyncVectorEnv(counters(2), **every_engine)
    envs.reset(seed=1)
    pids = [process.pid for process in envs.processes]
    reference = weakref.ref(envs)
    del envs
    gc.collect()
    assert reference() is None
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))


def test_engine_with_a_failed_constructor_can_be_deleted() -> None:
    envs: Any = vecenv.AsyncVectorEnv.__new__(vecenv.AsyncVectorEnv)
    with pytest.raises(ValueError, match="AutoresetMode"):
        envs.__init__(counters(1), autoreset_mode="x")
    del envs
    gc.collect()


# --- exceptions of environments, as the caller gets them, and the calls that follow --------------


class CustomError(Exception):
    """An exception class that is not built in."""


def raising_env_fn(index: int, error: BaseException, method: str = "step", at: int = 2) -> Any:
    return functools.partial(RaisingEnv, index, error, method, at)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyError("k"), CustomError("odd"), ZeroDivisionError(), OSError(2, "no")], ids=repr
)
@pytest.mark.parametrize("method", ["step", "reset"])
def test_exception_of_an_env_is_raised_with_its_type_and_text(every_engine: Options, error: Exception, method: str) -> None:
    # a copy, because a raised exception keeps references to the frames that it passed through
    with ready_engine([*counters(2), raising_env_fn(2, copy.copy(error), method)], **every_engine) as envs:
        envs.step([0, 0, 0])
        with raises_and_warns(type(error)) as (caught, _):
            if method == "step":
                envs.step([0, 0, 0])
            else:
                envs.reset(seed=1)
        assert type(caught.value) is type(error)
        assert str(error) in str(caught.value)


@contextmanager
def failed_engine(engine: Options) -> Iterator[tuple[Any, Exception, list[str]]]:
    """Yield an engine after env 2 has raised in a step, its exception, and the texts of the warnings."""
    with ready_engine([*counters(2, lengths=(9,)), raising_env_fn(2, ValueError("x"))], **engine) as envs:
        envs.step([0, 0, 0])
        with raises_and_warns(ValueError) as (caught, texts):
            envs.step([0, 0, 0])
        yield envs, caught.value, texts


def test_one_failure_emits_exactly_three_warnings() -> None:
    with failed_engine({}) as (_, _, texts):
        prefix, suffix = "\x1b[31mERROR: ", "\x1b[0m"  # escape codes for red
        assert texts[0] == f"{prefix}Received the following error from Worker-2 - Shutting it down{suffix}"
        assert texts[1].startswith(f"{prefix}Traceback (most recent call last):\n")
        assert "\nValueError: x\n" in texts[1]
        assert texts[1].endswith(f"\n{suffix}")
        assert texts[2] == f"{prefix}Raising the last exception back to the main process.{suffix}"


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "use_caller": True}], ids=str
)
def test_failure_without_one_process_per_env_is_reported_only_by_the_exception(options: Options) -> None:
    """There are no warnings like Gymnasium's about the end of a worker, because the workers continue."""
    with failed_engine(options) as (_, error, texts):
        assert texts == []
        printed = "".join(traceback.format_exception(error))
        assert printed.count("in _maybe_raise") == 1, printed
        assert "env 2, " in printed


def test_two_failures_emit_exactly_five_warnings_and_others_are_stepped() -> None:
    fns = [counters(4)[0], raising_env_fn(1, ValueError("one")), counters(4)[2], raising_env_fn(3, KeyError("three"))]
    with ready_engine(fns) as envs:
        envs.step([0] * 4)
        with raises_and_warns((ValueError, KeyError), failures=2) as (_, texts):
            envs.step([0] * 4)
        assert "Worker-1" in texts[0]
        assert "Worker-3" in texts[2]
        assert envs.exec_func(lambda env: env.steps, [0, 2]) == (2, None, 2, None)


class PercentEnv(CounterEnv):
    """An environment that raises an exception with percent signs in its text, which logging must not interpret."""

    def reset(self, **kwargs: Any) -> Any:
        raise ValueError("100% wrong: %s %d")


def test_logged_traceback_shows_the_raising_line_and_the_unformatted_text() -> None:
    with open_engine([PercentEnv]) as envs:
        with raises_and_warns(ValueError, match="100% wrong: %s %d") as (_, texts):
            envs.reset(seed=1)
        line = 'raise ValueError("100% wrong: %s %d")'
        assert f"in reset\n    {line}\nValueError: 100% wrong: %s %d" in texts[1]


def test_exception_names_the_environment_and_shows_its_traceback(every_engine: Options) -> None:
    with failed_engine(every_engine) as (_, error, _):
        notes = "\n".join(error.__notes__)
        assert "env 2" in notes
        assert "step" in notes
        assert error.envs == (2,)  # type: ignore[attr-defined]
        assert "_maybe_raise" in "".join(traceback.format_exception(error))


def test_exception_has_the_indices_of_all_environments_that_failed() -> None:
    env_fns = [*counters(1), *(raising_env_fn(index, ValueError("x"), at=1) for index in (1, 2)), *counters(2)]
    with ready_engine(env_fns, num_workers=5) as envs:
        envs.processes[4].kill()
        with raises_and_warns(ValueError) as (caught, _):
            envs.step([0] * 5)
        assert caught.value.envs == (1, 2, 4)  # type: ignore[attr-defined]
        envs.reset(options={"reset_mask": np.isin(range(5), caught.value.envs)})  # type: ignore[attr-defined]
        assert "failed" not in repr(envs)


class ErrorWithoutAttributes(Exception):
    """An exception that refuses the attribute ``envs``."""

    @property
    def envs(self) -> None:
        raise AttributeError("envs")


def test_exception_that_refuses_attributes_is_raised() -> None:
    with ready_engine([*counters(1), raising_env_fn(1, ErrorWithoutAttributes("x"), at=1)], num_workers=0) as envs:
        with raises_and_warns(ErrorWithoutAttributes) as (caught, _):
            envs.step([0, 0])
        assert not hasattr(caught.value, "envs")


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that can be neither changed nor unpickled."""

    code: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotsError(Exception):
    """An exception that cannot be changed: even ``add_note`` raises, and so does an assignment to ``__cause__``."""

    code: int = 3


class ConstantError(Exception):
    """An exception that refuses all assignments, as :class:`FrozenSlotsError` does."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set")


CONSTANT_ERRORS = pytest.mark.parametrize("error", [FrozenError, FrozenSlotsError, ConstantError])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("method", ["step", "reset", "call"])
@CONSTANT_ERRORS
def test_exception_that_cannot_be_changed_is_raised_like_others(error: Any, method: str, num_workers: int) -> None:
    at = 2 if method == "reset" else 1
    env_fns = [RaisingEnv, raising_env_fn(1, error, method, at), raising_env_fn(2, error, method, at)]
    calls: dict[str, Callable[[Any], Any]] = {
        "step": lambda envs: envs.step([0] * 3),
        "reset": lambda envs: envs.reset(),
        "call": lambda envs: envs.call("_maybe_raise", "call"),
    }
    with ready_engine(env_fns, num_workers=num_workers) as envs:
        with pytest.raises((error, EnvError)) as caught:
            calls[method](envs)
        assert isinstance(caught.value, EnvError if num_workers and error is FrozenError else error)
        assert caught.value.envs == (1, 2)
        printed = "".join(traceback.format_exception(caught.value))
        assert "env 1, " in printed
        assert "also failed in the same way: env 2" in printed
        assert "in _maybe_raise" in printed
        assert [record.env for record in envs.errors] == [1, 2]
        envs.reset(seed=1)
        assert envs.call("env_id") == (0, 1, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
@CONSTANT_ERRORS
def test_environment_is_restarted_after_an_exception_that_cannot_be_changed(error: Any, num_workers: int) -> None:
    env_fns = [RaisingEnv, raising_env_fn(1, error, at=1)]
    with ready_engine(env_fns, num_workers=num_workers, on_failure="restart") as envs:
        assert envs.step([0, 0])[3].tolist() == [False, True]
        assert len(envs.errors) == 1


class UnreducibleInfoEnv(CounterEnv):
    """An environment with an info value that raises a :class:`ConstantError` when it is pickled."""

    def __reduce__(self) -> Any:
        raise ConstantError("no state")

    def step(self, action: Any) -> Any:
        return *super().step(action)[:4], {"env": self}


def test_info_whose_pickling_raises_an_exception_that_cannot_be_changed_is_named() -> None:
    with ready_engine([UnreducibleInfoEnv], num_workers=1) as envs:
        with pytest.raises(EnvError, match=r"env 0, .* its info key 'env' cannot be pickled: ConstantError: no state"):
            envs.step([0])
        assert envs.call("steps") == (1,)


class OnceUnpicklableInfoEnv(CounterEnv):
    """An environment with reset infos of which the first, in each process, cannot be pickled."""

    is_first: ClassVar[bool] = True

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        is_first, type(self).is_first = self.is_first, False
        return super().reset(**kwargs)[0], {"is_first": is_first, **({"lock": threading.Lock()} if is_first else {})}


def test_environment_rebuilt_because_of_its_info_has_only_the_new_info() -> None:
    with open_engine([OnceUnpicklableInfoEnv], num_workers=1, on_failure="restart") as envs:
        assert envs.reset()[1]["is_first"].tolist() == [False]
        assert "lock" in str(envs.errors[0].error)


def test_nothing_is_logged_without_a_failure(every_engine: Options, recwarn: pytest.WarningsRecorder) -> None:
    with ready_engine(counters(2), **every_engine) as envs:
        envs.step([0, 0])
        envs.call("env_id")
    # From Python 3.12 on, a fork warns if there are other threads, and pytest-timeout has one.
    texts = [str(warning.message) for warning in recwarn]
    assert [text for text in texts if "multi-threaded" not in text] == []


def test_reset_rebuilds_only_the_failed_environment(every_engine: Options) -> None:
    with failed_engine(every_engine) as (envs, *_):
        observations, _ = envs.reset(seed=5)
        # the first two environments are in their second episode; the third was rebuilt and is in its first
        assert observations[:, 2:].tolist() == [[2, 5], [2, 6], [1, 7]]
        assert envs.step([0, 0, 0])[0][:, 1].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("by_row", [True, False], ids=["by row", "at once"])
@pytest.mark.parametrize("method", ["step", "reset"])
def test_stats_count_all_but_the_failed_environment(every_engine: Options, method: str, by_row: bool) -> None:
    with ready_engine([*counters(2), raising_env_fn(2, ValueError("x"), method)], **every_engine) as envs:
        envs.step([0, 0, 0])
        before = envs.stats()
        if by_row:
            if method == "step":
                envs.send([0, 0, 0], range(3))
            else:
                envs.reset_async()
            for _ in range(3):
                with contextlib.suppress(ValueError):
                    envs.recv(count=1)
        else:
            with pytest.raises(ValueError, match="x"):
                envs.step([0, 0, 0]) if method == "step" else envs.reset()
        after = envs.stats()
        assert [after[name] - before[name] for name in ("steps", "resets")] == ([2, 0] if method == "step" else [0, 2])


class ReusingTextEnv(CounterEnv):
    """An environment that changes its array in every step, also before it raises for action 1. Observations are pickled."""

    def __init__(self) -> None:
        super().__init__(lengths=(1000,))
        self.observation_space = spaces.Dict({"text": spaces.Text(5), "steps": spaces.Box(0, 1000, (1,))})
        self.array = np.zeros(1, np.float32)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.array[:] = 0
        return {"text": "reset", "steps": self.array}, {}

    def step(self, action: Any) -> Any:
        self.array += 1
        if action == 1:
            raise ValueError("action 1")
        return {"text": "step", "steps": self.array}, 0.0, False, False, {}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_failed_env_keeps_its_last_complete_pickled_observation(every_engine: Options) -> None:
    with ready_engine([ReusingTextEnv] * 2, **every_engine) as envs:
        envs.step([0, 0])
        with pytest.raises(ValueError, match="action 1"):
            envs.step([1, 0])
        observations, _ = envs.reset(options={"reset_mask": np.array([False, True])})
        assert observations["steps"].tolist() == [[1.0], [0.0]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_stats_count_all_errors_though_only_the_last_1000_are_kept() -> None:
    with ready_engine([raising_env_fn(row, ValueError("x"), at=1) for row in range(300)], num_workers=0) as envs:
        for _ in range(4):
            with pytest.raises(ValueError, match="x"):
                envs.step([0] * 300)
            envs.reset()
        assert (len(envs.errors), envs.stats()["errors"]) == (1000, 1200)


class MisfitEnv(CounterEnv):
    """An environment with pickled observations.

    Action 3 returns an observation without keys, and so does a reset if the option ``misfit`` is the environment's index.
    """

    def __init__(self, env_id: int = 0) -> None:
        super().__init__(env_id, lengths=(1000,))
        self.observation_space = spaces.Dict({"text": spaces.Text(20), "steps": spaces.Discrete(1000)})

    def _observe(self) -> Any:
        return {"text": f"{self.env_id}", "steps": self.steps}

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        return ({} if kwargs.get("options") == {"misfit": self.env_id} else observation), info

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return {} if action == 3 else observation, *others


MISFITS = [functools.partial(MisfitEnv, row) for row in range(3)]


@pytest.mark.parametrize("method", ["step", "reset"])
def test_stats_count_all_but_the_environment_whose_observation_does_not_fit(method: str) -> None:
    with ready_engine(MISFITS, num_workers=2) as envs:
        before = envs.stats()
        with pytest.raises(ObservationError, match="env 1"):
            envs.step([0, 3, 0]) if method == "step" else envs.reset(options={"misfit": 1})
        after = envs.stats()
        assert [after[name] - before[name] for name in ("steps", "resets")] == ([2, 0] if method == "step" else [0, 2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_environment_with_a_pickled_observation_that_does_not_fit_is_rebuilt(num_workers: int) -> None:
    with ready_engine(MISFITS, num_workers=num_workers, on_failure="restart") as envs:
        envs.step([0, 0, 0])
        observations, _, _, truncations, infos = envs.step([0, 3, 0])
        assert observations["steps"].tolist() == [2, 1, 2]
        assert truncations.tolist() == infos["restarted"].tolist() == [False, True, False]
        assert infos["final_obs"][1] == {"text": "1", "steps": 1}
        (record,) = envs.errors
        assert (record.env, type(record.error)) == (1, ObservationError)
        assert envs.step([0, 0, 0])[0]["steps"].tolist() == [3, 0, 3]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_masked_reset_after_an_observation_that_does_not_fit_returns_the_one_before(num_workers: int, dropped: bool) -> None:
    with ready_engine(MISFITS, num_workers=num_workers) as envs:
        envs.step([0, 0, 0])
        if dropped:  # the reset drops the result of this step
            envs.send([0, 3, 0], range(3))
        else:
            with pytest.raises(ObservationError, match="env 1") as caught:
                envs.step([0, 3, 0])
            assert caught.value.envs == (1,)  # type: ignore[attr-defined]
        observations, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
        assert observations["steps"].tolist() == [0, 1, 2]
        with pytest.raises(EnvFailed, match="env 1 failed earlier"):
            envs.step([0, 0, 0])
        envs.reset(options={"reset_mask": np.array([False, True, False])})
        assert envs.step([0, 0, 0])[0]["steps"].tolist() == [1, 1, 3]


def test_observation_of_a_reset_that_does_not_fit_is_not_stored() -> None:
    with ready_engine(MISFITS, num_workers=2) as envs:
        with pytest.raises(ObservationError, match="env 1"):
            envs.reset(options={"misfit": 1})
        observations, _ = envs.reset(options={"reset_mask": np.array([True, False, False])})
        assert observations["steps"].tolist() == [0, 0, 0]
    with open_engine(MISFITS, num_workers=2) as envs:
        with pytest.raises(ObservationError, match="env 1"):
            envs.reset(options={"misfit": 1})
        with pytest.raises(ValueError, match="no observation of env 1 yet"):
            envs.reset(options={"reset_mask": np.array([True, False, False])})


@pytest.mark.parametrize("method", ["step", "reset"])
def test_recv_raises_for_observations_that_do_not_fit_and_returns_the_other_rows(method: str) -> None:
    with ready_engine(MISFITS, num_workers=2) as envs:
        before = envs.stats()
        if method == "step":
            envs.send([3, 0, 3], range(3))
        else:
            envs.reset_async(options=[{"misfit": 0}, None, {"misfit": 2}], env_id=range(3))
        rows, failed = [], []
        while count := envs.in_flight.size:
            try:
                rows += envs.recv(count=count)[4]["env_id"].tolist()
            except ObservationError as error:
                failed += error.envs  # type: ignore[attr-defined]
        assert rows == [1]
        assert sorted(failed) == [0, 2]
        after = envs.stats()
        assert [after[name] - before[name] for name in ("steps", "resets")] == ([1, 0] if method == "step" else [0, 1])
        envs.reset(options={"reset_mask": np.array([True, False, True])})
        envs.send([0, 0, 0], range(3))
        assert sorted(envs.recv(count=3)[0]["text"]) == ["0", "1", "2"]


class LengthEnv(CounterEnv):
    """An environment with observations of as many elements as the action."""

    def __init__(self, env_id: int = 0) -> None:
        super().__init__(env_id, lengths=(1000,))
        self.observation_space = SameLengthSpace()

    def reset(self, **kwargs: Any) -> Any:
        return np.zeros(1), super().reset(**kwargs)[1]

    def step(self, action: Any) -> Any:
        return np.zeros(action), *super().step(action)[1:]


LENGTHS = [functools.partial(LengthEnv, row) for row in range(3)]


@pytest.mark.filterwarnings("ignore:.*SameLengthSpace")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_observations_that_do_not_fit_together_end_the_request(num_workers: int) -> None:
    with ready_engine(LENGTHS, num_workers=num_workers) as envs:
        before = envs.stats()["steps"]
        with pytest.raises(ValueError, match="same shape") as caught:
            envs.step([2, 3, 2])
        assert caught.value.envs == (0, 1, 2)  # type: ignore[attr-defined]
        envs.send([2, 3, 2], range(3))
        with pytest.raises(ValueError, match="same shape") as caught:
            envs.recv(count=3)
        assert caught.value.envs == (0, 1, 2)  # type: ignore[attr-defined]
        assert envs.in_flight.tolist() == []
        assert envs.step([4, 4, 4])[0].shape == (3, 4)
        assert envs.stats()["steps"] == before + 9
        assert not envs.errors


@pytest.mark.filterwarnings("ignore:.*SameLengthSpace")
def test_rebuilt_environments_are_not_subtracted_from_the_count_of_a_later_step() -> None:
    """The step that rebuilds them raises, because the observations do not fit together."""
    with ready_engine(LENGTHS, num_workers=2, on_failure="restart") as envs:
        envs.processes[1].kill()
        with pytest.raises(WorkerDied):
            envs.call("sleep", 0.0)
        with pytest.raises(ValueError, match="same shape"):
            envs.step([3, 1, 1])
        before = envs.stats()["steps"]
        envs.step([1, 1, 1])
        assert envs.stats()["steps"] == before + 3


def test_step_of_a_failed_environment_raises_and_steps_no_other(every_engine: Options) -> None:
    with failed_engine(every_engine) as (envs, *_):
        before = envs.exec_func(lambda env: env.steps, [0, 1])
        with pytest.raises(EnvFailed, match="2"):
            envs.step([0, 0, 0])
        assert envs.exec_func(lambda env: env.steps, [0, 1]) == before


def test_masked_reset_recovers_a_failed_environment(every_engine: Options) -> None:
    with failed_engine(every_engine) as (envs, *_):
        observations, _ = envs.reset(seed=1, options={"reset_mask": np.array([False, False, True])})
        assert observations[:, 1:3].tolist() == [[2, 1], [2, 1], [0, 1]]
        assert envs.step([0, 0, 0])[0][:, 1].tolist() == [3, 3, 1]


@pytest.fixture(autouse=True)
def enable_the_collector_afterwards() -> Iterator[None]:
    yield
    gc.enable()


class InstanceCountingEnv(CounterEnv):
    """An environment that counts the earlier instances that still exist, and puts the number into its reset infos.

    It raises for action 4, and in a reset with options if there are no earlier instances.
    """

    instances: ClassVar[weakref.WeakSet[InstanceCountingEnv]] = weakref.WeakSet()

    def __init__(self) -> None:
        gc.disable()  # an instance is freed only when its last reference is dropped
        super().__init__(lengths=(1000,))
        self.earlier = len(self.instances)
        self.instances.add(self)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if kwargs.get("options") and not self.earlier:
            raise RuntimeError("no options")
        return super().reset(**kwargs)[0], {"earlier": self.earlier}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if action == 4:
            raise RuntimeError("no fours")
        return super().step(action)


@pytest.mark.parametrize("env_threads", [1, 2])
def test_failed_environment_is_freed_before_its_replacement_is_built(env_threads: int) -> None:
    with ready_engine([InstanceCountingEnv], num_workers=1, env_threads=env_threads, on_failure="restart") as envs:
        for saves in (False, False, True):
            if saves:
                envs.save(verify=False)
            envs.step(np.array([4]))
            assert envs.step(np.array([0]))[4]["earlier"].tolist() == [0]


def test_reset_frees_a_failed_environment() -> None:
    with ready_engine([InstanceCountingEnv], num_workers=1) as envs:
        for _ in range(2):
            with raises_and_warns(RuntimeError, "no fours"):
                envs.step(np.array([4]))
            with raises_and_warns(RuntimeError, "no options"):
                envs.reset(options={"a": 1})
            assert envs.reset()[1]["earlier"].tolist() == [0]


class FailingStepEnv(CounterEnv):
    """An environment with steps that fail. Actions 1 to 4 return a wrong shape; others raise an error with the action."""

    def step(self, action: Any) -> Any:
        if 1 <= action <= 4:
            return np.zeros(1, self.observation_space.dtype), 0.0, False, False, {}
        raise RuntimeError(f"cannot do {action}")


def test_equal_exceptions_share_one_note() -> None:
    with ready_engine([FailingStepEnv] * 8, num_workers=2) as envs:
        with pytest.raises(ObservationError, match="env 0: observation") as caught:
            envs.step(np.array([1, 2, 3, 5, 5, 6, 4, 5]))
        (location, *others) = caught.value.__notes__
        assert location.startswith("env 0, worker 0")
        assert others == [
            "also failed in the same way: envs 1-2, 6",
            "also failed: envs 3-4, 7: RuntimeError: cannot do 5",
            "also failed: env 5: RuntimeError: cannot do 6",
        ]


def test_equal_exits_of_different_workers_share_one_note() -> None:
    exits = [EnvError(f"env {row}, worker {row}, during step: SystemExit: 3", original="SystemExit: 3") for row in (0, 1)]
    assert notes_about_others(list(enumerate(exits))) == ["also failed in the same way: env 1"]
    # an index is ignored only in vecenv's own texts
    first, second = ValueError("the user's own text: env 0: x"), ValueError("the user's own text: env 1: x")
    assert notes_about_others([(0, first), (1, second)]) == ["also failed: env 1: ValueError: the user's own text: env 1: x"]


def test_traceback_of_a_wrong_observation_shows_no_other_exception(every_engine: Options) -> None:
    with ready_engine([FailingStepEnv] * 2, **every_engine) as envs:
        with pytest.raises(ObservationError) as caught:
            envs.step(np.array([1, 1]))
        assert "During handling" not in "".join(traceback.format_exception(caught.value))


class ExitingEnv(CounterEnv):
    def step(self, action: Any) -> Any:
        raise SystemExit(3)


def test_exit_in_a_worker_is_described_once(process_engine: Options) -> None:
    with ready_engine([ExitingEnv] * 2, **process_engine) as envs:
        with pytest.raises(EnvError) as caught:
            envs.step(np.array([0, 0]))
        text = "".join(traceback.format_exception_only(caught.value))
        assert text.count("during step") == 1


class NeedsResetEnv(CounterEnv):
    """An environment with steps that use an attribute which only ``reset`` defines."""

    def reset(self, **kwargs: Any) -> Any:
        self.position = 0
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.position += 1
        if action == 4:
            raise RuntimeError("no fours")
        return super().step(action)


@pytest.mark.parametrize(("num_workers", "on_failure"), [(0, "raise"), (2, "raise"), (2, "restart")])
def test_exception_before_the_first_reset_has_a_note_about_the_reset(num_workers: int, on_failure: Any) -> None:
    note = "reset() was never called"
    with open_engine([NeedsResetEnv] * 2, num_workers=num_workers, on_failure=on_failure) as envs:
        with pytest.raises(AttributeError, match="position") as caught:
            envs.step(np.array([0, 0]))
        assert note in caught.value.__notes__
        envs.reset()
        if on_failure == "raise":
            with pytest.raises(RuntimeError, match="no fours") as later:
                envs.step(np.array([4, 0]))
            assert note not in later.value.__notes__
        else:
            assert envs.step(np.array([4, 0]))[4]["restarted"].tolist() == [True, False]
    # no note if the exception itself is about the missing reset
    env_fns = [functools.partial(gymnasium.make, "CartPole-v1")] * 2
    with open_engine(env_fns, num_workers=num_workers, on_failure=on_failure) as envs:
        with pytest.raises(ResetNeeded) as checked:
            envs.step(np.array([0, 0]))
        assert note not in checked.value.__notes__


def test_error_of_a_dead_worker_explains_how_to_recover() -> None:
    with ready_engine(counters(2), num_workers=2) as envs:
        envs.processes[1].kill()
        with pytest.raises(WorkerDied) as caught:
            envs.step([0, 0])
        assert caught.value.__notes__ == [
            "reset() rebuilds the environments of dead workers; on_failure='restart' does so automatically"
        ]
        envs.reset()


def test_error_without_text_is_shown_without_a_colon(caplog: pytest.LogCaptureFixture) -> None:
    with ready_engine([functools.partial(RaisingEnv, error=MemoryError())], num_workers=1, on_failure="restart") as envs:
        envs.step(np.array([0]))
        text = r" died during step: MemoryError, at envs.py:\d+ in _maybe_raise, so it was killed$"
        assert re.search(text, caplog.text.strip())
        assert str(envs.errors[0]).endswith("step: MemoryError")


def test_restart_after_a_memory_error_starts_a_new_process() -> None:
    """A library may have leaked the memory, so a rebuild in the same process could fail again."""
    env_fns = [functools.partial(RaisingEnv, error=MemoryError()), RaisingEnv]
    with ready_engine(env_fns, num_workers=1, on_failure="restart") as envs:
        pid = envs.processes[0].pid
        # the second environment was not in a step when its process was killed, so the next step restarts it
        for rows in ([True, False], [False, True]):
            assert envs.step(np.array([0, 0]))[4]["restarted"].tolist() == rows
        assert envs.processes[0].pid != pid
        assert envs.stats()["restarts"] == 1


class OutOfMemoryEnv(SleepingEnv):
    """A :class:`SleepingEnv` that raises ``MemoryError`` for action 0."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if not action:
            raise MemoryError
        return super().step(action)


@pytest.mark.parametrize(("method", "args"), [("reset", ()), ("step", ([0.01, 0.01],))])
def test_rows_of_a_worker_killed_after_a_memory_error_do_not_stay_in_flight(method: str, args: Any) -> None:
    """``send`` sends this worker two messages, and the budget does not allow a restart."""
    with open_engine([OutOfMemoryEnv] * 2, num_workers=1, on_failure=vecenv.Restart(limit=0)) as envs:
        getattr(envs, method)(*args)
        envs._driver.exchange.rows_at_once = 1
        envs.send(np.array([0, 0.5]))
        with pytest.raises(RestartsExhausted):
            envs.recv()
        assert not len(envs.in_flight)


def test_restarted_row_contains_no_data_of_its_failed_step(process_engine: Options) -> None:
    """The invalid reward is detected after the observation and the info were read."""
    zeros = np.zeros(4, np.float32)
    good, bad = (zeros, 1.0, False, False, {}), (zeros + 9, object(), False, False, {"pickled": [1], "number": 3})
    fns = [functools.partial(ReturningEnv, [(zeros, {})], [step]) for step in (good, bad)]
    with ready_engine(fns, on_failure="restart", **process_engine) as envs:
        observations, rewards, _, truncations, infos = envs.step([0, 0])
        assert {key.removeprefix("_") for key in infos} == {"restarted", "final_obs"}
        assert (observations == 0).all()
        assert (rewards.tolist(), truncations.tolist()) == ([1.0, 0.0], [False, True])


def test_error_in_an_autoreset_is_raised_by_step(process_engine: Options) -> None:
    class FailingSecondResetEnv(CounterEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.episodes:
                raise ValueError("cannot reset again")
            return super().reset(**kwargs)

    for mode in ("NextStep", "SameStep"):
        fns = [counters(2)[0], functools.partial(FailingSecondResetEnv, 1, lengths=(1,))]
        with (
            ready_engine(fns, autoreset_mode=mode, **process_engine) as envs,
            raises_and_warns(ValueError, match="cannot reset again"),
        ):
            envs.step([0, 0])
            envs.step([0, 0])


# --- timeouts: one deadline applies to all environments, and a late result stays pending ---------

DELAY_SECONDS = 0.5


def sleeping_env_fns(n: int = 3) -> list[Any]:
    return [lambda i=i: SleepingEnv(i) for i in range(n)]


# Each value has a function that submits the request, the method that waits for its result, and a check of the result.
WAITS: dict[str, tuple[Callable[[Any], Any], str, Callable[[Any], bool]]] = {
    "reset": (
        lambda envs: envs.reset_async(seed=7, options={"seconds": DELAY_SECONDS}), "reset_wait",
        lambda result: result[0][:, 1:].tolist() == [[0, 2, 7], [0, 2, 8], [0, 2, 9]],
    ),
    "step": (
        lambda envs: envs.step_async([0.0, DELAY_SECONDS, 0.0]), "step_wait",
        lambda result: (result[0][:, 1].tolist(), result[1].tolist()) == ([1, 1, 1], [0.001, 1.001, 2.001]),
    ),
    "call": (lambda envs: envs.call_async("sleep", DELAY_SECONDS), "call_wait", lambda result: result == (0, 1, 2)),
    "exec_func": (
        lambda envs: envs.exec_func_send(lambda env: env.sleep(DELAY_SECONDS), [1]), "exec_func_fetch",
        lambda result: result == (None, 1, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("timeout", [0, pytest.param(0.1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "call", ["call", "exec_func", *(pytest.param(name, marks=pytest.mark.long) for name in ("reset", "step"))]
)
def test_late_result_is_returned_by_the_same_wait(process_engine: Options, call: str, timeout: float) -> None:
    submit, wait, is_expected = WAITS[call]
    with ready_engine(sleeping_env_fns(), **process_engine) as envs:
        submit(envs)
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            getattr(envs, wait)(timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, StepTimeout)
        assert str(caught.value).startswith(f"The call to `{wait}` has timed out after {float(timeout)} second(s).")
        pending = "call" if call == "exec_func" else call
        for refused_call in (lambda: envs.step_async([0.0] * 3), envs.reset_async, lambda: envs.set_attr("note", "x")):
            with pytest.raises(AlreadyPendingCallError, match=f"pending call to `{pending}`"):
                refused_call()
        assert is_expected(getattr(envs, wait)())
        steps = 2 if call == "step" else 1
        observations, rewards, *_ = envs.step([0.0, 0.0, 0.0])
        assert observations[:, 1].tolist() == [steps] * 3
        np.testing.assert_allclose(rewards, np.arange(3) + steps / 1000)


def test_repeated_timeouts_lose_no_result(process_engine: Options) -> None:
    with ready_engine(sleeping_env_fns(), **process_engine) as envs:
        timeouts = 0
        for t in range(1, 4):
            envs.step_async([0.0, 0.2, 0.0])
            while True:
                try:
                    observations, rewards, *_ = envs.step_wait(timeout=0.02)
                    break
                except TimeoutError:
                    timeouts += 1
            assert observations[:, 1].tolist() == [t] * 3
            np.testing.assert_allclose(rewards, np.arange(3) + t / 1000)
        assert timeouts >= 1


def test_result_within_the_timeout_is_returned(process_engine: Options) -> None:
    with open_engine(sleeping_env_fns(), **process_engine) as envs:
        envs.reset_async(seed=1)
        assert envs.reset_wait(timeout=20)[0].shape == (3, 4)
        envs.step_async([0.0, 0.0, 0.0])
        assert envs.step_wait(timeout=20)[0].shape == (3, 4)
        envs.call_async("env_id")
        assert envs.call_wait(timeout=20) == (0, 1, 2)


@pytest.mark.long
def test_timeout_applies_to_all_environments_together() -> None:
    with ready_engine(sleeping_env_fns()) as envs:
        envs.step_async([0.3, 0.6, 0.9])
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.4)
        assert time.monotonic() - begin < 20
        assert envs.step_wait()[0][:, 1].tolist() == [1, 1, 1]


# --- calls in the wrong phase: the order of checks, and unchanged state (each call in each phase: ``faults/test_misuse.py``)

# methods and attributes that submit a call and wait for its result
SHORTCUTS: dict[str, Callable[[Any], Any]] = {
    "call": lambda envs: envs.call("env_id"),
    "get_attr": lambda envs: envs.get_attr("env_id"),
    "render": lambda envs: envs.render(),
    "np_random": lambda envs: envs.np_random,
    "np_random_seed": lambda envs: envs.np_random_seed,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shortcut", SHORTCUTS.values(), ids=list(SHORTCUTS))
def test_shortcuts_of_call_are_refused_like_call_async(every_engine: Options, shortcut: Callable[[Any], Any]) -> None:
    with open_engine(counters(2), **every_engine) as envs:
        envs.reset_async()
        with pytest.raises(AlreadyPendingCallError, match="Calling `call_async` while waiting") as caught:
            shortcut(envs)
        assert caught.value.name == "reset"
        envs.reset_wait()
        envs.close()
        for refused_call in (shortcut, lambda envs: envs.exec_func(id)):
            with pytest.raises(ClosedEnvironmentError) as closed:
                refused_call(envs)
            assert str(closed.value) == "Trying to operate on `AsyncVectorEnv`, after a call to `close()`."


def test_error_after_close_names_the_subclass() -> None:
    class Subclass(vecenv.AsyncVectorEnv):
        pass

    envs: Any = Subclass(counters(1), num_workers=0)
    envs.close()
    with pytest.raises(ClosedEnvironmentError, match="`Subclass`"):
        envs.reset()


def test_pending_call_error_of_reset_and_step_names_the_async_method() -> None:
    with open_engine(counters(2)) as envs:
        envs.call_async("env_id")
        with pytest.raises(AlreadyPendingCallError, match="Calling `reset_async`"):
            envs.reset()
        with pytest.raises(AlreadyPendingCallError, match="Calling `step_async`") as caught:
            envs.step([0, 0])
        assert caught.value.__notes__ == ["call `call_wait()` first."]
        assert envs.call_wait() == (0, 1)


def test_pending_call_error_of_send_and_recv_names_the_method() -> None:
    with open_engine(counters(2)) as envs:
        envs.reset()
        envs.step_async([0, 0])
        with pytest.raises(AlreadyPendingCallError, match="Calling `send`"):
            envs.send([0, 0])
        with pytest.raises(AlreadyPendingCallError, match=r"Calling `recv` .*`step_wait` fetches it"):
            envs.recv()
        envs.step_wait()
        envs.call_async("env_id")
        with pytest.raises(AlreadyPendingCallError, match="Calling `recv`"):
            envs.recv()
        assert envs.call_wait() == (0, 1)


def test_seed_list_is_checked_before_the_phase() -> None:
    with open_engine(counters(2)) as envs:
        envs.reset_async()
        with pytest.raises(ValueError, match="num_envs=2 but got length=1"):
            envs.reset_async(seed=[1])
        with pytest.raises(AlreadyPendingCallError):
            envs.reset_async(seed=[1, 2], options={"reset_mask": "not a mask"})
        envs.reset_wait()


def test_phase_is_checked_before_actions() -> None:
    with open_engine(counters(2)) as envs:
        envs.reset_async()
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async(3)
        envs.reset_wait()


def test_reset_async_accepts_arguments_by_position() -> None:
    with open_engine(counters(2)) as envs:
        envs.reset_async(5, {"a": 1})
        observations, infos = envs.reset_wait()
        assert observations[:, 3].tolist() == [5, 6]
        assert "'a'" in infos["reset_kwargs"][0]
