"""Failures are recorded in files, and ``vecenv replay`` repeats them in a new process."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import pickle
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from history_envs import HistoryEnv
from programs import python_output, run_python
from sampling import each_once

import vecenv
from vecenv.errors import RestartsExhausted, StepTimeout, WorkerDied, envs_text
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.recording import recorder
from vecenv.recording.file import read_header, running_env
from vecenv.testing.faulty import FAULTS, FaultyEnv
from vecenv.tools import cli
from vecenv.tools.replay import _find_running_env, _replay_here, replay

pytestmark = pytest.mark.timeout(180)

FAILING_STEP = 9
"""The step that fails, in the first episode."""


class ShortEnv(gym.Env[Any, Any]):
    """An environment with episodes of 40 steps."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gym.spaces.Discrete(5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        draw = self.np_random.random()
        return np.array([draw, self.steps], np.float32), draw + int(action), False, self.steps == 40, {}


def step_until_error(envs: Any, get_actions: Any) -> None:
    """Step with the actions that ``get_actions(step)`` returns until an environment raises."""
    for step in range(10_000):
        envs.step(get_actions(step))


def send_until_error(envs: Any) -> None:
    """Receive rows and send actions to them until an environment raises."""
    while True:
        rows = envs.recv()[-1]["env_id"]
        envs.send(rows % 5, rows)


def make_faulty_env(fault: str, **when: Any) -> Any:
    return FaultyEnv(ShortEnv(), fault, **when)


def record_failure(
    folder: Path, fault: str, *, when: dict[str, Any] | None = None, **options: Any
) -> tuple[list[Path], Any]:
    """Step three environments until env 1 fails, and return the files and the exception."""
    when = when or {"step": FAILING_STEP}
    fns = [ShortEnv, functools.partial(make_faulty_env, fault, **when), ShortEnv]
    rng = np.random.default_rng(0)
    raised: Any = None
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, record_failures=folder, **options)) as envs:
        try:
            envs.reset(seed=3)
            for _ in range(60):
                envs.step(rng.integers(0, 5, 3))
        except (Exception, KeyboardInterrupt) as error:
            raised = error
        records = list(envs.errors)
        envs.close(terminate=True)
    files = sorted(folder.glob("*.vecenv"))
    assert raised is not None
    text = "" if "unprintable" in fault else str(raised)
    text += "\n".join(getattr(raised, "__notes__", ()))
    named = [file for file in files if str(file) in text]
    assert named, f"the exception names none of {files}"
    assert any(str(named[0]) in str(record) and str(named[0]) in record.recorded for record in records)
    return files, raised


FAULTS_THAT_RAISE = (
    "raises", "two_arguments_error", "keyword_only_error", "unpicklable_error", "evil_error", "unprintable_error",
    "sys_exit", "keyboard_interrupt", "wrong_shape", "no_observation", "too_few_values",
)  # fmt: skip
FAULTS_THAT_KILL = ("segfault", "abort", "bus_error", "arithmetic_error", "kill", "exit_now", "fork_helper_and_die")
DEFAULT_FAULTS = (
    "raises", "unpicklable_error", "sys_exit", "wrong_shape", "segfault", "kill", "exit_now", "fork_helper_and_die",
)  # fmt: skip
"""The faults that are not marked ``long``."""


