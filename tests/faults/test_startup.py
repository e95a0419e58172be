"""Engines that cannot start: rows 21 to 24, 36 and 42 of the table in ``FAULTS.md``."""

from __future__ import annotations

import functools
import itertools
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from observe import FAULTS, METHODS, PACKAGE, Launch, report
from vandals import crew, witness

import vecenv
from vecenv.errors import EnvError, StartupTimeout, WorkerDied
from vecenv.testing.faulty import (
    FaultyConstructor,
    NestedEnv,
    UnloadableConstructor,
    UnpicklableConstructor,
    WitnessEnv,
)

pytestmark = FAULTS


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
