"""Asking workers what they are doing does them no harm, however often, whatever their threads are doing meanwhile."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from observe import CHEAP, FAULTS, Launch, report, wait_for, worker_pids
from vandals import Announce, crew, vandal

from vecenv.engine.handles import ProcessWorker
from vecenv.errors import StepTimeout

pytestmark = [*FAULTS, pytest.mark.linux]


class Works(gymnasium.Env[Any, Any]):
    """Steps that compute in Python, in several frames, and sleep, for as long as the action says."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, *, own_thread: bool = False) -> None:
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work_on, daemon=True)
        if own_thread:
            self._thread.start()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        until = time.monotonic() + int(action) / 100
        while time.monotonic() < until:
            self._deep(20)
            time.sleep(1e-4)
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def _deep(self, depth: int) -> int:
        return self._deep(depth - 1) + sum(k for k in (1, 2, 3)) if depth else 0

    def _work_on(self) -> None:
        while not self._closed.wait(1e-4):
            self._deep(10)

    def close(self) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()


WORKS = {
    "env_threads": ([functools.partial(Works)] * 4, {"num_workers": 1, "env_threads": 4}),
    "own_threads": ([functools.partial(Works, own_thread=True)] * 2, {"num_workers": 1}),
}


def ask(envs: Any, steps: int, hundredths: int, look: Callable[[], object]) -> None:
    """Call ``look`` over and over while the environments step; every step is answered."""
    for _ in range(steps):
        envs.step_async(np.full(envs.num_envs, hundredths))
        until = time.monotonic() + hundredths / 100
        while time.monotonic() < until:
            look()
        envs.step_wait(timeout=60)


@CHEAP
@pytest.mark.parametrize(("steps", "hundredths"), [(4, 50), pytest.param(20, 99, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", WORKS)
def test_a_worker_that_is_asked_for_its_stack_goes_on(launch: Launch, kind: str, steps: int, hundredths: int) -> None:
    """Walking the stacks of threads that run, from within a signal, ends workers by SIGSEGV, once in some hundred times."""
    env_fns, how = WORKS[kind]
    envs = launch(env_fns, **how)
    envs.reset(seed=1)
    stacks: list[str] = []
    ask(envs, steps, hundredths, lambda: stacks.append(envs._pool.workers[0].stack()))
    assert any("in step" in stack for stack in stacks), stacks[:3]
    assert len(stacks) > 500 or steps == 4


@CHEAP
def test_a_poll_asks_a_worker_for_nothing(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """``timeout=0`` says how far it is, and sends no signal."""
    sent: list[int] = []
    monkeypatch.setattr(ProcessWorker, "signal", lambda worker, number: sent.append(number))
    env_fns, how = WORKS["env_threads"]
    envs = launch(env_fns, **how)
    envs.reset(seed=1)
    polls = 0
    envs.step_async(np.full(4, 99))
    while True:
        try:
            envs.step_wait(timeout=0 if polls < 2000 else 60)
            break
        except StepTimeout as error:
            assert "envs [0, 1, 2, 3]" in report(error)
            polls += 1
    assert polls > 10
    envs.send(np.full(4, 99), range(4))
    while True:
        try:
            envs.recv(count=4, timeout=0 if polls < 4000 else 60)
            break
        except StepTimeout:
            polls += 1
    assert not sent
    monkeypatch.undo()


@CHEAP
@pytest.mark.parametrize("fault", ["sleep", "hold_gil"])
def test_the_stack_of_an_old_question_is_no_last_stack(launch: Launch, tmp_path: Path, fault: str) -> None:
    """A worker that is killed later has left no stack, and none is shown."""
    envs = launch(crew(2, {1: vandal(1, Announce(tmp_path / "stuck", fault), step=1)}))
    envs.reset(seed=1)
    envs.step_async([0, 0])
    wait_for(tmp_path / "stuck")
    with pytest.raises(StepTimeout, match=f"in {fault}"):
        envs.step_wait(timeout=0.2)
    os.kill(worker_pids(envs)[1], 9)
    with pytest.raises(Exception, match="SIGKILL") as caught:
        envs.step_wait()
    assert "last Python stack" not in report(caught.value)