@pytest.mark.sampled("segfault-fork")
@pytest.mark.parametrize(
    "context",
    ["fork", pytest.param("spawn", marks=pytest.mark.slow), pytest.param("forkserver", marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "fault",
    [
        fault if fault in DEFAULT_FAULTS else pytest.param(fault, marks=pytest.mark.long)
        for fault in (*FAULTS_THAT_RAISE, *FAULTS_THAT_KILL)
    ],
)
def test_replay_repeats_fault(fault: str, context: str, tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, fault, context=context)
    assert [file.name for file in files] == [f"ShortEnv-env1-episode1-step{FAILING_STEP}.vecenv"]
    result = replay(files[0])
    assert result.text.startswith(f"happened again at step {FAILING_STEP}: "), result


@pytest.mark.long
@pytest.mark.parametrize(("on_failure", "fault"), each_once(["raise", "restart"], ["sleep", "hold_gil"]))
def test_replay_repeats_hang(fault: str, on_failure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = vecenv.Restart(0) if on_failure == "restart" else on_failure
    files, _ = record_failure(tmp_path, fault, step_timeout=1.0, on_failure=policy)
    result = replay(files[0])
    assert result.text == f"happened again at step {FAILING_STEP}: it hung for more than 1 second"
    assert capsys.readouterr().err.splitlines()[-1] == f"waiting up to 6 s for step {FAILING_STEP}"
    assert (result.step, result.location.partition(":")[0]) == (FAILING_STEP, "faulty.py")
    assert f"in {fault}\n" in result.stack


@pytest.mark.long
def test_replay_of_abandoned_worker_prints_that_it_waits(tmp_path: Path) -> None:
    fns = [functools.partial(make_faulty_env, "sleep", step=1)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, record_failures=tmp_path)) as envs:
        envs.reset(seed=1)
        envs.step_async([0])
        time.sleep(0.3)
        envs.abandon([0])
        with pytest.raises(WorkerDied, match="abandoned"):
            envs.step_wait()
    (file,) = tmp_path.glob("*.vecenv")
    command = [sys.executable, "-m", "vecenv", "replay", str(file), "--yes"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as replaying:
        assert replaying.stderr is not None
        line = replaying.stderr.readline()
        replaying.send_signal(signal.SIGINT)
        assert replaying.wait() == 130
    assert line == "waiting for step 1, without a time limit (--pdb: Ctrl-C shows where it is)\n"


def cause_fault_of_replay(result: Any) -> Any:
    """Cause the fault that the environment variable ``REPLAY_FAULT`` names, as if the environment had been edited."""
    return FAULTS[os.environ["REPLAY_FAULT"]](result) if "REPLAY_FAULT" in os.environ else result


def record_changed_env(folder: Path) -> Path:
    """Record an environment that raises. A replay causes the fault ``REPLAY_FAULT`` in the step before."""
    fns = [lambda: FaultyEnv(make_faulty_env("raises", step=FAILING_STEP), cause_fault_of_replay, step=FAILING_STEP - 1)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, record_failures=folder)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="out of order"):
            step_until_error(envs, lambda step: [0])
    (file,) = folder.glob("*.vecenv")
    return file


@pytest.mark.long
def test_replay_that_hangs_unlike_the_record_prints_that_it_waits(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vecenv", "replay", str(record_changed_env(tmp_path)), "--yes"]
    environ = {**os.environ, "REPLAY_FAULT": "sleep"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ) as replaying:
        assert replaying.stderr is not None
        line = replaying.stderr.readline()  # before the signal, which could interrupt the output
        replaying.send_signal(signal.SIGINT)
        assert replaying.wait() == 130
    assert line == f"waiting for step {FAILING_STEP - 1}, without a time limit (--pdb: Ctrl-C shows where it is)\n"


def test_pdb_of_a_replay_that_crashes_unlike_the_record_shows_the_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = record_changed_env(tmp_path)
    monkeypatch.setenv("REPLAY_FAULT", "segfault")
    done = run_replay(file, "--yes", "--pdb")
    assert done.returncode == -signal.SIGSEGV
    assert "faulty.py" in done.stderr.partition("Fatal Python error: Segmentation fault")[2]


def test_step_timeout_names_file_of_hanging_environment(tmp_path: Path) -> None:
    files, error = record_failure(tmp_path, "sleep", step_timeout=1.0, num_workers=1)
    assert isinstance(error, StepTimeout)
    assert [file.name[:13] for file in files] == ["ShortEnv-env0", "ShortEnv-env1", "ShortEnv-env2"]
    assert any(note.startswith(f"recorded: {files[1]}\n") for note in error.__notes__), error.__notes__
    headers = [read_header(file)[0] for file in files]
    assert all(header.failed.startswith("it hung for more than 1 second: env 1, of envs 0-2, ") for header in headers)
    assert [header.other_running_env for header in headers] == [1, None, 1]


def test_later_runs_in_a_folder_keep_files_of_earlier_ones(tmp_path: Path) -> None:
    for _ in range(3):
        files, error = record_failure(tmp_path, "raises")
    name = f"ShortEnv-env1-episode1-step{FAILING_STEP}"
    assert [file.name for file in files] == [f"{name}-2.vecenv", f"{name}-3.vecenv", f"{name}.vecenv"]
    assert f"{name}-3.vecenv" in "".join(error.__notes__)


@pytest.mark.long
def test_replay_repeats_failing_reset(tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, "raises", when={"seed": 4})
    assert replay(files[0]).text.startswith("happened again in the reset before step 1: ")
    found = json.loads(run_replay(files[0], "--yes", "--json").stdout)
    assert (found["step"], found["recorded_step"]) == (0, 0)


@pytest.mark.long
def test_replay_of_external_kill_reports_no_failure(tmp_path: Path) -> None:
    once = tmp_path / "once"
    files, error = record_failure(tmp_path / "records", "kill", when={"step": FAILING_STEP, "once": str(once)})
    assert isinstance(error, WorkerDied)
    assert replay(files[0])[:2] == (
        "did not happen again",
        f"did not happen again: steps 1 to {FAILING_STEP - 1} matched; "
        f"step {FAILING_STEP} returned, but failed in the record; a kill from outside is not repeated",
    )


class ProcessDependentEnv(ShortEnv):
    """An environment with rewards and an exception that contain the id of its process, so that replays differ."""

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        if self.steps == FAILING_STEP:
            raise ValueError(f"{os.getpid()}")
        return observation, float(os.getpid() if self.steps > 4 else 1.0), terminated, truncated, info


@pytest.mark.long
def test_replay_reports_first_difference_from_record(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([ProcessDependentEnv] * 2, record_failures=tmp_path)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match=r"\d+"):
            step_until_error(envs, lambda step: np.zeros(2, np.int64))
    result = replay(min(tmp_path.glob("*.vecenv")))
    assert result.status == "did not happen again"
    assert f"another failure at step {FAILING_STEP}: ValueError" in result.text
    assert "first difference from the record at step 5: reward" in result.text


class SecondEpisodeEnv(ShortEnv):
    """An environment that fails in its second episode, with rewards that are different in each process."""

    failing_step = 0

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        if self.steps == self.failing_step:
            raise ValueError("second episode")
        self.failing_step = 2 if truncated else self.failing_step
        return observation, float(os.getpid()), terminated, truncated, info


def test_difference_in_an_earlier_episode_has_no_step_number(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([SecondEpisodeEnv], record_failures=tmp_path)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="second episode"):
            step_until_error(envs, lambda step: np.zeros(1, np.int64))
    result = replay(min(tmp_path.glob("*.vecenv")))
    assert result.text.startswith("happened again at step 2: ValueError: second episode; first difference from the record ")
    assert "record in an earlier episode: reward" in result.text


@contextlib.contextmanager
def run_with_restarts(fns: list[Any], recording: Any, steps: int, num_workers: int) -> Iterator[Any]:
    """Yield an engine that restarts workers and has taken this many steps."""
    with contextlib.closing(
        vecenv.AsyncVectorEnv(fns, record_failures=recording, on_failure="restart", num_workers=num_workers)
    ) as envs:
        envs.reset(seed=3)
        for _ in range(steps):
            envs.step(np.zeros(len(fns), np.int64))
        yield envs


@pytest.mark.long
def test_dead_worker_leaves_a_file_per_environment(tmp_path: Path) -> None:
    files, error = record_failure(tmp_path, "segfault", num_workers=1)
    assert isinstance(error, WorkerDied)
    assert error.__notes__[:-1] == [f"recorded: {files[1]}\nand 2 more in {tmp_path}"]
    assert [file.name[:13] for file in files] == ["ShortEnv-env0", "ShortEnv-env1", "ShortEnv-env2"]
    results = [replay(file) for file in files]
    assert [result.status for result in results] == ["did not happen again", "happened again", "did not happen again"]
    assert (results[1].step, results[1].location) == (FAILING_STEP, parse_location(error))
    assert 'faulty.py", line ' in results[1].stack
    listed = [line.split(":")[0] for line in run_replay(tmp_path).stderr.splitlines()[1:]]
    assert listed == [f"  {files[1]}"], "siblings are listed"


def parse_location(error: BaseException) -> str:
    """Return the location at the end of the first line of a ``WorkerDied``."""
    return str(error).partition("\n")[0].rpartition(", at ")[2]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", pytest.param("sleep", marks=pytest.mark.slow)])
def test_replay_of_sibling_names_file_of_running_environment(fault: str, tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, fault, num_workers=1, step_timeout=1.0)
    done = run_replay(files[2], "--yes")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == (
        f"Env 2 only shared a worker with env 1, which was running when the worker failed: replay {files[1]}"
    )
    assert json.loads(run_replay(files[0], "--yes", "--json").stdout)["instead"] == str(files[1])


def test_replay_of_sibling_without_a_reset_names_file_of_running_environment(tmp_path: Path) -> None:
    fns = [ShortEnv, functools.partial(make_faulty_env, "kill", step=2)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, num_workers=1, record_failures=tmp_path)) as envs:
        envs.reset_async(seed=[1], env_id=[1])
        for _ in range(2):
            envs.recv(count=1)
            envs.send(np.zeros(1, int), [1])
        with pytest.raises(WorkerDied):
            envs.recv(count=1)
    files = sorted(tmp_path.glob("*.vecenv"))
    reason, advice = run_replay(files[0], "--yes").stdout.splitlines()[-2:]
    assert reason.startswith("Cannot be replayed, because the record has neither a reset with a seed nor a snapshot")
    assert advice.endswith(f"replay {files[1]}")


def test_environment_that_failed_before_its_worker_died_leaves_one_file(tmp_path: Path) -> None:
    fns = [functools.partial(make_faulty_env, "raises", step=1), functools.partial(make_faulty_env, "kill", step=2)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, num_workers=1, record_failures=tmp_path)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="the environment is out of order"):
            envs.step([0, 0])
        envs.send(np.zeros(1, int), [1])
        with pytest.raises(WorkerDied):
            envs.recv(count=1)
        raised, died = envs.errors
    files = sorted(tmp_path.glob("*.vecenv"))
    assert [raised.recorded, died.recorded] == [str(file) for file in files]


@pytest.mark.parametrize("rows", [[1], [1, 3], [0, 1, 3, 4], [4, 5, 9]], ids=str)
def test_running_environment_is_read_from_the_text_of_a_failure(rows: list[int]) -> None:
    text = f"it hung: {envs_text(rows, rows[-1])}, worker 0, pid 12"
    for row in rows:
        assert running_env(text, row) == ((rows[-1], rows) if len(rows) > 1 else None)
    assert running_env(text, 2) is None


def test_replay_of_sibling_does_not_name_file_of_later_failure(tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, "kill", num_workers=1)
    files[1].unlink()
    later, _ = record_failure(tmp_path, "kill", num_workers=1)
    header, _ = read_header(files[0])
    assert _find_running_env(files[0], header) == (1, None)
    headers = {path: read_header(path)[0] for path in later}
    (newest,) = {other.failure for other in headers.values()} - {header.failure}
    found = {_find_running_env(path, other) for path, other in headers.items() if other.failure == newest}
    assert found == {(1, files[1]), (None, None)}
    done = run_replay(files[0], "--yes")
    assert done.stdout.splitlines()[-1].endswith("env 1, which was running when the worker failed: its file is gone")


@pytest.mark.long
def test_restart_logs_its_file_and_replay_repeats_the_death(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vecenv"):
        fns = [functools.partial(make_faulty_env, "kill", step=20)] * 2
        with run_with_restarts(fns, tmp_path, 50, num_workers=2):
            pass
    files = sorted(tmp_path.glob("*.vecenv"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 4
    for file in files:
        assert any(f"(recorded: {file})" in record.getMessage() for record in caplog.records)
        assert replay(file).status == "happened again"


def return_no_info(result: Any) -> Any:
    return (*result[:-1], None)


def raise_memory_error(result: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("when", [{"step": FAILING_STEP}, {"reset": 2}], ids=str)
def test_replay_repeats_info_that_is_not_a_dict(when: dict[str, int], tmp_path: Path) -> None:
    fns = [ShortEnv, functools.partial(make_faulty_env, return_no_info, **when)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, on_failure="restart", record_failures=tmp_path)) as envs:
        envs.reset(seed=1)
        step_until(envs, lambda infos: "restarted" in infos)
    (file,) = tmp_path.glob("*.vecenv")
    result = replay(file)
    assert result.text.startswith("happened again "), result
    assert result.text.endswith(": InfoError: env 1: info: got None, expected a dict")


def test_worker_out_of_memory_is_recorded_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fns = [ShortEnv, functools.partial(make_faulty_env, raise_memory_error, step=FAILING_STEP), ShortEnv]
    with contextlib.closing(
        vecenv.AsyncVectorEnv(fns, num_workers=1, on_failure="restart", record_failures=tmp_path)
    ) as envs:
        envs.reset(seed=1)
        step_until(envs, lambda infos: "restarted" in infos)
        envs.step([0, 0, 0])
        raised, died = envs.errors
    files = sorted(tmp_path.glob("*.vecenv"))
    assert [file.name[:13] for file in files] == ["ShortEnv-env0", "ShortEnv-env1", "ShortEnv-env2"]
    assert raised.recorded == died.recorded == str(files[1])
    assert str(files[1]) in caplog.text
    assert replay(files[1]).text == f"happened again at step {FAILING_STEP}: MemoryError"
    assert _find_running_env(files[2], read_header(files[2])[0]) == (1, files[1])


def step_until(envs: Any, is_last: Any) -> None:
    """Step until ``is_last`` returns ``True`` for the infos of a step."""
    for _ in range(60):
        if is_last(envs.step(np.zeros(envs.num_envs, int))[4]):
            return
    raise AssertionError("no step returned such infos")


@pytest.mark.sampled("{'num_workers': 1, 'use_caller': True}")
@pytest.mark.parametrize(
    "options",
    [{"num_workers": 0}, {"num_workers": 1, "use_caller": True}, {"num_workers": 2, "autoreset_mode": "SameStep"}],
    ids=str,
)
def test_replay_repeats_failure_of_each_engine(options: dict[str, Any], tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, "raises", when={"step": 50}, **options)
    result = replay(files[0])
    assert result.status == "happened again", result.text


@pytest.mark.long
def test_replay_repeats_failure_raised_by_recv(tmp_path: Path) -> None:
    fns = [functools.partial(make_faulty_env, "raises", step=30)] + [ShortEnv] * 3
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, record_failures=tmp_path, batch_size=2)) as envs:
        envs.reset(seed=3)
        envs.send(np.zeros(4, np.int64), np.arange(4))
        with pytest.raises(ValueError, match="the environment is out of order"):
            send_until_error(envs)
    (file,) = tmp_path.glob("*.vecenv")
    assert file.name == "ShortEnv-env0-episode1-step30.vecenv"
    assert replay(file).text.startswith("happened again at step 30: ")


def test_keep_counts_the_files_of_the_latest_failure_as_one(tmp_path: Path) -> None:
    recording = vecenv.FlightRecorder(tmp_path, keep=2)
    fns = [functools.partial(make_faulty_env, "kill", step=5)] * 3
    with run_with_restarts(fns, recording, 12, num_workers=1) as envs:
        assert len(list(tmp_path.glob("*.vecenv"))) == 4, "expected three files of the latest failure, and an older one"
        note = next(note for note in envs.errors[-1].error.__notes__ if note.startswith("recorded: "))
        assert note.endswith(f"\nand 2 more in {tmp_path}")
        assert Path(envs.errors[-1].recorded) in tmp_path.glob("*-env0-*.vecenv")
    assert not list(tmp_path.glob(".*")), "an unfinished file is left"


def test_unwritable_folder_does_not_hide_the_failure(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with contextlib.closing(
        vecenv.AsyncVectorEnv([functools.partial(make_faulty_env, "raises", step=2)], record_failures=blocked / "folder")
    ) as envs:
        envs.reset(seed=1)
        envs.step([0])
        with pytest.raises(ValueError, match="out of order") as caught:
            envs.step([0])
    assert "not recorded: NotADirectoryError" in "".join(caught.value.__notes__)


class MatchingPennies:
    """A game of two players that raises at a random time."""

    metadata = {"name": "pennies"}  # noqa: RUF012
    possible_agents = ["left", "right"]  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return gym.spaces.Box(0, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.rounds = list(self.possible_agents), 0
        return self._for_all_agents(lambda: self.rng.random(2).astype(np.float32)), self._for_all_agents(dict)

    def _for_all_agents(self, make_value: Any) -> dict[str, Any]:
        return {agent: make_value() for agent in self.possible_agents}

    def step(self, actions: Any) -> Any:
        self.rounds += 1
        if self.rng.random() < 0.02:
            raise ValueError(f"a penny is lost after {self.rounds} throws of {sum(map(int, actions.values()))}")
        done = self.rounds == 30
        if done:
            self.agents = []
        rewards = self._for_all_agents(lambda: float(self.rng.random()))
        observations = self._for_all_agents(lambda: self.rng.random(2).astype(np.float32))
        terminations, truncations = self._for_all_agents(lambda: done), self._for_all_agents(lambda: False)
        return observations, rewards, terminations, truncations, self._for_all_agents(dict)

    def close(self) -> None:
        pass


@pytest.mark.long
def test_replay_repeats_failure_of_multi_agent_env(tmp_path: Path) -> None:
    with contextlib.closing(MultiAgentVecEnv([MatchingPennies] * 3, record_failures=tmp_path, num_workers=2)) as envs:
        envs.reset(seed=8)
        with pytest.raises(ValueError, match="a penny is lost"):
            step_until_error(envs, lambda step: np.full((3, 2), step % 2))
    (file,) = tmp_path.glob("pennies-env*.vecenv")
    assert "a penny is lost" in replay(file).text
    assert replay(file).status == "happened again"


# -- the command ----------------------------------------------------------------------------------------------------------


def run_replay(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run ``vecenv replay`` with these arguments."""
    return run_python("-m", "vecenv", "replay", *arguments)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record an environment that raises in step 9, and return the file, which has a snapshot."""
    folder = tmp_path_factory.mktemp("records")
    recording = vecenv.FlightRecorder(folder, snapshot_every=4)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(
            vecenv.AsyncVectorEnv([functools.partial(HistoryEnv, FAILING_STEP)], record_failures=recording, num_workers=0)
        ) as envs,
    ):
        patch.setattr(recorder, "_LONG_REPLAY_SECONDS", -1.0)  # otherwise, a record this short has no snapshot
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="the environment broke"):
            step_until_error(envs, lambda step: [step % 5])
    (written,) = folder.glob("*.vecenv")
    return written


def test_replay_prints_record_traceback_and_result(file: Path) -> None:
    done = run_replay(file, "--yes")
    assert done.returncode == 0, done.stderr
    first, recorded, *traceback, result = done.stdout.splitlines()
    assert first.startswith("HistoryEnv, env 0, episode 1, step ")
    assert recorded.startswith("Recorded: ValueError: the environment broke after 9 steps at ")
    assert result.startswith("Happened again at step ")
    assert "the environment broke after 9 steps at " in result
    assert traceback[0] == "Traceback (most recent call last):"
    assert any(line.startswith("  File") and line.endswith("in step") and "history_envs.py" in line for line in traceback)
    assert traceback[-1].startswith("ValueError: the environment broke after 9 steps at ")


def test_replay_json_has_environment_step_and_location(file: Path) -> None:
    done = run_replay(file, "--yes", "--json")
    found = json.loads(done.stdout)
    step = int(file.stem.rpartition("step")[2])
    assert (found["result"], found["env_id"], found["env"], found["step"]) == ("happened again", "HistoryEnv", 0, step)
    assert (found["episode"], found["recorded_step"], found["instead"]) == (1, step, None)
    assert re.fullmatch(r"history_envs\.py:\d+ in step", found["location"])
    assert found["traceback"].startswith("Traceback (most recent call last):\n")
    assert found["recorded"].startswith("ValueError: the environment broke")


@pytest.mark.long
def test_replay_of_a_folder_lists_its_newest_files(file: Path, tmp_path: Path) -> None:
    done = run_replay(file.parent)
    assert done.returncode == 2
    first, listed = done.stderr.splitlines()
    assert first == f"vecenv: {file.parent} is a folder; choose one of its files. The newest:"
    assert listed.startswith(f"  {file}: ValueError: the environment broke after 9 steps")
    done = run_replay(tmp_path)
    assert (done.returncode, done.stderr) == (2, f"vecenv: {tmp_path} is a folder without recorded failures (*.vecenv)\n")


@pytest.mark.long
def test_replay_from_snapshot_repeats_and_until_stops_before_step(file: Path) -> None:
    done = run_replay(file, "--yes", "--json", "--from-snapshot")
    assert json.loads(done.stdout)["result"] == "happened again"
    step = int(file.stem.rpartition("step")[2])
    done = run_replay(file, "--yes", "--until", max(step - 1, 1))
    assert done.stdout.splitlines()[-1] == f"Stopped before step {max(step - 1, 1)}: everything matched the record"
    assert done.returncode == 0
    done = run_replay(file, "--yes", "--json", "--until", max(step - 1, 1))
    assert (json.loads(done.stdout)["result"], done.returncode) == ("stopped", 0)


def make_env_that_dies_and_fails_to_close(fault: str) -> Any:
    return FaultyEnv(make_faulty_env("exit_now", step=FAILING_STEP), fault, close=True)


@pytest.mark.parametrize("fault", ["exit_now", pytest.param("sleep", marks=pytest.mark.long)])
def test_replay_until_a_step_ignores_a_failure_of_close(fault: str, tmp_path: Path) -> None:
    fns = [ShortEnv, functools.partial(make_env_that_dies_and_fails_to_close, fault)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, record_failures=tmp_path)) as envs:
        envs.reset(seed=3)
        with pytest.raises(WorkerDied):
            step_until_error(envs, lambda step: [0, 0])
    (file,) = tmp_path.glob("*.vecenv")
    assert replay(file, until=2).text == "stopped before step 2: everything matched the record"


@pytest.mark.parametrize("options", [(), ("--pdb",)], ids=str)
def test_replay_until_a_step_after_the_record_exits_with_an_error(options: Sequence[str], file: Path) -> None:
    step = int(file.stem.rpartition("step")[2])
    done = run_replay(file, "--yes", "--until", step + 1, *options)
    assert (done.returncode, done.stderr) == (2, f"vecenv: --until {step + 1}: the record ends at step {step}\n")


def test_replay_with_pdb_and_json_exits_with_an_error(file: Path) -> None:
    done = run_replay(file, "--yes", "--pdb", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "vecenv: --pdb and --json cannot be combined\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("out.txt", "--frames: the name of a video must end in .gif or .mp4, got 'out.txt'"),
        ("folder.gif", "--frames: "),
        ("/proc/out.gif", "--frames: "),
    ],
)
def test_replay_with_frames_that_cannot_be_written_exits_before_replaying(
    name: str, text: str, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "folder.gif").mkdir()
    done = run_replay(file, "--yes", "--frames", tmp_path / name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"vecenv: {text}")
    assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "library", "command"), [("out.gif", "Pillow", "pillow"), ("out.mp4", "moviepy", "'moviepy>=2'")]
)
def test_replay_with_frames_but_no_video_library_names_the_install_command(
    name: str, library: str, command: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["replay", str(file), "--yes", "--frames", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    needs = f"writing {Path(name).suffix} needs {library}, not installed here: pip install {command}"
    assert output.err == f"vecenv: --frames: {needs}\n"


class RenderingEnv(ShortEnv):
    """An environment that can be rendered, with an optional fault."""

    render_mode = "rgb_array"
    metadata = {"render_fps": 0.5}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def step(self, action: Any) -> Any:
        if self.fault == "step" and self.steps == 4:
            os._exit(3)
        return super().step(action)

    def render(self) -> Any:
        if self.fault == "render":
            raise RuntimeError("the brush is lost")
        if self.fault == "render dies":
            os._exit(3)
        return np.full((8, 8, 3), 60 * self.steps, np.uint8)


def record_rendering_env(folder: Path, fault: str) -> Path:
    """Record five steps. With the fault ``"step"``, the last one ends the process."""
    with contextlib.closing(vecenv.AsyncVectorEnv([functools.partial(RenderingEnv, fault)], record_failures=folder)) as envs:
        envs.reset(seed=1)
        with contextlib.suppress(WorkerDied):
            for _ in range(5):
                envs.step([1])
            return envs.record(0)
    return min(folder.glob("*.vecenv"))


def test_frames_before_a_crash_are_written(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    out = tmp_path / "out.gif"
    done = run_replay(record_rendering_env(tmp_path, "step"), "--yes", "--frames", out)
    assert done.returncode == 0, done.stderr
    *_, result, wrote = done.stdout.splitlines()
    assert result.startswith("Happened again at step 5: ")
    assert wrote == f"Wrote {out} (5 frames)"
    video = image.open(out)
    assert (video.n_frames, video.info["duration"]) == (5, 2000)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("render", "Cannot be rendered, because render() raised RuntimeError: the brush is lost"),
        ("render dies", "Cannot be rendered, because the process died in render(): exited with exit code 3"),
    ],
)
def test_frames_report_failing_render(fault: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    done = run_replay(record_rendering_env(tmp_path, fault), "--yes", "--frames", tmp_path / "out.gif")
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (2, text, "")


def test_frames_of_a_failing_reset_report_no_frames(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with (
        contextlib.closing(
            vecenv.AsyncVectorEnv([functools.partial(FaultyEnv, RenderingEnv(), "raises", seed=2)], record_failures=tmp_path)
        ) as envs,
        contextlib.suppress(ValueError),
    ):
        envs.reset(seed=2)
    done = run_replay(min(tmp_path.glob("*.vecenv")), "--yes", "--frames", tmp_path / "out.gif")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "No frames: the environment failed before the first step"


class RenderModeEnv(RenderingEnv):
    """An environment that renders only if it was built with a render mode."""

    def __init__(self, fault: str = "", *, render_mode: str | None = None) -> None:
        super().__init__(fault)
        self.render_mode = render_mode or ""


def assert_frames_are_rendered(envs: Any) -> None:
    with contextlib.closing(envs):
        envs.reset(seed=1)
        envs.step([1] * envs.num_envs)
        files = [envs.record(env) for env in range(envs.num_envs)]
    for path in files:
        reported: list[Any] = []
        result = _replay_here(path, begin="latest", until=None, render=True, report=reported.append)
        assert result.status == "happened again"
        assert [message.frame[0, 0, 0] for message in reported if hasattr(message, "frame")] == [0, 60]


def test_frames_are_rendered_if_recorded_without_a_render_mode(tmp_path: Path) -> None:
    env_fns = [RenderModeEnv, functools.partial(RenderModeEnv, ""), functools.partial(RenderModeEnv, render_mode=None)]
    assert_frames_are_rendered(vecenv.AsyncVectorEnv(env_fns, record_failures=tmp_path, num_workers=0))


@pytest.mark.parametrize("kind", ["own generators", "spare workers", "EnvChoice"])
def test_frames_are_rendered_by_environments_that_vecenv_wraps(kind: str, tmp_path: Path) -> None:
    if kind == "spare workers":
        envs: Any = vecenv.EpisodePrefetcher.from_env_fns([RenderModeEnv] * 2, 1, record_failures=tmp_path, context="fork")
    else:
        env_fn: Any = vecenv.EnvChoice({"only": RenderModeEnv}) if kind == "EnvChoice" else RenderModeEnv
        generators = "own" if kind == "own generators" else "shared"
        envs = vecenv.AsyncVectorEnv([env_fn] * 2, record_failures=tmp_path, num_workers=0, generators=generators)
    assert_frames_are_rendered(envs)


class RandomFramesEnv(RenderModeEnv):
    """An environment with rewards from numpy's global generator."""

    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, np.random.random(), *others


def test_frames_of_a_registered_environment_with_own_generators_are_those_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym, "registry", dict(gym.registry))
    monkeypatch.setattr(gym.envs.registration, "registry", gym.registry)
    gym.register("RandomFrames-v0", RandomFramesEnv)
    make: Any = lambda: gym.make("RandomFrames-v0", disable_env_checker=True)  # noqa: E731 - takes no render_mode
    assert_frames_are_rendered(vecenv.AsyncVectorEnv([make], record_failures=tmp_path, generators="own"))


@pytest.mark.parametrize("env_kwargs", [{}, {"fault": ""}, {"render_mode": None}])
@pytest.mark.parametrize("wrappers", [None, [functools.partial(gym.wrappers.TimeLimit, max_episode_steps=9)]])
def test_frames_of_a_class_passed_to_make_vec_are_rendered(
    tmp_path: Path, env_kwargs: dict[str, Any], wrappers: list[Any] | None
) -> None:
    options = {"record_failures": tmp_path, "num_workers": 0}
    assert_frames_are_rendered(
        vecenv.make_vec(RenderModeEnv, 2, wrappers=wrappers, vector_kwargs=options, env_kwargs=env_kwargs)
    )


class ReusedFrameEnv(RenderingEnv):
    """An environment that renders every frame into the same array."""

    frame = np.zeros((8, 8, 3), np.uint8)

    def render(self) -> Any:
        self.frame[:] = super().render()
        return self.frame


def test_frames_of_a_reused_array_are_copied(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([ReusedFrameEnv], record_failures=tmp_path, num_workers=0)) as envs:
        envs.reset(seed=1)
        envs.step([1])
        envs.step([1])
        path = envs.record(0)
    reported: list[Any] = []
    _replay_here(path, begin="latest", until=None, render=True, report=reported.append)
    assert [message.frame[0, 0, 0] for message in reported if hasattr(message, "frame")] == [0, 60, 120]


@pytest.mark.long
def test_frames_are_written_if_the_environment_can_be_rendered(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    done = run_replay(file, "--yes", "--frames", tmp_path / "out.gif")
    assert done.stdout.splitlines()[-1] == f"Wrote {tmp_path / 'out.gif'} ({FAILING_STEP} frames)"
    with contextlib.closing(vecenv.AsyncVectorEnv([ShortEnv], record_failures=tmp_path, num_workers=0)) as envs:
        envs.reset(seed=1)
        done = run_replay(envs.record(0), "--yes", "--frames", tmp_path / "out.gif")
    assert done.returncode == 2
    assert "Cannot be rendered, because the environment is not registered: " in done.stdout
    recording = vecenv.FlightRecorder(tmp_path)
    with contextlib.closing(
        vecenv.AsyncVectorEnv([functools.partial(gym.make, "CartPole-v1")], record_failures=recording, num_workers=0)
    ) as envs:
        envs.reset(seed=1)
        for _ in range(6):
            envs.step([1])
        written = envs.record(0)
    assert written.name == "CartPole-v1-env0-episode1-step6.vecenv"
    pytest.importorskip("pygame")
    done = run_replay(written, "--yes", "--frames", tmp_path / "out.gif")
    assert done.returncode == 0, done.stdout
    assert getattr(Image.open(tmp_path / "out.gif"), "n_frames", 0) > 1
    assert done.stdout.splitlines()[-1] == f"Wrote {tmp_path / 'out.gif'} (7 frames)"


def write_changed_copy(file: Path, target: Path, change: Any) -> Path:
    target.write_bytes(change(file.read_bytes()))
    return target


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda blob: b"", "is not a flight record of vecenv"),
        (lambda blob: pickle.dumps([1]), "is not a flight record of vecenv"),
        (lambda blob: blob[:-10], "is truncated: "),
        (lambda blob: blob[:40], "is damaged: its header cannot be read"),
        (lambda blob: blob[:-10] + b"0123456789", "is damaged: its bytes are not those that were written"),
        (lambda blob: blob.replace(b'"format": 6', b'"format": 9', 1), "has format 9, and this version of vecenv reads 6"),
    ],
)
def test_replay_of_an_invalid_file_exits_before_unpickling(change: Any, text: str, file: Path, tmp_path: Path) -> None:
    done = run_replay(write_changed_copy(file, tmp_path / "wrong.vecenv", change), "--yes")
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


