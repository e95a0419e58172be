"""Environments that do not answer: rows 15 to 20 of the table in ``FAULTS.md``."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from gymnasium.error import AlreadyPendingCallError
from observe import CHEAP, FAULTS, PATIENCE, Launch, alive, names, remaining, report, wait_for, worker_pids
from vandals import Announce, Ledger, Pause, Touch, crew, vandal

from vecenv.engine.handles import ProcessWorker
from vecenv.errors import StepTimeout
from vecenv.system.supervision import BlackBox

pytestmark = FAULTS


GRACE = 0.3  # what the tests give close()


def closes(envs: Any, timeout: float = GRACE) -> None:
    """``close(timeout)`` is a bound, whatever the workers do."""
    pids = worker_pids(envs)
    begun = time.monotonic()
    envs.close(timeout=timeout)
    assert time.monotonic() - begun < timeout + PATIENCE
    assert envs.closed
    assert not remaining(pids, PATIENCE)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sleep", "gil"])
def test_hang(launch: Launch, kind: str, tmp_path: Path) -> None:
    """The timeout says where in the environment's own code it hangs; waiting again and closing both work."""
    fault = {"sleep": "sleep", "gil": "hold_gil"}[kind]
    envs = launch(crew(4, {3: vandal(3, Announce(tmp_path / "stuck", fault), step=1)}), num_workers=2)
    envs.reset(seed=1)
    pid = worker_pids(envs)[1]
    envs.step_async([0] * 4)
    wait_for(tmp_path / "stuck")
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.2)
        assert 0.19 < time.monotonic() - begun < 0.2 + PATIENCE
        assert isinstance(caught.value, multiprocessing.TimeoutError)
        assert isinstance(caught.value, TimeoutError)
        assert re.search(rf"faulty\.py.*in {fault}", report(caught.value)), report(caught.value)
        names(caught.value, env=3, worker=1, pid=pid, command="step")
    with pytest.raises(AlreadyPendingCallError):
        envs.step_async([0] * 4)
    closes(envs)


