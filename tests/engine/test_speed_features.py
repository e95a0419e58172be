"""Tests of features that make an engine faster, and of ``vecenv.share``, which gives all workers one copy of their data."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from envs import Options, SleepingEnv, assert_matches_sync, ready_engine
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import DelayObservation, FlattenObservation, FrameStackObservation, OrderEnforcing, TimeLimit
from signals import signal_handler

import vecenv
from vecenv.planning.independence import Independence
from vecenv.planning.plan import Plan, caller_share, choose, plan_batches, workers_and_share
from vecenv.planning.trial import StepTimes
from vecenv.shm import Tree
from vecenv.system import cores
from vecenv.worker import rows

# --- fast paths must not change results: info columns, buffers, the caller's share, plans, placements


class NumericInfoEnv(gymnasium.Env[Any, Any]):
    """An environment with numeric infos of every kind.

    Keys are always the same ("regular"), differ "by env" or "over time", or include a text in every second step ("mixed").
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, env: int, style: str = "regular") -> None:
        self.env, self.style, self.t = env, style, 0

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "int": self.t,
            "float": self.t / 7,
            "bool": self.t % 2 == 0,
            "np32": np.float32(self.t / 3),
            "u8": np.uint8(self.t),
            "vector": np.arange(3, dtype=np.float32) * self.t,
            "matrix": np.full((2, 2), self.t, np.int16),
            "nested": {"deep": {"x": float(self.env)}, "empty": {}, "y": np.int64(self.t)},
        }
        if self.style == "by env":
            return {f"only{self.env % 2}": self.env, "shared": float(self.t)}
        if self.style == "over time":
            return [{}, {"a": 1.5}, {"a": 2, "b": True}, {"e": np.ones(2)}, {"c": {"d": self.t}}][(self.t + self.env) % 5]
        if self.style == "mixed" and self.t % 2:
            info["text"] = f"env {self.env}"
        return info

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.random(2, np.float32), {"start": self.env} if self.style == "regular" else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.np_random.random(2, np.float32), float(action[0]), self.t >= 3 + self.env, False, self._info()


def make_numeric_env_fns(count: int, style: str = "regular") -> list[Callable[[], NumericInfoEnv]]:
    return [lambda i=i: NumericInfoEnv(i, style) for i in range(count)]  # type: ignore[misc]


ENGINES = [{"num_workers": 2}, {"num_workers": 0}, {"use_caller": True}, {"use_caller": True, "num_workers": 2}]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
@pytest.mark.parametrize("style", ["regular", "by env", "mixed"])
def test_numeric_infos_equal_sync_vector_env(engine: Options, mode: AutoresetMode, style: str) -> None:
    assert_matches_sync(make_numeric_env_fns(4, style), 14, autoreset_mode=mode, **engine)


@pytest.mark.parametrize("engine", ENGINES[:2], ids=str)
def test_infos_with_changing_keys_equal_sync_vector_env(engine: Options) -> None:
    assert_matches_sync(make_numeric_env_fns(3, "over time"), 14, merge_by_gymnasium=True, **engine)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP], ids=str)
def test_repeated_infos_are_not_pickled(mode: AutoresetMode) -> None:
    with ready_engine(make_numeric_env_fns(4), num_workers=2, autoreset_mode=mode) as envs:
        actions = np.zeros((4, 2), np.float32)
        for _ in range(20):  # long enough for infos of steps, of ends of episodes, and of resets
            envs.step(actions)
        bytes_before = envs.stats()["bytes_pickled"]
        for _ in range(40):
            envs.step(actions)
        assert envs.stats()["bytes_pickled"] == bytes_before


