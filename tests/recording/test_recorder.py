"""Recordings are complete: a replay of the recorded calls returns the same results."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from history_envs import BoxActionEnv, ChecksumEnv, GlobalRandomEnv, HistoryEnv, TextActionEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import each_once
from signals import Alarm, signal_handler

import vecenv
from vecenv.errors import (
    EnvFailed,
    EpisodeOver,
    NotRestorable,
    RestartsExhausted,
    SnapshotMismatch,
    StepTimeout,
    WorkerDied,
)  # fmt: skip
from vecenv.recording import file as file_module
from vecenv.recording import recorder as recorder_module
from vecenv.recording.file import read, read_header
from vecenv.recording.replay import AGAIN, Replay, ReplayResult
from vecenv.testing import FaultyEnv

pytestmark = pytest.mark.timeout(120)

MODES = ("NextStep", "SameStep", "Disabled")


@pytest.fixture(autouse=True)
def _always_record_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record snapshots even if a replay from the reset is short."""
    monkeypatch.setattr(recorder_module, "_LONG_REPLAY_SECONDS", -1.0)


def replay_file(path: Path, begin: str = "latest") -> tuple[ReplayResult, int]:
    """Replay a file in this process, and return the result and the number of steps."""
    header, body = read_header(path)
    replay = Replay(header, read(header, body), begin=begin)
    steps = sum(step != 0 for step in replay.run())
    replay.close()
    assert replay.result is not None
    return replay.result, steps


def require_replays_match(envs: Any, folder: Path, *begins: str) -> None:
    """Record each row, and check that its replays from these points match the record."""
    for row in range(envs.num_envs):
        for begin in begins or ("latest", "first"):
            result, _ = replay_file(envs.record(row, folder / f"{row}.vecenv"), begin)
            assert result.status == AGAIN, (row, begin, result.text)
            assert "matched the record" in result.text


@contextlib.contextmanager
def open_recorded_envs(env_fn: Any, folder: Path, count: int = 4, **options: Any) -> Iterator[Any]:
    """Yield ``count`` environments with a flight recorder, and with a prefetcher if there are spare workers."""
    snapshot_every = options.pop("snapshot_every", None)
    recording = vecenv.FlightRecorder(folder, snapshot_every=snapshot_every)
    spares = options.pop("spare_workers", 0)
    options["record_failures"] = recording
    build = partial(vecenv.EpisodePrefetcher.from_env_fns, spares=spares) if spares else vecenv.AsyncVectorEnv
    with contextlib.closing(build([env_fn] * count, **options)) as envs:
        yield envs


ENGINES = {
    "one env per worker": {},
    "two workers": {"num_workers": 2},
    "spawn": {"num_workers": 2, "context": "spawn"},
    "in process": {"num_workers": 0},
    "use_caller": {"num_workers": 1, "use_caller": True},
    "threads": {"num_workers": 2, "env_threads": 2},
    "own generators": {"num_workers": 2, "generators": "own"},
    "restarts": {"num_workers": 2, "on_failure": "restart"},
    "spare workers": {"spare_workers": 2},
}


