"""Timeouts: one deadline for all environments, and an answer that is late is still the answer."""

from __future__ import annotations

import multiprocessing
import re
import time
from typing import Any

import numpy as np
import pytest
from envs import PROCESS_ENGINES, SleepingEnv, opened
from gymnasium.error import AlreadyPendingCallError

from vecenv.errors import StepTimeout

engines = pytest.mark.parametrize("engine", PROCESS_ENGINES.values(), ids=list(PROCESS_ENGINES))
LATE = 0.8


def sleepers(n: int = 3) -> list[Any]:
    return [lambda i=i: SleepingEnv(i) for i in range(n)]


@pytest.mark.long
@engines
def test_a_timeout_is_gymnasiums_error_and_the_builtin_one_with_its_text(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.reset(seed=1)
        envs.step_async([LATE, 0.0, 0.0])
        begin = time.monotonic()
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            envs.step_wait(timeout=0.05)
        assert time.monotonic() - begin < LATE
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, StepTimeout)
        text = "The call to `step_wait` has timed out after 0.05 second(s)."
        assert str(caught.value).startswith(text)
        envs.step_wait()


@pytest.mark.long
@engines
@pytest.mark.parametrize("timeout", [0, 0.02, 0.1])
def test_after_a_timeout_of_step_the_same_answer_can_be_waited_for(engine: dict[str, Any], timeout: float) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.reset(seed=1)
        envs.step_async([0.0, LATE, 0.0])
        with pytest.raises(TimeoutError, match="step_wait"):
            envs.step_wait(timeout=timeout)
        with pytest.raises(AlreadyPendingCallError, match="pending call to `step`"):
            envs.step_async([0.0, 0.0, 0.0])
        with pytest.raises(AlreadyPendingCallError, match="pending call to `step`"):
            envs.reset_async()
        observations, rewards, *_ = envs.step_wait()
        assert observations[:, 1].tolist() == [1, 1, 1]
        assert rewards.tolist() == [0.001, 1.001, 2.001]
        observations, rewards, *_ = envs.step([0.0, 0.0, 0.0])
        assert observations[:, 1].tolist() == [2, 2, 2]
        assert rewards.tolist() == [0.002, 1.002, 2.002]


@engines
def test_several_timeouts_in_a_row_lose_nothing(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.reset(seed=1)
        for t in range(1, 4):
            envs.step_async([0.0, 0.1, 0.0])
            late = 0
            while True:
                try:
                    observations, rewards, *_ = envs.step_wait(timeout=0.02)
                    break
                except TimeoutError:
                    late += 1
            assert late >= 1
            assert observations[:, 1].tolist() == [t] * 3
            np.testing.assert_allclose(rewards, np.arange(3) + t / 1000)


@pytest.mark.long
@engines
def test_after_a_timeout_of_reset_the_same_answer_can_be_waited_for(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.reset(seed=1)
        envs.reset_async(seed=7, options={"seconds": LATE})
        text = "The call to `reset_wait` has timed out after 0.02 second(s)."
        with pytest.raises(multiprocessing.TimeoutError, match=re.escape(text)):
            envs.reset_wait(timeout=0.02)
        assert envs.reset_wait()[0][:, 3].tolist() == [7, 8, 9]
        assert envs.step([0.0, 0.0, 0.0])[0][:, 1].tolist() == [1, 1, 1]


@engines
def test_after_a_timeout_of_call_the_same_answer_can_be_waited_for(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.call_async("sleep", 0.1)
        text = "The call to `call_wait` has timed out after 0.02 second(s)."
        with pytest.raises(multiprocessing.TimeoutError, match=re.escape(text)):
            envs.call_wait(timeout=0.02)
        with pytest.raises(AlreadyPendingCallError):
            envs.set_attr("note", "x")
        assert envs.call_wait() == (0, 1, 2)
        assert envs.call("add", 1) == (1, 2, 3)


@engines
def test_after_a_timeout_of_exec_func_the_same_answer_can_be_waited_for(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.exec_func_send(lambda env: env.sleep(0.1), [1])
        with pytest.raises(multiprocessing.TimeoutError):
            envs.exec_func_fetch(timeout=0.02)
        assert envs.exec_func_fetch() == (None, 1, None)


@engines
def test_an_answer_within_the_timeout_is_no_error(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.reset_async(seed=1)
        assert envs.reset_wait(timeout=20)[0].shape == (3, 4)
        envs.step_async([0.0, 0.0, 0.0])
        assert envs.step_wait(timeout=20)[0].shape == (3, 4)
        envs.call_async("env_id")
        assert envs.call_wait(timeout=20) == (0, 1, 2)


@pytest.mark.long
def test_the_deadline_is_one_for_all_environments() -> None:
    with opened(sleepers()) as envs:
        envs.reset(seed=1)
        envs.step_async([0.3, 0.6, 0.9])
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.4)
        assert time.monotonic() - begin < 20
        assert envs.step_wait()[0][:, 1].tolist() == [1, 1, 1]


@engines
def test_after_a_timeout_it_can_be_closed_by_force(engine: dict[str, Any]) -> None:
    with opened(sleepers(), **engine) as envs:
        envs.reset(seed=1)
        envs.step_async([30.0, 0.0, 0.0])
        with pytest.raises(multiprocessing.TimeoutError):
            envs.step_wait(timeout=0.05)
        with pytest.warns(UserWarning, match="Calling `close` while waiting"):
            envs.close(terminate=True)
        assert envs.closed
