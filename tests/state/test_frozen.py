"""Tests of ``freeze`` and ``thaw``: copies continue exactly and leave nothing behind, and errors name their reasons."""

from __future__ import annotations

import fcntl
import functools
import gc
import importlib.util
import inspect
import mmap
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from envs import counters
from gymnasium.vector import AutoresetMode
from signals import Alarm, signal_handler

import vecenv
from vecenv import freezing
from vecenv.errors import EnvFailed, NotRestorable, WorkerDied
from vecenv.testing import assert_identical

pytestmark = pytest.mark.timeout(120)


SHARED_MEMORY = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
"""Shared memory that workers inherit."""


class _Slots:
    __slots__ = ("content",)

    def __init__(self, content: Any) -> None:
        self.content = content


class GeneratorFunctionEnv(gym.Env):
    """An environment that keeps its state in a running generator, which cannot be pickled. Episodes have 23 steps."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def _walk(self) -> Iterator[np.ndarray]:
        position = self.np_random.normal(size=3)
        while True:
            action = yield position
            position = position + (action or 0) + self.np_random.normal(size=3) + np.random.normal() + random.random()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps, self._generator = 0, self._walk()
        return next(self._generator), {"steps": 0}

    def step(self, action: Any) -> Any:
        self._steps += 1
        position = self._generator.send(int(action))  # type: ignore[attr-defined]
        return position, float(position.sum()), self._steps % 23 == 0, False, {"steps": self._steps}

    def call_method(self, name: str) -> Any:
        """Call one of the methods below, which open resources, start processes, or return the depth of the stack."""
        return getattr(self, f"_{name}")()

    def _depth(self) -> int:
        return len(inspect.stack())

    def _socket(self) -> None:
        self.resource = socket.socketpair()

    def _thread(self) -> None:
        self.resource = threading.Thread(target=time.sleep, args=(1000,), daemon=True)
        self.resource.start()

    def _pipe(self) -> None:
        self.resource = subprocess.Popen(["sleep", "1000"], stdin=subprocess.PIPE)

    def _file_for_writing(self) -> None:
        self.resource = Path(os.environ["VECENV_TEST_LOG"]).open("w")  # noqa: SIM115 - it stays open

    def _helper(self) -> int:
        self.resource = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        return self.resource.pid

    def _file_for_reading(self) -> None:
        self.resource = Path(__file__).open()  # noqa: SIM115 - it stays open

    def _maps(self) -> None:
        with subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL) as process:
            self.resource = Path(f"/proc/{process.pid}/maps").open()  # noqa: SIM115 - it stays open
            process.kill()

    def _eventfd(self) -> None:
        self.resource = os.eventfd(0)

    def _memory(self) -> None:
        self.resource = mmap.mmap(-1, 4096)

    def _inherited(self) -> None:
        self.resource = SHARED_MEMORY

    def _inherited_in_slots(self) -> None:
        self.resource = _Slots(SHARED_MEMORY)

    def _timer(self) -> None:
        signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_VIRTUAL, 1000)


def open_envs(count: int = 4, **kwargs: Any) -> Any:
    """Return a context manager with environments after a reset with seed 5."""
    envs = vecenv.AsyncVectorEnv([GeneratorFunctionEnv] * count, **kwargs)
    envs.reset(seed=5)
    return closing(envs)


def run_steps(envs: Any, steps: int, rows: tuple[int, ...]) -> list[Any]:
    """Step all rows with the same random actions. Return, for each of ``rows``, a list of its results."""
    action_space = envs.single_action_space
    action_space.seed(4)
    results: list[Any] = [[] for _ in rows]
    for _ in range(steps):
        actions = np.stack([action_space.sample()] * envs.num_envs)
        observations, rewards, terminations, truncations, infos = envs.step(actions)
        for row, row_results in zip(rows, results, strict=True):
            steps_so_far = infos["steps"][row] if "steps" in infos else None
            row_results.append((observations[row].copy(), rewards[row], terminations[row], truncations[row], steps_so_far))
    return results


@pytest.mark.sampled("fork-AutoresetMode.NEXT_STEP")
@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_thawed_copies_continue_like_the_original(context: str, mode: AutoresetMode) -> None:
    with open_envs(context=context, autoreset_mode=mode) as envs:
        assert envs.capabilities.freezing
        run_steps(envs, 23, (0,))  # in next-step mode, the next step is an automatic reset
        [frozen] = envs.freeze([0])
        with pytest.raises(NotRestorable):
            envs.save([0])
        observations, *_ = envs.thaw(frozen, into=[1, 2, 3])
        assert_identical(observations, np.stack([frozen.observation] * 3))
        results = run_steps(envs, 60, (0, 1, 2, 3))
        for copy_results in results[1:]:
            assert_identical(copy_results, results[0])
        envs.thaw(frozen, into=[0])  # a copy can also replace its original
        assert_identical(run_steps(envs, 60, (0,)), results[:1])


@pytest.mark.long
def test_thaw_into_more_rows_than_messages_fit_into_a_pipe() -> None:
    with open_envs(24, context="fork") as envs:
        run_steps(envs, 3, ())
        [frozen] = envs.freeze([0])
        fcntl.fcntl(frozen._copy.channel.out, fcntl.F_SETPIPE_SZ, 4096)
        observations, *_ = envs.thaw(frozen, into=list(range(24)))
        assert_identical(observations, np.stack([frozen.observation] * 24))
        first, *_, last = run_steps(envs, 3, tuple(range(24)))
        assert_identical(last, first)


@pytest.mark.long
def test_thawing_a_copy_90_times_does_not_leak_descriptors() -> None:
    with open_envs(context="fork") as envs:
        [frozen] = envs.freeze([0])
        counts = []
        for _ in range(90):
            envs.thaw(frozen, into=[1])
            counts.append(len(os.listdir("/proc/self/fd")))
        assert max(counts[45:]) <= max(counts[:45]) + 10, counts  # replaced workers are ended in batches


class SlowlyClosedEnv(GeneratorFunctionEnv):
    """An environment that creates a file named after its process in a folder when it is closed, which takes a moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def close(self) -> None:
        time.sleep(0.05)
        (self.folder / str(os.getpid())).touch()


