"""Tests of the start of engines, and of the end of their trainers."""

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


# --- Engines that cannot start: rows 21 to 24, 36 and 42 of the table in ``FAULTS.md`` ----------


def start_timeout(method: str) -> float:
    """Return a timeout that is long enough for a healthy worker; ``spawn`` first starts an interpreter and imports numpy."""
    return 10.0 if method == "spawn" else 3.0


START_FAULTS = {
    "raises": ("raises", ValueError, ("out of order", "in raises")),
    "unpicklable": ("unpicklable_error", EnvError, ("UnpicklableError", "holds a lock")),
    "sys_exit": ("sys_exit", EnvError, ("SystemExit",)),
    "exit": ("exit_now", WorkerDied, (r"exit code 0\b",)),
    "segfault": ("segfault", WorkerDied, ("SIGSEGV", "in segfault")),
    "hang": ("sleep", StartupTimeout, ("in sleep",)),
    "hang_gil": ("hold_gil", StartupTimeout, ("in hold_gil",)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", START_FAULTS)
def test_failed_start_raises_with_environment_and_cause(launch: Launch, method: str, kind: str) -> None:
    """The error names environment and worker, and no resource is left."""
    fault, expected, patterns = START_FAULTS[kind]
    env_fns = make_env_fns(4, {3: FaultyConstructor(healthy_env_fn(3), fault)})
    started_at = time.monotonic()
    # only a hang takes that long; other starts get more time, because the machine may be busy
    limit = start_timeout(method) if expected is StartupTimeout else 60.0
    with pytest.raises(expected) as caught:
        launch(env_fns, num_workers=2, worker_options=WorkerOptions(start_timeout=limit))
    assert expected is not StartupTimeout or time.monotonic() - started_at < limit + 15
    text = format_error(caught.value)
    assert type(caught.value) is expected
    assert re.search(r"\benvs?\b[^\n]*\b3\b", text), text
    assert re.search(r"\bworkers?\b[^\n]*\b1\b", text), text
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
@pytest.mark.parametrize("kind", ["pickle", "unpickle"])
def test_unpicklable_env_fn_is_named(launch: Launch, method: str, kind: str) -> None:
    """The error has the index of the ``env_fn`` that cannot be pickled or unpickled."""
    constructor = {"pickle": UnpicklableConstructor, "unpickle": UnloadableConstructor}[kind]
    env_fns = make_env_fns(4, {3: constructor(healthy_env_fn(3))})
    with pytest.raises(Exception, match=r".") as caught:
        launch(env_fns, num_workers=2, worker_options=WorkerOptions(start_timeout=10))
    text = format_error(caught.value)
    assert not isinstance(caught.value, (StartupTimeout, WorkerDied)), text
    assert re.search(r"\benv(_fns?)?\b[^\n]{0,3}\b3\b", text), text
    assert {"pickle": "cannot be pickled", "unpickle": "cannot be loaded here"}[kind] in text


@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_unpicklable_env_fn_works_with_fork(launch: Launch) -> None:
    """A forked worker inherits its ``env_fn``."""
    envs = launch(make_env_fns(2, {1: UnpicklableConstructor(healthy_env_fn(1))}))
    envs.reset(seed=1)
    envs.step([0, 0])


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_fork_that_hangs_beside_threads_recommends_forkserver(launch: Launch) -> None:
    """The child never gets a lock that another thread held during the fork. The error recommends ``forkserver``."""
    may_end = threading.Event()
    other = threading.Thread(target=may_end.wait)
    other.start()
    try:
        env_fns = make_env_fns(2, {1: FaultyConstructor(healthy_env_fn(1), "sleep")})
        with pytest.raises(StartupTimeout, match=r"(?s)thread.*forkserver"):
            launch(env_fns, worker_options=WorkerOptions(start_timeout=1.0))
    finally:
        may_end.set()
        other.join()


@contextmanager
def limit_descriptors(count: int) -> Iterator[None]:
    """Limit the number of descriptors that this process can still open to about ``count``."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = {int(name) for name in os.listdir("/proc/self/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in in_use), count)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


@pytest.mark.long
@pytest.mark.parametrize("available", [8, 25])
def test_too_few_descriptors_raise_with_limit_and_need(launch: Launch, method: str, available: int) -> None:
    """The error names the limit and the number of descriptors that the workers need, and no resource is left."""
    launch([healthy_env_fn(0)]).close()  # starts the fork server and the resource tracker, which need descriptors
    with limit_descriptors(available), pytest.raises((OSError, vecenv.errors.VecEnvError)) as caught:
        launch([healthy_env_fn(index) for index in range(32)], worker_options=WorkerOptions(start_timeout=10))
    text = str(caught.value)
    assert "RLIMIT_NOFILE" in text
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]
    assert any(number >= 64 for number in numbers), f"the number that 32 workers need is missing: {text}"


@pytest.mark.long
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("inner", ["vecenv", "gymnasium"])
def test_nested_engine_needs_workers_that_are_not_daemonic(launch: Launch, inner: str, daemon: bool) -> None:
    """Daemonic processes may not have children; the error names the option ``daemon``."""
    inner_class = {"vecenv": vecenv.AsyncVectorEnv, "gymnasium": gym.vector.AsyncVectorEnv}[inner]
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
    observations, _ = envs.reset(seed=[10, 20])
    assert observations.shape == (2, 2, 64)
    for step in range(1, 4):
        observations, rewards, *_ = envs.step(np.ones((2, 2), dtype=np.int64))
        ticks = [[WitnessEnv.read(row)["tick"] for row in pair] for pair in observations]
        assert ticks == [[step, step], [step, step]]
        assert rewards.tolist() == [2 * (step + step / 1024)] * 2
    envs.close()


UNGUARDED = {
    "engine": "vecenv.AsyncVectorEnv([make] * 2, context=method)",
    "engine, nothing built here": "vecenv.AsyncVectorEnv([make] * 2, context=method, "
    "worker_options=vecenv.WorkerOptions(dummy_env=False))",
    "auto": "vecenv.AsyncVectorEnv([make] * 2, context=method, num_workers='auto')",
    "make_vec": "vecenv.make_vec('CartPole-v1', 2, vector_kwargs={'context': method})",
    "make_vec, default": "multiprocessing.set_start_method(method, force=True); vecenv.make_vec('CartPole-v1', 2)",
    "plan": "vecenv.plan(make, 2, context=method)",
    "evaluate": "vecenv.evaluate(vecenv.AsyncVectorEnv([make] * 2, context=method), len, 1)",
}


def make_unguarded_program(method: str, call: str) -> str:
    """Return the text of a program without a main guard."""
    imports = "import multiprocessing, gymnasium, vecenv"
    return f"{imports}\nmethod = {method!r}\nmake = lambda: gymnasium.make('CartPole-v1')\n{call}\n"


def run_failing_program(program: str | None, directory: Path, **kwargs: Any) -> str:
    """Run a program that fails, and return its stderr."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(IMPORT_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *([program] if program else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=directory, timeout=250, check=False, **kwargs
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize("call", UNGUARDED)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
def test_program_without_a_main_guard_raises(method: str, call: str, tmp_path: Path) -> None:
    """Workers import the main program; without the guard, each of them would start workers."""
    (tmp_path / "unguarded.py").write_text(make_unguarded_program(method, UNGUARDED[call]))
    output = run_failing_program("unguarded.py", tmp_path)
    assert output.startswith("Traceback"), output
    assert output.count("Traceback") == 1, output
    assert len(output.splitlines()) <= 20, output
    error = output[output.index("vecenv.errors.") :].splitlines()
    assert len(error) <= 8, output
    assert error[0].startswith("vecenv.errors.WorkerDied: the main guard is missing in ")
    assert "unguarded.py" in error[0]
    assert [line.strip() for line in error[-2:]] == ['if __name__ == "__main__":', "main()"]


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
def test_program_from_standard_input_raises(method: str, tmp_path: Path) -> None:
    """Workers cannot import the program, because it has no file."""
    output = run_failing_program(None, tmp_path, input=make_unguarded_program(method, UNGUARDED["engine"]))
    assert "RuntimeError: the main file is missing" in output
    assert "context='fork'" in output
    assert len(output.splitlines()) <= 12, output


# --- Ends of the trainer itself: rows 30 to 34, 37 and 38 of the table in ``FAULTS.md`` ---------
# Each trainer is a program (``trainer.py``) in a separate session, which the test ends.

Start = Callable[..., Trainer]


def wait_until_running(trainer: Trainer, scenario: str, folder: Path) -> list[int]:
    """Wait until the scenario is running; return the pids of all processes except the trainer."""
    processes = trainer.read_message()
    if scenario in ("stepping", "holding_gil", "interrupted"):
        wait_for_file(folder / "begun")
        time.sleep(0.05)  # the environment writes the file just before it hangs
    pids = [*processes["workers"], *processes.get("helpers", [])]
    assert all(map(is_running, pids))
    return pids


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["waiting", "stepping", "holding_gil", "with_helper", "nested"])
def test_killed_trainer_leaves_no_orphans(start_trainer: Start, scenario: str, tmp_path: Path) -> None:
    """After SIGKILL to the trainer, all its processes end, in each of several situations.

    That includes programs of environments and the workers of an engine inside an environment, which the fixture
    ``nothing_left_behind`` detects.
    """
    program = start_trainer(scenario)
    pids = wait_until_running(program, scenario, tmp_path)
    program.process.kill()
    program.process.wait(60)
    assert not still_running(pids, WAIT_SECONDS)
    assert "Traceback" not in program.read_stderr()


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["waiting", "stepping"])
def test_group_kill_leaves_nothing(
    start_trainer: Start, scenario: str, tmp_path: Path, take_stock: Callable[[], Any]
) -> None:
    """SIGKILL to the process group, as by ``docker kill``, also kills the fork server and the resource tracker."""
    before = take_stock()
    program = start_trainer(scenario)
    pids = wait_until_running(program, scenario, tmp_path)
    os.killpg(program.process.pid, signal.SIGKILL)
    program.process.wait(60)
    assert not still_running(pids, WAIT_SECONDS)
    assert not take_stock().new_since(before, ["shared_memory"])