class RowWritingEnv(gymnasium.Env[Any, Any]):
    """An environment that writes its observations directly into its row of the batch."""

    observation_space = spaces.Box(0, 255, (8, 8), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.canvas = np.zeros((8, 8), np.uint8)
        self.has_row = False
        self.t = 0

    def observation_buffer(self, views: Any) -> None:
        self.canvas, self.has_row = views, True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        self.canvas[...] = 0
        return self.canvas, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.canvas[...] = self.t
        return self.canvas, 0.0, self.t == 3, False, {}


@pytest.mark.parametrize("engine", ENGINES[:2], ids=str)
def test_env_that_writes_into_its_row_returns_correct_observations(engine: Options) -> None:
    with ready_engine([RowWritingEnv] * 3, autoreset_mode=AutoresetMode.SAME_STEP, **engine) as envs:
        assert envs.get_attr("has_row") == (True,) * 3
        for t in (1, 2):
            assert (envs.step(np.zeros(3, np.int64))[0] == t).all()
        observations, _, terminations, _, infos = envs.step(np.zeros(3, np.int64))
        assert terminations.all()
        assert (observations == 0).all()
        assert all((final == 3).all() for final in infos["final_obs"])


class CountingEnv(gymnasium.Env[Any, Any]):
    """An environment that counts its steps, in a new array for each observation unless it has a buffer."""

    observation_space = spaces.Box(0, 99, (2, 3), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.buffer: Any = None
        self.t = 0

    def observation_buffer(self, buffer: Any) -> None:
        self.buffer = buffer

    def observe(self) -> Any:
        if self.buffer is None:
            return np.full((2, 3), self.t)
        self.buffer[...] = self.t
        return self.buffer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), 0.0, False, False, {}


class KeepingLimit(TimeLimit):
    """A time limit that returns the observation of the step before."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        self.last, info = super().reset(**arguments)
        return self.last, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        last = self.last
        self.last, *others = super().step(action)
        return last, *others


WRAPPED = {
    "delay": lambda: DelayObservation(CountingEnv(), 2),
    "stack": lambda: FrameStackObservation(CountingEnv(), 3),
    "flatten": lambda: TimeLimit(FlattenObservation(CountingEnv()), 4),
    "subclass": lambda: KeepingLimit(CountingEnv(), 4),
    "limit": lambda: OrderEnforcing(TimeLimit(CountingEnv(), 4)),
}


@pytest.mark.parametrize("engine", [{"num_workers": 0}, {"num_workers": 1, "generators": "own"}], ids=str)
@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_around_row_writing_envs_return_the_same_as_in_gymnasium(name: str, engine: Options) -> None:
    expected = SyncVectorEnv([WRAPPED[name]] * 2)
    with contextlib.closing(expected), ready_engine([WRAPPED[name]] * 2, **engine) as envs:
        expected.reset()
        snapshots = envs.save(verify=False)
        for _ in range(5):
            np.testing.assert_array_equal(envs.step(np.zeros(2, np.int64))[0], expected.step(np.zeros(2, np.int64))[0])
        expected.reset()
        envs.load(snapshots)
        for _ in range(3):
            np.testing.assert_array_equal(envs.step(np.zeros(2, np.int64))[0], expected.step(np.zeros(2, np.int64))[0])
        assert (envs.get_attr("buffer")[0] is not None) == (name == "limit")


class UnpickledSpacesEnv(RowWritingEnv):
    """An environment with unpickled spaces. Their dtypes equal NumPy's dtypes, but are other objects."""

    observation_space = pickle.loads(pickle.dumps(RowWritingEnv.observation_space))
    action_space = pickle.loads(pickle.dumps(spaces.Box(-1, 1, (2,), np.float32)))

    def __init__(self) -> None:
        self.canvas = np.zeros((8, 8), self.observation_space.dtype)
        self.t = 0

    observation_buffer = None  # type: ignore[assignment]


def test_unpickled_dtypes_use_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready_engine([UnpickledSpacesEnv] * 2, num_workers=0) as envs:
        actions = envs.action_space.sample()
        assert actions.dtype is not np.dtype(np.float32), "this test is useless if the dtypes are the same object"
        for worker in envs._driver.pool.workers:
            rows = worker.env_rows
            monkeypatch.setattr(rows, "_write_row", lambda k, observation: pytest.fail("observations used the slow path"))
        monkeypatch.setattr(Tree, "match", lambda *args: pytest.fail("actions used the slow path"))
        assert (envs.step(actions)[0] == 1).all()


# -- plans ----------------------------------------------------------------------------------------------------------


class SleepingRowEnv(RowWritingEnv):
    """An environment with steps that sleep 4 ms."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.004)
        return super().step(action)


def test_plan_for_envs_that_wait_has_more_workers_than_cores() -> None:
    plan = vecenv.plan(SleepingRowEnv, 32)
    assert isinstance(plan, Plan)
    assert plan.probe.waits > 0.8
    assert plan.num_workers > plan.cores
    assert "wait" in str(plan)


def test_plan_reports_measurements_and_reason() -> None:
    plan = vecenv.plan(lambda: NumericInfoEnv(0), 8)
    text = str(plan)
    assert "8 environments" in text
    assert f"num_workers={plan.num_workers}" in text
    assert plan.reason in text


@pytest.mark.parametrize("cores", [1, 2, 8])
@pytest.mark.parametrize("step", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("num_envs", [1, 2, 64])
def test_choose_returns_a_valid_plan(cores: int, step: float, num_envs: int) -> None:
    for waits in (0.0, 0.9):
        probe = StepTimes(100, step, step * (1 - waits))
        for use_caller in (True, False):
            plan = choose(probe, num_envs, cores, use_caller=use_caller)
            assert 0 <= plan.num_workers <= num_envs
            assert plan.num_workers > 0 or use_caller
            if plan.use_caller:
                assert 1 <= plan.caller_share <= num_envs - plan.num_workers


@pytest.mark.parametrize("num_envs", [1, 2, 8, 64])
@pytest.mark.parametrize("cores", [2, 8, 64])
@pytest.mark.parametrize("step", [1e-6, 5e-6, 2e-5, 1e-4, 5e-4, 1e-2])
def test_plan_uses_only_workers_if_that_costs_less_than_a_tenth(step: float, cores: int, num_envs: int) -> None:
    step_times = StepTimes(100, step, step)
    fastest, only_workers, chosen = (choose(step_times, num_envs, cores, use_caller=use) for use in (True, False, None))
    cost = min(only_workers.estimates.values()) / min(fastest.estimates.values())
    fastest_uses_caller = fastest.num_workers == 0 or fastest.use_caller
    expected = only_workers if fastest_uses_caller and cost < 1.1 else fastest
    assert (chosen.num_workers, chosen.use_caller) == (expected.num_workers, expected.use_caller)
    assert ("ends the program" in chosen.reason) == (chosen.num_workers == 0 or chosen.use_caller)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"on_failure": "restart", "step_timeout": 60}, "on_failure and step_timeout"),
        ({"worker_options": vecenv.WorkerOptions(env={"A_NAME": "1"})}, "WorkerOptions(env)"),
        ({"use_caller": False}, "use_caller=False"),
    ],
)
def test_plan_names_the_options_that_exclude_this_process(options: Any, cause: str, closes: Any) -> None:
    envs = closes(vecenv.AsyncVectorEnv([lambda: NumericInfoEnv(0)] * 2, num_workers="auto", **options))
    assert envs.plan.reason == f"one process per usable core, because of {cause}"


def test_use_caller_false_steps_all_envs_in_workers(closes: Any) -> None:
    envs = closes(vecenv.make_vec(lambda: NumericInfoEnv(0), 2, vector_kwargs={"use_caller": False}))
    assert envs.num_workers == 2
    assert not envs.local_envs


@pytest.mark.parametrize("num_envs", [2, 4])
def test_workers_on_separate_cores_cost_no_wake_ups(num_envs: int) -> None:
    computing, waiting = (choose(StepTimes(100, 1e-4, cpu), num_envs, 4) for cpu in (1e-4, 5e-5))
    assert waiting.estimates == computing.estimates
    assert waiting.num_workers == num_envs


def test_only_slow_steps_are_shared_between_cores() -> None:
    slow = choose(StepTimes(100, 0.01, 0.01), 8, 2)
    assert slow.num_workers + slow.use_caller == 2
    assert choose(StepTimes(100, 1e-6, 1e-6), 2, 2).num_workers == 0


@pytest.mark.parametrize(
    ("step", "num_envs", "without_workers"), [(1e-6, 8, True), (5e-6, 2, True), (5e-6, 8, False), (1e-6, 64, False)]
)
def test_batch_is_shared_only_if_that_is_faster(step: float, num_envs: int, without_workers: bool) -> None:
    """On two cores, 8 empty steps took 9 us in the caller, and 16 us if shared with a worker. CartPole took 46 and 34 us."""
    plan = choose(StepTimes(100, step, step), num_envs, 2)
    assert (plan.num_workers == 0) == without_workers
    assert plan.use_caller != without_workers


def test_sharing_must_gain_more_on_slow_machines_or_shared_cores() -> None:
    """On a slow machine, 3 steps of CartPole took 28 us in the caller and 42 us shared. 64 steps are always shared."""
    step = 6.7e-6

    def plans_no_workers(num_envs: int, **machine: float) -> bool:
        return choose(StepTimes(100, step, step, **machine), num_envs, 2).num_workers == 0

    assert not plans_no_workers(4)
    assert plans_no_workers(4, pace=1.2, crowding=1.7)
    assert plans_no_workers(2, pace=1.9)
    assert not plans_no_workers(64, pace=1.2, crowding=1.7)
    assert not plans_no_workers(64, crowding=9.0), "a moment of high load must not change the plan for many environments"


def test_probe_measures_the_speed_of_the_machine() -> None:
    probe = vecenv.plan(lambda: NumericInfoEnv(0), 8).probe
    assert 0.1 < probe.pace < 50
    assert 1.0 <= probe.crowding < 10


def test_callers_share_is_smaller_if_steps_are_short() -> None:
    assert caller_share(64, 1, 0.01) == 32
    assert caller_share(64, 1, 5e-7) == 31
    assert caller_share(2, 1, 1e-6) == 1


def test_repr_shows_the_number_of_planned_workers(closes: Any) -> None:
    envs = closes(vecenv.AsyncVectorEnv(make_numeric_env_fns(4), num_workers="auto"))
    assert envs.plan is not None
    assert f"workers={envs.plan.num_workers}" in repr(envs)
    envs.reset()


def test_auto_with_restarts_does_not_use_the_caller(closes: Any) -> None:
    envs = closes(vecenv.AsyncVectorEnv(make_numeric_env_fns(2), num_workers="auto", on_failure="restart"))
    assert envs.num_workers >= 1
    assert "caller" not in repr(envs)


@pytest.mark.parametrize("fault", ["raises", "exits"])
def test_env_that_cannot_be_probed_raises_with_the_reason(fault: str) -> None:
    def build() -> Any:
        if fault == "exits":
            os._exit(5)
        raise LookupError("no such thing")

    with pytest.raises(LookupError if fault == "raises" else vecenv.errors.WorkerDied, match=r"no such thing|exit code 5"):
        vecenv.plan(build, 4)


# -- placements and spinning ---------------------------------------------------------------------------------------------


@pytest.mark.linux
def test_placements_leave_the_caller_a_core_and_spin_only_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: None)
    two_workers, caller_spin = cores.placements(2)
    assert caller_spin == cores.SPIN_SECONDS
    assert [placement.cpus for placement in two_workers] == [frozenset({1}), frozenset({2})]
    four_workers, caller_spin = cores.placements(4)
    assert caller_spin == cores.SPIN_SECONDS
    assert four_workers[0] == cores.Placement(frozenset({0}), 0.0, shares_core=True)
    assert len({placement.cpus for placement in four_workers}) == 4
    five_workers, caller_spin = cores.placements(5)
    assert caller_spin == 0.0
    assert five_workers == [cores.Placement()] * 5
    monkeypatch.setattr(cores, "_cgroup_quota", lambda: 2.0)
    assert cores.placements(2) == ([cores.Placement()] * 2, 0.0)  # a quota reserves no core


def test_affinity_of_the_caller_is_unchanged() -> None:
    affinity = os.sched_getaffinity(0)
    with ready_engine(make_numeric_env_fns(2), num_workers=1) as envs:
        for _ in range(200):
            envs.step(np.zeros((2, 2), np.float32))
        assert os.sched_getaffinity(0) == affinity
    assert os.sched_getaffinity(0) == affinity


class FakeKernel:
    """A clock that advances by a microsecond per reading, and a counter of the seconds that other processes use the core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        self.waiting_time = 0.0
        monkeypatch.setattr(cores.time, "perf_counter", self)
        monkeypatch.setattr(cores, "seconds_waited", lambda: self.waiting_time)

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def run(self, policy: cores.SpinPolicy, seconds: float, lost: float) -> int:
        """Spin before each of many steps of a millisecond. Return the number of successful spins.

        Args:
            policy: The policy that decides whether to spin.
            seconds: The total time of the steps.
            lost: The fraction of each step in which another process has the core.
        """
        spins = 0
        for _ in range(int(seconds * 1e3)):
            spins += policy.spin(lambda timeout: 1)
            self.now += 1e-3
            self.waiting_time += 1e-3 * lost
        return spins


def test_spinning_stops_under_load_and_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, no_spin_until = FakeKernel(monkeypatch), np.zeros(1)
    policy, other_policy = cores.SpinPolicy(1e-2, no_spin_until), cores.SpinPolicy(1e-2, no_spin_until)
    assert kernel.run(policy, 1.0, lost=0.2) == 1000
    kernel.run(policy, 0.2, lost=0.5)
    assert not policy.spin(lambda timeout: pytest.fail("the process polls during a pause"))
    assert not other_policy.spin(lambda timeout: pytest.fail("another process of the engine polls during the pause"))
    kernel.run(policy, 60.0, lost=0.5)
    assert kernel.run(policy, 60.0, lost=0.5) < 0.05 * 60_000, "the process spins too often on a busy machine"
    kernel.run(policy, cores._MAX_PAUSE_SECONDS, lost=0.0)
    end_of_last_pause = no_spin_until[0]
    assert kernel.run(policy, 1.0, lost=0.0) == 1000
    assert other_policy.spin(lambda timeout: 1)
    assert no_spin_until[0] == end_of_last_pause
    kernel.run(policy, 0.2, lost=0.5)
    assert not kernel.run(policy, 0.1, lost=0.0)
    assert kernel.run(policy, 0.2, lost=0.0), "the first pause after a quiet period is too long"


def test_caller_on_a_workers_core_keeps_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    assert kernel.run(cores.SpinPolicy(1e-2, np.zeros(1), shares_core=True), 2.0, lost=0.5) == 2000


def test_spin_ends_after_its_time_limit() -> None:
    started_at = time.perf_counter()
    assert not cores.SpinPolicy(2e-3, np.zeros(1)).spin(lambda timeout: 0)
    assert 2e-3 <= time.perf_counter() - started_at < 20
    assert not cores.SpinPolicy(0.0, np.zeros(1)).spin(lambda timeout: pytest.fail("the process polls without spin time"))


def test_timeout_error_of_a_signal_handler_while_a_kernel_file_is_read_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptedFile(io.FileIO):
        def read(self, size: int | None = -1) -> Any:
            signal.raise_signal(signal.SIGUSR1)
            return super().read(size)

    monkeypatch.setattr(cores, "FileIO", InterruptedFile)
    with signal_handler(signal.SIGUSR1, TimeoutError), pytest.raises(TimeoutError):
        cores.seconds_waited()


@pytest.mark.parametrize("content", [b"0 0 0\n", b"", b"what?"])
def test_seconds_waited_is_none_if_the_kernel_does_not_report_it(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "FileIO", lambda name: io.BytesIO(content))
    assert cores.seconds_waited() is None


@pytest.mark.linux
def test_seconds_waited_grows_on_a_contended_core() -> None:
    affinity = os.sched_getaffinity(0)
    core = {min(affinity)}
    program = f"import os; os.sched_setaffinity(0, {core})\nprint(flush=True)\nwhile True: pass"
    busy_process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(0, core)
        assert busy_process.stdout is not None
        busy_process.stdout.readline()
        waited_before, started_at = cores.seconds_waited(), time.perf_counter()
        while time.perf_counter() - started_at < 0.5:
            pass
        waited_after = cores.seconds_waited()
        assert waited_before is not None
        assert waited_after is not None
        assert 0.1 < waited_after - waited_before < time.perf_counter() - started_at
    finally:
        os.sched_setaffinity(0, affinity)
        busy_process.kill()
        busy_process.communicate()


@pytest.mark.linux
@pytest.mark.skipif(cores.usable_cores() != 2, reason="needs one core for the caller and one for the worker")
def test_worker_is_unbound_from_a_contended_core_and_bound_again() -> None:
    envs = vecenv.AsyncVectorEnv(make_numeric_env_fns(4), num_workers=1, use_caller=True)
    all_cores = os.sched_getaffinity(0)
    busy_processes: list[subprocess.Popen[bytes]] = []

    def step_until(bound: bool) -> None:
        deadline = time.monotonic() + 20
        while (os.sched_getaffinity(pid) != all_cores) != bound:
            assert time.monotonic() < deadline, f"the worker is on {os.sched_getaffinity(pid)}"
            envs.step(np.zeros((4, 2), np.float32))

    try:
        envs.reset()
        (pid,) = (process.pid for process in envs.processes)
        step_until(bound=True)
        busy_processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
        step_until(bound=False)
        for busy_process in busy_processes:
            busy_process.kill()
        step_until(bound=True)
    finally:
        for busy_process in busy_processes:
            busy_process.kill()
            busy_process.wait()
        envs.close()


def test_stats_are_floats_and_count_steps_and_resets() -> None:
    with ready_engine(make_numeric_env_fns(4), num_workers=2) as envs:
        for _ in range(10):
            envs.step(np.zeros((4, 2), np.float32))
        stats = envs.stats()
    assert all(type(value) is float for value in stats.values()), stats
    assert stats["steps"] == 40
    assert stats["resets"] == 4
    assert 0 < stats["step_time_mean"] < 1
    assert 0 <= stats["wait_fraction"] <= 1


@pytest.mark.long
@pytest.mark.parametrize(("slow_step", "straggler_share"), [(0.03, 0.0), (0.09, 4 / 9)], ids=["equal-steps", "one-slow-env"])
def test_stats_show_the_slow_environment(slow_step: float, straggler_share: float) -> None:
    """Two environments take 30 ms per step, and one takes 30 or 90 ms."""
    with ready_engine([SleepingEnv] * 3) as envs:
        for _ in range(10):
            envs.step(np.array([0.03, slow_step, 0.03]))
        stats = envs.stats()
    assert stats["steps"] == 30
    assert stats["step_time_mean"] == pytest.approx((0.06 + slow_step) / 3, rel=0.2)
    assert stats["step_time_slowest_env"] == pytest.approx(slow_step, rel=0.3)
    assert stats["straggler_share"] == pytest.approx(straggler_share, abs=0.1)


def test_worker_stats_show_the_slow_environment_after_three_steps() -> None:
    with ready_engine([SleepingEnv] * 3, num_workers=1) as envs:
        for _ in range(3):
            envs.step(np.array([0.0, 0.02, 0.0]))
        (worker,) = envs.worker_stats()
    assert worker.slowest_env == 1
    assert worker.slowest_seconds >= 0.02


def test_untimed_messages_are_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances by 10 us per reading, every message seems to take 10 us."""
    ticks = itertools.count()
    monkeypatch.setattr(rows, "clock", lambda: next(ticks) * 1e-5)
    with ready_engine(make_numeric_env_fns(4), num_workers=0) as envs:
        for _ in range(1000):
            envs.step(np.zeros((4, 2), np.float32))
        (env_steps,), (seconds,) = envs._driver.arrays.worker_steps, envs._driver.arrays.worker_time
    messages = env_steps / 4
    assert 1000 - 31 <= messages <= 1000
    extra_readings = 8  # one message in 32 also reads the clock twice per environment; it counts for all 32
    assert seconds == pytest.approx((messages + 32 * extra_readings) * 1e-5)
    assert next(ticks) < 2 * (1000 / 32 + 2) + extra_readings, "the clock is read too often"


@pytest.mark.long
def test_steps_in_short_messages_are_counted_and_their_times_sampled() -> None:
    with ready_engine(make_numeric_env_fns(4), num_workers=2, batch_size=3) as envs:
        for _ in range(1000):
            envs.step(np.zeros((4, 2), np.float32))
        arrays = envs._driver.arrays
        env_steps, seconds = np.array(arrays.worker_steps), np.array(arrays.worker_time)
        stats = envs.stats()
        assert stats["steps"] == 4000
        assert [2000 - 2 * 31 <= steps <= 2000 for steps in env_steps] == [True, True, False]
        assert env_steps[2] == seconds[2] == 0, "the caller has no share"
        assert stats["step_time_mean"] == pytest.approx(seconds.sum() / env_steps.sum())
        envs.reset_async()
        for _ in range(1000):  # each message is about one or two environments
            *_, infos = envs.recv()
            envs.send(np.zeros((3, 2), np.float32), infos["env_id"])
        envs.recv()
        new_steps = float(arrays.worker_steps.sum() - env_steps.sum())
        assert 4000 + 2999 <= envs.stats()["steps"] <= 4000 + 3000  # the last step may still be pending
    assert new_steps == pytest.approx(3000, rel=0.2)


@pytest.mark.parametrize(
    ("step", "cpu", "num_envs", "workers", "cores", "batch_size", "rows_at_once", "reason"),
    [
        (5e-6, 5e-6, 64, 2, 2, 64, None, "lock-step: half of them are stepped in 80 us"),
        (2e-4, 2e-4, 8, 2, 2, 4, None, "halves: half of them are stepped in 400 us"),
        (2e-4, 2e-4, 8, 2, 16, 4, 2, "2 of a worker's 4 in one message"),  # the caller has a core
        (1e-4, 1e-4, 256, 64, 65, 256, None, "lock-step: half of them are stepped in 200 us"),  # the caller is too slow
        (5e-3, 1e-4, 64, 16, 2, 32, 2, "2 of a worker's 4 in one message"),  # steps that wait
        (5e-3, 1e-4, 64, 64, 2, 32, None, "halves"),  # one environment per worker cannot be split
        (5e-3, 5e-3, 1, 1, 2, 1, None, "no environment can be ahead of another"),
        (5e-3, 5e-3, 8, 0, 2, 8, None, "no environment can be ahead of another"),
    ],
)
def test_batch_size_auto_depends_on_step_time_and_cores(
    step: float, cpu: float, num_envs: int, workers: int, cores: int, batch_size: int, rows_at_once: int | None, reason: str
) -> None:
    plan = plan_batches(Plan(num_envs, workers, 0, "as requested", StepTimes(100, step, cpu), cores, {}))
    assert (plan.batch_size, plan.rows_at_once) == (batch_size, rows_at_once)
    assert reason in plan.batch_reason
    assert (plan.num_workers, plan.reason) == (workers, "as requested")


def test_batch_size_auto_gives_the_caller_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    step_times = StepTimes(100, 3e-4, 3e-4)
    assert choose(step_times, 8, 2, use_caller=True).use_caller
    monkeypatch.setattr("vecenv.planning.plan.usable_cores", lambda: 2)
    workers, share, plan = workers_and_share(8, "auto", True, lambda: (step_times, Independence()), "auto")
    assert (workers, share) == (2, 0)
    assert plan is not None
    assert (plan.batch_size, plan.use_caller) == (4, False)


def test_engine_and_pool_have_at_most_30_attributes() -> None:
    """CPython 3.11 shares at most 30 keys per class. With more, all lookups are slower: 2 % of a step, 5 % of recv."""
    with ready_engine([SleepingEnv] * 2, num_workers=2) as envs:
        for instance in (envs._driver, envs._pool):
            assert len(vars(instance)) <= 30, f"{type(instance).__name__}: {sorted(vars(instance))}"


# --- ``vecenv.share``: one copy of read-only data for all workers, with every start method ------

START_METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)]
MIB = 2**20


class PriceEnv(gymnasium.Env):
    """An environment that observes four consecutive prices, and moves on by one price per step.

    Action 1 writes into the prices. Action 2 kills the process.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, prices: Any) -> None:
        self.prices = prices["close"] if isinstance(prices, dict) else prices
        self.position = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.position = int(self.np_random.integers(100))
        return self.prices[self.position : self.position + 4].copy(), {}

    def step(self, action: int) -> Any:
        if action == 1:
            self.prices[0] = 0.0
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.position += 1
        observation, reward = self.prices[self.position : self.position + 4].copy(), float(self.prices[self.position])
        return observation, reward, self.position % 50 == 0, False, {}

    def private_mib(self) -> float:
        """Return the memory in MiB that only this process uses."""
        return psutil.Process().memory_full_info().uss / MIB