@pytest.mark.long
def test_replaced_environments_are_closed(tmp_path: Path) -> None:
    with closing(vecenv.AsyncVectorEnv([functools.partial(SlowlyClosedEnv, tmp_path)] * 2, context="fork")) as envs:
        envs.reset(seed=5)
        [frozen] = envs.freeze([0])
        pids = []
        for _ in range(20):
            pids.append(envs.processes[1].pid)
            envs.thaw(frozen, into=[1])
            time.sleep(0.1)  # 16 workers that have ended are a batch
    assert set(map(str, pids)) <= set(os.listdir(tmp_path))


class UnclosableEnv(GeneratorFunctionEnv):
    """An environment that raises in ``close`` once ``raises`` is True."""

    raises = False

    def close(self) -> None:
        if self.raises:
            raise OSError("the disk is full")


def test_close_reports_the_errors_of_replaced_environments() -> None:
    envs = vecenv.AsyncVectorEnv([UnclosableEnv] * 2, context="fork")
    envs.reset(seed=5)
    [frozen] = envs.freeze([0])
    envs.set_attr("raises", [False, True])
    envs.thaw(frozen, into=[1])
    with pytest.warns(UserWarning, match=r"env 1 raised in close\(\): OSError: the disk is full"):
        envs.close()


@pytest.mark.sampled("CartPole-v1-options0", "LunarLander-v3-options4")
@pytest.mark.parametrize(
    ("name", "options"),
    [("CartPole-v1", {}), ("Ant-v5", {}), ("Humanoid-v5", {}), ("ALE/Pong-v5", {"repeat_action_probability": 0.25}),
     ("LunarLander-v3", {}), ("BipedalWalker-v3", {})],
)  # fmt: skip
def test_thawed_copies_of_real_environments_continue_like_the_original(name: str, options: dict[str, Any]) -> None:
    packages = {"ALE/Pong-v5": "ale_py", "LunarLander-v3": "Box2D", "BipedalWalker-v3": "Box2D", "CartPole-v1": "numpy"}
    package = packages.get(name, "mujoco")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    inherited = mmap.mmap(-1, mmap.PAGESIZE)  # makes workers check whether objects of the environment lie in such memory
    with closing(inherited), closing(vecenv.AsyncVectorEnv([functools.partial(make_env, name, options)] * 3)) as envs:
        envs.reset(seed=5)
        run_steps(envs, 20, (0,))
        with envs.freeze([0])[0] as frozen:
            envs.thaw(frozen, into=[1, 2])
        results = run_steps(envs, 200, (0, 1, 2))
        for copy_results in results[1:]:
            assert_identical(copy_results, results[0])


