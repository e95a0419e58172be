"""Tests of the probe process: it closes its environment, leaves nothing behind, and samples actions that masks allow."""

from __future__ import annotations

import functools
import gc
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from faulty_envs import EchoEnv
from gymnasium import spaces
from observe import FAULT_MARKS, IMPORT_ROOT, METHODS, WAIT_SECONDS, still_running, wait_for_file

import vecenv
from vecenv import Restart, WorkerOptions
from vecenv.errors import StartupTimeout, WorkerDied
from vecenv.planning import probe, trial
from vecenv.planning.probe import EnvDescription, EnvProbe
from vecenv.planning.trial import time_steps
from vecenv.system.cores import usable_cores
from vecenv.testing.faulty import NestedEnv

pytestmark = FAULT_MARKS


# --- the probe process closes its environment and leaves nothing behind, however it or its caller ends --


def write_file(path: Path, text: object = "") -> None:
    """Write a file that appears only when it is complete."""
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(str(text))
    part.rename(path)


class CloseRecordingEnv(EchoEnv):
    """An environment that writes a file when it is closed."""

    def __init__(self, path: Path, close_seconds: float = 0.0) -> None:
        super().__init__(0)
        self._path, self._close_seconds = path, close_seconds

    def close(self) -> None:
        time.sleep(self._close_seconds)
        write_file(self._path)


def do_nothing() -> None:
    pass


class EnvWithHelper(EchoEnv):
    """An environment that starts a helper in its constructor, and never ends it. The constructor then calls ``fault``."""

    def __init__(self, path: Path, own_session: bool, fault: Callable[[], object] = do_nothing) -> None:
        super().__init__(0)
        write_file(path, subprocess.Popen(["sleep", "60"], start_new_session=own_session).pid)
        fault()


class DyingEnvWithHelper(EchoEnv):
    """An environment that dies while a forked helper holds its descriptors."""

    def __init__(self, path: Path) -> None:
        super().__init__(0)
        if os.fork() == 0:
            write_file(path, os.getpid())
            time.sleep(60)
        wait_for_file(path)
        os._exit(5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [False, True])
def test_probed_environment_is_closed(tmp_path: Path, method: str, step: bool) -> None:
    context = multiprocessing.get_context(method)
    probe = EnvProbe([functools.partial(CloseRecordingEnv, tmp_path / "closed")], context, in_this_process=False, step=step)
    assert isinstance(probe.describe(), EnvDescription)
    assert (probe._measured is not None) == step
    assert (tmp_path / "closed").exists()


@pytest.mark.sampled("options1", "options2")
@pytest.mark.parametrize(
    "options", [{"num_workers": "auto"}, {"use_caller": True}, {"worker_options": WorkerOptions(dummy_env=False)}]
)
def test_engines_close_the_probed_environment(tmp_path: Path, options: dict[str, Any]) -> None:
    envs = vecenv.AsyncVectorEnv([functools.partial(CloseRecordingEnv, tmp_path / "closed")] * 2, **options)
    assert (tmp_path / "closed").exists()
    envs.close()


def test_probe_does_not_wait_for_a_close_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CLOSE_SECONDS", 0.3)
    started_at = time.monotonic()
    assert EnvProbe([functools.partial(CloseRecordingEnv, tmp_path / "closed", 60.0)]).measure()[0].steps > 0
    assert time.monotonic() - started_at < 30
    assert not (tmp_path / "closed").exists()


class RaisingCloseEnv(EchoEnv):
    def close(self) -> None:
        raise SystemExit("no")


def test_probe_ignores_an_exception_of_close() -> None:
    assert EnvProbe([functools.partial(RaisingCloseEnv, 0)]).measure()[0].steps > 0


def hang() -> None:
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_error() -> None:
    raise ZeroDivisionError


ENDINGS: dict[str, tuple[Callable[[], object], type[Exception] | None]] = {  # faults, and the errors of the probe
    "returns": (do_nothing, None),
    "raises": (raise_error, ZeroDivisionError),
    "killed": (die, WorkerDied),
    "hangs": (hang, StartupTimeout),
}


