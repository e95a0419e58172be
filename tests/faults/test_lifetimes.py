"""Tests of engines that fail to start, and of what remains after a trainer ends."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import pty
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from faulty_envs import faulty_env_fn, healthy_env_fn, make_env_fns
from observe import (
    FAULT_MARKS,
    IMPORT_ROOT,
    METHODS,
    WAIT_SECONDS,
    Launch,
    Trainer,
    format_error,
    is_running,
    still_running,
    wait_for_file,
    worker_pids,
)

import vecenv
from vecenv import WorkerOptions
from vecenv.errors import EnvError, StartupTimeout, WorkerDied
from vecenv.testing.faulty import FaultyConstructor, NestedEnv, UnloadableConstructor, UnpicklableConstructor, WitnessEnv

pytestmark = FAULT_MARKS


# --- engines that cannot start: rows 21 to 23, 36 and 42 of the table in ``FAULTS.md`` ----------


def choose_start_timeout(method: str) -> float:
    """Return a timeout that suffices for a healthy worker. With ``spawn``, it has to start Python and import NumPy."""
    return 10.0 if method == "spawn" else 3.0


START_FAILURES = {
    "raises": ("raises", ValueError, ("out of order", "in raises")),
    "unpicklable": ("unpicklable_error", EnvError, ("UnpicklableError", "holds a lock")),
    "sys_exit": ("sys_exit", EnvError, ("SystemExit",)),
    "exit": ("exit_now", WorkerDied, (r"exit code 0\b",)),
    "segfault": ("segfault", WorkerDied, ("SIGSEGV", "in segfault")),
    "hang": ("sleep", StartupTimeout, ("in sleep",)),
    "hang_gil": ("hold_gil", StartupTimeout, ("in hold_gil",)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", START_FAILURES)
def test_failed_start_raises_with_environment_and_cause(launch: Launch, method: str, kind: str) -> None:
    """The error names environment and worker, and no resource is left."""
    fault, error_class, patterns = START_FAILURES[kind]
    env_fns = make_env_fns(4, {3: FaultyConstructor(healthy_env_fn(3), fault)})
    started_at = time.monotonic()
    # on a busy machine, other failures must not become timeouts
    limit = choose_start_timeout(method) if error_class is StartupTimeout else 60.0
    with pytest.raises(error_class) as caught:
        launch(env_fns, num_workers=2, worker_options=WorkerOptions(start_timeout=limit))
    assert error_class is not StartupTimeout or time.monotonic() - started_at < limit + 15
    text = format_error(caught.value)
    assert type(caught.value) is error_class
    assert re.search(r"\benvs?\b[^\n]*\b3\b", text), text
    assert re.search(r"\bworkers?\b[^\n]*\b1\b", text), text
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
@pytest.mark.parametrize("kind", ["pickle", "unpickle"])
def test_unpicklable_env_fn_is_named(launch: Launch, method: str, kind: str) -> None:
    """The error has the index of the ``env_fn`` that cannot be pickled or unpickled."""
    constructor_class = {"pickle": UnpicklableConstructor, "unpickle": UnloadableConstructor}[kind]
    env_fns = make_env_fns(4, {3: constructor_class(healthy_env_fn(3))})
    with pytest.raises(Exception, match=r".") as caught:
        launch(env_fns, num_workers=2, worker_options=WorkerOptions(start_timeout=10))
    text = format_error(caught.value)
    assert not isinstance(caught.value, (StartupTimeout, WorkerDied)), text
    assert re.search(r"\benv(_fns?)?\b[^\n]{0,3}\b3\b", text), text
    assert {"pickle": "cannot be pickled", "unpickle": "cannot be loaded here"}[kind] in text


@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_unpicklable_env_fn_works_with_fork(launch: Launch) -> None:
    """Forked workers inherit the functions, so nothing is pickled."""
    envs = launch(make_env_fns(2, {1: UnpicklableConstructor(healthy_env_fn(1))}))
    envs.reset(seed=1)
    envs.step([0, 0])


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_start_timeout_in_a_program_with_threads_recommends_forkserver(launch: Launch) -> None:
    """A forked worker may hang because another thread held a lock during the fork."""
    may_end = threading.Event()
    other_thread = threading.Thread(target=may_end.wait)
    other_thread.start()
    try:
        env_fns = make_env_fns(2, {1: FaultyConstructor(healthy_env_fn(1), "sleep")})
        with pytest.raises(StartupTimeout, match=r"(?s)thread.*forkserver"):
            launch(env_fns, worker_options=WorkerOptions(start_timeout=1.0))
    finally:
        may_end.set()
        other_thread.join()


@contextmanager
def limit_free_descriptors(count: int) -> Iterator[None]:
    """Let this process open at most about ``count`` more descriptors."""
    limits_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = {int(name) for name in os.listdir("/proc/self/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in in_use), count)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, limits_before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits_before)


@pytest.mark.long
@pytest.mark.parametrize("free_descriptors", [8, 25])
def test_too_few_descriptors_raise_with_limit_and_need(launch: Launch, method: str, free_descriptors: int) -> None:
    """The error names the limit and the number of descriptors that the workers need, and no resource is left."""
    launch([healthy_env_fn(0)]).close()  # starts the fork server and the resource tracker, which need descriptors
    with limit_free_descriptors(free_descriptors), pytest.raises((OSError, vecenv.errors.VecEnvError)) as caught:
        launch([healthy_env_fn(index) for index in range(32)], worker_options=WorkerOptions(start_timeout=10))
    text = str(caught.value)
    assert "RLIMIT_NOFILE" in text
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]
    assert any(number >= 64 for number in numbers), f"the number of descriptors that 32 workers need is missing: {text}"


@pytest.mark.long
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("inner_engine", ["vecenv", "gymnasium"])
def test_nested_engine_works_only_with_daemon_false(launch: Launch, inner_engine: str, daemon: bool) -> None:
    """Daemonic processes may not have children. The error recommends ``daemon=False``."""
    inner_class = {"vecenv": vecenv.AsyncVectorEnv, "gymnasium": gym.vector.AsyncVectorEnv}[inner_engine]
    env_fns = [functools.partial(NestedEnv, functools.partial(inner_class, make_env_fns(2), context="fork"))] * 2
    try:
        envs = launch(env_fns, daemon=daemon)
    except Exception as error:
        assert daemon
        text = format_error(error)
        assert "daemonic" in text
        assert "daemon=False" in text
        assert re.search(r"\benv 0\b", text)
        return
    assert not daemon
    observations, _ = envs.reset(seed=[10, 20])
    assert observations.shape == (2, 2, 64)
    for step in range(1, 4):
        observations, rewards, *_ = envs.step(np.ones((2, 2), dtype=np.int64))
        ticks = [[WitnessEnv.read(row)["tick"] for row in pair] for pair in observations]
        assert ticks == [[step, step], [step, step]]
        assert rewards.tolist() == [2 * (step + step / 1024)] * 2
    envs.close()


UNGUARDED_CALLS = {
    "engine": "vecenv.AsyncVectorEnv([make] * 2, context=method)",
    "engine without dummy_env": "vecenv.AsyncVectorEnv([make] * 2, context=method, "
    "worker_options=vecenv.WorkerOptions(dummy_env=False))",
    "auto": "vecenv.AsyncVectorEnv([make] * 2, context=method, num_workers='auto')",
    "make_vec": "vecenv.make_vec('CartPole-v1', 2, vector_kwargs={'context': method})",
    "make_vec, default": "multiprocessing.set_start_method(method, force=True); vecenv.make_vec('CartPole-v1', 2)",
    "plan": "vecenv.plan(make, 2, context=method)",
    "evaluate": "vecenv.evaluate(vecenv.AsyncVectorEnv([make] * 2, context=method), len, 1)",
}


def make_unguarded_program(method: str, call: str) -> str:
    """Return the source of a program without a main guard."""
    imports = "import multiprocessing, gymnasium, vecenv"
    return f"{imports}\nmethod = {method!r}\nmake = lambda: gymnasium.make('CartPole-v1')\n{call}\n"


def run_failing_program(program: str | None, directory: Path, **kwargs: Any) -> str:
    """Run a program, by default from standard input, check that it fails, and return its stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(IMPORT_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *([program] if program else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=directory, timeout=250, check=False, **kwargs
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize("call", UNGUARDED_CALLS)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
def test_program_without_a_main_guard_raises_one_short_error(method: str, call: str, tmp_path: Path) -> None:
    """Each worker imports the main program, so without the guard it would start workers itself."""
    (tmp_path / "unguarded.py").write_text(make_unguarded_program(method, UNGUARDED_CALLS[call]))
    output = run_failing_program("unguarded.py", tmp_path)
    assert output.startswith("Traceback"), output
    assert output.count("Traceback") == 1, output
    assert len(output.splitlines()) <= 24, output
    error = output[output.index("vecenv.errors.") :].splitlines()
    assert len(error) <= 8, output
    assert error[0].startswith("vecenv.errors.WorkerDied: the main guard is missing in ")
    assert "unguarded.py" in error[0]
    assert [line.strip() for line in error[-2:]] == ['if __name__ == "__main__":', "main()"]


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
def test_program_from_standard_input_raises_and_recommends_fork(method: str, tmp_path: Path) -> None:
    """Workers cannot import the program, because it has no file."""
    output = run_failing_program(None, tmp_path, input=make_unguarded_program(method, UNGUARDED_CALLS["engine"]))
    assert "RuntimeError: the main file is missing" in output
    assert "context='fork'" in output
    assert len(output.splitlines()) <= 12, output


# --- ends of the trainer: rows 30 to 34, 37 and 38 of the table in ``FAULTS.md`` ----------------
# Each trainer is a program (``trainer.py``) in a separate session. The fixture ``start_trainer`` ends it.

StartTrainer = Callable[..., Trainer]


def wait_until_running(trainer: Trainer, scenario: str, folder: Path) -> list[int]:
    """Wait until the scenario is running; return the pids of the trainer's workers and helpers."""
    message = trainer.read_message()
    if scenario in ("hang_in_step", "hang_in_c_code", "close_after_ctrl_c"):
        wait_for_file(folder / "begun")
        time.sleep(0.05)  # the environment creates the file just before it hangs
    pids = [*message["workers"], *message.get("helpers", [])]
    assert all(map(is_running, pids))
    return pids


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario", ["wait_between_calls", "hang_in_step", "hang_in_c_code", "wait_with_helper", "wait_with_nested_engine"]
)
def test_killed_trainer_leaves_no_orphans(start_trainer: StartTrainer, scenario: str, tmp_path: Path) -> None:
    """When a trainer is killed, all its processes end.

    The fixture ``nothing_left_behind`` also detects programs of environments, and workers of an engine in an environment.
    """
    program = start_trainer(scenario)
    pids = wait_until_running(program, scenario, tmp_path)
    program.process.kill()
    program.process.wait(60)
    assert not still_running(pids, WAIT_SECONDS)
    assert "Traceback" not in program.read_stderr()


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["wait_between_calls", "hang_in_step"])
def test_group_kill_leaves_nothing(
    start_trainer: StartTrainer, scenario: str, tmp_path: Path, take_stock: Callable[[], Any]
) -> None:
    """A SIGKILL to the process group, like that of ``docker kill``, also kills fork server and resource tracker."""
    before = take_stock()
    program = start_trainer(scenario)
    pids = wait_until_running(program, scenario, tmp_path)
    os.killpg(program.process.pid, signal.SIGKILL)
    program.process.wait(60)
    assert not still_running(pids, WAIT_SECONDS)
    assert not take_stock().new_since(before, ["shared_memory"])