def make_env(name: str, options: dict[str, Any]) -> Any:
    if name.startswith("ALE/"):
        import ale_py

        gym.register_envs(ale_py)
    return gym.make(name, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("generators", ["shared", "own"])
def test_thaw_continues_random_numbers_or_changes_them_with_reseed(generators: Any) -> None:
    with open_envs(3, generators=generators) as envs:
        [frozen] = envs.freeze([0])
        envs.thaw(frozen, into=[1])
        envs.thaw(frozen, into=[2], reseed=True)
        original, thawed, reseeded = run_steps(envs, 20, (0, 1, 2))
        assert_identical(thawed, original)
        observation, reseeded_observation = original[1][0], reseeded[1][0]
        assert observation[0] != reseeded_observation[0]


class TwoReferencesEnv(gym.Env[Any, Any]):
    """An environment that draws through a second reference to its generator."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.generator = self.np_random
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return self.generator.random(1), 0.0, False, False, {}


def test_thaw_with_reseed_seeds_a_generator_with_two_references() -> None:
    with closing(vecenv.AsyncVectorEnv([TwoReferencesEnv] * 3, num_workers=None)) as envs:
        envs.reset(seed=5)
        [frozen] = envs.freeze([0])
        envs.thaw(frozen, into=[1, 2], reseed=True)
        assert len(np.unique(envs.step(np.zeros(3, int))[0])) == 3


def test_freeze_after_thaw_or_load_has_no_info_of_the_replaced_environment() -> None:
    with open_envs(2) as envs:
        run_steps(envs, 1, ())
        [frozen] = envs.freeze([0])
        run_steps(envs, 2, ())
        envs.thaw(frozen, into=[1])
        [again] = envs.freeze([1])
        assert_identical([again.info, again.observation], [frozen.info, frozen.observation])
        assert envs.thaw(again, into=[0])[1]["steps"].tolist() == [1]
        run_steps(envs, 1, ())
        assert [copy.info["steps"] for copy in envs.freeze()] == [2, 2]
    with closing(vecenv.AsyncVectorEnv(counters(2, lengths=(100,)))) as envs:
        envs.reset()
        snapshots = envs.save()
        run_steps(envs, 2, ())
        envs.load(snapshots[:1], [0])
        assert [copy.info for copy in envs.freeze()] == [{}, {"steps": 2}]


def test_thaw_into_a_failed_row_recovers_the_row() -> None:
    with open_envs(2, on_failure="raise") as envs:
        [frozen] = envs.freeze([0])
        os.kill(envs.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            envs.step(np.zeros(2, np.int64))
        with pytest.raises(EnvFailed):
            envs.freeze([1])
        envs.thaw(frozen, into=[1, 0])
        first, second = run_steps(envs, 30, (0, 1))
        assert_identical(second, first)


def test_freeze_with_a_file_that_cannot_be_reopened_names_the_error() -> None:
    with open_envs(2) as envs:
        envs.exec_func(lambda env: env.call_method("maps"), [1])
        with pytest.raises(NotRestorable, match=r"cannot be frozen: ProcessLookupError: .*No such process"):
            envs.freeze()
        envs.step(np.zeros(2, np.int64))


@pytest.mark.filterwarnings("ignore:.*ERROR.*:UserWarning")
def test_freeze_of_a_failed_row_raises() -> None:
    with open_envs(2, on_failure="raise") as envs:
        envs.exec_func(lambda env: setattr(env.unwrapped, "_generator", None), [0])
        with pytest.raises(AttributeError):
            envs.step(np.zeros(2, np.int64))
        with pytest.raises(EnvFailed, match="env 0: AttributeError"):
            envs.freeze([0])
        assert len(envs.freeze([1])) == 1


def test_thawed_worker_supports_calls_attributes_and_restarts() -> None:
    with open_envs(2, on_failure="restart") as envs:
        [frozen] = envs.freeze([0])
        envs.thaw(frozen, into=[1])
        worker = envs.processes[1]
        assert psutil.pid_exists(worker.pid)
        assert worker.is_alive()
        helper = envs.call("call_method", "helper")[1]
        envs.set_attr("mine", [1, 2])
        assert envs.get_attr("mine") == (1, 2)
        os.kill(worker.pid, signal.SIGKILL)
        *_, truncated, infos = envs.step(np.zeros(2, np.int64))
        assert truncated.tolist() == infos["restarted"].tolist() == [False, True]
        assert not worker.is_alive()
        assert not psutil.pid_exists(helper)
        assert "killed" in str(envs.errors[0]) or "exit code is not known" in str(envs.errors[0])
        envs.thaw(frozen, into=[1])
        run_steps(envs, 3, (0, 1))


def test_repeated_freeze_and_thaw_does_not_deepen_the_stack() -> None:
    with open_envs(1) as envs:
        depths = []
        for _ in range(4):
            [frozen] = envs.freeze([0])
            with frozen:
                envs.thaw(frozen, into=[0])
            depths += envs.call("call_method", "depth")
        assert len(set(depths)) == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("resource", "text"),
    [("socket", r"copies would share the descriptors that it has open for writing: socket:\[\d+\], socket:"),
     ("pipe", r"pipe:\[\d+\]"), ("thread", "it has 2 threads, and a copy would have only one"),
     ("file_for_writing", "for writing: .*frozen.log$"), ("file_for_reading", None),
     ("eventfd", r"for writing: anon_inode:\[eventfd\]$"), ("memory", "share memory that they write to: /dev/zero$"),
     ("inherited", r"share memory that they write to: GeneratorFunctionEnv.resource \(ndarray\)$"),
     ("inherited_in_slots", r"share memory that they write to: GeneratorFunctionEnv.resource.content \(ndarray\)$"),
     ("timer", "it has a running timer"),
     ("helper", r"it has started processes, which a copy would share: pid \d+$")],
)  # fmt: skip
def test_freeze_names_resources_that_cannot_be_copied(
    resource: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VECENV_TEST_LOG", str(tmp_path / "frozen.log"))
    with open_envs(2) as envs:
        envs.exec_func(lambda env: env.call_method(resource), [1])
        if text is None:
            assert len(envs.freeze()) == 2
            return
        with pytest.raises(NotRestorable) as caught:
            envs.freeze()
        assert "cannot be frozen" in str(caught.value)
        assert re.search(text, str(caught.value), re.MULTILINE), caught.value
        assert "env 1" in "".join(getattr(caught.value, "__notes__", []))
        assert envs.stats().get("frozen", 0.0) == 0.0
        envs.step(np.zeros(2, np.int64))


class SlowForkEnv(GeneratorFunctionEnv):
    """An environment with an open pipe if ``uncopyable``, and otherwise with copies that sleep half a second when forked."""

    def __init__(self, uncopyable: bool) -> None:
        worker = os.getpid()

        def sleep_in_copy() -> None:
            if os.getppid() != worker:  # not in the child that forks the copy, because the worker waits for this child
                time.sleep(0.5)

        if uncopyable:
            self.resource = os.pipe()
        else:
            os.register_at_fork(after_in_child=sleep_in_copy)


def test_failed_freeze_leaves_no_copies_while_its_exception_is_kept() -> None:
    with closing(vecenv.AsyncVectorEnv(env_fns=counters(2), num_workers=None)) as envs:
        envs.reset(seed=1)
        envs.exec_func(open_pipe, [1])
        caller = psutil.Process()
        before = caller.num_fds()
        with pytest.raises(NotRestorable) as caught:
            envs.freeze()
        assert caller.num_fds() == before
        assert caught.value.__traceback__ is not None


def open_pipe(env: Any) -> None:
    env.pipe = os.pipe()


def test_copies_of_a_failed_freeze_do_not_write_to_files_of_the_caller(tmp_path: Path) -> None:
    """When a slow copy opens its pipes, their descriptor numbers may already belong to other files."""
    env_fns = [functools.partial(SlowForkEnv, uncopyable) for uncopyable in (False, True)]
    with closing(vecenv.AsyncVectorEnv(env_fns, num_workers=None)) as envs:
        envs.reset(seed=1)
        with suppress(NotRestorable):
            envs.freeze()
        files = [(tmp_path / str(number)).open("w") for number in range(32)]
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert not any(os.fstat(file.fileno()).st_size for file in files)
            time.sleep(0.05)
        for file in files:
            file.close()


class FileReadingEnv(gym.Env):
    """An environment that reads a file in each step: by two descriptors in turn that share a position, and by a third."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb", buffering=0)
        self.duplicate = os.dup(self.file.fileno())
        self.other = path.open("rb")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.file.seek(0)
        self.other.seek(0)
        return self.step(0)[0], {"steps": 0}

    def step(self, action: Any) -> Any:
        record = self.file.read(8) if self.file.tell() % 16 else os.read(self.duplicate, 8)
        return np.frombuffer(record + self.other.read(8)), 0.0, False, False, {}

    def close(self) -> None:
        self.file.close()
        self.other.close()
        os.close(self.duplicate)