def test_replay_of_several_files_exits_with_an_error(file: Path) -> None:
    done = run_replay(file, file, "--yes", file)
    assert done.returncode == 2
    assert done.stderr.endswith(": error: replay takes one FILE, got 3\n")


def test_replay_of_a_missing_file_exits_with_an_error() -> None:
    done = run_replay("nowhere.vecenv", "--yes")
    assert done.returncode == 2
    assert "No such file" in done.stderr
    assert "keep=" not in done.stderr


def test_replay_of_a_missing_recorder_file_mentions_keep(file: Path) -> None:
    done = run_replay(file.with_name("Ant-v5-env3-episode17-step412.vecenv"), "--yes")
    assert done.returncode == 2
    assert done.stderr.endswith("step412.vecenv' (the recorder keeps only the newest files; see keep=)\n")


def test_replay_needs_confirmation_before_unpickling(file: Path) -> None:
    done = run_replay(file)
    assert done.returncode == 2
    reason = "the file contains a pickle, which can run arbitrary code; pass --yes if it is yours"
    assert done.stderr == f"vecenv: not replayed, because {reason}\n"
    output = run_in_terminal([sys.executable, "-m", "vecenv", "replay", str(file)], ("[y/N]", "n"))
    assert output.splitlines()[-1] == "vecenv: not replayed"


