"""Tests of ``num_workers="auto"``, which groups only independent environments, and of the guard against later changes."""

from __future__ import annotations

import contextlib
import decimal
import functools
import importlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from programs import run_python

import vecenv
from planning.cases.registry import CASES, CHANGES, CLEAN, SAME_OBJECT, SHARES, UNKNOWN, BaseEnv
from planning.sharing_envs import (
    DIFFERS_FROM_GYMNASIUM,
    MISSED_CASES,
    OWN_GENERATORS_SUFFIX,
    SLOW_CASES,
    digest_results,
    get_verdict,
)
from vecenv.planning.independence import MAX_STEPS, Independence
from vecenv.planning.plan import choose
from vecenv.planning.probe import EnvProbe, find_process_object
from vecenv.planning.trial import StepTimes, TriedEnv, run_phases
from vecenv.system.process_settings import SettingsGuard

DEFAULT_CASES = (
    "default_client", "working_directory", "rank_from_process_name", "class_counter_of_steps", "harmless_cache",
    "numpy_errors_same_for_all", "clock_in_observation", "crashes_with_second_instance", "CartPole-v1",
)  # fmt: skip
"""Cases that run in this process. All others run in a new interpreter, in tests that are ``long`` or ``slow``."""


def build_envs(env_fns: Any, **options: Any) -> Any:
    """Build an engine with ``num_workers="auto"``; with ``make_vec`` if all functions are the same."""
    if all(env_fn is env_fns[0] for env_fn in env_fns):
        return vecenv.make_vec(env_fns[0], len(env_fns), vector_kwargs=options)
    return vecenv.AsyncVectorEnv(env_fns, num_workers="auto", **options)


@pytest.mark.sampled("harmless_cache", "crashes_with_second_instance")
@pytest.mark.parametrize("name", DEFAULT_CASES)
def test_auto_groups_only_independent_environments(name: str, closes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vecenv.planning.plan.usable_cores", lambda: 2)  # with more cores, each env gets a process anyway
    expected, env_fns = CASES[name][0], CASES[name][1]()
    envs = closes(build_envs(env_fns))
    assert get_verdict(envs.plan) == expected, envs.plan
    assert envs.plan.independence.steps <= MAX_STEPS
    if expected in (SHARES, UNKNOWN):
        assert envs.num_workers == len(env_fns)
        assert "one process per environment, because" in envs.plan.reason
        assert envs.plan.independence.reason in str(envs.plan)
    else:
        assert envs.num_workers < len(env_fns)
    if expected in (SHARES, UNKNOWN, CHANGES):
        assert not envs.local_envs
    if name not in DIFFERS_FROM_GYMNASIUM:
        reference = closes(gym.vector.AsyncVectorEnv(env_fns))
        assert digest_results(envs) == digest_results(reference)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if number % 12 else pytest.mark.long)
        for number, name in enumerate(CASES) if name not in DEFAULT_CASES
    ],
)  # fmt: skip
def test_vecenv_run_prints_the_expected_verdict_and_the_results_of_gymnasium(name: str) -> None:
    expected, file = CASES[name][0], str(Path(__file__).with_name("sharing_envs.py"))
    options = ["--generators", "own"] if name.endswith(OWN_GENERATORS_SUFFIX) else []
    if name == "hangs_in_step":
        options += ["--step-timeout", "2"]
    variables = {"SDL_VIDEODRIVER": "dummy", "PYTHONPATH": str(Path(__file__).parents[1])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python(*arguments, file, name, timeout=200, **variables)

    process = run("-m", "vecenv", "run", *options)
    output, errors = process.stdout, process.stderr
    if output.startswith("skipped"):
        pytest.skip(output)
    if missing := re.search(r"(?:ModuleNotFoundError|DependencyNotInstalled): (?!No module named 'vecenv)(.*)", errors):
        pytest.skip(missing[1])
    if expected == SAME_OBJECT:
        second_index = 2 if name == "pool_of_two_objects" else 1
        assert f"ValueError: env_fns[0]() and env_fns[{second_index}]()" in errors
        assert SAME_OBJECT in errors
        return
    line = next((line for line in errors.splitlines() if line.startswith("VERDICT")), None)
    assert line is not None, errors
    verdict, workers, uses_caller = json.loads(line.removeprefix("VERDICT"))
    if name in MISSED_CASES:
        assert verdict == CLEAN
        return
    assert verdict == expected or verdict in expected or (name in SLOW_CASES and verdict == "not checked"), errors
    num_envs = 2 if name in ("torch_dtype_by_kind", "jax_x64_by_kind") else 4
    if verdict not in (CLEAN, CHANGES):
        assert workers == num_envs
    if verdict != CLEAN:
        assert not uses_caller
    if name not in DIFFERS_FROM_GYMNASIUM:
        assert output.splitlines()[-1] == run().stdout.splitlines()[-1]  # pybullet also prints a line per client


@pytest.mark.long
@pytest.mark.parametrize("names", [("CartPole-v1", "HalfCheetah-v5"), ("HalfCheetah-v5", "CartPole-v1")])
def test_different_environments_are_independent(names: tuple[str, str]) -> None:
    _, independence = EnvProbe([functools.partial(gym.make, name) for name in names]).measure()
    assert str(independence) == CLEAN


# -- the same object ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": "auto"}, {"num_workers": 1, "use_caller": True}],
    ids=str,
)  # fmt: skip
def test_functions_that_return_one_object_are_refused(options: dict[str, Any]) -> None:
    shared_env = gym.wrappers.TimeLimit(BaseEnv(), 9)
    text = r"env_fns\[\d\]\(\) returned the same object \(BaseEnv\).*in place of `lambda: env`"
    with pytest.raises(ValueError, match=text):
        vecenv.AsyncVectorEnv([lambda: gym.wrappers.TimeLimit(shared_env, 5)] * 4, **options)