def test_thawed_copies_have_separate_file_positions(tmp_path: Path) -> None:
    np.arange(1000.0).tofile(tmp_path / "records")
    with closing(vecenv.AsyncVectorEnv([functools.partial(FileReadingEnv, tmp_path / "records")] * 3)) as envs:
        envs.reset(seed=1)
        run_steps(envs, 4, (0,))
        with envs.freeze([0])[0] as frozen:
            run_steps(envs, 3, (0,))
            envs.thaw(frozen, into=[1, 2])
            envs.thaw(frozen, into=[0])
            for number in range(5, 10):
                assert envs.step(np.zeros(3, np.int64))[0].tolist() == [[number, number]] * 3


def test_freeze_and_thaw_raise_unless_each_env_has_its_own_process() -> None:
    for kwargs in ({"num_workers": 1}, {"num_workers": 0}, {"use_caller": True}):
        with closing(vecenv.AsyncVectorEnv(counters(1) * 2, **kwargs)) as envs:
            assert not envs.capabilities.freezing
            for call in (lambda envs=envs: envs.freeze(), lambda envs=envs: envs.thaw(None, [0])):
                with pytest.raises(NotImplementedError, match=r"AsyncVectorEnv cannot `(freeze|thaw)`: "):
                    call()


def test_thaw_of_unusable_copies_raises() -> None:
    with open_envs(2) as envs, open_envs(1) as others:
        others.reset(seed=5)
        killed, closed = envs.freeze([0, 1])
        [usable] = envs.freeze([0])
        os.kill(killed.pid, signal.SIGKILL)
        assert ends_soon(killed.pid)
        with pytest.raises(WorkerDied, match=r"the frozen copy of env 0 \(pid \d+\) has ended"):
            envs.thaw(killed, into=[0])
        closed.close()
        closed.close()
        with pytest.raises(ValueError, match=r"Frozen\(env 1, closed\) cannot be thawed"):
            envs.thaw(closed, into=[0])
        with pytest.raises(ValueError, match="another vector environment"):
            others.thaw(usable, into=[0])
        with pytest.raises(ValueError, match="env_id"):
            envs.thaw(usable, into=[2])
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(usable)
        with pytest.raises(TypeError, match=r"`frozen` must be one of the copies that freeze\(\) returned, got list"):
            envs.thaw([usable], into=[0])
        envs.step_async(np.zeros(2, np.int64))
        for call in (lambda: envs.thaw(usable, [0]), lambda: envs.freeze([0])):
            with pytest.raises(gym.error.AlreadyPendingCallError):
                call()
        envs.step_wait()
        assert "MiB" in repr(usable)
    assert usable.closed


