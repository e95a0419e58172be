"""Tests of helpers that have left the process group of their worker: they are found by its mark, or as its descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from observe import FAULT_MARKS, WAIT_SECONDS, is_running, still_running, wait_for_file

from vecenv.system import cores, descendants
from vecenv.system.descendants import end_descendants, end_marked, end_own_descendants, mark, new_token

pytestmark = [*FAULT_MARKS, pytest.mark.linux]

Start = Callable[..., "Worker"]


class Worker:
    """A process that starts a helper, which writes its pid to a file, and then waits until it is ended or killed."""

    def __init__(self, pid: int, helper: int, token: int, pipe: int) -> None:
        self.pid, self.helper, self.token, self._pipe = pid, helper, token, pipe

    def finish(self) -> None:
        """Close the worker's pipe, and wait until the worker has exited."""
        os.close(self._pipe)
        self._pipe = -1
        os.waitpid(self.pid, 0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def write_pid(path: Path, pid: int) -> None:
    """Write a pid to a file that appears only when it is complete."""
    path.with_suffix(".part").write_text(str(pid))
    path.with_suffix(".part").rename(path)


def write_pid_and_sleep(path: Path) -> None:
    """Write the pid of this process, which is a forked helper, and sleep."""
    write_pid(path, os.getpid())
    time.sleep(60)
    os._exit(0)


def start_in_own_session(path: Path) -> None:
    write_pid(path, subprocess.Popen(["sleep", "60"], start_new_session=True).pid)


def start_in_own_session_without_variables(path: Path) -> None:
    write_pid(path, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env={}).pid)


def start_orphan_of_a_shell(path: Path) -> None:
    subprocess.run(["sh", "-c", f"setsid sleep 60 & echo $! > {path}.part; mv {path}.part {path}"], check=True)


