"""Lifetimes: how engines start, and how their trainers end."""

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
from observe import FAULTS, METHODS, PACKAGE, PATIENCE, Launch, Trainer, alive, remaining, report, wait_for, worker_pids
from vandals import crew, vandal, witness

import vecenv
from vecenv.errors import EnvError, StartupTimeout, WorkerDied
from vecenv.testing.faulty import FaultyConstructor, NestedEnv, UnloadableConstructor, UnpicklableConstructor, WitnessEnv

pytestmark = FAULTS


# --- Engines that cannot start: rows 21 to 24, 36 and 42 of the table in ``FAULTS.md`` ----------


def patience(method: str) -> float:
    """A start-up timeout that a healthy worker meets with ease: spawn loads an interpreter and numpy first."""
    return 10.0 if method == "spawn" else 3.0


STARTS = {
    "raises": ("raises", ValueError, ("out of order", "in raises")),
    "unpicklable": ("unpicklable_error", EnvError, ("UnpicklableError", "holds a lock")),
    "sys_exit": ("sys_exit", EnvError, ("SystemExit",)),
    "exit": ("exit_now", WorkerDied, (r"exit code 0\b",)),
    "segfault": ("segfault", WorkerDied, ("SIGSEGV", "in segfault")),
    "hang": ("sleep", StartupTimeout, ("in sleep",)),
    "hang_gil": ("hold_gil", StartupTimeout, ("in hold_gil",)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", STARTS)
def test_startup(launch: Launch, method: str, kind: str) -> None:
    """The constructor says which environment, and why; nothing of the others stays."""
    fault, expected, patterns = STARTS[kind]
    env_fns = crew(4, {3: FaultyConstructor(witness(3), fault)})
    begun = time.monotonic()
    # only what hangs is waited for to the end; on a busy machine a healthy start takes its time
    limit = patience(method) if expected is StartupTimeout else 60.0
    with pytest.raises(expected) as caught:
        launch(env_fns, num_workers=2, start_timeout=limit)
    assert expected is not StartupTimeout or time.monotonic() - begun < limit + 15
    text = report(caught.value)
    assert type(caught.value) is expected
    assert re.search(r"\benvs?\b[^\n]*\b3\b", text), text
    assert re.search(r"\bworkers?\b[^\n]*\b1\b", text), text
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
@pytest.mark.parametrize("kind", ["pickle", "unpickle"])
def test_startup_of_what_cannot_travel(launch: Launch, method: str, kind: str) -> None:
    """An ``env_fn`` that cannot be pickled, or not unpickled, is named in the caller."""
    constructor = {"pickle": UnpicklableConstructor, "unpickle": UnloadableConstructor}[kind]
    with pytest.raises(Exception, match=r".") as caught:
        launch(crew(4, {3: constructor(witness(3))}), num_workers=2, start_timeout=10)
    text = report(caught.value)
    assert not isinstance(caught.value, (StartupTimeout, WorkerDied)), text
    assert re.search(r"\benv(_fns?)?\b[^\n]{0,3}\b3\b", text), text
    assert {"pickle": "stays where it is", "unpickle": "cannot be loaded here"}[kind] in text


@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_startup_by_fork_needs_no_pickle(launch: Launch) -> None:
    """A fork inherits its ``env_fn``; refusing what cannot be pickled would be refusing what works."""
    envs = launch(crew(2, {1: UnpicklableConstructor(witness(1))}))
    envs.reset(seed=1)
    envs.step([0, 0])


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork"], indirect=True)
def test_a_fork_that_hangs_beside_threads_is_told_about_forkserver(launch: Launch) -> None:
    """A lock that another thread held during the fork is held for ever in the child; the remedy is in the message."""
    enough = threading.Event()
    other = threading.Thread(target=enough.wait)
    other.start()
    try:
        with pytest.raises(StartupTimeout, match=r"(?s)thread.*forkserver"):
            launch(crew(2, {1: FaultyConstructor(witness(1), "sleep")}), start_timeout=1.0)
    finally:
        enough.set()
        other.join()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open about so many more files."""
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = itertools.islice((number for number in itertools.count() if number not in taken), count)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


@pytest.mark.long
@pytest.mark.parametrize("left", [8, 25])
def test_fd_limit(launch: Launch, method: str, left: int) -> None:
    """Too few descriptors for so many workers: the limit is named, with what is needed; nothing of the start remains."""
    launch([witness(0)]).close()  # fork server and resource tracker run, so that they do not matter
    with descriptors_left(left), pytest.raises((OSError, vecenv.errors.VecEnvError)) as caught:
        launch([witness(index) for index in range(32)], start_timeout=10)
    text = str(caught.value)
    assert "RLIMIT_NOFILE" in text
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", text)]
    assert any(number >= 64 for number in numbers), f"what 32 workers need is not said: {text}"


@pytest.mark.long
@pytest.mark.parametrize("daemon", [False, True])
@pytest.mark.parametrize("inner", ["vecenv", "gymnasium"])
def test_nested(launch: Launch, inner: str, daemon: bool) -> None:
    """An environment may itself be a vector environment with workers of its own.

    Python allows daemonic processes no children; where that is in the way, the error says what would help.
    """
    inner_class = {"vecenv": vecenv.AsyncVectorEnv, "gymnasium": gym.vector.AsyncVectorEnv}[inner]
    env_fns = [functools.partial(NestedEnv, functools.partial(inner_class, crew(2), context="fork"))] * 2
    try:
        envs = launch(env_fns, daemon=daemon)
    except Exception as error:
        assert daemon
        text = report(error)
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
    "engine, nothing built here": "vecenv.AsyncVectorEnv([make] * 2, context=method, dummy_env=False)",
    "auto": "vecenv.AsyncVectorEnv([make] * 2, context=method, num_workers='auto')",
    "make_vec": "vecenv.make_vec('CartPole-v1', 2, vector_kwargs={'context': method})",
    "make_vec, default": "multiprocessing.set_start_method(method, force=True); vecenv.make_vec('CartPole-v1', 2)",
    "plan": "vecenv.plan(make, 2, context=method)",
    "evaluate": "vecenv.evaluate(vecenv.AsyncVectorEnv([make] * 2, context=method), len, 1)",
}


def unguarded(method: str, call: str) -> str:
    imports = "import multiprocessing, gymnasium, vecenv"
    return f"{imports}\nmethod = {method!r}\nmake = lambda: gymnasium.make('CartPole-v1')\n{call}\n"


def ends(program: str | None, directory: Path, **how: Any) -> str:
    """What a program that fails prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, *([program] if program else [])]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=directory, timeout=250, check=False, **how
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize("call", UNGUARDED)
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
def test_a_program_without_a_main_guard_is_told_so(method: str, call: str, tmp_path: Path) -> None:
    """Starting workers imports the main program again; without the guard that would start workers without end."""
    (tmp_path / "unguarded.py").write_text(unguarded(method, UNGUARDED[call]))
    printed = ends("unguarded.py", tmp_path)
    assert printed.startswith("Traceback"), printed
    assert printed.count("Traceback") == 1, printed
    assert len(printed.splitlines()) <= 20, printed
    error = printed[printed.index("vecenv.errors.") :].splitlines()
    assert len(error) <= 8, printed
    assert error[0].startswith("vecenv.errors.WorkerDied: the main guard is missing in ")
    assert "unguarded.py" in error[0]
    assert [line.strip() for line in error[-2:]] == ['if __name__ == "__main__":', "main()"]


@pytest.mark.long
@pytest.mark.parametrize("method", [name for name in METHODS if name != "fork"], indirect=True)
def test_a_program_from_standard_input_is_told_so(method: str, tmp_path: Path) -> None:
    """There is no file that workers could import."""
    printed = ends(None, tmp_path, input=unguarded(method, UNGUARDED["engine"]))
    assert "RuntimeError: the main file is missing" in printed
    assert "context='fork'" in printed
    assert len(printed.splitlines()) <= 12, printed


# --- The ends of the trainer itself: rows 30 to 34, 37 and 38 of the table in ``FAULTS.md`` -----
# Each trainer is a program of its own (``trainer.py``), in a session of its own, and is ended from here.

Start = Callable[..., Trainer]


def in_the_middle(trainer: Trainer, scenario: str, folder: Path) -> list[int]:
    """Wait until the scenario is in full swing; the pids of everybody but the trainer."""
    everybody = trainer.hear()
    if scenario in ("stepping", "gil", "interrupted"):
        wait_for(folder / "begun")
        time.sleep(0.05)  # the file is written just before it hangs
    pids = [*everybody["workers"], *everybody.get("helpers", [])]
    assert all(map(alive, pids))
    return pids


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["waiting", "stepping", "gil", "family", "nested"])
def test_orphans(trainer: Start, scenario: str, tmp_path: Path) -> None:
    """The trainer is killed outright: soon nobody is left, whatever they were doing.

    That includes programs that environments had started, and the workers of an engine inside an environment;
    those two are found by ``nothing_left_behind`` if they stay.
    """
    program = trainer(scenario)
    pids = in_the_middle(program, scenario, tmp_path)
    program.process.kill()
    program.process.wait(60)
    assert not remaining(pids, PATIENCE)
    assert "Traceback" not in program.complaints()


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["waiting", "stepping"])
def test_group_kill_leaves_nothing(trainer: Start, scenario: str, tmp_path: Path, take_stock: Callable[[], Any]) -> None:
    """As ``docker kill`` does it: the trainer's whole group, helpers of multiprocessing included."""
    before = take_stock()
    program = trainer(scenario)
    pids = in_the_middle(program, scenario, tmp_path)
    os.killpg(program.process.pid, signal.SIGKILL)
    program.process.wait(60)
    assert not remaining(pids, PATIENCE)
    assert not take_stock().beyond(before, ["shared_memory"])  # but for what belongs to other programs


