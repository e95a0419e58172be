"""The start of workers: failures, start methods, preloaded modules, cores and environment variables."""

from __future__ import annotations

import functools
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, Options, SpaceEnv, assert_matches_sync, counters, open_engine, raises_and_warns, ready_engine
from gymnasium import spaces
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import SyncVectorEnv
from programs import run_python

import vecenv
from vecenv import Restart, WorkerOptions
from vecenv.errors import StartupTimeout, VecEnvError, WorkerDied
from vecenv.link.observations import make_exact_rows
from vecenv.shm import Layout, fixed_tree
from vecenv.system.cores import bound_placements, usable_cores
from vecenv.system.spawning import find_late_variables
from vecenv.testing import assert_identical

requires_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes")

NO_DUMMY_ENV: dict[str, Any] = {"worker_options": WorkerOptions(dummy_env=False)}


# --- workers start concurrently, failures are raised with their cause, and no process remains ----


def make_env_fn_with_call(function: Any) -> Any:
    """Return a function that builds a :class:`CounterEnv`. In processes other than this one, it first calls ``function``."""
    caller_pid = os.getpid()

    def build() -> gymnasium.Env:
        if os.getpid() != caller_pid:
            function()
        return CounterEnv()

    return build


def raise_no_display() -> None:
    raise RuntimeError("no display")


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_exception_of_an_env_fn_in_a_worker_is_raised_with_its_index(process_engine: Options, failing: int) -> None:
    fns = counters(3)
    fns[failing] = make_env_fn_with_call(raise_no_display)
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv(fns, **process_engine)
    assert f"env {failing}" in str(caught.value) + "\n".join(getattr(caught.value, "__notes__", []))
    assert "raise_no_display" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


def test_exception_of_the_first_env_is_raised_if_several_env_fns_raise(process_engine: Options) -> None:
    def raise_another() -> None:
        raise ValueError("another")

    fns = [*counters(1), make_env_fn_with_call(raise_no_display), make_env_fn_with_call(raise_another)]
    with pytest.raises(RuntimeError, match="no display"):
        vecenv.AsyncVectorEnv(fns, **process_engine)


def test_exit_in_an_env_fn_is_raised_as_an_error_in_the_caller(process_engine: Options) -> None:
    with pytest.raises(VecEnvError, match=r"\b2\b"):
        vecenv.AsyncVectorEnv([*counters(2), make_env_fn_with_call(lambda: sys.exit(3))], **process_engine)
    with pytest.raises(VecEnvError):
        vecenv.AsyncVectorEnv([*counters(2), make_env_fn_with_call(lambda: os._exit(4))], **process_engine)
    assert multiprocessing.active_children() == []


def test_hanging_start_raises_startup_timeout(process_engine: Options) -> None:
    begin = time.monotonic()
    with pytest.raises(StartupTimeout) as caught:
        vecenv.AsyncVectorEnv(
            [*counters(2), make_env_fn_with_call(lambda: time.sleep(60))],
            worker_options=WorkerOptions(start_timeout=0.5), **process_engine,
        )  # fmt: skip
    assert time.monotonic() - begin < 70
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, multiprocessing.TimeoutError)
    assert multiprocessing.active_children() == []


