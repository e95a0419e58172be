"""An environment with actions that make it fail, and checks that a client's next reset works after a failure."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import pytest
from signals import signal_handler

import vecenv
from vecenv.errors import StepTimeout, WorkerDied

NUM_ENVS, FAULTY = 4, 1
FINE, RAISES, DIES, LATE = range(4)
LATE_STEP_SECONDS = 3.0
"""The duration of a late step: twice ``step_timeout``, so that it ends before :func:`reset_until_ready` gives up."""
FAULTS = [pytest.param(fault, id=name) for fault, name in ((RAISES, "raises"), (DIES, "dies"), (LATE, "late"))]

R = TypeVar("R")


class FaultyEnv(gym.Env[Any, Any]):
    """An environment with observations (steps, seed of the latest reset). Actions other than ``FINE`` make it fail.

    Args:
        reset_failure_file: The path of a file; while the file exists, resets raise.
    """

    observation_space = gym.spaces.Box(-1, 1e6, (2,))
    action_space = gym.spaces.Discrete(4)

    def __init__(self, reset_failure_file: str = "") -> None:
        self.reset_failure_file = reset_failure_file

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.reset_failure_file and os.path.exists(self.reset_failure_file):
            raise ValueError("the lid is stuck")
        self.steps, self.seed = 0, -1 if seed is None else seed
        return np.array([0, self.seed], np.float32), {}

    def step(self, action: Any) -> Any:
        if action == RAISES:
            raise ValueError("the lid is stuck")
        if action == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == LATE:
            time.sleep(LATE_STEP_SECONDS)
        self.steps += 1
        return np.array([self.steps, self.seed], np.float32), 1.0, False, False, {}


def make_engine(on_failure: str = "raise", env_fns: Any = None, **options: Any) -> Any:
    """Build an engine with four faulty environments, each in its own process."""
    # torch's threads would make a fork of this process unsafe
    context = "forkserver" if "torch" in sys.modules else None
    options = {"context": context, "step_timeout": LATE_STEP_SECONDS / 2, **options}
    return vecenv.AsyncVectorEnv(env_fns or [FaultyEnv] * NUM_ENVS, num_workers=NUM_ENVS, on_failure=on_failure, **options)


def actions_with_fault(fault: int) -> Any:
    """Return actions that cause this fault in environment ``FAULTY``, and none in the others."""
    return np.where(np.arange(NUM_ENVS) == FAULTY, fault, FINE)


def reset_until_ready(reset: Callable[[], R]) -> R:
    """Call ``reset`` until it does not time out, at most four times: a late environment may still be in its step."""
    for _ in range(3):
        try:
            return reset()
        except StepTimeout:
            continue
    return reset()


def check_new_episode(client: Any) -> None:
    """Check that every environment begins an episode and takes a step, and that no earlier results are returned."""
    assert reset_until_ready(client.reset)[:, 0].tolist() == [0.0] * NUM_ENVS
    assert client.step(np.zeros(NUM_ENVS, np.int64))[:, 0].tolist() == [1.0] * NUM_ENVS


def assert_reset_works_after_failure(make_client: Callable[[Any], Any], on_failure: str, fault: int, **options: Any) -> None:
    """Check that the next reset of a client works after a failure.

    Args:
        make_client: Builds a client of an engine. Its ``reset`` and ``step`` return observations in the order of rows.
        on_failure: The engine's option.
        fault: The action that fails.
        **options: Other options of the engine.
    """
    client = make_client(make_engine(on_failure, **options))
    client.reset()
    if on_failure == "raise":
        with pytest.raises({RAISES: ValueError, DIES: WorkerDied, LATE: StepTimeout}[fault]):
            client.step(actions_with_fault(fault))
    else:
        client.step(actions_with_fault(fault))
    check_new_episode(client)
    client.close()


def assert_reset_drops_interrupted_call(make_client: Callable[[Any], Any]) -> None:
    """Check that the next reset of a client drops a call that a signal handler interrupted."""

    class Interrupted(Exception):
        pass

    client = make_client(make_engine())
    client.reset()
    with signal_handler(signal.SIGALRM, Interrupted):
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            client.step(actions_with_fault(LATE))
    check_new_episode(client)
    client.close()