@pytest.mark.long
@pytest.mark.parametrize("own_session", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_helpers_end_with_the_probe(tmp_path: Path, ending: str, own_session: bool) -> None:
    fault, expected = ENDINGS[ending]
    env_fn = functools.partial(EnvWithHelper, tmp_path / "helper", own_session, fault)
    if expected is None:
        EnvProbe([env_fn]).measure()
    else:
        with pytest.raises(expected):
            EnvProbe([env_fn], timeout=1.0).measure()
    helper = int((tmp_path / "helper").read_text())
    assert not still_running([helper], WAIT_SECONDS)


class DelayedFaultEnv(EnvWithHelper):
    """An environment with a helper; it calls ``fault`` in step ``at``, or in its first reset if ``at`` is 0."""

    def __init__(self, path: Path, fault: Callable[[], object], at: int = 3) -> None:
        super().__init__(path, True)
        self._fault, self._steps_left = fault, at

    def reset(self, **kwargs: Any) -> Any:
        if not self._steps_left:
            self._fault()
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._steps_left -= 1
        if not self._steps_left:
            self._fault()
        return super().step(action)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("raises", "ZeroDivisionError"), ("killed", "the process that tried an environment died: killed by SIGKILL"),
        pytest.param("hangs", "within 1 second", marks=pytest.mark.long),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", [3, 0], ids=["step", "reset"])
def test_failure_of_an_environment_in_the_probe_is_reported(tmp_path: Path, ending: str, text: str, at: int) -> None:
    env_fn = functools.partial(DelayedFaultEnv, tmp_path / "helper", ENDINGS[ending][0], at)
    probe = EnvProbe([env_fn], timeout=1.0, in_this_process=False)
    assert isinstance(probe.describe(), EnvDescription)
    assert probe.measure()[0].steps == 0
    assert text in probe.measure()[0].failure
    assert not still_running([int((tmp_path / "helper").read_text())], WAIT_SECONDS)


@pytest.mark.parametrize("ending", ["raises", pytest.param("killed", marks=pytest.mark.long)])
def test_auto_starts_workers_if_the_environment_fails_in_the_probe(tmp_path: Path, ending: str, closes: Any) -> None:
    """The failure occurs again in the workers, and the environments are restarted."""
    env_fn = functools.partial(DelayedFaultEnv, tmp_path / "helper", ENDINGS[ending][0])
    envs: Any = closes(vecenv.make_vec(env_fn, 2, vector_kwargs={"on_failure": Restart(100)}))
    assert envs.num_workers == min(2, usable_cores())
    assert "caller" not in repr(envs)
    assert "failed while it was tried" in envs.plan.reason
    assert "no step could be timed: " in str(envs.plan)
    envs.reset(seed=1)
    for _ in range(5):
        envs.step([0, 0])
    assert envs.stats()["restarts"] >= 2


class RaisingStepEnv(EchoEnv):
    def step(self, action: Any) -> Any:
        raise ZeroDivisionError


def test_caller_gets_an_even_share_if_no_step_could_be_timed(closes: Any) -> None:
    envs = closes(vecenv.AsyncVectorEnv([functools.partial(RaisingStepEnv, 0)] * 4, num_workers=1, use_caller=True))
    assert len(envs.local_envs) == 2


def test_death_is_noticed_while_a_helper_holds_its_pipe(tmp_path: Path) -> None:
    started_at = time.monotonic()
    with pytest.raises(WorkerDied, match="exit code 5"):
        EnvProbe([functools.partial(DyingEnvWithHelper, tmp_path / "helper")]).measure()
    assert time.monotonic() - started_at < 30
    assert not still_running([int((tmp_path / "helper").read_text())], WAIT_SECONDS)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_environment_may_start_processes_if_the_probe_is_not_daemonic(method: str) -> None:
    """The environment contains a vector environment."""
    context = multiprocessing.get_context(method)
    inner = functools.partial(vecenv.AsyncVectorEnv, [functools.partial(EchoEnv, k) for k in range(2)], context=method)
    env_fn = functools.partial(NestedEnv, inner)
    with pytest.raises(Exception, match="daemon"):
        EnvProbe([env_fn], context, 15.0).measure()
    probe = EnvProbe([env_fn], context, 15.0, in_this_process=False, daemon=False)
    assert probe.describe().metadata is not None
    assert probe.measure()[0].steps > 0
    assert EnvProbe([env_fn], context, 15.0, daemon=False).measure()[0].steps > 0


def build_env_with_process() -> gym.Env:
    """Start a process, which a daemonic process may not do, and return an environment."""
    multiprocessing.Process(target=int).start()
    return EchoEnv(0)


def test_error_of_a_daemonic_probe_names_the_option() -> None:
    with pytest.raises(AssertionError, match="daemonic") as caught:
        EnvProbe([build_env_with_process]).measure()
    assert any("daemon=False" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("timeout", [math.inf, 1e7, 1e300])
def test_probe_accepts_infinite_and_huge_timeouts(timeout: float) -> None:
    assert EnvProbe([functools.partial(EchoEnv, 0)], timeout=timeout).measure()[0].steps > 0


class LargeArgumentEnv(EchoEnv):
    """An environment with an argument that exceeds the capacity of a pipe when it is pickled."""

    def __init__(self, argument: bytes) -> None:
        super().__init__(0)


@pytest.mark.parametrize("method", METHODS)
def test_pickled_env_fn_may_exceed_the_capacity_of_a_pipe(method: str) -> None:
    env_fn = functools.partial(LargeArgumentEnv, b"x" * 2_000_000)
    probe = EnvProbe([env_fn], multiprocessing.get_context(method), in_this_process=False, step=False)
    assert isinstance(probe.describe(), EnvDescription)


def test_probe_reports_why_it_cannot_start_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "explain_unsupported_processes", lambda: "no processes in this test")
    assert probe.EnvProbe([raise_error]).measure()[0].failure == "no processes in this test"


# --- interrupted callers ------------------------------------------------------------------------


class Alarm(TimeoutError):
    """The exception that a time limit with SIGALRM raises. It is an ``OSError``, like ``BrokenPipeError``."""


@contextmanager
def alarm_after(seconds: float, interval: float = 0.0) -> Iterator[None]:
    """Raise :class:`Alarm` in the block after ``seconds``, and then every ``interval`` seconds if it is not 0."""

    def raise_alarm(*_: object) -> None:
        raise Alarm

    def ignore_alarms(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Alarm):  # an alarm in a finalizer cannot propagate
            previous_hook(unraisable)

    previous_hook, sys.unraisablehook = sys.unraisablehook, ignore_alarms
    previous_handler = signal.signal(signal.SIGALRM, raise_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, interval)
        yield
    finally:
        while True:  # another alarm may interrupt this
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, previous_handler)
                sys.unraisablehook = previous_hook
                break
            except Alarm:
                pass