@pytest.mark.long
def test_workers_start_concurrently() -> None:
    begin = time.monotonic()
    with open_engine([make_env_fn_with_call(lambda: time.sleep(2.0))] * 4):
        assert time.monotonic() - begin < 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (lambda: Restart(limit=-1), "`Restart(limit)` must be None, a non-negative int or float('inf'), got -1"),
        (lambda: Restart(period=0.0), "`Restart(period)` must be a number of seconds above 0, got 0.0"),
        (lambda: WorkerOptions(start_timeout=-1), "`WorkerOptions(start_timeout)` must be a number of seconds above 0"),
        (lambda: WorkerOptions(threads=0), "`WorkerOptions(threads)` must be None or a positive int, got 0"),
        (lambda: WorkerOptions(dummy_env="no"), "`WorkerOptions(dummy_env)` must be None, True, False or an object with"),
    ],
)
def test_restart_and_worker_options_are_checked_when_constructed(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        options()


FORMER_OPTIONS = {
    "strict": "It was removed", "ragged_infos": "It was removed", "isolate": "use_caller=False in place of isolate=True",
    "restart_limit": "on_failure=vecenv.Restart(limit=...)", "restart_period": "vecenv.Restart(limit=..., period=...)",
    "threads_per_worker": "WorkerOptions(threads=...)", "worker_affinity": "WorkerOptions(cores=...)",
    "worker_env": "WorkerOptions(env=...)", "preload": "WorkerOptions(preload=...)",
    "start_timeout": "WorkerOptions(start_timeout=...)", "dummy_env": "WorkerOptions(dummy_env=...)",
}  # fmt: skip


@pytest.mark.parametrize("option", FORMER_OPTIONS)
def test_former_option_names_its_replacement(option: str) -> None:
    for build in (vecenv.AsyncVectorEnv, vecenv.MultiAgentVecEnv):
        with pytest.raises(TypeError, match=f"no option '{option}'.*{re.escape(FORMER_OPTIONS[option])}"):
            build(counters(2), **{option: 1})
    with pytest.raises(TypeError, match=f"no option '{option}'.*{re.escape(FORMER_OPTIONS[option])}"):
        vecenv.make_vec("CartPole-v1", 2, **{option: 1})


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"num_workers": -1}, ()),
        ({"num_workers": 1.5}, ()),
        ({"num_workers": "many"}, ("auto",)),
        ({"on_failure": "shrug"}, ("raise", "restart")),
        ({"on_failure": None}, ("raise", "restart")),
        ({"step_timeout": -1.0}, ()),
        ({"step_timeout": math.nan}, ()),
        ({"use_caller": "yes"}, ("None, True or False",)),
        ({"worker_options": {"threads": 2}}, ("WorkerOptions",)),
        ({"worker": print, "on_failure": "restart"}, ("on_failure",)),
    ],
    ids=str,
)
def test_invalid_option_is_refused_before_anything_is_built(options: Options, texts: tuple[str, ...]) -> None:
    """The error names the option and, if there are only a few, the accepted values."""

    def fail_to_build() -> gymnasium.Env:
        raise AssertionError("built too early")

    with pytest.raises((ValueError, TypeError)) as caught:
        vecenv.AsyncVectorEnv([fail_to_build, fail_to_build], **options)
    option, *_ = options
    for text in (option, *texts):
        assert text in str(caught.value)


# --- sources of the spaces -----------------------------------------------------------------------


def build_only_in_workers() -> gymnasium.Env:
    """Build an environment. Raise in the process of the tests, which is the caller."""
    assert multiprocessing.parent_process() is not None, "built in the caller"
    return CounterEnv()


def make_env_fn_with_upper_bound(high: int) -> Any:
    def build() -> gymnasium.Env:
        assert multiprocessing.parent_process() is not None, "built in the caller"
        return SpaceEnv(spaces.Box(0.0, float(high), (2,), np.float32))

    return build


class UnpicklableSpace(spaces.Discrete):
    def __reduce__(self) -> Any:
        raise TypeError("this space cannot be pickled")


def build_env_with_unpicklable_space() -> gymnasium.Env:
    env = CounterEnv()
    env.action_space = UnpicklableSpace(5)
    return env


@pytest.mark.long
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_dummy_env_false_reads_spaces_in_another_process(context: str) -> None:
    with open_engine([build_only_in_workers] * 3, **NO_DUMMY_ENV, context=context, num_workers=2) as envs:
        env = CounterEnv()
        assert envs.single_observation_space == env.observation_space
        assert envs.single_action_space == env.action_space
        assert envs.observation_space.shape == (3, *env.observation_space.shape)
        assert envs.metadata == {**env.metadata, "autoreset_mode": envs.autoreset_mode}
        assert envs.render_mode == env.render_mode
        assert envs.reset(seed=1)[0] in envs.observation_space


def test_num_workers_auto_reads_spaces_in_the_probe_process() -> None:
    # with a timeout, num_workers="auto" never chooses to step environments in the caller
    with open_engine([build_only_in_workers] * 2, num_workers="auto", step_timeout=30.0) as envs:
        assert envs.plan is not None
        assert envs.reset(seed=1)[0] in envs.observation_space


def test_dummy_env_false_reads_different_spaces_in_other_processes() -> None:
    fns = [make_env_fn_with_upper_bound(1), make_env_fn_with_upper_bound(2)]
    with open_engine(fns, **NO_DUMMY_ENV, observation_mode="different") as envs:
        assert envs.observation_space.high.tolist() == [[1, 1], [2, 2]]