@pytest.mark.sampled("spawn")
def test_sigterm_ends_trainer_and_workers(start_trainer: StartTrainer, tmp_path: Path) -> None:
    """The package leaves the default action of SIGTERM."""
    program = start_trainer("hang_in_step")
    pids = wait_until_running(program, "hang_in_step", tmp_path)
    program.process.terminate()
    assert program.process.wait(60) == -signal.SIGTERM
    assert not still_running(pids, WAIT_SECONDS)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a pseudo-terminal, one for the keyboard and one for the program."""
    keyboard, screen = pty.openpty()
    yield keyboard, screen
    os.close(keyboard)
    os.close(screen)


def read_terminal(keyboard: int) -> str:
    """Return the output on the terminal so far."""
    text = b""
    while select.select([keyboard], [], [], 0.1)[0]:
        text += os.read(keyboard, 1 << 16)
    return text.decode(errors="replace")


@pytest.mark.sampled("forkserver")
def test_ctrl_c_raises_once_and_close_works(start_trainer: StartTrainer, terminal: tuple[int, int], tmp_path: Path) -> None:
    """Ctrl-C at a terminal sends SIGINT to the whole process group, but no process prints a traceback."""
    keyboard, screen = terminal
    program = start_trainer("close_after_ctrl_c", terminal=screen)
    pids = wait_until_running(program, "close_after_ctrl_c", tmp_path)
    os.write(keyboard, b"\x03")
    report = program.read_message()
    assert (report["interrupts"], report["closed"]) == (1, True)
    assert report["seconds"] < WAIT_SECONDS
    assert program.process.wait(60) == 0
    assert not still_running(pids, WAIT_SECONDS)
    shown = read_terminal(keyboard)
    assert "Traceback" not in shown, shown
    assert "KeyboardInterrupt" not in shown, shown


@pytest.mark.sampled("fork")
def test_pending_step_continues_after_ctrl_c(start_trainer: StartTrainer, terminal: tuple[int, int], tmp_path: Path) -> None:
    """After Ctrl-C in ``step_wait``, a second wait returns the pending result."""
    keyboard, screen = terminal
    program = start_trainer("continue_after_ctrl_c", terminal=screen)
    program.read_message()
    wait_for_file(tmp_path / "begun")
    time.sleep(0.2)
    os.write(keyboard, b"\x03")
    report = program.read_message()
    assert (report["interrupts"], report["closed"], report["ticks"]) == (1, True, [1, 1, 1])
    assert program.process.wait(60) == 0
    assert "Traceback" not in read_terminal(keyboard)


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "code"), [("exit_during_step", 0), ("raise_during_step", 9)])
def test_program_with_a_pending_step_exits(start_trainer: StartTrainer, scenario: str, code: int) -> None:
    """The program ends without ``close()`` while a step hangs."""
    program = start_trainer(scenario)
    report = program.read_message()
    assert program.process.wait(60) == code, program.read_stderr()
    assert time.monotonic() - report["ended"] < WAIT_SECONDS
    assert not still_running(report["workers"], WAIT_SECONDS)
    assert "Traceback" not in program.read_stderr()


def find_namespace_command(commands: str) -> list[str]:
    """Return a command that runs ``commands`` and then a program in a new mount namespace; empty if that is not allowed."""
    if shutil.which("unshare") is None:
        return []
    for options in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        prefix = ["unshare", *options, "sh", "-c", f'{commands} && exec "$@"', "sh"]
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return []


def can_mount() -> bool:
    """True if this process may mount (CAP_SYS_ADMIN, number 21)."""
    status = Path("/proc/self/status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> 21 & 1)


@pytest.mark.long
def test_small_dev_shm_is_not_used(start_trainer: StartTrainer) -> None:
    """The shared memory lies neither in /dev/shm, which is small in containers, nor on disk.

    Without the permission to mount a small /dev/shm, the test uses the one of the machine.
    """
    prefix = find_namespace_command("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    assert prefix or not can_mount(), "this process may mount, but no small /dev/shm was mounted"
    report = start_trainer("use_small_shm", prefix=prefix).read_message()
    if prefix:
        assert report["shm"] == 2**20
    if "refused" in report:  # without memfd, the error has the sizes needed and available
        assert not hasattr(os, "memfd_create")
        assert re.search(r"\d[\d,]{6,}", report["refused"])
    else:
        assert report["correct"]
        assert report["used"] < 2**20
        assert not report["on_disk"]


@pytest.mark.long
@pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
def test_dropped_engine_ends_with_a_warning(method: str, pending: bool) -> None:
    """Without ``close()``, the last reference to an engine ends it."""
    envs = vecenv.AsyncVectorEnv(make_env_fns(2, {1: faulty_env_fn(1, "sleep", step=1)}), context=method)
    envs.reset(seed=1)
    pids = worker_pids(envs)
    weak_reference = weakref.ref(envs)
    if pending:
        envs.step_async([0, 0])
    references = [envs]
    del envs
    with pytest.warns(ResourceWarning, match="AsyncVectorEnv"):
        clear_and_collect(references)
    assert weak_reference() is None
    assert not still_running(pids, WAIT_SECONDS)


def clear_and_collect(references: list[Any]) -> None:
    references.clear()
    gc.collect()


@pytest.mark.long
def test_exception_in_the_constructor_ends_workers(method: str, take_stock: Callable[[], Any]) -> None:
    """They end even while the traceback of the exception keeps the engine alive."""
    before = take_stock()
    with pytest.raises(LookupError) as caught:
        vecenv.AsyncVectorEnv(make_env_fns(2, {1: _raise_lookup_error}), context=method)
    deadline = time.monotonic() + 1.0
    kinds = ("processes", "threads")  # but not the shared memory, which the traceback keeps alive
    while (left := take_stock().new_since(before, kinds)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert caught.value.__traceback__ is not None


def _raise_lookup_error() -> Any:
    raise LookupError("no such environment")