@pytest.mark.long
def test_exception_while_the_caller_waits_ends_the_probe(tmp_path: Path) -> None:
    env_fn = functools.partial(EnvWithHelper, tmp_path / "helper", True, hang)
    with pytest.raises(Alarm), alarm_after(1.0):
        EnvProbe([env_fn]).measure()
    assert not still_running([int((tmp_path / "helper").read_text())], WAIT_SECONDS)
    assert not multiprocessing.active_children()


@pytest.mark.long
def test_exception_at_any_moment_leaves_nothing_behind(take_stock: Callable[[], Any]) -> None:
    """Resources are compared after each exception, because a later one could hide the leak of an earlier one."""
    env_fn = functools.partial(EchoEnv, 0)
    EnvProbe([env_fn], in_this_process=False, step=False).describe()
    rng = random.Random(1)
    interrupted = 0
    for _ in range(60):
        before = take_stock()
        try:
            with alarm_after(rng.uniform(1e-4, 0.03)):
                EnvProbe([env_fn], in_this_process=False, step=False).describe()
        except Alarm:
            interrupted += 1
        left = take_stock().new_since(before, ("processes", "descriptors"))
        assert not left
    assert interrupted > 5


def test_repeated_exceptions_leave_nothing_behind(take_stock: Callable[[], Any]) -> None:
    before = take_stock()
    for _ in range(10):
        with pytest.raises(Alarm), alarm_after(0.002, 0.0005):
            EnvProbe([functools.partial(EchoEnv, 0)], in_this_process=False, step=False).describe()
    gc.collect()
    assert not take_stock().new_since(before, ("processes", "descriptors"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


PROGRAM = """
import functools, multiprocessing, os, subprocess, sys, time
from pathlib import Path
from faulty_envs import EchoEnv
from vecenv.planning.probe import EnvProbe

def build(folder):
    helper = subprocess.Popen(["sleep", "60"])
    (folder / "part").write_text(f"{os.getpid()} {helper.pid}")
    (folder / "part").rename(folder / "pids")
    time.sleep(60)

if __name__ == "__main__":
    EnvProbe([functools.partial(build, Path(sys.argv[2]))], multiprocessing.get_context(sys.argv[1])).measure()
"""


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_killed_program_leaves_nothing_behind(tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    import_path = os.pathsep.join([str(IMPORT_ROOT), str(Path(__file__).parent)])
    environ = {**os.environ, "PYTHONPATH": import_path}
    program = subprocess.Popen([sys.executable, str(script), method, str(tmp_path)], env=environ)
    try:
        wait_for_file(tmp_path / "pids")
    finally:
        program.kill()
        program.wait()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert not still_running(pids, WAIT_SECONDS)


def test_probe_runs_in_its_own_session() -> None:
    class ProcessInfoEnv(EchoEnv):
        def __init__(self) -> None:
            super().__init__(0)
            self.metadata = {"session": os.getsid(0), "pid": os.getpid(), "sigint": signal.getsignal(signal.SIGINT)}

    context = multiprocessing.get_context("fork")
    description = EnvProbe([ProcessInfoEnv], context, in_this_process=False, step=False).describe()
    session, pid, sigint = (description.metadata[name] for name in ("session", "pid", "sigint"))
    assert session == pid != os.getpid()
    assert sigint == signal.SIG_IGN


# --- the probe samples actions that the environment's masks allow --------------------------------


class MaskedActionEnv(gym.Env[Any, Any]):
    """An environment with a mask that allows one action per step; any other action raises.

    Args:
        where: The place of the mask: ``"observation"``, or its key in the info.
        start: The smallest action.
    """

    def __init__(self, where: str, start: int) -> None:
        self.where = where
        self.action_space = spaces.Discrete(5, start=start)
        mask = spaces.Box(0, 1, (5,), np.int8)
        fields: Any = {"action_mask": mask} if where == "observation" else {"time": spaces.Discrete(99)}
        self.observation_space = spaces.Dict(fields)

    def _observe(self) -> Any:
        self.mask = np.zeros(5, np.int8)
        self.mask[self.time % 5] = 1
        if self.where == "observation":
            return {"action_mask": self.mask}, {}
        return {"time": self.time}, {self.where: self.mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._observe()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        if not self.mask[action - self.action_space.start]:
            raise RuntimeError("illegal")
        self.time += 1
        observation, info = self._observe()
        return observation, 0.0, self.time == 7, False, info


@pytest.mark.parametrize("where", ["observation", "action_mask", "action_masks"])
@pytest.mark.parametrize("start", [0, 3])
def test_probe_samples_actions_that_the_mask_allows(where: str, start: int) -> None:
    measured = time_steps(MaskedActionEnv(where, start))
    assert measured.steps == 10
    assert not measured.failure