def test_dummy_env_false_raises_errors_of_env_fns_unchanged() -> None:
    with pytest.raises(RuntimeError, match="no display") as caught:
        vecenv.AsyncVectorEnv([make_env_fn_with_call(raise_no_display)], **NO_DUMMY_ENV)
    assert "raise_no_display" in str(caught.value.__cause__)
    with pytest.raises(WorkerDied, match="exit code 4"):
        vecenv.AsyncVectorEnv([make_env_fn_with_call(lambda: os._exit(4))], **NO_DUMMY_ENV)
    options = WorkerOptions(dummy_env=False, start_timeout=0.5)
    with pytest.raises(StartupTimeout):
        vecenv.AsyncVectorEnv([make_env_fn_with_call(lambda: time.sleep(60))], worker_options=options)
    assert multiprocessing.active_children() == []


def test_unpicklable_spaces_raise_only_with_dummy_env_false() -> None:
    with pytest.raises(TypeError, match="this space cannot be pickled"):
        vecenv.AsyncVectorEnv([build_env_with_unpicklable_space] * 2, **NO_DUMMY_ENV)
    # fork, because other start methods pickle the spaces for the workers
    fns = [build_env_with_unpicklable_space] * 2
    with open_engine(fns, num_workers="auto", step_timeout=30.0, context="fork") as envs:
        assert type(envs.single_action_space) is UnpicklableSpace


def test_object_with_spaces_replaces_the_dummy_env() -> None:
    example = CounterEnv()
    example.metadata = {"name": "example"}
    with open_engine([build_only_in_workers] * 3, num_workers=2, worker_options=WorkerOptions(dummy_env=example)) as envs:
        assert envs.metadata["name"] == "example"
        assert envs.single_observation_space == example.observation_space
        envs.reset(seed=0)
    with pytest.raises(ValueError, match="WorkerOptions\\(dummy_env\\)` must be None, True, False or an object with observ"):
        WorkerOptions(dummy_env=3)


# --- fork, spawn and forkserver: results and errors are the same, also for local classes and functions

every_start_method = pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])


@pytest.mark.sampled("fork")
@every_start_method
def test_all_calls_work_with_every_start_method(context: str, closes: Any) -> None:
    """All checks share one start of workers, because spawn is slow. The class and the functions are local."""

    class LocalClassEnv(CounterEnv):
        def step(self, action: Any) -> Any:
            if action == 4:
                raise ValueError("four")
            return super().step(action)

    shortest, offset = 2, 5
    fns = [lambda i=i: LocalClassEnv(i, lengths=(shortest + i,), render_mode="rgb_array") for i in range(3)]
    reference = closes(SyncVectorEnv(fns))
    with open_engine(fns, context=context, num_workers=2) as envs:
        assert envs.context == context
        assert os.getpid() not in envs.call("pid")
        assert_same_trajectory_without_action_4(envs, reference)
        assert envs.call("add", 2) == (2, 3, 4)
        assert envs.exec_func(lambda env: env.env_id + offset, [2]) == (None, None, 7)
        envs.set_attr("note", ["a", "b", "c"])
        assert envs.get_attr("note") == ("a", "b", "c")
        assert len(envs.render()) == 3
        envs.reset(seed=1)
        with raises_and_warns(ValueError, match="four"):
            envs.step([0, 4, 0])
        assert envs.reset(seed=3)[0][:, 3].tolist() == [3, 4, 5]


def assert_same_trajectory_without_action_4(envs: Any, reference: Any) -> None:
    rng = np.random.default_rng(0)
    assert_identical(envs.reset(seed=1), reference.reset(seed=1))
    for t in range(8):
        actions = rng.integers(4, size=3)
        assert_identical(envs.step(actions), reference.step(actions), f"step {t}")
    mask = np.array([True, False, True])
    result, expected = (vector_env.reset(seed=3, options={"reset_mask": mask.copy()}) for vector_env in (envs, reference))
    assert_identical(result, expected)


@pytest.mark.sampled("fork")
@every_start_method
def test_cartpole_trajectories_equal_sync_vector_env_with_every_start_method(context: str) -> None:
    fns = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=9)] * 3
    assert_matches_sync(fns, 30, autoreset_mode="SameStep", context=context, copy=False, num_workers=2)


class StepsUnderSemaphore(CounterEnv):
    """An environment that holds the program's semaphore in a step, sets its event, and counts steps in its shared array."""

    def __init__(self, semaphore: Any, stepped: Any, steps: Any) -> None:
        super().__init__()
        self._semaphore, self._stepped, self._steps = semaphore, stepped, steps

    def step(self, action: Any) -> Any:
        with self._semaphore:
            self._stepped.set()
            self._steps[0] += 1
        return super().step(action)