class PrintingEnv(ShortEnv):
    """An environment that prints its actions."""

    def step(self, action: Any) -> Any:
        print("step", action)
        return super().step(action)


def test_stdout_contains_only_json_despite_a_prompt_and_an_environment_that_prints(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([PrintingEnv], record_failures=tmp_path, num_workers=0)) as envs:
        envs.reset(seed=1)
        envs.step([3])
        path = envs.record(0)
    terminal, stdin = pty.openpty()
    try:
        os.write(terminal, b"y\n")
        command = [sys.executable, "-m", "vecenv", "replay", path, "--json"]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, check=False)
    finally:
        os.close(terminal)
        os.close(stdin)
    assert json.loads(done.stdout)["text"] == "nothing had failed, and its one step matched the record"
    assert "[y/N] step 3" in done.stderr


class LongTextEnv(ShortEnv):
    """An environment that raises an exception with a text of two million characters."""

    def step(self, action: Any) -> Any:
        raise ValueError("\N{RAISED HAND}" * 2**21)


def test_replay_repeats_an_exception_with_a_long_text(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([LongTextEnv], record_failures=tmp_path, num_workers=0)) as envs:
        envs.reset(seed=1)
        with pytest.raises(ValueError, match="\N{RAISED HAND}"):
            envs.step([0])
    (path,) = tmp_path.glob("*.vecenv")
    assert len(read_header(path)[0].failed) == 10_000
    result = _replay_here(path, begin="latest", until=None, render=False, report=lambda message: None)
    assert result.status == "happened again"