@pytest.mark.sampled("in process-NextStep", "two workers-SameStep", "one env per worker-NextStep", "use_caller-NextStep")
@pytest.mark.parametrize(("engine", "mode"), each_once(list(ENGINES), list(MODES)))
def test_replay_of_every_engine_matches_the_record(engine: str, mode: str, tmp_path: Path) -> None:
    if engine == "spare workers" and mode == "Disabled":
        pytest.skip("spare workers need automatic resets")
    env_fn = GlobalRandomEnv if engine == "own generators" else HistoryEnv
    with open_recorded_envs(env_fn, tmp_path, autoreset_mode=mode, **ENGINES[engine]) as envs:
        envs.reset(seed=5)
        for step in range(150):
            _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
            if mode == "Disabled" and (done := terminated | truncated).any():
                envs.reset(options={"reset_mask": done})
            if step == 40:
                envs.set_attr("gain", 3.0 if engine == "spare workers" else [2.0, 3.0, 4.0, 5.0])
        require_replays_match(envs, tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spares", [0, 2])
def test_replay_of_send_and_recv_matches_the_record(spares: int, tmp_path: Path) -> None:
    with open_recorded_envs(HistoryEnv, tmp_path, batch_size=2, spare_workers=spares) as envs:
        envs.reset(seed=5)
        envs.send(np.zeros(4, np.int64), np.arange(4))
        for _ in range(150):
            rows = envs.recv()[-1]["env_id"]
            envs.send(rows % 5, rows)
        envs.recv(count=4)
        require_replays_match(envs, tmp_path)


@pytest.mark.parametrize("env_fn", [BoxActionEnv, TextActionEnv])
def test_replay_of_box_and_text_actions_matches_the_record(env_fn: Any, tmp_path: Path) -> None:
    with open_recorded_envs(env_fn, tmp_path, num_workers=2) as envs:
        envs.action_space.seed(1)
        envs.reset(seed=[4, 3, 2, 1])
        for _ in range(60):
            envs.step(envs.action_space.sample())
        require_replays_match(envs, tmp_path)


def test_replay_of_actions_of_another_dtype_matches_the_record(tmp_path: Path) -> None:
    with open_recorded_envs(HistoryEnv, tmp_path, num_workers=2) as envs:
        envs.reset(seed=1)
        for step in range(40):
            envs.step(np.array([step % 5] * 4, np.int16) if step % 2 else [0, 1, 2, 3])
        require_replays_match(envs, tmp_path)


def test_replay_of_resets_without_a_seed_matches_the_record(tmp_path: Path) -> None:
    with open_recorded_envs(HistoryEnv, tmp_path) as envs:
        first, _ = envs.reset()
        envs.step(np.zeros(4, np.int64))
        second, _ = envs.reset()  # continues the random streams of the first
        for _ in range(30):
            envs.step(np.ones(4, np.int64))
        require_replays_match(envs, tmp_path)
    assert len({row.tobytes() for row in np.concatenate([first, second])}) == 8, "two rows or resets have the same seed"


def make_call(envs: Any, call: str, number: int, snapshots: list[Any]) -> None:
    """Make one call, which may change environments."""
    row = number % envs.num_envs
    match call:
        case "step":
            for step in range(number % 7 + 1):
                envs.step((np.arange(envs.num_envs) + step + number) % 5)
        case "reset":
            envs.reset(seed=[None if i == row else number + i for i in range(envs.num_envs)])
        case "mask":
            mask = np.arange(envs.num_envs) == row
            envs.reset(seed=number, options={"reset_mask": mask, "start": float(number)})
        case "options":
            envs.reset(options=[{"start": float(i + number)} for i in range(envs.num_envs)])
        case "set_attr":
            envs.set_attr("gain", [float(number + i) for i in range(envs.num_envs)])
        case "call":
            envs.call("add", number)
        case "exec":
            envs.exec_func(_add, [row], number)
        case "next":
            envs.set_next_options({"start": float(number)}, seed=number, env_id=[row])
        case "save":
            snapshots.append(envs.save(verify=False))
        case "load" if snapshots:
            envs.load(snapshots[number % len(snapshots)])
        case "send":
            rows = np.unique([row, (row + 1) % envs.num_envs])
            envs.send(np.full(len(rows), number % 5), rows)
            envs.reset_async(seed=number, env_id=[i for i in range(envs.num_envs) if i not in rows][:1])
            envs.recv(len(rows) + 1)


def _add(env: Any, amount: float) -> float:
    return float(env.unwrapped.add(amount))


CALLS = ("step", "reset", "mask", "options", "set_attr", "call", "exec", "next", "save", "load", "send")


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.long)])
def test_replay_of_random_calls_matches_the_record(examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    given_calls = given(
        calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 30)), min_size=1, max_size=25),
        engine=st.sampled_from([{"num_workers": 0}, {"num_workers": 2}]),
        every=st.sampled_from([None, 5]),
        tmp_path_factory=st.just(tmp_path_factory),
    )
    settings(max_examples=examples, deadline=None)(given_calls(require_replay_of_calls_matches))()