@pytest.mark.sampled("dummy_env=False-forkserver")
@pytest.mark.parametrize("context", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
@pytest.mark.parametrize("options", [{}, NO_DUMMY_ENV], ids=["", "dummy_env=False"])
def test_env_fns_may_contain_multiprocessing_locks_events_and_arrays(context: Any, options: Options) -> None:
    mp_context = multiprocessing.get_context(context)
    semaphore, stepped, steps = mp_context.Semaphore(1), mp_context.Event(), mp_context.Array("i", 1)
    env_fns = [functools.partial(StepsUnderSemaphore, semaphore, stepped, steps)] * 2
    with open_engine(env_fns, context=context, on_failure="restart", **options) as envs:
        envs.reset(seed=0)
        envs.step(np.zeros(2, int))
        assert stepped.is_set()
        os.kill(envs.processes[0].pid, signal.SIGKILL)
        assert envs.step(np.zeros(2, int))[4]["restarted"].tolist() == [True, False]
        envs.step(np.zeros(2, int))
    assert steps[0] == 4  # two before the kill, then two of env 1: the first step of env 0 after its restart is an autoreset


def test_lock_of_another_start_method_raises_and_names_the_env_fn() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    if not hasattr(lock, "_is_fork_ctx"):
        pytest.skip("Python before 3.11.5 does not detect this")
    with pytest.raises(RuntimeError, match="fork context") as caught:
        vecenv.AsyncVectorEnv([functools.partial(StepsUnderSemaphore, lock, None, None)] * 2, context="spawn")
    assert "env_fns[0]" in caught.value.__notes__[0]
    assert multiprocessing.active_children() == []


def test_unpickled_layout_has_numpys_own_dtype_objects() -> None:
    """Every observation's dtype is compared, which is faster for identical objects than for equal ones."""
    observation, action = fixed_tree(Box(-1, 1, (4, 2), np.float32)), fixed_tree(Discrete(2), "action")
    layout = Layout.for_spaces(observation, action, 3, 1, final=False)
    unpickled = pickle.loads(pickle.dumps(layout))
    assert unpickled == layout
    batch = unpickled.view(bytearray(layout.size))
    for array in (*batch.observations, *batch.actions, batch.rewards, batch.terminations):
        assert array.dtype is np.zeros(1, array.dtype.str).dtype
    for row in make_exact_rows(unpickled.observations.leaf, batch.observations[0]):
        assert row._dtype is batch.observations[0].dtype


# --- ``WorkerOptions(preload=)``: the fork server imports modules once, for all workers -------------------------

PRELOAD_PROGRAM = """
import sys, gymnasium, vecenv

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self):
        self.imported = {name: name in sys.modules for name in ("tabnanny", "pyclbr")}
    def reset(self, *, seed=None, options=None):
        return self.observation_space.low, {}
    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}

if __name__ == "__main__":
    def find_imported(**options):
        envs = vecenv.AsyncVectorEnv([Env] * 2, context="forkserver", **options)
        imported = envs.get_attr("imported")
        envs.close()
        return [modules["tabnanny"] for modules in imported], [modules["pyclbr"] for modules in imported]
    print(find_imported(worker_options=vecenv.WorkerOptions(preload=["tabnanny"])))
    print(find_imported(worker_options=vecenv.WorkerOptions(preload=["pyclbr"])))  # the fork server is running already
"""


def test_fork_server_preloads_modules_for_workers(tmp_path: Any) -> None:
    file = tmp_path / "program.py"
    file.write_text(PRELOAD_PROGRAM)
    completed = run_python(file)
    assert completed.stdout.splitlines() == ["([True, True], [False, False])"] * 2, completed.stderr
    assert "WorkerOptions(preload) has no effect: the fork server" in completed.stderr


TORCH_MODULE = """
import os
with open(os.path.join(os.path.dirname(__file__), "pids"), "a") as file:
    print(os.getpid(), file=file)
class Module: ...
def set_num_threads(number): ...
"""
TRAINING_PROGRAM = """
import gymnasium, torch, vecenv
{}
if __name__ == "__main__":
    vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, num_workers="auto", context="forkserver").close()
    vecenv.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, context="forkserver").close()
"""


@pytest.mark.parametrize("line", ["class Agent(torch.Module): ...", "del torch"])
def test_fork_server_imports_torch_if_the_main_file_uses_it(line: str, tmp_path: Any) -> None:
    (tmp_path / "torch.py").write_text(TORCH_MODULE)
    (tmp_path / "training.py").write_text(TRAINING_PROGRAM.format(line))
    # PYTHONPATH, because the fork server must also find this torch
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    run_python(tmp_path / "training.py", PYTHONPATH=path)
    pids = (tmp_path / "pids").read_text().split()
    # the program and the fork server import torch; if the main file deletes it, every worker imports it
    if line == "del torch":
        assert len(pids) != 2
    else:
        assert len(pids) == 2, f"torch was imported {len(pids)} times"


# --- ``WorkerOptions(cores=)``, and the number of usable cores


def get_affinity(env: Any) -> set[int]:
    return os.sched_getaffinity(0)


@requires_affinity
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_workers_and_their_replacements_run_on_the_given_cores(context: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    options = WorkerOptions(cores=[cores[-1], cores])
    with ready_engine(counters(4), num_workers=2, context=context, worker_options=options, on_failure="restart") as envs:
        for _ in range(2):
            assert envs.exec_func(get_affinity) == ({cores[-1]}, {cores[-1]}, set(cores), set(cores))
            for _ in range(50):
                envs.step(np.zeros(4, np.int64))
            os.kill(envs.processes[0].pid, signal.SIGKILL)
            envs.step(np.zeros(4, np.int64))


@requires_affinity
def test_cores_may_be_numpy_integers() -> None:
    core = min(os.sched_getaffinity(0))
    for cores in (np.array([core] * 2), np.array([[core]] * 2), [np.int64(core), [np.int64(core)]]):
        placements = bound_placements(cores, 2)
        assert [placement.cpus for placement in placements] == [{core}, {core}]
        assert {type(cpu) for placement in placements for cpu in placement.cpus or ()} == {int}


@requires_affinity
@pytest.mark.parametrize("wrong", [3, [0], [0, []], [0, "x"], [0, [[0]]], [0, 10_000], "01"], ids=str)
def test_invalid_cores_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"WorkerOptions\(cores\)(\[1\])? must be .*, got "):
        vecenv.AsyncVectorEnv(counters(2), num_workers=2, worker_options=WorkerOptions(cores=wrong))


@requires_affinity
def test_usable_cores_are_limited_by_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = usable_cores()
    for limit, expected in (("1", 1), ("100000", usable), ("", usable), ("2(x2)", usable)):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", limit)
        assert usable_cores() == expected


@pytest.mark.parametrize(
    ("group", "files"),
    [("0::/outer/inner", {"outer/inner/cpu.max": "max 100000", "outer/cpu.max": "150000 50000", "cpu.max": "400000 100000"}),
     ("1:cpu:/outer", {"cpu/outer/cpu.cfs_quota_us": "300000\n", "cpu/outer/cpu.cfs_period_us": "100000\n"})],
    ids=["cgroup v2", "cgroup v1"],
)  # fmt: skip
def test_usable_cores_are_limited_by_the_smallest_cgroup_quota(
    group: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = {"/proc/self/cgroup": f"{group}\n", **{f"/sys/fs/cgroup/{file}": text for file, text in files.items()}}
    monkeypatch.setattr("vecenv.system.cores.read_kernel_file", lambda path: content.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert usable_cores() == 3


# --- ``WorkerOptions(env=)``: environment variables that workers set before they import anything

LONG_START_METHODS = [pytest.param(name, marks=pytest.mark.long) for name in ("spawn", "forkserver")]


def get_variables(envs: Any, *names: str) -> list[tuple[str | None, ...]]:
    return [tuple(found) for found in envs.exec_func(lambda env: [os.environ.get(name) for name in names])]


@pytest.mark.parametrize("context", ["fork", *LONG_START_METHODS])
def test_each_worker_has_its_own_variables(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECENV_TEST_GONE", "here")
    before = dict(os.environ)
    variables = {"VECENV_TEST_DEVICE": lambda worker: worker + 4, "VECENV_TEST_GL": "egl", "VECENV_TEST_GONE": None}
    with open_engine(counters(4), num_workers=2, context=context, worker_options=WorkerOptions(env=variables)) as envs:
        assert get_variables(envs, *variables) == [("4", "egl", None)] * 2 + [("5", "egl", None)] * 2
    assert dict(os.environ) == before


def test_restarted_worker_has_its_variables_again() -> None:
    worker_options = WorkerOptions(env={"VECENV_TEST_DEVICE": str})
    with ready_engine(counters(2), on_failure="restart", worker_options=worker_options) as envs:
        os.kill(envs.processes[1].pid, signal.SIGKILL)
        while not envs.stats()["restarts"]:
            envs.step([0, 0])
        assert get_variables(envs, "VECENV_TEST_DEVICE") == [("0",), ("1",)]


def test_probed_environment_has_the_variables_of_worker_0(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def build() -> Any:
        with log.open("a") as file:
            print(os.getpid(), os.environ.get("VECENV_TEST_DEVICE"), file=file)
        return gymnasium.make("CartPole-v1")

    options = WorkerOptions(env={"VECENV_TEST_DEVICE": lambda worker: f"gpu{worker}"})
    with open_engine([build] * 2, num_workers=2, worker_options=options):
        pids_and_devices = [line.split() for line in log.read_text().splitlines()]
    first, *others = [device for _, device in pids_and_devices]
    assert (first, sorted(others)) == ("gpu0", ["gpu0", "gpu1"])  # sorted, because workers build concurrently
    assert str(os.getpid()) not in {pid for pid, _ in pids_and_devices}


def test_auto_with_variables_starts_workers() -> None:
    with open_engine(counters(2), num_workers="auto", worker_options=WorkerOptions(env={"VECENV_TEST_GL": "egl"})) as envs:
        assert envs.num_workers >= 1
        assert get_variables(envs, "VECENV_TEST_GL") == [("egl",)] * 2


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
@pytest.mark.long
def test_main_module_is_imported_with_the_variables(context: str, tmp_path: Path) -> None:
    """``Process`` imports the main module before it unpickles its arguments, so ``NameWithVariables`` sets the variables."""
    (tmp_path / "simulator.py").write_text("""
import os
AT_IMPORT = os.environ.get("VECENV_TEST_DEVICE")
import gymnasium
def env_fn():
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.at_import = AT_IMPORT
    return env
""")
    program = tmp_path / "program.py"
    program.write_text(f"""
import simulator, vecenv
if __name__ == "__main__":
    options = vecenv.WorkerOptions(env={{"VECENV_TEST_DEVICE": str}})
    envs = vecenv.AsyncVectorEnv([simulator.env_fn] * 2, context={context!r}, worker_options=options)
    print(simulator.AT_IMPORT, *envs.get_attr("at_import"))
    envs.close()
""")
    completed = run_python(program, PYTHONPATH=str(Path(vecenv.__file__).parents[1]))
    assert completed.stdout.split() == ["None", "0", "1"], completed.stderr


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (["A"], TypeError, r"WorkerOptions\(env\) must be a dict of environment variables, got list"),
        ({1: "a"}, TypeError, "a name that is not a string: 1"),
        ({"A=B": "a"}, ValueError, "an invalid name of an environment variable: 'A=B'"),
        ({"": "a"}, ValueError, "an invalid name of an environment variable: ''"),
        ({"A": b"a"}, TypeError, r"WorkerOptions\(env\)\['A'\] must be .* got b'a'"),
        ({"A": True}, TypeError, r"WorkerOptions\(env\)\['A'\] must be .* got True"),
        ({"A": "a\0"}, ValueError, r"WorkerOptions\(env\)\['A'\] must not contain a null character"),
        ({"A": lambda worker: [worker]}, TypeError, r"WorkerOptions\(env\)\['A'\] must be .* got \[0\] for worker 0"),
    ],
)
def test_invalid_variables_are_refused_before_anything_is_built(wrong: Any, error: type[Exception], text: str) -> None:
    def fail_to_build() -> Any:
        raise AssertionError("built too early")

    with pytest.raises(error, match=text):
        vecenv.AsyncVectorEnv([fail_to_build], worker_options=WorkerOptions(env=wrong))


def test_exception_in_the_function_of_a_variable_leaves_no_process() -> None:
    def value_for_worker_0_or_1(worker: int) -> str:
        return {0: "a", 1: "b"}[worker]

    with pytest.raises(KeyError):
        vecenv.AsyncVectorEnv(counters(3), worker_options=WorkerOptions(env={"A": value_for_worker_0_or_1}))


def test_fork_warns_about_modules_that_read_variables_on_import(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "OpenGL", sys)  # any module will do
    monkeypatch.setenv("PYOPENGL_PLATFORM", "glx")
    with (
        pytest.warns(UserWarning, match=r"PYOPENGL_PLATFORM \(read by OpenGL\).*context='spawn'"),
        open_engine(counters(1), context="fork", worker_options=WorkerOptions(env={"PYOPENGL_PLATFORM": "egl"})),
    ):
        pass
    assert find_late_variables([{"PYOPENGL_PLATFORM": "glx"}]) == {}