@pytest.mark.long
def test_replay_needs_the_module_of_the_environment(tmp_path: Path) -> None:
    module = tmp_path / "gone_world.py"
    module.write_text(Path(__file__).with_name("history_envs.py").read_text())
    program = (
        "import vecenv, gone_world, functools\n"
        "if __name__ == '__main__':\n"
        "    envs = vecenv.AsyncVectorEnv([gone_world.HistoryEnv], num_workers=0, record_failures='records')\n"
        "    envs.reset(seed=1); envs.step([1]); print(envs.record(0)); envs.close()\n"
    )
    path = python_output("-c", program, cwd=tmp_path).strip()
    assert run_replay(path, "--yes").returncode == 0, "the module was not found in the recorded folder"
    module.unlink()
    done = run_replay(path, "--yes")
    assert done.returncode == 2
    assert "Cannot be replayed, because " in done.stdout
    assert "No module named 'gone_world'" in done.stdout


def test_replay_uses_recorded_definitions_of_the_main_script(tmp_path: Path) -> None:
    program = (
        "import vecenv, gymnasium as gym\n"
        "def make(): return gym.make('CartPole-v1')\n"
        "if __name__ == '__main__':\n"
        "    envs = vecenv.AsyncVectorEnv([make], num_workers=0, record_failures='records')\n"
        "    envs.reset(seed=1); envs.step([1]); print(envs.record(0)); envs.close()\n"
    )
    done = run_replay(tmp_path / python_output("-c", program, cwd=tmp_path).strip(), "--yes")
    assert done.stdout.splitlines()[-2].startswith("What the main script or notebook defined is replayed as it was recorded")