def require_replay_of_calls_matches(
    calls: list[tuple[str, int]], engine: dict[str, Any], every: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("records")
    with open_recorded_envs(HistoryEnv, folder, 3, snapshot_every=every, **engine) as envs:
        recorder = envs._recorder
        snapshots: list[Any] = []
        envs.reset(seed=9)
        for call, number in calls:
            recorder._next_snapshot_time = 0.0
            make_call(envs, call, number, snapshots)
        require_replays_match(envs, folder)
        if read(*read_header(folder / "0.vecenv")).snapshot is not None:
            require_replays_match(envs, folder, "snapshot")


def test_replay_starts_at_snapshot_after_old_steps_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_BLOCK_TICKS", 16)
    monkeypatch.setattr(recorder_module, "_RING_BYTES", 0)  # the recorder keeps two blocks nevertheless
    with open_recorded_envs(HistoryEnv, tmp_path, num_workers=0, snapshot_every=10) as envs:
        envs.reset(seed=2)
        envs.set_attr("gain", 3.0)
        episodes, steps, done = np.ones(4, int), np.zeros(4, int), np.zeros(4, bool)
        for _ in range(500):
            envs._recorder._next_snapshot_time = 0.0
            _, _, terminated, truncated, _ = envs.step(envs.action_space.sample())
            episodes, steps = episodes + done, np.where(done, 0, steps + 1)
            done = terminated | truncated
        assert envs._recorder._capacity == 32
        for row in range(4):
            result, replayed = replay_file(path := envs.record(row))
            assert result.status == AGAIN, result.text
            assert replayed <= 26, "the replay did not start at the snapshot"
            episode, step = (episodes[row] + 1, 0) if done[row] else (episodes[row], steps[row])
            assert path.name == f"HistoryEnv-env{row}-episode{episode}-step{step}.vecenv"


def test_record_of_a_prefetcher_without_a_path_chooses_a_name(tmp_path: Path) -> None:
    with open_recorded_envs(HistoryEnv, tmp_path, spare_workers=1) as envs:
        envs.reset(seed=2)
        assert envs.record(0).parent == tmp_path


def test_replay_without_old_steps_or_a_snapshot_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_BLOCK_TICKS", 16)
    monkeypatch.setattr(recorder_module, "_RING_BYTES", 0)
    with open_recorded_envs(HistoryEnv, tmp_path, num_workers=0) as envs:
        envs.reset(seed=2)
        for _ in range(100):
            envs.step(envs.action_space.sample())
        header, body = read_header(envs.record(0))
        with pytest.raises(ValueError, match="the record has neither a reset with a seed nor a snapshot"):
            Replay(header, read(header, body))
        envs.reset(seed=3)
        envs.step(envs.action_space.sample())
        require_replays_match(envs, tmp_path)


class UnsaveableEnv(HistoryEnv):
    """A history environment that can neither be pickled nor copied, and has an iterator and an open file."""

    def __getstate__(self) -> Any:
        raise TypeError("not picklable")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not copyable")

    __reduce_ex__ = __getstate__  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.iterator = iter(range(9))
        self.file = open("/dev/null")  # noqa: SIM115

    def close(self) -> None:
        self.file.close()


def test_unsaveable_environments_are_recorded_from_their_reset(tmp_path: Path) -> None:
    with open_recorded_envs(UnsaveableEnv, tmp_path, 2, num_workers=0, snapshot_every=3) as envs:
        envs.reset(seed=2)
        for _ in range(10):
            envs.step(envs.action_space.sample())
        with pytest.raises(NotRestorable):
            envs.save()
        require_replays_match(envs, tmp_path)
        header, body = read_header(envs.record(0))
        with pytest.raises(ValueError, match=r"from a snapshot, because there is none: .*cannot be saved"):
            Replay(header, read(header, body), begin="snapshot")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from alarms during garbage collection
@pytest.mark.parametrize("count", [1000, pytest.param(4000, marks=pytest.mark.long)])
def test_interrupted_steps_are_recorded_once(count: int, tmp_path: Path) -> None:
    armed = False

    def raise_if_armed(number: int, frame: Any) -> None:
        if armed:
            raise Alarm

    rng = np.random.default_rng(3)
    recorded = open_recorded_envs(HistoryEnv, tmp_path, snapshot_every=20, num_workers=2)
    with signal_handler(signal.SIGALRM, raise_if_armed), recorded as envs:
        envs.reset(seed=1)
        interrupted = steps = 0
        while steps < count or interrupted < count // 40:
            steps += 1
            envs._recorder._next_snapshot_time = 0.0
            actions = rng.integers(0, 5, 4)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(2e-5, 8e-4)))
                envs.step(actions)
                armed = False
            except Alarm:
                armed, interrupted = False, interrupted + 1
                if "RESET_NEEDED" in repr(envs):
                    envs.reset(seed=interrupted)
                elif envs._state.value == "step":
                    envs.step_wait()
        require_replays_match(envs, tmp_path)
        require_replays_match(envs, tmp_path, "snapshot")