def test_sigterm(trainer: Start, tmp_path: Path) -> None:
    """The polite signal, with its default action: the trainer is gone, so its workers are."""
    program = trainer("stepping")
    pids = in_the_middle(program, "stepping", tmp_path)
    program.process.terminate()
    assert program.process.wait(60) == -signal.SIGTERM
    assert not remaining(pids, PATIENCE)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A pseudo-terminal: (the keyboard's side, the program's side)."""
    keyboard, screen = pty.openpty()
    yield keyboard, screen
    os.close(keyboard)
    os.close(screen)


def read_terminal(keyboard: int) -> str:
    """Everything on the screen so far."""
    text = b""
    while select.select([keyboard], [], [], 0.1)[0]:
        text += os.read(keyboard, 1 << 16)
    return text.decode(errors="replace")


def test_ctrl_c(trainer: Start, terminal: tuple[int, int], tmp_path: Path) -> None:
    """A real Ctrl-C, to the whole foreground group: one KeyboardInterrupt, silent workers, a close that works."""
    keyboard, screen = terminal
    program = trainer("interrupted", terminal=screen)
    pids = in_the_middle(program, "interrupted", tmp_path)
    os.write(keyboard, b"\x03")
    end = program.hear()
    assert (end["interrupts"], end["closed"]) == (1, True)
    assert end["seconds"] < PATIENCE
    assert program.process.wait(60) == 0
    assert not remaining(pids, PATIENCE)
    shown = read_terminal(keyboard)
    assert "Traceback" not in shown, shown
    assert "KeyboardInterrupt" not in shown, shown


def test_ctrl_c_and_on(trainer: Start, terminal: tuple[int, int], tmp_path: Path) -> None:
    """After Ctrl-C in ``step_wait`` the answer is still pending: waiting again gets it, and it is the right one."""
    keyboard, screen = terminal
    program = trainer("interrupted_then_on", terminal=screen)
    program.hear()
    wait_for(tmp_path / "begun")
    time.sleep(0.2)
    os.write(keyboard, b"\x03")
    end = program.hear()
    assert (end["interrupts"], end["closed"], end["ticks"]) == (1, True, [1, 1, 1])
    assert program.process.wait(60) == 0
    assert "Traceback" not in read_terminal(keyboard)


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "code"), [("pending", 0), ("raised", 9)])
def test_exit_with_pending_step(trainer: Start, scenario: str, code: int) -> None:
    """The program ends while a step is pending for ever, and closed nothing: it exits all the same."""
    program = trainer(scenario)
    end = program.hear()
    assert program.process.wait(60) == code, program.complaints()
    assert time.monotonic() - end["ended"] < PATIENCE
    assert not remaining(end["workers"], PATIENCE)
    assert "Traceback" not in program.complaints()


def isolated(commands: str) -> list[str]:
    """A command prefix that runs a program in a mount namespace of its own after ``commands``; empty if impossible."""
    if shutil.which("unshare") is None:
        return []
    for options in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        prefix = ["unshare", *options, "sh", "-c", f'{commands} && exec "$@"', "sh"]
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return []


def may_mount() -> bool:
    """Whether this process has the capability that mounting takes (CAP_SYS_ADMIN, number 21)."""
    status = Path("/proc/self/status").read_text()
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> 21 & 1)


@pytest.mark.long
def test_small_dev_shm(trainer: Start) -> None:
    """A container's small /dev/shm does not matter: the memory is not there, and not on disk either.

    Where nobody may mount a small one, the big one must stay unused, which is most of the point.
    """
    prefix = isolated("mount -t tmpfs -o size=1m tmpfs /dev/shm")
    assert prefix or not may_mount(), "a small /dev/shm could be mounted here, and was not"
    end = trainer("small_shm", prefix=prefix).hear()
    if prefix:
        assert end["shm"] == 2**20
    if "refused" in end:  # without memfd: both sizes are in the message, and nothing was started
        assert not hasattr(os, "memfd_create")
        assert re.search(r"\d[\d,]{6,}", end["refused"])
    else:
        assert end["right"]
        assert end["used"] < 2**20
        assert not end["on_disk"]


@pytest.mark.long
@pytest.mark.parametrize("pending", [False, True], ids=["idle", "pending"])
def test_dropped(method: str, pending: bool) -> None:
    """An engine that nobody refers to any more is ended, and the person is told to close it next time."""
    envs = vecenv.AsyncVectorEnv(crew(2, {1: vandal(1, "sleep", step=1)}), context=method)
    envs.reset(seed=1)
    pids = worker_pids(envs)
    gone = weakref.ref(envs)
    if pending:
        envs.step_async([0, 0])
    held = [envs]
    del envs
    with pytest.warns(ResourceWarning, match="AsyncVectorEnv"):
        drop(held)
    assert gone() is None
    assert not remaining(pids, PATIENCE)


def drop(held: list[Any]) -> None:
    held.clear()
    gc.collect()


@pytest.mark.long
def test_dropped_in_the_constructor(method: str, take_stock: Callable[[], Any]) -> None:
    """An exception in the constructor, whose traceback somebody keeps: the workers are ended all the same."""
    before = take_stock()
    with pytest.raises(LookupError) as kept:
        vecenv.AsyncVectorEnv(crew(2, {1: _raise}), context=method)
    deadline = time.monotonic() + 1.0
    kinds = ("processes", "threads")  # the traceback keeps the memory, as it keeps everything
    while (left := take_stock().beyond(before, kinds)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert kept.value.__traceback__ is not None


def _raise() -> Any:
    raise LookupError("no such environment")