def test_replay_begins_with_a_loaded_state_of_a_class_of_the_main_script(tmp_path: Path) -> None:
    program = (
        "import vecenv, gymnasium as gym, numpy as np\n"
        "class World(gym.Env):\n"
        "    observation_space, action_space = gym.spaces.Box(0, 99, (1,)), gym.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        return self.observe(), {}\n"
        "    def observe(self): return np.ones(1, np.float32)\n"
        "    def step(self, action): return self.observe(), self.np_random.random(), False, False, {}\n"
        "if __name__ == '__main__':\n"
        "    envs = vecenv.AsyncVectorEnv([World], num_workers=0, record_failures='records')\n"
        "    envs.reset(seed=1); envs.step([1]); envs.load(envs.save(verify=False)); envs.step([1])\n"
        "    print(envs.record(0)); envs.close()\n"
    )
    done = run_replay(tmp_path / python_output("-c", program, cwd=tmp_path).strip(), "--yes")
    assert done.returncode == 0, done.stdout


def test_replay_from_another_folder_finds_module_of_registered_class(tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(Path(__file__).with_name("history_envs.py").read_text())
    program = (
        "import vecenv, gymnasium, my_envs\n"
        "gymnasium.register('Odd-v0', entry_point=my_envs.HistoryEnv)\n"
        "envs = vecenv.make_vec('Odd-v0', 1, num_workers=0, record_failures='records')\n"
        "envs.reset(seed=1); envs.step([1]); print(envs.record(0)); envs.close()\n"
    )
    done = run_replay(python_output("-c", program, cwd=tmp_path).strip(), "--yes")
    assert done.returncode == 0, done.stdout


class MissingEngineEnv(ShortEnv):
    """An environment that cannot be built after its first failure, which sets a variable that its constructor checks."""

    def __init__(self) -> None:
        if missing := os.environ.get("MISSING_ENGINE"):
            raise ImportError(missing)

    def step(self, action: Any) -> Any:
        if action:
            os.environ["MISSING_ENGINE"] = "no engine"
            raise ValueError("overheated")
        return super().step(action)


def test_replay_without_a_working_constructor_repeats_only_its_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISSING_ENGINE", "")
    recorded: Any = {"record_failures": tmp_path, "on_failure": vecenv.Restart(1), "num_workers": 0}
    with contextlib.closing(vecenv.AsyncVectorEnv([MissingEngineEnv], **recorded)) as envs:
        envs.reset(seed=1)
        with contextlib.suppress(RestartsExhausted):
            for action in (0, 1, 0):
                envs.step([action])
    step_file, constructor_file = sorted(tmp_path.glob("*.vecenv"))
    results = [
        _replay_here(path, begin="latest", until=None, render=False, report=lambda message: None)
        for path in (step_file, constructor_file)
    ]
    assert [result.status for result in results] == ["cannot be replayed", "happened again"]
    assert results[0].text == "cannot be replayed, because the environment cannot be built here: ImportError: no engine"
    output = run_replay(step_file, "--yes", "--pdb").stdout
    assert output.count("ImportError: no engine\n") == 2  # in the traceback and in the sentence below it
    assert "The error" not in output


def run_in_terminal(command: Sequence[str], *exchanges: tuple[str, str]) -> str:
    """Run a command in a terminal and return its output.

    Each exchange is a text in the output to wait for, and the line (or Ctrl-C) to type after it.
    """
    pid, terminal = pty.fork()
    if not pid:
        os.execv(command[0], list(command))
    output, remaining = "", list(exchanges)
    try:
        while True:
            try:
                output += os.read(terminal, 4096).decode()
            except OSError:  # the command has ended
                break
            if remaining and remaining[0][0] in output.rpartition("\0")[2]:
                text = remaining.pop(0)[1]
                os.write(terminal, text.encode() + (b"" if text == "\x03" else b"\n"))
                output += "\0"  # the next text must appear after this mark
    finally:
        os.close(terminal)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert not remaining, output
    return output


def test_pdb_stops_in_the_frame_that_raised(file: Path) -> None:
    command = [sys.executable, "-m", "vecenv", "replay", str(file), "--pdb"]
    output = run_in_terminal(
        command, ("[y/N]", "y"), ("(Pdb)", "p self.step_count, self.fails_at"), ("(9, 9)", ""), ("(Pdb)", "q")
    )
    assert 'raise ValueError(f"the environment broke' in output
    assert "history_envs.py" in output
    assert output.count("Happened again at step ") == 1


@pytest.mark.long
def test_pdb_continues_to_the_end_of_the_record(file: Path) -> None:
    step = int(file.stem.rpartition("step")[2])
    command = [sys.executable, "-m", "vecenv", "replay", str(file), "--pdb", "--yes", "--until", str(step - 1)]
    output = run_in_terminal(
        command, ("(Pdb)", "p 'action', action"), ("('action',", ""), ("(Pdb)", "c"),
        ("(Pdb)", "p 'count', self.step_count"), ("('count', 9)", "q"),
    )  # fmt: skip
    assert output.count(f"Stopped before step {step - 1}: everything matched the record") == 1
    assert output.count(f"Happened again at step {step}: ") == 1
    output = run_in_terminal(command, ("(Pdb)", "q"))
    assert output.count("Stopped before step") == 1
    assert "happened again" not in output.lower()


@pytest.mark.parametrize("fault", ["too_few_values", pytest.param("wrong_shape", marks=pytest.mark.long)])
def test_pdb_names_the_option_that_stops_before_a_bad_result(fault: str, tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, fault)
    done = run_replay(files[0], "--yes", "--pdb")
    assert done.returncode == 0, done.stderr
    advice = f"No frame of the environment is left: --pdb --until {FAILING_STEP} stops before that step"
    assert advice in done.stdout.splitlines()


@pytest.mark.parametrize("trigger", ["requested", pytest.param("automatic", marks=pytest.mark.long)])
def test_pdb_stops_before_a_fatal_reset(trigger: str, tmp_path: Path) -> None:
    file = record_fatal_reset(tmp_path, trigger)
    command = [sys.executable, "-m", "vecenv", "replay", str(file), "--pdb", "--yes"]
    output = run_in_terminal(command, ("(Pdb)", "p 'options', options"), ("('options',", ""), ("(Pdb)", "q"))
    assert "faulty.py" in output
    assert "Stopped before the reset: everything matched the record" in output


def record_fatal_reset(folder: Path, trigger: str) -> Path:
    """Record a worker that dies in its second reset."""
    fns = [functools.partial(make_faulty_env, "exit_now", reset=2)]
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, record_failures=folder)) as envs:
        envs.reset(seed=1)
        if trigger == "requested":
            reset = functools.partial(envs.reset, seed=2)
        else:
            reset = functools.partial(step_until_error, envs, lambda step: [0])
        with pytest.raises(WorkerDied):
            reset()
    return min(folder.glob("*.vecenv"))


