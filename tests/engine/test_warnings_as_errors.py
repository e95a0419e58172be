"""Tests with filters that turn warnings into exceptions: calls return their results, and ``close`` ends the workers."""

from __future__ import annotations

import multiprocessing
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envs import CounterEnv, RaisingEnv, ready_engine
from gymnasium.spaces import Box
from programs import run_python


@pytest.fixture(autouse=True)
def raise_user_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        yield


class OverflowingEnv(CounterEnv):
    """An environment with observations that overflow to infinity in the dtype of the space."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(-np.inf, np.inf, (1,), np.float32)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.array([1e300]), super().reset(**kwargs)[1]

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.array([1e300]), *super().step(action)[1:]


class RaisingInCloseEnv(CounterEnv):
    """An environment that raises in ``close``, in worker processes only."""

    def close(self) -> None:
        if multiprocessing.parent_process() is not None:
            raise OSError("the simulator does not answer")


@pytest.mark.parametrize("num_workers", [None, 0])
def test_close_with_a_pending_step_ends_the_workers(caplog: pytest.LogCaptureFixture, num_workers: int | None) -> None:
    with ready_engine([CounterEnv] * 2, num_workers=num_workers) as envs:
        envs.step_async(np.zeros(2, int))
        processes = list(envs.processes)
        envs.close()
        assert envs.closed
        for process in processes:
            with pytest.raises(ValueError, match="closed"):  # only an ended process can be closed
                process.is_alive()
    assert "Calling `close` while waiting for a pending call to `step`" in caplog.text


def test_exception_in_the_close_of_an_env_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with ready_engine([RaisingInCloseEnv] * 2, num_workers=1) as envs:
        envs.close()
    assert "env 1 raised in close(): OSError: the simulator does not answer" in caplog.text


@pytest.mark.parametrize("num_workers", [1, 0])
def test_warning_about_environments_is_logged_and_step_returns(caplog: pytest.LogCaptureFixture, num_workers: int) -> None:
    with ready_engine([OverflowingEnv] * 2, num_workers=num_workers) as envs:
        assert envs.step(np.zeros(2, int))[0].tolist() == [[np.inf], [np.inf]]
    assert "became infinite" in caplog.text


def test_exception_of_an_env_is_raised_and_the_warning_about_it_logged(caplog: pytest.LogCaptureFixture) -> None:
    with ready_engine([CounterEnv, partial(RaisingEnv, error=KeyError("door"))]) as envs:
        with pytest.raises(KeyError, match="door"):
            envs.step(np.zeros(2, int))
        envs.reset(seed=1)
    assert "Received the following error from Worker-1" in caplog.text


UNCLOSED_PROGRAM = """
import builtins, sys
import gymnasium, vecenv
from pathlib import Path

class CloseMarker(gymnasium.Wrapper):
    def close(self):
        Path(sys.argv[2]).touch()

builtins.kept = sys.modules["__main__"]  # as torch and jax do; Python then clears other modules first
first = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
envs = vecenv.AsyncVectorEnv([lambda: CloseMarker(gymnasium.make("CartPole-v1"))] * 2, num_workers=int(sys.argv[1]))
envs.reset(seed=1)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_workers", [2, 0])
@pytest.mark.parametrize(("warning_filter", "warning_count"), [("ignore", 0), ("error::ResourceWarning", 2)])
def test_program_without_close_ends_without_a_traceback(
    num_workers: int, warning_filter: str, warning_count: int, tmp_path: Path
) -> None:
    closed_file = tmp_path / "closed"
    process = run_python("-W", warning_filter, "-c", UNCLOSED_PROGRAM, str(num_workers), closed_file, cwd=tmp_path)
    assert process.returncode == 0
    assert "Exception ignored" not in process.stderr
    assert process.stderr.count("ResourceWarning: unclosed AsyncVectorEnv") == warning_count
    if warning_count == 0:
        assert process.stderr == ""
    if num_workers == 0:
        assert closed_file.exists()


SPAWNING_PROGRAM = """
import gymnasium, vecenv

envs = vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, context="spawn")
envs.reset(seed=1)
envs.close()
"""


def test_functions_are_pickled_without_comparing_bytes_and_text() -> None:
    """With ``-bb``, Python raises ``BytesWarning`` for such a comparison."""
    process = run_python("-bb", "-c", SPAWNING_PROGRAM)
    assert (process.returncode, process.stderr) == (0, "")
