"""Timeouts: one deadline for all environments, and an answer that is late is still the answer."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from envs import Options, SleepingEnv, opened, started
from gymnasium.error import AlreadyPendingCallError

from vecenv.errors import StepTimeout

LATE = 0.5


def sleepers(n: int = 3) -> list[Any]:
    return [lambda i=i: SleepingEnv(i) for i in range(n)]


# what begins it, what waits for it, and whether an answer is right
WAITS: dict[str, tuple[Callable[[Any], Any], str, Callable[[Any], bool]]] = {
    "reset": (
        lambda envs: envs.reset_async(seed=7, options={"seconds": LATE}), "reset_wait",
        lambda answer: answer[0][:, 1:].tolist() == [[0, 2, 7], [0, 2, 8], [0, 2, 9]],
    ),
    "step": (
        lambda envs: envs.step_async([0.0, LATE, 0.0]), "step_wait",
        lambda answer: (answer[0][:, 1].tolist(), answer[1].tolist()) == ([1, 1, 1], [0.001, 1.001, 2.001]),
    ),
    "call": (lambda envs: envs.call_async("sleep", LATE), "call_wait", lambda answer: answer == (0, 1, 2)),
    "exec_func": (
        lambda envs: envs.exec_func_send(lambda env: env.sleep(LATE), [1]), "exec_func_fetch",
        lambda answer: answer == (None, 1, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("timeout", [0, pytest.param(0.1, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "call", [*("call", "exec_func"), *(pytest.param(name, marks=pytest.mark.long) for name in ("reset", "step"))]
)
def test_an_answer_that_is_late_is_pending_and_the_same_wait_gives_it(
    process_engine: Options, call: str, timeout: float
) -> None:
    begin, wait, is_right = WAITS[call]
    with started(sleepers(), **process_engine) as envs:
        begin(envs)
        with pytest.raises(multiprocessing.TimeoutError) as caught:
            getattr(envs, wait)(timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, StepTimeout)
        assert str(caught.value).startswith(f"The call to `{wait}` has timed out after {float(timeout)} second(s).")
        pending = "call" if call == "exec_func" else call
        for early in (lambda: envs.step_async([0.0] * 3), envs.reset_async, lambda: envs.set_attr("note", "x")):
            with pytest.raises(AlreadyPendingCallError, match=f"pending call to `{pending}`"):
                early()
        assert is_right(getattr(envs, wait)())
        steps = 2 if call == "step" else 1
        observations, rewards, *_ = envs.step([0.0, 0.0, 0.0])
        assert observations[:, 1].tolist() == [steps] * 3
        np.testing.assert_allclose(rewards, np.arange(3) + steps / 1000)


def test_several_timeouts_in_a_row_lose_nothing(process_engine: Options) -> None:
    with started(sleepers(), **process_engine) as envs:
        late = 0
        for t in range(1, 4):
            envs.step_async([0.0, 0.2, 0.0])
            while True:
                try:
                    observations, rewards, *_ = envs.step_wait(timeout=0.02)
                    break
                except TimeoutError:
                    late += 1
            assert observations[:, 1].tolist() == [t] * 3
            np.testing.assert_allclose(rewards, np.arange(3) + t / 1000)
        assert late >= 1


def test_an_answer_within_the_timeout_is_no_error(process_engine: Options) -> None:
    with opened(sleepers(), **process_engine) as envs:
        envs.reset_async(seed=1)
        assert envs.reset_wait(timeout=20)[0].shape == (3, 4)
        envs.step_async([0.0, 0.0, 0.0])
        assert envs.step_wait(timeout=20)[0].shape == (3, 4)
        envs.call_async("env_id")
        assert envs.call_wait(timeout=20) == (0, 1, 2)


@pytest.mark.long
def test_the_deadline_is_one_for_all_environments() -> None:
    with started(sleepers()) as envs:
        envs.step_async([0.3, 0.6, 0.9])
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            envs.step_wait(timeout=0.4)
        assert time.monotonic() - begin < 20
        assert envs.step_wait()[0][:, 1].tolist() == [1, 1, 1]