def make_price_env_fns(prices: Any, count: int = 4) -> list[Any]:
    return [functools.partial(PriceEnv, prices)] * count


@pytest.fixture(scope="module")
def prices() -> np.ndarray:
    return np.random.default_rng(0).normal(size=64 * MIB // 8)


@pytest.mark.sampled("fork")
@pytest.mark.parametrize("context", START_METHODS)
def test_workers_do_not_copy_shared_data_and_return_the_same_results(context: str, prices: np.ndarray, closes: Any) -> None:
    shared = vecenv.share({"close": prices, "volume": np.arange(3)})
    assert shared["close"].flags.writeable is False
    reference = SyncVectorEnv(make_price_env_fns(prices))
    envs = closes(vecenv.AsyncVectorEnv(make_price_env_fns(shared), num_workers=2, context=context))
    small_env_fns = make_price_env_fns(prices[:1000].copy())
    with contextlib.closing(vecenv.AsyncVectorEnv(small_env_fns, num_workers=2, context=context)) as baseline:
        baseline_mib = min(baseline.call("private_mib"))
    np.testing.assert_array_equal(envs.reset(seed=1)[0], reference.reset(seed=1)[0])
    for _ in range(60):
        for result, expected in zip(envs.step(np.zeros(4, np.int64))[:4], reference.step([0] * 4)[:4], strict=True):
            np.testing.assert_array_equal(result, expected)
    assert max(envs.call("private_mib")) < baseline_mib + 8  # a copy would add 64


@pytest.mark.sampled("fork")
@pytest.mark.parametrize("context", START_METHODS)
def test_shared_data_is_read_only_and_available_after_a_restart(context: str, prices: np.ndarray) -> None:
    shared = vecenv.share(prices[:10_000])
    fns = make_price_env_fns(shared, 2)
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, context=context, on_failure="restart")) as envs:
        envs.reset(seed=1)
        for action in (1, 2):
            *_, truncated, infos = envs.step(np.array([0, action]))
            assert infos["restarted"].tolist() == truncated.tolist() == [False, True]
            envs.step(np.zeros(2, np.int64))
        assert "read-only" in str(envs.errors[0].error)
        assert envs.errors[0].env == 1
    np.testing.assert_array_equal(shared, prices[:10_000])