def test_replay_of_a_thawed_environment_before_a_reset_raises(tmp_path: Path) -> None:
    with open_recorded_envs(HistoryEnv, tmp_path, 2) as envs:
        envs.reset(seed=2)
        with contextlib.closing(envs.freeze([0])[0]) as frozen:
            envs.thaw(frozen, into=[1])
        envs.step(envs.action_space.sample())
        header, body = read_header(envs.record(1))
        with pytest.raises(ValueError, match="has neither a reset with a seed"):
            Replay(header, read(header, body))
        envs.reset(seed=4)
        require_replays_match(envs, tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"record_failures": 3}, "`record_failures` must be None, a folder or a vecenv.FlightRecorder, got 3."),
        ({"record_failures": True}, "got True"),
        ({"record_failures": ""}, "the folder of `record_failures` is an empty path"),
        ({"record_failures": __file__}, f"the folder of `record_failures` is a file: {__file__!r}"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        vecenv.AsyncVectorEnv([HistoryEnv], **options)
    with pytest.raises(ValueError, match="`keep` must be a positive int, got 0"):
        vecenv.FlightRecorder("failures", keep=0)
    with pytest.raises(ValueError, match="`snapshot_every` must be a positive int, got 'often'"):
        vecenv.FlightRecorder("failures", snapshot_every="often")  # type: ignore[arg-type]


def test_record_without_a_recorder_raises() -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([HistoryEnv], num_workers=0)) as envs:
        assert not envs.capabilities.recording
        with pytest.raises(NotImplementedError, match="AsyncVectorEnv cannot `record`: record_failures= was not given"):
            envs.record(0)


# -- the folder and its files ---------------------------------------------------------------------------------------------


class EndlessEnv(HistoryEnv):
    """A history environment with episodes that do not end."""

    def step(self, action: Any) -> Any:
        observation, reward, *_ = super().step(action)
        return observation, reward, False, False, {}


@contextlib.contextmanager
def open_failing_envs(folder: Path, **options: Any) -> Iterator[Any]:
    """Yield two environments of one worker after a reset. Both raise in their fifth step."""
    with open_recorded_envs(functools.partial(EndlessEnv, 5), folder, 2, num_workers=1, **options) as envs:
        envs.reset(seed=[3, 4])
        yield envs


def take_nine_steps(envs: Any) -> None:
    for _ in range(9):
        envs.step([1, 2])


def step_until_failure(envs: Any) -> Path:
    """Step until both environments raise, and return the file about the first failure."""
    with pytest.raises(ValueError, match="the environment broke"):
        take_nine_steps(envs)
    return Path(envs.errors[-2].recorded)


def create_dangling_link(folder: Path) -> None:
    (folder / "old.vecenv").symlink_to(folder / "gone")


def create_directory(folder: Path) -> None:
    (folder / "old.vecenv").mkdir()


@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("obstacle", [create_dangling_link, create_directory])
def test_obstacle_in_the_folder_does_not_hide_the_failure(obstacle: Any, on_failure: Any, tmp_path: Path) -> None:
    obstacle(tmp_path)
    with open_failing_envs(tmp_path, on_failure=on_failure) as envs:
        if on_failure == "raise":
            step_until_failure(envs)
        else:
            assert [envs.step([1, 2])[3].all() for _ in range(5)] == [False] * 4 + [True]
        assert replay_file(Path(envs.errors[0].recorded))[0].status == AGAIN
        envs.reset()
    assert (tmp_path / "old.vecenv").is_symlink() or (tmp_path / "old.vecenv").is_dir()


def test_files_are_private_and_replace_links(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    with open_failing_envs(tmp_path) as envs:
        for row in range(2):
            (tmp_path / f"EndlessEnv-env{row}-episode1-step5.vecenv").symlink_to(secret)
        path = step_until_failure(envs)
        requested = envs.record(1, tmp_path / "requested")
    assert secret.read_text() == "mine"
    for file in (path, requested):
        assert not file.is_symlink()
        assert file.stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".*")), "an unfinished file is left"


def test_exception_of_a_signal_handler_after_a_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*paths: Any) -> None:
        monkeypatch.undo()
        os.replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        file_module.write(tmp_path / "record.vecenv", b"content")
    assert (tmp_path / "record.vecenv").read_bytes() == b"content"