def test_functions_that_return_one_object_are_accepted_with_one_process_per_environment(closes: Any) -> None:
    shared_env = BaseEnv()
    envs = closes(vecenv.AsyncVectorEnv([lambda: shared_env] * 2))
    envs.reset()
    assert envs.step([0, 0])[0].ravel().tolist() == [1.0, 1.0]


# -- the steps of the probe -----------------------------------------------------------------------------------------------


class FileEnv(BaseEnv):
    """An environment that appends a byte to a file in each step, so that other processes can count its steps."""

    clock_in_info, step_seconds = False, 0.0

    def __init__(self, path: Path) -> None:
        self.path = path

    def step(self, action: Any) -> Any:
        with self.path.open("a") as file:
            file.write(".")
        time.sleep(self.step_seconds)
        return *super().step(action)[:4], {"clock": time.perf_counter()} if self.clock_in_info else {}


class ClockFileEnv(FileEnv):
    clock_in_info = True
    episodes = 0

    def reset(self, **kwargs: Any) -> Any:
        self.episodes += 1
        return super().reset(**kwargs)

    def observe(self) -> Any:
        return np.array([float(self.episodes)])


class WaitingEnv(FileEnv):
    step_seconds = 0.004


class SlowEnv(FileEnv):
    step_seconds = 0.012


@pytest.mark.sampled("FileEnv-28-0.1")
@pytest.mark.parametrize(
    ("env_class", "max_steps", "max_seconds"),
    [(FileEnv, 28, 0.1), (ClockFileEnv, 64, 0.1), (WaitingEnv, 28, 0.2), (SlowEnv, 2, 0.1)],
)
def test_probe_takes_few_steps(tmp_path: Path, env_class: Any, max_steps: int, max_seconds: float, closes: Any) -> None:
    envs = closes(vecenv.make_vec(functools.partial(env_class, tmp_path / "steps"), 4))
    steps = (tmp_path / "steps").stat().st_size
    assert steps == envs.plan.independence.steps <= max_steps
    assert steps * env_class.step_seconds <= max_seconds
    assert f"{steps} steps in all" in str(envs.plan)
    assert envs.plan.independence.verdict == ("not checked" if env_class is SlowEnv else CLEAN)
    if env_class is SlowEnv:
        assert envs.num_workers == 4