@pytest.mark.long
def test_shared_data_is_available_in_spare_workers(prices: np.ndarray) -> None:
    fns = make_price_env_fns(vecenv.share(prices[:10_000]), 2)
    with contextlib.closing(vecenv.EpisodePrefetcher.from_env_fns(fns, 1, context="spawn")) as envs:
        check_prices(envs, prices)
        assert 2 in envs.places  # an episode runs in the spare worker


@pytest.mark.long
def test_shared_data_is_available_in_the_probe(prices: np.ndarray) -> None:
    fns = make_price_env_fns(vecenv.share(prices[:10_000]), 2)
    with contextlib.closing(vecenv.AsyncVectorEnv(fns, context="spawn", num_workers="auto")) as envs:
        check_prices(envs, prices)


def check_prices(envs: Any, prices: np.ndarray) -> None:
    """Reset and step two environments with these prices, and check each observation and reward."""
    starts = [int(gymnasium.utils.seeding.np_random(seed)[0].integers(100)) for seed in (1, 2)]
    observations, _ = envs.reset(seed=1)
    np.testing.assert_array_equal(observations, [prices[start : start + 4] for start in starts])
    windows = {window.tobytes() for window in np.lib.stride_tricks.sliding_window_view(prices[:200], 4)}
    for _ in range(60):
        observations, rewards, *_ = envs.step(np.zeros(2, np.int64))
        assert all(observation.tobytes() in windows for observation in observations)
        stepped = rewards != 0  # the others began an episode
        np.testing.assert_array_equal(rewards[stepped], observations[stepped, 0])


