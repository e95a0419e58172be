"""Tests of the fixture ``nothing_left_behind``: it detects processes, descriptors, threads and shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observe import FAULT_MARKS, METHODS, WAIT_SECONDS, still_running

pytestmark = FAULT_MARKS

TakeStock = Callable[[], Any]


def test_process_is_detected(take_stock: TakeStock) -> None:
    before = take_stock()
    child = subprocess.Popen(["sleep", "30"])
    assert any(f"pid {child.pid}: " in text for text in take_stock().beyond(before)["processes"])
    child.kill()
    child.wait()
    assert not take_stock().beyond(before)


def test_grandchild_in_its_own_session_is_detected(take_stock: TakeStock) -> None:
    """The test process is a subreaper, so it becomes the parent of an orphan even if that is in another session."""
    before = take_stock()
    subprocess.run(["sh", "-c", "setsid sleep 30 & exit 0"], check=True)
    (description,) = take_stock().beyond(before)["processes"]
    pid = int(description.removeprefix("pid ").partition(":")[0])
    os.kill(pid, signal.SIGKILL)
    assert not still_running([pid], WAIT_SECONDS)
    assert not take_stock().beyond(before)


def test_zombie_is_detected(take_stock: TakeStock) -> None:
    before = take_stock()
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    assert not still_running([child.pid], WAIT_SECONDS)
    assert any("never joined" in text for text in take_stock().beyond(before)["processes"])
    child.join()
    child.close()
    assert not take_stock().beyond(before)


def test_descriptor_is_detected(take_stock: TakeStock) -> None:
    before = take_stock()
    ends = os.pipe()
    assert len(take_stock().beyond(before)["descriptors"]) == 2
    for end in ends:
        os.close(end)
    assert not take_stock().beyond(before)


def test_thread_is_detected(take_stock: TakeStock) -> None:
    before = take_stock()
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name="forgotten")
    thread.start()
    assert any("forgotten" in text for text in take_stock().beyond(before)["threads"])
    may_end.set()
    thread.join()
    deadline = time.monotonic() + 2
    while take_stock().beyond(before) and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread still exists in the kernel for a moment after join()
    assert not take_stock().beyond(before)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm on this system")
def test_file_in_dev_shm_is_detected(take_stock: TakeStock) -> None:
    before = take_stock()
    path = Path(f"/dev/shm/vecenv-test-{os.getpid()}")
    path.touch()
    try:
        assert take_stock().beyond(before)["shared_memory"] == [str(path)]
    finally:
        path.unlink()
    assert "shared_memory" not in take_stock().beyond(before)


@pytest.mark.parametrize("method", METHODS)
def test_processes_of_multiprocessing_are_tolerated(method: str, take_stock: TakeStock) -> None:
    """The fork server and the resource tracker of ``multiprocessing`` run, by design, until the program ends."""
    before = take_stock()
    context = multiprocessing.get_context(method)
    child = context.Process(target=os.getpid)
    child.start()
    child.join()
    child.close()
    context.Lock()
    deadline = time.monotonic() + 2
    while take_stock().beyond(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not take_stock().beyond(before)