def test_step_time_excludes_waiting_for_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Otherwise fast steps would seem slow on a busy machine, and each environment would get its own process."""
    readings = itertools.count()
    monkeypatch.setattr("vecenv.planning.trial.seconds_waited", lambda: next(readings) * SlowEnv.step_seconds)
    bit_generator: Any = np.random.bit_generator
    monkeypatch.setattr(bit_generator, "randbits", bit_generator.randbits)  # TriedEnv replaces it until the test ends
    tried_env = TriedEnv(functools.partial(SlowEnv, tmp_path / "steps"), 0, 0)
    run_phases(tried_env.phase(3, 1))
    assert len(tried_env.step_seconds) == 3
    assert not tried_env.is_slow


class OldResetEnv(BaseEnv):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class NoResultEnv(BaseEnv):
    def step(self, action: Any) -> Any:
        super().step(action)


@pytest.mark.parametrize(
    ("env_class", "text"), [(OldResetEnv, "reset returned one ndarray"), (NoResultEnv, "step returned one NoneType")]
)
def test_probe_reports_the_invalid_value_that_an_environment_returned(env_class: Any, text: str) -> None:
    times, independence = EnvProbe([env_class] * 2).measure()
    assert times.failure.startswith(f"TypeError: env 0: {text}")
    assert str(independence) == CLEAN


def test_environments_with_multiprocessing_objects_are_not_probed(closes: Any) -> None:
    """Otherwise the steps of the probe would change the shared counter."""
    counter = multiprocessing.get_context("fork").Value("i", 0)

    class SharedCounterEnv(BaseEnv):
        def step(self, action: Any) -> Any:
            with counter.get_lock():
                counter.value += 1
            return super().step(action)

    envs = closes(vecenv.AsyncVectorEnv([SharedCounterEnv] * 4, num_workers="auto", context="fork"))
    envs.reset()
    envs.step([0] * 4)
    assert counter.value == 4
    assert envs.num_workers == 4
    assert "not tried, because their functions use a multiprocessing Synchronized" in envs.plan.reason


def test_multiprocessing_objects_are_found_in_functions() -> None:
    lock, queue = multiprocessing.Lock(), multiprocessing.get_context("fork").SimpleQueue()
    partial: Any = functools.partial

    class Builder:
        def __init__(self) -> None:
            self.queue = queue

        def __call__(self) -> BaseEnv:
            return BaseEnv()

    functions = (
        lambda: lock,
        partial(BaseEnv, lock),
        partial(lambda x: x, x=lock),
        queue.get,
        Builder(),
        partial(Builder()),
    )
    for function in functions:
        assert find_process_object([function]), function
    assert not find_process_object([BaseEnv, functools.partial(gym.make, "CartPole-v1")])


# -- where environments may run -----------------------------------------------------------------------------------------


def test_caller_in_another_thread_steps_no_environments() -> None:
    class SignalHandlingEnv(BaseEnv):
        def step(self, action: Any) -> Any:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            return super().step(action)

    def train() -> tuple[Any, str]:
        envs: Any = vecenv.make_vec(SignalHandlingEnv, 4)
        try:
            envs.reset()
            return envs.step([0] * 4)[0].ravel().tolist(), envs.plan.reason
        finally:
            envs.close()

    with ThreadPoolExecutor(1) as pool:
        values, reason = pool.submit(train).result()
    assert values == [1.0] * 4
    assert "this is not the main thread" in reason


@pytest.mark.parametrize(
    ("times", "independence", "workers"),
    [
        (StepTimes(10, 1e-6, 1e-6), Independence(CLEAN), 0),
        (StepTimes(10, 1e-6, 1e-6), Independence(CLEAN, changes=("they change x",)), 2),
        (StepTimes(10, 1e-6, 1e-6), Independence(SHARES, "x"), 8),
        (StepTimes(10, 1e-6, 1e-6), Independence(UNKNOWN, "x"), 8),
        (StepTimes(2, 0.02, 0.02), Independence(), 8),
        (StepTimes.failed("x"), Independence(CLEAN), 2),
        (StepTimes.failed("x"), Independence(UNKNOWN, "x"), 8),
    ],
)
def test_number_of_workers_depends_on_the_verdict(times: StepTimes, independence: Independence, workers: int) -> None:
    plan = choose(times, 8, 2, independence=independence, use_caller=True)
    assert plan.num_workers == workers
    assert not plan.use_caller


def test_check_is_skipped_if_each_worker_has_one_environment(closes: Any) -> None:
    envs = closes(vecenv.make_vec(BaseEnv, 2, vector_kwargs={"use_caller": False}))
    assert envs.plan.independence.verdict == ("not checked" if envs.plan.cores >= 2 else CLEAN)


# -- the guard ------------------------------------------------------------------------------------------------------------


SETTING_CHANGES: dict[str, Callable[[], object]] = {
    "working directory": lambda: os.chdir(os.sep),
    "environment variables": lambda: os.environ.update(SIM_PORT="1"),
    "numpy error handling": lambda: np.seterr(all="raise"),
    "signal handlers": lambda: signal.signal(signal.SIGUSR1, lambda *_: None),
    "warning filters": lambda: warnings.simplefilter("error"),
    "decimal precision": lambda: setattr(decimal.getcontext(), "prec", 5),
    "socket timeout": lambda: socket.setdefaulttimeout(3),
    "sys.stdout": lambda: setattr(sys, "stdout", None),
    "threading.excepthook": lambda: setattr(threading, "excepthook", print),
    "interval timer": lambda: signal.setitimer(signal.ITIMER_REAL, 1000),
}


@pytest.fixture
def restore_settings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Undo the test's changes to the settings of this process."""
    folder, errors, handler = os.getcwd(), np.geterr(), signal.getsignal(signal.SIGUSR1)
    precision, timeout = decimal.getcontext().prec, socket.getdefaulttimeout()
    monkeypatch.setenv("SIM_PORT", "0")
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    with warnings.catch_warnings():
        yield
    os.chdir(folder)
    np.seterr(**errors)
    signal.signal(signal.SIGUSR1, handler)
    signal.setitimer(signal.ITIMER_REAL, 0)
    decimal.getcontext().prec = precision
    socket.setdefaulttimeout(timeout)