@pytest.mark.sampled("spawn")
def test_sigterm_ends_trainer_and_workers(start_trainer: Start, tmp_path: Path) -> None:
    """SIGTERM has its default action."""
    program = start_trainer("stepping")
    pids = wait_until_running(program, "stepping", tmp_path)
    program.process.terminate()
    assert program.process.wait(60) == -signal.SIGTERM
    assert not still_running(pids, WAIT_SECONDS)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Yield the two ends of a pseudo-terminal: that of the keyboard, and that of the program."""
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
def test_ctrl_c_raises_once_and_close_works(start_trainer: Start, terminal: tuple[int, int], tmp_path: Path) -> None:
    """Ctrl-C at a terminal, which goes to the whole process group, prints nothing."""
    keyboard, screen = terminal
    program = start_trainer("interrupted", terminal=screen)
    pids = wait_until_running(program, "interrupted", tmp_path)
    os.write(keyboard, b"\x03")
    end = program.read_message()
    assert (end["interrupts"], end["closed"]) == (1, True)
    assert end["seconds"] < WAIT_SECONDS
    assert program.process.wait(60) == 0
    assert not still_running(pids, WAIT_SECONDS)
    shown = read_terminal(keyboard)
    assert "Traceback" not in shown, shown
    assert "KeyboardInterrupt" not in shown, shown


@pytest.mark.sampled("fork")
def test_step_continues_after_ctrl_c(start_trainer: Start, terminal: tuple[int, int], tmp_path: Path) -> None:
    """After Ctrl-C in ``step_wait``, a second wait returns the pending result."""
    keyboard, screen = terminal
    program = start_trainer("interrupted_and_continued", terminal=screen)
    program.read_message()
    wait_for_file(tmp_path / "begun")
    time.sleep(0.2)
    os.write(keyboard, b"\x03")
    end = program.read_message()
    assert (end["interrupts"], end["closed"], end["ticks"]) == (1, True, [1, 1, 1])
    assert program.process.wait(60) == 0
    assert "Traceback" not in read_terminal(keyboard)


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "code"), [("exiting_in_step", 0), ("raising_in_step", 9)])
def test_program_with_a_pending_step_exits(start_trainer: Start, scenario: str, code: int) -> None:
    """The program ends without ``close()`` while a step hangs."""
    program = start_trainer(scenario)
    end = program.read_message()
    assert program.process.wait(60) == code, program.read_stderr()
    assert time.monotonic() - end["ended"] < WAIT_SECONDS
    assert not still_running(end["workers"], WAIT_SECONDS)
    assert "Traceback" not in program.read_stderr()


def find_isolation_prefix(commands: str) -> list[str]:
    """Return a command that runs ``commands`` and a program in a new mount namespace; empty if that is not allowed."""
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
def test_small_dev_shm_is_not_used(start_trainer: Start) -> None:
    """The shared memory is neither in /dev/shm, which is small in containers, nor on disk.

    If no small /dev/shm can be mounted, the test checks that the large one is not used.
    """
    prefix = find_isolation_prefix("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    assert prefix or not can_mount(), "this process may mount, but no small /dev/shm was mounted"
    end = start_trainer("small_shm", prefix=prefix).read_message()
    if prefix:
        assert end["shm"] == 2**20
    if "refused" in end:  # without memfd; the message has both sizes
        assert not hasattr(os, "memfd_create")
        assert re.search(r"\d[\d,]{6,}", end["refused"])
    else:
        assert end["correct"]
        assert end["used"] < 2**20
        assert not end["on_disk"]


@pytest.mark.long
@pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
def test_dropped_engine_ends_with_a_warning(method: str, pending: bool) -> None:
    """An engine without references ends, and a warning recommends ``close()``."""
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
    """The workers end even while the traceback of the exception is referenced."""
    before = take_stock()
    with pytest.raises(LookupError) as caught:
        vecenv.AsyncVectorEnv(make_env_fns(2, {1: _raise_lookup_error}), context=method)
    deadline = time.monotonic() + 1.0
    kinds = ("processes", "threads")  # the traceback keeps the shared memory
    while (left := take_stock().new_since(before, kinds)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert caught.value.__traceback__ is not None


def _raise_lookup_error() -> Any:
    raise LookupError("no such environment")