@pytest.mark.linux
@CHEAP
@pytest.mark.parametrize("how", ["slowly", "late"])
def test_hang_whose_stack_is_written(launch: Launch, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may lose its core in the middle of a line, or wait for one before it begins: it is given the time."""
    written, reads = BlackBox.read, itertools.count(1)

    def slowly(box: BlackBox) -> str:
        text = written(box)
        return text[: max(len(text) * next(reads) // 10, 1)] if text else text

    first: list[float] = []

    def late(box: BlackBox) -> str:
        first.append(time.monotonic())
        return written(box) if first[-1] - first[0] > 0.15 else ""

    if how == "late":
        monkeypatch.setattr(ProcessWorker, "_state", lambda worker: "R")
    monkeypatch.setattr(BlackBox, "read", slowly if how == "slowly" else late)
    envs = launch(crew(2, {1: vandal(1, Announce(tmp_path / "stuck", "sleep"), reset=2)}))
    envs.reset(seed=1)
    envs.reset_async()
    wait_for(tmp_path / "stuck")
    with pytest.raises(StepTimeout) as caught:
        envs.reset_wait(timeout=0.3)
    assert "in sleep" in report(caught.value)


@pytest.mark.long
@CHEAP
@pytest.mark.parametrize("call", ["reset", "call"])
def test_hang_in_other_calls(launch: Launch, call: str, tmp_path: Path) -> None:
    """A reset and a call have timeouts just as well."""
    stuck = vandal(1, Announce(tmp_path / "stuck", "sleep"), reset=2)
    envs = launch(crew(2, {1: stuck}))
    envs.reset(seed=1)
    if call == "reset":
        envs.reset_async()
        wait_for(tmp_path / "stuck")
    else:
        envs.call_async("do", "sleep", only=1)
    with pytest.raises(StepTimeout) as caught:
        getattr(envs, f"{call}_wait")(timeout=0.3)
    assert "in sleep" in report(caught.value)
    closes(envs)


@pytest.mark.long
def test_step_timeout_option(launch: Launch) -> None:
    """``step_timeout`` bounds plain ``step()``."""
    envs = launch(crew(2, {1: vandal(1, "sleep", step=2)}), step_timeout=0.5)
    envs.reset(seed=1)
    envs.step([0, 0])
    begun = time.monotonic()
    with pytest.raises(StepTimeout, match="env"):
        envs.step([0, 0])
    assert 0.45 < time.monotonic() - begun < 0.5 + PATIENCE
    closes(envs)


@pytest.mark.long
def test_results_never_shift(launch: Launch) -> None:
    """A late answer belongs to the step that asked for it, also when other calls come in between."""
    slow = {index: vandal(index, Pause(0.25), step={2, 4, 5}) for index in (1, 3)}
    envs = launch(crew(4, slow), num_workers=2)
    ledger = Ledger.of(envs)
    late = 0
    for step in range(1, 8):
        actions = [step, step + 1, step + 2, step + 3]
        envs.step_async(actions)
        while True:
            try:
                answer = envs.step_wait(timeout=0.05)
                break
            except StepTimeout:
                late += 1
                with pytest.raises(AlreadyPendingCallError):
                    envs.call_async("echo", step)
        ledger.step(actions, answer)
        assert envs.call("echo", step) == (step,) * 4
        assert envs.get_attr("tick") == tuple(row["tick"] for row in ledger.rows)
    assert late >= 3
    ledger.reset(envs.reset())
    ledger.step([0] * 4, envs.step([0] * 4))


def test_stopped(launch: Launch) -> None:
    """A worker under SIGSTOP: a timeout, then either it is continued and answers, or close kills it."""
    envs = launch(crew(2))
    ledger = Ledger.of(envs)
    pid = worker_pids(envs)[1]
    for ending in ("continued", "closed"):
        os.kill(pid, signal.SIGSTOP)
        envs.step_async([1, 1])
        with pytest.raises(StepTimeout) as caught:
            envs.step_wait(timeout=0.2)
        names(caught.value, env=1, worker=1, pid=pid, command="step")
        assert alive(pid)
        if ending == "continued":
            os.kill(pid, signal.SIGCONT)
            ledger.step([1, 1], envs.step_wait(timeout=60))
    closes(envs)


@pytest.mark.long
@pytest.mark.parametrize("fault", ["sleep", "hold_gil", "ignore_sigterm", "stop"])
def test_close_hangs(launch: Launch, fault: str, tmp_path: Path) -> None:
    """An environment whose ``close`` never returns is ended in time; its sibling was closed properly."""
    closers = {  # not the first: that one is also built and closed in this process, to learn the spaces
        1: vandal(1, Announce(tmp_path / "closing", fault), close=True),
        2: vandal(2, Touch(tmp_path / "closed"), close=True),
    }
    envs = launch(crew(3, closers))
    envs.reset(seed=1)
    closes(envs, timeout=0.5)
    assert (tmp_path / "closed").exists()
    assert (tmp_path / "closing").exists()


@pytest.mark.parametrize("fault", ["raises", "sys_exit", "evil_error", "unpicklable_error"])
def test_close_raises(launch: Launch, fault: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All others are closed, in the same worker too; there is one warning and no traceback on the terminal."""
    closers = {index: vandal(index, Touch(tmp_path / f"closed-{index}"), close=True) for index in range(4)}
    closers[2] = vandal(2, fault, close=True)
    envs = launch(crew(4, closers), num_workers=2)
    envs.reset(seed=1)
    for path in tmp_path.glob("closed-*"):
        path.unlink()  # the first environment was also built and closed in this process, to learn the spaces
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        closes(envs, timeout=5)
    assert sorted(path.name for path in tmp_path.glob("closed-*")) == ["closed-0", "closed-1", "closed-3"]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 1, texts
    assert re.search(r"\benv 2\b", texts[0])
    wanted = {"raises": "out of order", "sys_exit": "SystemExit", "evil_error": "EvilError"}
    assert wanted.get(fault, "UnpicklableError") in texts[0]
    assert "Traceback" not in capfd.readouterr().err


@CHEAP
def test_close_dead(launch: Launch, tmp_path: Path) -> None:
    """A worker that dies in ``close`` does not keep the others from closing."""
    closers = {
        1: vandal(1, "segfault", close=True),
        2: vandal(2, Touch(tmp_path / "closed"), close=True),
    }
    envs = launch(crew(3, closers))
    envs.reset(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        closes(envs, timeout=5)
    assert (tmp_path / "closed").exists()