def fork_and_setsid(path: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        write_pid_and_sleep(path)


def double_fork(path: Path) -> None:
    """Start a daemon by two forks: an orphan without descriptors."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            write_pid_and_sleep(path)
        os._exit(0)
    os.waitpid(child, 0)


def double_fork_and_exec(path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            write_pid(path, os.getpid())
            os.execvp("sleep", ["sleep", "60"])
        os._exit(0)
    os.waitpid(child, 0)


def fork_helper_with_child(path: Path) -> None:
    """Fork a helper that starts a child without environment variables; write the pid of the child."""
    if os.fork() == 0:
        os.setsid()
        write_pid(path, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env={}).pid)
        time.sleep(60)


def start_orphan_without_variables(path: Path) -> None:
    child = os.fork()
    if child == 0:
        start_in_own_session_without_variables(path)
        os._exit(0)
    os.waitpid(child, 0)


DESCENDANTS = [start_in_own_session, start_in_own_session_without_variables, fork_and_setsid, fork_helper_with_child]
ORPHANS = [start_orphan_of_a_shell, double_fork, double_fork_and_exec, start_orphan_without_variables]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that forks a worker, which starts a helper; kill both after the test."""
    workers: list[Worker] = []

    def launch(start_helper: Callable[[Path], None], *, ends_helpers: bool = False) -> Worker:
        path = tmp_path / f"helper-{len(workers)}"
        token = new_token()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(writer)
                for other in workers:
                    with contextlib.suppress(OSError):
                        os.close(other._pipe)
                os.setsid()
                mark(token)
                start_helper(path)
                os.read(reader, 1)
                if ends_helpers:
                    end_own_descendants()
            finally:
                os._exit(0)
        os.close(reader)
        workers.append(Worker(pid, -1, token, writer))
        wait_for_file(path)
        workers[-1].helper = int(path.read_text())
        return workers[-1]

    yield launch
    for worker in workers:
        worker.kill()
        if worker.helper > 0 and is_running(worker.helper):
            os.kill(worker.helper, signal.SIGKILL)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("start_helper", [*DESCENDANTS, *ORPHANS])
def test_helpers_of_a_killed_worker_are_found_by_its_mark(start: Start, start_helper: Callable[[Path], None]) -> None:
    worker = start(start_helper)
    worker.kill()
    assert is_running(worker.helper)
    assert end_marked([new_token(), worker.token]) >= 1
    assert not still_running([worker.helper], WAIT_SECONDS)
    assert end_marked([worker.token]) == 0


@pytest.mark.parametrize("start_helper", DESCENDANTS)
def test_descendants_of_a_running_worker_can_be_ended(start: Start, start_helper: Callable[[Path], None]) -> None:
    worker = start(start_helper)
    assert end_descendants([worker.pid]) >= 1
    assert not still_running([worker.helper], WAIT_SECONDS)
    assert is_running(worker.pid)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("start_helper", [*DESCENDANTS, *ORPHANS])
def test_worker_ends_its_own_helpers(start: Start, start_helper: Callable[[Path], None]) -> None:
    worker = start(start_helper, ends_helpers=True)
    worker.finish()
    assert not still_running([worker.helper], WAIT_SECONDS)


def test_only_helpers_of_the_given_worker_end(start: Start) -> None:
    """When a worker is replaced, the helpers of the other workers continue."""
    dead, sibling = start(start_in_own_session), start(double_fork)
    dead.kill()
    end_marked([dead.token])
    assert not is_running(dead.helper)
    assert is_running(sibling.helper)


def test_helpers_of_a_nested_engine_have_the_marks_of_both_workers(start: Start) -> None:
    """A worker starts two inner workers with a helper each, and ends the first helper by the mark of its inner worker."""

    def start_inner_workers(path: Path) -> None:
        tokens = [new_token() for _ in range(2)]
        assert len(set(tokens)) == 2
        for number, token in enumerate(tokens):
            if os.fork() == 0:
                os.setsid()
                mark(token)
                assert new_token() == 0, "a third level gets no mark"
                start_in_own_session(path.with_name(f"{number}"))
                os._exit(0)
            os.wait()
        first, second = (int(path.with_name(f"{number}").read_text()) for number in range(2))
        end_marked([tokens[0]])
        assert not is_running(first)
        write_pid(path, second)

    outer = start(start_inner_workers)
    outer.kill()
    assert is_running(outer.helper)
    assert end_marked([outer.token]) >= 1
    assert not is_running(outer.helper)


def keep_forking(path: Path) -> None:
    """Continue in a forked child every 0.2 seconds, for ten seconds: a search may take that long on a busy machine."""
    if os.fork():
        return
    os.setsid()
    write_pid(path, os.getpid())
    for _ in range(50):
        time.sleep(0.2)
        if os.fork():
            os._exit(0)


def test_helper_that_forks_while_it_is_ended_does_not_escape(start: Start) -> None:
    worker = start(keep_forking)
    worker.kill()
    assert end_marked([worker.token]) >= 1
    assert end_marked([worker.token]) == 0


def test_reused_process_id_is_never_signalled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the same pid, but another start time, is not killed, with or without pidfds."""
    worker = start(start_in_own_session)
    process = descendants._read_process(worker.helper)
    assert process is not None
    earlier_process = process._replace(started=process.started - 1)
    assert not descendants._kill(earlier_process)
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert not descendants._kill(earlier_process)
    assert is_running(worker.helper)


def test_helpers_are_ended_without_pidfds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    worker = start(double_fork)
    worker.kill()
    assert end_marked([worker.token]) >= 1
    assert not still_running([worker.helper], WAIT_SECONDS)


def test_resource_tracker_is_not_ended(start: Start) -> None:
    """A resource tracker unlinks the shared memory of its processes after they have ended."""
    code = "import time; 'multiprocessing.resource_tracker'; time.sleep(60)"

    def start_tracker(path: Path) -> None:
        write_pid(path, subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid)

    worker = start(start_tracker)
    time.sleep(0.1)  # until the started program has replaced the forked process
    worker.kill()
    assert end_marked([worker.token]) == 0
    assert is_running(worker.helper)
    os.kill(worker.helper, signal.SIGKILL)


@pytest.mark.long
def test_mark_opens_no_descriptor_and_does_not_prevent_locks() -> None:
    """The test runs in a separate process, because a mark is permanent."""
    code = """
import fcntl, os, tempfile
from vecenv.system.descendants import mark, new_token
before = os.listdir("/proc/self/fd")
mark(new_token())
assert os.listdir("/proc/self/fd") == before
with tempfile.TemporaryFile() as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    fcntl.lockf(file, fcntl.LOCK_EX)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_search_without_helpers_is_cheap() -> None:
    tokens = [new_token() for _ in range(1000)]
    times = []
    for _ in range(20):
        started_at = time.process_time()
        assert end_marked(tokens) == 0
        assert end_descendants([2**22 + 1]) == 0
        times.append(time.process_time() - started_at)
    count = len(descendants._list_processes())
    assert min(times) < 0.005 + count * 400e-6


def test_no_search_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("searched"))
    assert end_marked([]) == end_marked([0]) == end_descendants([]) == 0


def test_search_does_nothing_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_LINUX", False)
    assert new_token() == 0
    mark(0)
    assert end_marked([1]) == end_descendants([os.getpid()]) == end_own_descendants() == 0


def test_search_without_permissions_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_permission_error(*_: object, **__: object) -> object:
        raise PermissionError

    for module, name in ((os, "listdir"), (os, "pidfd_open"), (cores, "FileIO"), (descendants.resource, "setrlimit")):
        monkeypatch.setattr(module, name, raise_permission_error)
    mark(new_token())
    assert end_marked([1]) == end_descendants([1]) == end_own_descendants() == 0
    mark(0)  # later tests in this process must not have the token


def test_helper_continues_unless_it_is_ended(start: Start) -> None:
    """If helpers ended by themselves, the tests above would prove nothing."""
    worker = start(double_fork)
    worker.kill()
    assert still_running([worker.helper], 0.1) == [worker.helper]