@pytest.mark.usefixtures("restore_settings")
@pytest.mark.parametrize("name", SETTING_CHANGES)
def test_guard_finds_a_changed_setting_once(name: str) -> None:
    guard = SettingsGuard(seconds=0.0)
    guard.on_reset()
    assert guard.due
    assert not guard.find_changes()
    SETTING_CHANGES[name]()
    assert guard.find_changes() == [(name, "")]
    assert not guard.find_changes()


def test_guard_does_not_compare_right_after_a_reset() -> None:
    guard = SettingsGuard()
    guard.on_reset()
    assert not guard.due


@pytest.mark.usefixtures("restore_settings")
@pytest.mark.parametrize("num_workers", [0, 1, "auto"])
def test_environments_step_in_a_deleted_working_directory(num_workers: Any, tmp_path: Path, closes: Any) -> None:
    (tmp_path / "deleted").mkdir()
    os.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    envs = closes(vecenv.AsyncVectorEnv([BaseEnv] * 2, num_workers=num_workers, context="fork"))
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())


class SignalIgnoringEnv(BaseEnv):
    def __init__(self) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def test_plan_names_a_signal_handler_that_is_not_a_function() -> None:
    plan = vecenv.plan(SignalIgnoringEnv, 4)
    assert plan.independence.changes == (f"they change handler of signal {int(signal.SIGUSR1)} from SIG_DFL to SIG_IGN",)


def test_event_loop_policy_that_an_import_sets_is_no_change_by_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy_of_library.py").write_text("import asyncio.events\nasyncio.events._event_loop_policy = object()\n")
    monkeypatch.syspath_prepend(tmp_path)

    class ImportingEnv(BaseEnv):
        def __init__(self) -> None:
            importlib.import_module("policy_of_library")

    assert not vecenv.plan(ImportingEnv, 4).independence.changes


