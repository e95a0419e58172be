"""Section 1.12: closing, once, twice, late, by force, and by nobody."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
from envs import CounterEnv, Options, SleepingEnv, counters, started


class TellsWhenClosed(CounterEnv):
    def __init__(self, file: Path, env_id: int = 0) -> None:
        super().__init__(env_id)
        self.closed_file = file


def telling(file: Path, n: int) -> list[Any]:
    return [functools.partial(TellsWhenClosed, file, index) for index in range(n)]


def test_close_closes_every_environment_once(every_engine: Options, tmp_path: Path) -> None:
    file = tmp_path / "closed"
    with started(telling(file, 3), **every_engine) as envs:
        file.unlink(missing_ok=True)  # the one that was built to be asked
        envs.close()
        assert envs.closed is True
        envs.close()
        envs.close(timeout=1)
        envs.close(terminate=True)
    assert sorted(file.read_text().split()) == ["0", "1", "2"]


@pytest.mark.parametrize("how", [{"terminate": True}, {"timeout": 0.2}, {}], ids=str)
def test_close_by_force_with_a_timeout_or_after_one_does_not_wait_for_environments(
    process_engine: Options, how: Options
) -> None:
    with started([SleepingEnv] * 2, **process_engine) as envs:
        envs.step_async([30.0, 0.0])
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.05)
        begin = time.monotonic()
        with pytest.warns(UserWarning, match="Calling `close` while waiting for a pending call to `step` to complete"):
            envs.close(**how)
        assert time.monotonic() - begin < 10
        assert envs.closed is True


@pytest.mark.parametrize("pending", ["reset", "step", "call"])
def test_closing_during_a_pending_call_warns_and_waits_for_it(every_engine: Options, pending: str) -> None:
    begin = {
        "reset": lambda envs: envs.reset_async(seed=1),
        "step": lambda envs: envs.step_async([0.05, 0.05]),
        "call": lambda envs: envs.call_async("sleep", 0.05),
    }
    with started([SleepingEnv] * 2, **every_engine) as envs:
        begin[pending](envs)
        text = f"Calling `close` while waiting for a pending call to `{pending}` to complete."
        with pytest.warns(UserWarning, match=text):
            envs.close()
        assert envs.closed is True


def test_an_error_in_the_pending_call_does_not_come_out_of_close(process_engine: Options) -> None:
    with started(counters(2), **process_engine) as envs:
        envs.call_async("fail", ValueError("x"))
        with pytest.warns(UserWarning):  # noqa: PT030 - the failure may be logged as well
            envs.close()
        assert envs.closed is True


def test_close_extras_takes_the_same_arguments(every_engine: Options) -> None:
    with started(counters(2), **every_engine) as envs:
        envs.close_extras(timeout=5, terminate=False)
        envs.close()


def test_one_that_nobody_refers_to_any_more_is_closed(every_engine: Options) -> None:
    import vecenv

    envs: Any = vecenv.AsyncVectorEnv(counters(2), **every_engine)
    envs.reset(seed=1)
    pids = [process.pid for process in envs.processes]
    gone = weakref.ref(envs)
    del envs
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))


def test_a_constructor_that_failed_leaves_an_object_that_can_be_deleted() -> None:
    import vecenv

    envs: Any = vecenv.AsyncVectorEnv.__new__(vecenv.AsyncVectorEnv)
    with pytest.raises(ValueError, match="AutoresetMode"):
        envs.__init__(counters(1), autoreset_mode="x")
    del envs
    gc.collect()
