"""The ends of the trainer itself: rows 30 to 34, 37 and 38 of the table in ``FAULTS.md``.

Each trainer is a program of its own (``trainer.py``), in a session of its own, and is ended from here.
"""

from __future__ import annotations

import gc
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from observe import FAULTS, PATIENCE, Trainer, alive, remaining, wait_for, worker_pids
from vandals import crew, vandal

import vecenv

pytestmark = FAULTS

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