def test_shared_arrays_and_views_of_every_kind_reach_workers(prices: np.ndarray) -> None:
    data = {
        "rows": np.arange(24.0).reshape(4, 6), "columns": np.asfortranarray(np.arange(24).reshape(4, 6)),
        "none": np.zeros((3, 0)), "one": np.array(5), "days": np.array(["2026-01-01", "NaT"], "M8[D]"),
        "records": np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), "letters": np.array([b"ab", b"c"]),
        "steps": np.arange(20)[::3],
    }  # fmt: skip
    shared = vecenv.share(data)
    parts = [shared["rows"][1:, ::-2], shared["columns"].T[2:], shared["rows"][:, 3], shared["steps"][::-1]]
    views = [*shared.values(), *parts]
    expected_arrays = [np.array(view) for view in views]

    def build_env(views: list[Any] = views) -> Any:
        return ViewsEnv(views)

    with contextlib.closing(vecenv.AsyncVectorEnv([build_env] * 2, num_workers=1, context="spawn")) as envs:
        for copies in envs.get_attr("copies"):
            for result, expected in zip(copies, expected_arrays, strict=True):
                assert result.dtype == expected.dtype
                np.testing.assert_array_equal(result, expected)
        assert envs.get_attr("shared") == (True, True)
    for array in views:  # outside of workers, pickling copies the data
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)), array)