@pytest.mark.parametrize("trigger", ["requested", pytest.param("automatic", marks=pytest.mark.long)])
def test_replay_names_a_fatal_reset(trigger: str, tmp_path: Path) -> None:
    result = replay(record_fatal_reset(tmp_path, trigger))
    assert result.text == "happened again in the reset before step 1: exited with exit code 0"
    assert result.step == 0


def test_pdb_stops_before_a_fatal_step(tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path, "kill")
    command = [sys.executable, "-m", "vecenv", "replay", str(files[0]), "--pdb", "--yes"]
    output = run_in_terminal(command, ("(Pdb)", "p 'action', action"), ("('action',", ""), ("(Pdb)", "q"))
    assert "faulty.py" in output
    assert output.count("Continuing repeats the failure in this process, and may end it") == 1


@pytest.mark.long
def test_pdb_shows_the_stack_of_a_crash_and_the_prompt_in_a_hang(tmp_path: Path) -> None:
    files, _ = record_failure(tmp_path / "segfault", "segfault")
    command = [sys.executable, "-m", "vecenv", "replay", "--pdb", "--yes"]
    output = run_in_terminal([*command, str(files[0])], ("(Pdb)", "c"))
    assert "Fatal Python error: Segmentation fault" in output
    assert "faulty.py" in output.partition("Fatal Python error")[2]
    files, _ = record_failure(tmp_path / "sleep", "sleep", step_timeout=0.5)
    # the debugger stops at the next line of Python code, so the hang must consist of many short sleeps
    many_sleeps = "import time; time.sleep = lambda s, nap=time.sleep: [(print('Zz'), nap(s / 72_000)) for _ in range(2000)]"
    output = run_in_terminal([*command, str(files[0])], ("(Pdb)", many_sleeps), ("(Pdb)", "c"), ("Zz\r", "\x03"),
                             ("(Pdb)", "p 'frame', s"), ("('frame',", "q"))  # fmt: skip
    assert "Interrupted" in output
    assert "Traceback" not in output