def test_stats_count_copies_and_collected_copies_end() -> None:
    with open_envs(2) as envs:
        copies = envs.freeze()
        stats = envs.stats()
        assert stats["frozen"] == 2.0
        assert 2**16 < stats["frozen_bytes"] < 2**28
        pids = [copy.pid for copy in copies]
        del copies
        gc.collect()
        for pid in pids:
            assert ends_soon(pid)
        [frozen] = envs.freeze([0])
    assert ends_soon(frozen.pid)  # because the environments were closed


def ends_soon(pid: int) -> bool:
    """True if the process ends within 10 seconds, or is a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    "rounds", [8, pytest.param(20, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(1800)
def test_many_copies_leak_neither_descriptors_nor_memory(rounds: int) -> None:
    with open_envs(2) as envs:
        caller = psutil.Process()
        for number in range(rounds):
            if number == 5:
                before = caller.num_fds(), caller.memory_info().rss
            [frozen] = envs.freeze([0])
            if number % 10 == 0:
                envs.thaw(frozen, into=[1])
            frozen.close()
        assert caller.num_fds() < before[0] + 120  # replaced workers may still have open descriptors
        assert caller.memory_info().rss - before[1] < 30 * 2**20
        run_steps(envs, 3, (0,))


PROGRAM = """
    import sys, os, numpy as np
    sys.path[:0] = {paths}
    from test_frozen import GeneratorFunctionEnv
    import vecenv

    envs = vecenv.AsyncVectorEnv([GeneratorFunctionEnv] * 2)
    envs.reset(seed=1)
    print(*[worker.pid for worker in envs.processes], flush=True)
    while True:
        copies = envs.freeze()
        print(*[copy.pid for copy in copies], flush=True)
        envs.thaw(copies[0], into=[0, 1])
        print(*[worker.pid for worker in envs.processes], flush=True)
        copies[0].close()