class AlarmWhenPickled:
    """A value that raises a signal when it is pickled for the first time."""

    pickled = False

    def __reduce__(self) -> Any:
        if not AlarmWhenPickled.pickled:
            AlarmWhenPickled.pickled = True
            signal.raise_signal(signal.SIGALRM)
        return AlarmWhenPickled, ()


def test_alarm_while_arguments_are_recorded_is_raised(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([HistoryEnv], num_workers=0, record_failures=tmp_path)) as envs:
        envs.reset(seed=0)
        with signal_handler(signal.SIGALRM, Alarm), pytest.raises(Alarm):
            envs.exec_func(lambda env, value: None, None, AlarmWhenPickled())
        assert AlarmWhenPickled.pickled


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_disk_full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with open_failing_envs(tmp_path) as envs:
        monkeypatch.setattr("os.replace", raise_disk_full)
        with pytest.raises(ValueError, match="the environment broke") as caught:
            take_nine_steps(envs)
        assert any(note.startswith("not recorded: OSError") for note in caught.value.__notes__)
        assert envs.errors[0].recorded == ""
    assert list(tmp_path.iterdir()) == []


def test_versions_are_recorded_without_scanning_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_scan() -> Any:
        raise AssertionError("this reads the metadata of all installed packages")

    monkeypatch.setattr("importlib.metadata.packages_distributions", fail_on_scan)
    make = functools.partial(gym.make, "CartPole-v1")
    with contextlib.closing(vecenv.AsyncVectorEnv([make], num_workers=0, record_failures=tmp_path)) as envs:
        envs.reset(seed=1)
        header, _ = read_header(envs.record(0))
    assert header.versions.keys() == {"python", "vecenv", "gymnasium", "numpy"}
    assert header.differences() == []


# -- environments that replace failed ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("recovery", ["all", "mask", "by row", "restart"])
def test_replay_of_a_failure_starts_at_the_last_recovery(recovery: str, tmp_path: Path) -> None:
    with open_failing_envs(tmp_path, on_failure="restart" if recovery == "restart" else "raise") as envs:
        paths: list[Path] = []
        for failure in range(3):
            envs.set_attr("gain", 2.0 + failure)
            envs.call("add", 5)
            if recovery == "restart":
                for _ in range(6 if failure else 5):  # the first step of a rebuilt environment is its automatic reset
                    envs.step([1, 2])
            else:
                step_until_failure(envs)
                failed = np.ones(2, np.bool_)
                if recovery == "all":
                    envs.reset(options={"start": float(failure)})
                elif recovery == "mask":
                    envs.reset(options={"start": float(failure), "reset_mask": failed})
                else:
                    envs.reset_async(options={"start": float(failure)}, env_id=[0, 1])
                    envs.recv(count=2)
            paths = [Path(record.recorded) for record in envs.errors][-2:]
            for path in paths:
                renamed = path.rename(path.with_suffix(f".{failure}"))
                for begin in ("latest", "first"):
                    result, steps = replay_file(renamed, begin)
                    assert result.status == AGAIN, (failure, begin, result.text)
                    assert steps == 5