class ViewsEnv(PriceEnv):
    """An environment that holds views of shared arrays."""

    def __init__(self, views: list[Any]) -> None:
        super().__init__(np.zeros(200))
        self.views = views

    @property
    def copies(self) -> list[Any]:
        return [np.array(view) for view in self.views]

    @property
    def shared(self) -> bool:
        return all(not view.flags.writeable for view in self.views)


def test_shared_data_is_freed_with_its_last_array(prices: np.ndarray) -> None:
    def count_blocks() -> int:
        """Return the number of mappings plus the number of descriptors of shared memory in this process."""
        with open("/proc/self/maps") as maps:
            mapped = sum("memfd:vecenv" in line for line in maps)
        return mapped + sum("memfd:vecenv" in os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists())

    gc.collect()
    before = count_blocks()
    shared = vecenv.share(prices[:1000])
    part = shared[3:5]
    del shared
    assert count_blocks() == before + 3  # a mapping, its descriptor, and the descriptor that mmap duplicates
    with contextlib.closing(vecenv.AsyncVectorEnv(make_price_env_fns(part.repeat(100), 1), context="spawn")):
        pass
    np.testing.assert_array_equal(part, prices[3:5])
    del part
    gc.collect()
    assert count_blocks() == before


def test_share_names_the_value_that_it_refuses() -> None:
    with pytest.raises(TypeError, match=r"share\(\): 'x': expected a NumPy array or a dict of arrays, got list"):
        vecenv.share({"x": [1, 2]})
    with pytest.raises(TypeError, match=r"share\(\): expected a NumPy array or a dict of arrays, got int"):
        vecenv.share(3)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"share\(\): expected an array without Python objects, got dtype object"):
        vecenv.share(np.array([object()]))
    with pytest.raises(TypeError, match=r"share\(\): 'x': expected an array without a mask, got a masked array"):
        vecenv.share({"x": np.ma.masked_equal([1, 0], 0)})
    assert vecenv.share({}) == {}
    shared = vecenv.share(np.zeros(3))
    with pytest.raises(ValueError, match="read-only"):
        shared[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        shared.flags.writeable = True
    too_large = np.lib.stride_tricks.as_strided(np.zeros(1), (2**45,), (0,))
    with pytest.raises(vecenv.errors.ArenaError, match=r"share\(\) needs .* bytes of shared memory"):
        vecenv.share(too_large)