"""


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.long), pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_killed_caller_leaves_no_processes(times: int) -> None:
    program = textwrap.dedent(PROGRAM).format(paths=sys.path)
    rng = np.random.default_rng(7)
    for _ in range(times):
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        time.sleep(rng.uniform(0.0, 0.2))
        process.kill()
        pids += process.stdout.read().split()
        process.wait()
        process.stdout.close()
        for pid in pids:
            assert ends_soon(int(pid))


@pytest.mark.sampled("True")
@pytest.mark.parametrize("dead_row", [False, True])
def test_thaw_of_a_copy_that_dies_during_the_call_changes_nothing(dead_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_envs(3) as envs:
        [frozen] = envs.freeze([0])
        run_steps(envs, 5, (1,))
        if dead_row:
            os.kill(envs.processes[2].pid, signal.SIGKILL)
            with pytest.raises(WorkerDied):
                envs.step(np.zeros(3, np.int64))
        before = [worker.pid for worker in envs.processes], envs.observations.copy()
        require_usable = freezing.Frozen._require_usable

        def kill_after_check(copy: Any, engine: Any) -> Any:
            watch = require_usable(copy, engine)
            os.kill(copy.pid, signal.SIGKILL)
            return watch

        monkeypatch.setattr(freezing.Frozen, "_require_usable", kill_after_check)
        with pytest.raises(WorkerDied):
            envs.thaw(frozen, into=[1, 2])
        monkeypatch.undo()
        assert_identical(([worker.pid for worker in envs.processes], envs.observations.copy()), before)
        if dead_row:
            with pytest.raises(EnvFailed):
                envs.step(np.zeros(3, np.int64))
        else:
            assert run_steps(envs, 1, (1,))[0][0][4] == 6  # the sixth step of its episode


def test_copy_that_dies_when_it_is_ready_is_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_process(pid: int) -> int:
        raise ProcessLookupError(pid)

    with open_envs(2) as envs:
        [frozen] = envs.freeze([0])
        monkeypatch.setattr(freezing.CopiedProcess, "__init__", lambda self, pid, *_: find_no_process(pid))
        for call in (lambda: envs.freeze([1]), lambda: envs.thaw(frozen, into=[1])):
            with pytest.raises(WorkerDied, match="could not be started as a copy: it ended"):
                call()
        monkeypatch.undo()
        first, second = run_steps(envs, 3, (0, 1))
        assert len(first) == len(second) == 3


def test_thaw_in_place_of_a_worker_with_unwritten_bytes() -> None:
    with signal_handler(signal.SIGALRM, Alarm), open_envs(2) as envs:
        [frozen] = envs.freeze([0])
        pid = envs.processes[1].pid
        os.kill(pid, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Alarm):
            envs.set_attr("note", [None, "x" * 1_000_000])
        envs.thaw(frozen, into=[1])
        os.kill(pid, signal.SIGKILL)
        assert ends_soon(pid)
        first, second = run_steps(envs, 3, (0, 1))
        assert_identical(second, first)


@pytest.mark.parametrize(("name", "phase"), [("_fork_copies", "DEFAULT"), ("_replace_worker", "RESET_NEEDED")])
def test_interrupted_thaw_changes_nothing_or_needs_a_reset(name: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = getattr(freezing, name)

    def interrupt_and_call(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        function(*args)

    with signal_handler(signal.SIGALRM, Alarm), open_envs(3) as envs:
        [frozen] = envs.freeze([0])
        before = [worker.pid for worker in envs.processes]
        monkeypatch.setattr(freezing, name, interrupt_and_call)
        with pytest.raises(Alarm):
            envs.thaw(frozen, into=[1, 2])
        monkeypatch.undo()
        assert f"phase={phase}" in repr(envs)
        if phase == "DEFAULT":
            assert [worker.pid for worker in envs.processes] == before
            assert envs.step(np.zeros(3, np.int64))[4]["steps"].tolist() == [1, 1, 1]
        else:
            with pytest.raises(gym.error.ResetNeeded):
                envs.step(np.zeros(3, np.int64))
        envs.reset()
        run_steps(envs, 5, (0, 1, 2))
        assert run_steps(envs, 1, (1,))[0][0][4] == 6


@pytest.mark.parametrize("times", [3, pytest.param(8, marks=pytest.mark.long), pytest.param(2_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the signal may arrive in a finalizer
def test_envs_stay_usable_after_interrupted_freeze_and_thaw(times: int) -> None:
    rng = np.random.default_rng(3)
    with signal_handler(signal.SIGALRM, Alarm), open_envs(3) as envs:
        [frozen] = envs.freeze([0])
        expected = run_steps(envs, 5, (0,))
        for _ in range(times):
            copies = None
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.03))
            try:
                copies = envs.freeze([0])
                envs.thaw(frozen, into=[0, 2])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                if "RESET_NEEDED" in repr(envs):
                    envs.reset()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert copies is None or copies[0].pid > 0
            envs.thaw(frozen, into=[0])
            assert_identical(run_steps(envs, 5, (0,)), expected)