class DirectoryChangingEnv(BaseEnv):
    """An environment that changes the directory of its process in one call: "init", "reset" or "step".

    With ``restores``, this call also restores the previous directory.
    """

    def __init__(self, when: str, folder: str, restores: bool) -> None:
        self.when, self.folder, self.restores = when, folder, restores
        self.change_directory("init")

    def change_directory(self, call: str) -> None:
        if call == self.when:
            previous = os.getcwd()
            os.chdir(self.folder)
            if self.restores:
                os.chdir(previous)

    def reset(self, **kwargs: Any) -> Any:
        self.change_directory("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.change_directory("step")
        return super().step(action)


@pytest.mark.parametrize(
    ("when", "same_folder", "restores", "warns"),
    [
        ("init", False, False, True), ("reset", False, False, True), ("step", False, False, True),
        ("init", True, False, False), ("reset", True, False, False), ("step", False, True, False),
    ],
)  # fmt: skip
def test_workers_warn_if_environments_change_settings(
    tmp_path: Path, when: str, same_folder: bool, restores: bool, warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    folders = [tmp_path / ("0" if same_folder else str(row)) for row in range(2)]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    env_fns = [functools.partial(DirectoryChangingEnv, when, str(folder), restores) for folder in folders]
    envs: Any = vecenv.AsyncVectorEnv(env_fns, num_workers=1, worker_options=vecenv.WorkerOptions(dummy_env=False))
    with contextlib.closing(envs):
        envs.reset()
        for _ in range(3):
            envs.step([0, 0])
    messages = [str(warning.message) for warning in recwarn if "changed" in str(warning.message)]
    assert len(messages) == warns, messages
    if warns:
        assert "env 1 changed the working directory of its process, which envs 0-1 share" in messages[0]
        assert "num_workers=None" in messages[0]


class FakePybullet:
    """A physics library with the interface of pybullet. Its functions use client 0 by default."""

    def __init__(self) -> None:
        self.bodies: list[int] = []

    def connect(self) -> int:
        self.bodies.append(0)
        return len(self.bodies) - 1

    def create_body(self, physicsClientId: int = 0) -> None:  # noqa: N803
        self.bodies[physicsClientId] += 1

    def isConnected(self, physicsClientId: int = 0) -> int:  # noqa: N802, N803
        return int(physicsClientId < len(self.bodies))

    def getNumBodies(self, physicsClientId: int = 0) -> int:  # noqa: N802, N803
        return self.bodies[physicsClientId]


class PhysicsEnv(BaseEnv):
    """An environment that puts a body into a physics client: its "own", the "first" one, or "none"."""

    def __init__(self, client: str) -> None:
        self.client = client
        if client != "none":
            self.own_client = sys.modules["pybullet"].connect()

    def reset(self, **kwargs: Any) -> Any:
        if self.client != "none":
            sys.modules["pybullet"].create_body(self.own_client if self.client == "own" else 0)
        return super().reset(**kwargs)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("clients", [("first", "first"), ("own", "own"), ("own", "none"), ("none", "none")], ids=str)
def test_workers_warn_if_environments_share_a_physics_client(
    clients: tuple[str, str], num_workers: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setitem(sys.modules, "pybullet", FakePybullet())  # type: ignore[arg-type]
    env_fns = [functools.partial(PhysicsEnv, client) for client in clients for _ in range(2)]
    options: Any = {"num_workers": num_workers, "context": "fork"}
    if num_workers:
        options["worker_options"] = vecenv.WorkerOptions(dummy_env=False)
    with contextlib.closing(vecenv.AsyncVectorEnv(env_fns, **options)) as envs:
        for _ in range(2):
            envs.reset()
    messages = [str(warning.message) for warning in recwarn if "influence each other" in str(warning.message)]
    assert len(messages) == (clients[0] == "first"), messages
    if messages:
        last_env = 1 if num_workers == 2 else 3
        assert f"envs 0-{last_env} influence" in messages[0]
        assert "physics clients in this process, but all bodies are in the first. Pass `physicsClientId`" in messages[0]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("generators", ["shared", "own"])
def test_workers_warn_if_environments_draw_from_shared_generators(generators: str, recwarn: pytest.WarningsRecorder) -> None:
    env_fns = CASES["seeds_numpy_in_reset"][1]()
    options: Any = {"num_workers": 2, "generators": generators}
    options["worker_options"] = vecenv.WorkerOptions(dummy_env=False)
    with contextlib.closing(vecenv.AsyncVectorEnv(env_fns, **options)) as envs:
        envs.reset(seed=1)
    messages = [str(warning.message) for warning in recwarn if "draws from" in str(warning.message)]
    assert len(messages) == (generators == "shared"), messages


# -- error messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_workers": "auto"}, {"num_workers": 0}], ids=str)
def test_function_that_builds_a_vector_environment_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"env_fns\[0\]\(\) returned SyncVectorEnv, a vector env.* of 2 env.*num_workers=N"):
        vecenv.AsyncVectorEnv([lambda: gym.vector.SyncVectorEnv([BaseEnv] * 2)] * 2, **options)


def _build_and_step(num_workers: Any) -> str:
    """Return the observations of a step, or the error of the constructor, as text."""
    try:
        envs: Any = vecenv.AsyncVectorEnv([BaseEnv] * 2, num_workers=num_workers)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    with contextlib.closing(envs):
        envs.reset()
        return str(envs.step([0, 0])[0].ravel().tolist())


def test_daemonic_process_can_only_step_environments_itself() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        error, *results = pool.map(_build_and_step, [None, 0, "auto"])
    assert error.startswith("NotImplementedError")
    assert "daemon=False" in error
    assert "num_workers=0" in error
    assert results == ["[1.0, 1.0]"] * 2


def test_vecenv_run_reports_a_vector_environment_that_could_not_be_built(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import gymnasium as gym\ngym.vector.SyncVectorEnv([lambda: 1 / 0])\n")
    last_line = run_python("-m", "vecenv", "run", "--sync", program).stderr.splitlines()[-1]
    assert last_line == "vecenv run: no vector environment could be built: ZeroDivisionError: division by zero"