class RandomFailureEnv(gym.Env[Any, Any]):
    """An environment that raises or exits at random. The error or the exit code contains the number of the step."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, can_die: bool) -> None:
        self.can_die = can_die

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.step_number = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.step_number += 1
        if self.np_random.random() < 0.1:
            raise ValueError(f"at step {self.step_number}")
        if self.can_die and self.np_random.random() < 0.04:
            os._exit(10 + self.step_number)
        return np.zeros(1, np.float32), 0.0, False, self.step_number == 7, {}


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_reset_after_a_restart_is_not_counted_as_a_step(mode: str, by_row: bool, tmp_path: Path) -> None:
    env_fns: list[Any] = [functools.partial(RandomFailureEnv, can_die) for can_die in (False, True)]
    recording = vecenv.FlightRecorder(tmp_path, keep=100)
    options: Any = {"autoreset_mode": mode, "on_failure": vecenv.Restart(limit=1000)}
    with contextlib.closing(vecenv.AsyncVectorEnv(env_fns, num_workers=2, record_failures=recording, **options)) as envs:
        envs.reset(seed=2)
        for _ in range(100):
            if by_row:
                envs.send(np.zeros(2, np.int64), [0, 1])
                _, _, terminated, truncated, infos = envs.recv(2)
                done = (terminated | truncated)[np.argsort(infos["env_id"])]
            else:
                _, _, terminated, truncated, _ = envs.step([0, 0])
                done = terminated | truncated
            if mode == "Disabled" and done.any():
                envs.reset(options={"reset_mask": done})
    paths = sorted(tmp_path.glob("*.vecenv"))
    recorded_steps = set()
    for path in paths:
        header, _ = read_header(path)
        failed = re.search(r"at step (\d+)|exit code 1(\d)", header.failed)
        assert failed is not None, header.failed
        assert header.step == int(failed[1] or failed[2]), path
        if failed[1]:
            result, _ = replay_file(path)
            assert (result.status, result.step) == (AGAIN, header.step)
        recorded_steps.add(header.step)
    assert len(paths) > 8
    assert len(recorded_steps) > 3


def test_abandoned_worker_after_a_timeout_is_recorded_once(tmp_path: Path) -> None:
    env_fns: list[Any] = [HistoryEnv, functools.partial(FaultyEnv, HistoryEnv(), "sleep", step=2)]
    with contextlib.closing(
        vecenv.AsyncVectorEnv(env_fns, num_workers=1, step_timeout=0.3, record_failures=tmp_path)
    ) as envs:
        envs.reset(seed=1)
        envs.step([0, 0])
        with pytest.raises(StepTimeout) as timeout:
            envs.step([0, 0])
        envs.abandon(timeout.value.envs)
        with pytest.raises(WorkerDied, match=r"died during step: it was abandoned at .*, and was killed") as died:
            envs.step_wait()
        assert died.value.__notes__[: len(timeout.value.__notes__)] == timeout.value.__notes__
    first, second = sorted(tmp_path.glob("*.vecenv"))
    header, _ = read_header(second)
    assert header.failure == read_header(first)[0].failure
    named = r"env 1, of envs 0-1, worker 0, pid \d+, during step, at faulty\.py:\d+ in sleep"
    assert re.fullmatch(rf"it hung for more than 0\.3 seconds: {named}", header.failed), header.failed


def record_repeated_deaths(folder: Path, keep: int, steps: int, seed: int = 1) -> list[Path]:
    """Step two environments of a worker, which env 1 kills every five steps. Return the files of env 1, oldest first."""
    env_fns: list[Any] = [EndlessEnv, functools.partial(FaultyEnv, EndlessEnv(), "kill", step=5)]
    recording = vecenv.FlightRecorder(folder, keep=keep)
    with contextlib.closing(
        vecenv.AsyncVectorEnv(env_fns, num_workers=1, on_failure="restart", record_failures=recording)
    ) as envs:
        envs.reset(seed=seed)
        for _ in range(steps):
            envs.step([0, 0])
        return [Path(record.recorded) for record in envs.errors]


def test_files_of_siblings_are_removed_before_those_of_the_failed_environment(tmp_path: Path) -> None:
    failed = record_repeated_deaths(tmp_path, 3, 18)
    assert len(failed) == 3
    siblings = set(tmp_path.glob("*.vecenv")) - set(failed)
    assert all(path.is_file() for path in failed)
    assert [read_header(path)[0].failure for path in siblings] == [read_header(failed[-1])[0].failure]  # the latest sibling


def test_removal_of_files_of_an_earlier_run_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_repeated_deaths(tmp_path, 2, 12)
    assert "earlier run" not in caplog.text
    monkeypatch.setattr(file_module, "_RUN_ID", "another")
    record_repeated_deaths(tmp_path, 2, 12, seed=2)
    assert caplog.text.count("the flight recorder removed files of an earlier run from ") == 1


def test_note_about_a_dead_worker_has_one_path(tmp_path: Path) -> None:
    with open_recorded_envs(HistoryEnv, tmp_path, 3, num_workers=1) as envs:
        envs.reset(seed=1)
        envs.processes[0].kill()
        with pytest.raises(WorkerDied) as caught:
            envs.step([0, 0, 0])
        (record,) = envs.errors
    (note, _) = caught.value.__notes__
    assert note == f"recorded: {record.recorded}\nand 2 more in {tmp_path}"
    assert Path(record.recorded).is_file()


# -- requests that fail, are refused, or are dropped ----------------------------------------------------------------------


FIRST_ROW = np.array([True, False])


def open_checksum_envs(folder: Path, **options: Any) -> contextlib.AbstractContextManager[Any]:
    return open_recorded_envs(ChecksumEnv, folder, 2, **{"num_workers": 1, "autoreset_mode": "SameStep"} | options)


def require_failure_repeats(envs: Any) -> None:
    """Step so that all environments raise, and check that they raise again in a replay."""
    with pytest.raises(ValueError, match="the step broke"):
        envs.step([ChecksumEnv.RAISES] * envs.num_envs)
    for record in list(envs.errors)[-envs.num_envs :]:
        found = [replay_file(Path(record.recorded), begin)[0] for begin in ("latest", "first")]
        assert AGAIN in [result.status for result in found], found


def test_replay_starts_at_a_loaded_state(tmp_path: Path) -> None:
    with contextlib.closing(vecenv.AsyncVectorEnv([ChecksumEnv] * 2, num_workers=0)) as envs:
        envs.reset(seed=1)
        saved = envs.save(verify=False)

    def get_rewards_after_load(**options: Any) -> list[float]:
        with contextlib.closing(vecenv.AsyncVectorEnv([ChecksumEnv] * 2, num_workers=0, **options)) as envs:
            envs.load(saved)
            envs.step([1, 2])
            envs.reset()  # continues with the loaded generator
            rewards = envs.step([3, 4])[1].tolist()
            if options:
                require_failure_repeats(envs)
            return rewards  # type: ignore[no-any-return]

    assert get_rewards_after_load() == get_rewards_after_load(record_failures=tmp_path)


def test_step_that_raises_without_failed_environments_is_recorded(tmp_path: Path) -> None:
    with open_checksum_envs(tmp_path / "pickle") as envs:
        envs.reset(seed=1)
        with pytest.raises(TypeError, match="cannot pickle"):
            envs.step([ChecksumEnv.UNPICKLABLE, 1])
        envs.step([2, 3])
        require_failure_repeats(envs)
    with open_checksum_envs(tmp_path / "done", num_workers=0, autoreset_mode="Disabled") as envs:
        envs.reset(seed=1)
        done = np.zeros(2, np.bool_)
        while not done.any():
            _, _, terminated, truncated, _ = envs.step([1, 2])
            done = terminated | truncated
        with pytest.raises(EpisodeOver):
            envs.step([3, 4])
        envs.reset(options={"reset_mask": np.array([True, True])})
        require_failure_repeats(envs)


def test_replay_repeats_unpicklable_info_after_a_restart(tmp_path: Path) -> None:
    with open_checksum_envs(tmp_path, on_failure="restart") as envs:
        envs.reset(seed=1)
        envs.step([1, 1])
        envs.step([ChecksumEnv.UNPICKLABLE, 2])
        result, _ = replay_file(Path(envs.errors[0].recorded))
        assert result.status == AGAIN, result.text
        require_replays_match(envs, tmp_path)


def test_refused_calls_are_not_recorded(tmp_path: Path) -> None:
    lock = threading.Lock()
    with contextlib.closing(vecenv.AsyncVectorEnv([HistoryEnv], num_workers=0)) as other_envs:
        other_envs.reset(seed=1)
        snapshot_of_other_class = other_envs.save(verify=False)[0]
    with open_checksum_envs(tmp_path) as envs:
        for call in (
            lambda: envs.reset(seed=7, options={"lock": lock}),
            lambda: envs.reset(options={"lock": lock, "reset_mask": FIRST_ROW}),
            lambda: envs.step([1, 2, 3]),
            lambda: envs.step([lock, lock]),
            lambda: envs.send([lock, lock], [0, 1]),
            lambda: envs.send([1], [2]),
            lambda: envs.call("update_checksum", lock),
            lambda: envs.set_attr("knob", lock),
            lambda: envs.exec_func(lambda env, argument: None, [1], lock),
            lambda: envs.set_next_options({"lock": lock}),
            lambda: envs.load([snapshot_of_other_class], env_id=[0]),
        ):
            envs.reset()
            envs.step([1, 2])
            with pytest.raises((TypeError, ValueError, SnapshotMismatch)):
                call()
        require_replays_match(envs, tmp_path)
        require_failure_repeats(envs)


def test_calls_that_reached_no_environment_are_not_replayed(tmp_path: Path) -> None:
    with open_checksum_envs(tmp_path, num_workers=2) as envs:
        envs.reset(seed=1)
        envs.processes[0].kill()
        with pytest.raises(WorkerDied):
            envs.step([1, 2])
        with pytest.raises(EnvFailed):
            envs.call("update_checksum", 3)  # reaches no environment
        envs.reset(options={"reset_mask": FIRST_ROW})
        with pytest.raises(ValueError, match="the step broke"):
            envs.step([ChecksumEnv.RAISES, 2])
        with pytest.raises(EnvFailed):
            envs.call("update_checksum", 4)  # reaches one environment
        envs.reset(options={"reset_mask": FIRST_ROW})
        require_failure_repeats(envs)


def test_step_refused_after_too_many_restarts_is_not_recorded(tmp_path: Path) -> None:
    with open_checksum_envs(tmp_path, on_failure=vecenv.Restart(limit=1)) as envs:
        envs.reset(seed=1)
        envs.step([ChecksumEnv.RAISES, 1])
        with pytest.raises(RestartsExhausted):
            envs.step([ChecksumEnv.RAISES, 1])
        with pytest.raises(RestartsExhausted):
            envs.step([2, 3])
        envs.reset()
        envs.step([4, 5])
        require_replays_match(envs, tmp_path)


def test_steps_dropped_by_a_reset_of_other_rows_are_recorded(tmp_path: Path) -> None:
    with open_checksum_envs(tmp_path) as envs:
        envs.reset(seed=1)
        envs.send([1, 2], [0, 1])
        envs.reset(options={"reset_mask": ~FIRST_ROW})
        envs.send([3, 4], [0, 1])
        envs.recv(count=2)
        require_failure_repeats(envs)


def test_reset_that_drops_a_failing_step_is_recorded(tmp_path: Path) -> None:
    with open_checksum_envs(tmp_path) as envs:
        envs.reset(seed=1)
        envs.send([ChecksumEnv.RAISES, 2], [0, 1])
        envs.reset(seed=3)
        require_failure_repeats(envs)


def test_last_reply_of_a_killed_worker_is_recorded_as_a_step(tmp_path: Path) -> None:
    with open_recorded_envs(lambda: gym.wrappers.TimeLimit(EndlessEnv(), 1), tmp_path, 1) as envs:
        envs.reset(seed=1)
        envs.step_async([1])
        time.sleep(0.3)  # until the worker has replied
        envs.abandon([0])
        assert envs.step_wait()[3].all()
        with pytest.raises(EnvFailed):
            envs.step([1])
        envs.reset(seed=2)
        for _ in range(3):
            envs.step([2])
        require_replays_match(envs, tmp_path)


def test_calls_before_an_automatic_reset_with_a_seed_are_replayed_before_it(tmp_path: Path) -> None:
    with open_recorded_envs(functools.partial(ChecksumEnv, reset_on_seed=True), tmp_path, 2, num_workers=0) as envs:
        envs.reset(seed=1)
        done = np.zeros(2, np.bool_)
        while not done[0]:
            _, _, terminated, truncated, _ = envs.step([1, 2])
            done = terminated | truncated
        envs.set_next_options(seed=5, env_id=[0])
        envs.call("update_checksum", 6)
        envs.step([1, 2])
        envs.step([3, 4])
        for begin in ("latest", "first"):
            result, _ = replay_file(envs.record(0, tmp_path / "0.vecenv"), begin)
            assert result.status == AGAIN, result.text


@pytest.mark.parametrize("every", [None, 5])
def test_replay_after_many_resets_starts_at_a_snapshot_or_raises(
    every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_MAX_MESSAGES", 40)
    monkeypatch.setattr(recorder_module, "_LONG_REPLAY_SECONDS", 1e9)
    with open_checksum_envs(tmp_path, num_workers=0, snapshot_every=every) as envs:
        envs.set_attr("knob", 5)
        envs.reset(seed=1)
        for number in range(100):
            envs._recorder._next_snapshot_time = 0.0
            envs.step([1, 2])
            envs.reset(options={"start": number})
        if every:
            require_replays_match(envs, tmp_path)
        else:
            header, body = read_header(envs.record(0))
            with pytest.raises(ValueError, match="has neither a reset with a seed nor a snapshot"):
                Replay(header, read(header, body))
        envs.reset(seed=2)
        require_replays_match(envs, tmp_path)  # `set_attr` is still in the record
        for number in range(100):
            envs.call("update_checksum", number)
        envs.reset(seed=3)
        envs.step([1, 2])
        result, _ = replay_file(envs.record(0))
        assert "earlier calls, which may have changed the environment, are no longer in the record" in result.text
