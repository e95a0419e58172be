"""Helpers that left their worker's process group, found by mark and by descent; with real processes."""

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
from observe import FAULTS, PATIENCE, alive, still_running, wait_for

from vecenv.system import cores, descendants
from vecenv.system.descendants import end_descendants, end_marked, end_own_descendants, mark, new_token

pytestmark = [*FAULTS, pytest.mark.linux]

Start = Callable[..., "Worker"]


class Worker:
    """A process that starts a helper, reports its pid, and waits until it is ended or killed."""

    def __init__(self, pid: int, helper: int, token: int, pipe: int) -> None:
        self.pid, self.helper, self.token, self._pipe = pid, helper, token, pipe

    def leave(self) -> None:
        """Let it end by itself."""
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


def report_json(path: Path, pid: int) -> None:
    path.with_suffix(".part").write_text(str(pid))
    path.with_suffix(".part").rename(path)


def sleeps(path: Path) -> None:
    """Sleep, as a helper that was only forked."""
    report_json(path, os.getpid())
    time.sleep(60)
    os._exit(0)


def own_session(path: Path) -> None:
    report_json(path, subprocess.Popen(["sleep", "60"], start_new_session=True).pid)


def own_session_without_environment(path: Path) -> None:
    report_json(path, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env={}).pid)


def orphan_of_a_shell(path: Path) -> None:
    subprocess.run(["sh", "-c", f"setsid sleep 60 & echo $! > {path}.part; mv {path}.part {path}"], check=True)


def fork_and_setsid(path: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        sleeps(path)


def double_fork(path: Path) -> None:
    """Start a textbook daemon: it has no descriptors and no parent."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 256)
            sleeps(path)
        os._exit(0)
    os.waitpid(child, 0)


def double_fork_and_exec(path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            report_json(path, os.getpid())
            os.execvp("sleep", ["sleep", "60"])
        os._exit(0)
    os.waitpid(child, 0)


def family(path: Path) -> None:
    """Start a helper with a child that has no environment variables of the worker."""
    if os.fork() == 0:
        os.setsid()
        report_json(path, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env={}).pid)
        time.sleep(60)


def orphan_without_environment(path: Path) -> None:
    child = os.fork()
    if child == 0:
        own_session_without_environment(path)
        os._exit(0)
    os.waitpid(child, 0)


DESCENDED = [own_session, own_session_without_environment, fork_and_setsid, family]
MARKED = [*DESCENDED, orphan_of_a_shell, double_fork, double_fork_and_exec, orphan_without_environment]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Fork a worker with an environment that starts a helper."""
    workers: list[Worker] = []

    def launch(helps: Callable[[Path], None], *, ends: bool = False) -> Worker:
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
                helps(path)
                os.read(reader, 1)
                if ends:
                    end_own_descendants()
            finally:
                os._exit(0)
        os.close(reader)
        workers.append(Worker(pid, -1, token, writer))
        wait_for(path)
        workers[-1].helper = int(path.read_text())
        return workers[-1]

    yield launch
    for worker in workers:
        worker.kill()
        if worker.helper > 0 and alive(worker.helper):
            os.kill(worker.helper, signal.SIGKILL)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("helps", MARKED)
def test_helpers_of_a_killed_worker_are_found_by_its_mark(start: Start, helps: Callable[[Path], None]) -> None:
    worker = start(helps)
    worker.kill()
    assert alive(worker.helper)
    assert end_marked([new_token(), worker.token]) >= 1
    assert not still_running([worker.helper], PATIENCE)
    assert end_marked([worker.token]) == 0


@pytest.mark.parametrize("helps", DESCENDED)
def test_descendants_of_a_living_worker_can_be_ended(start: Start, helps: Callable[[Path], None]) -> None:
    worker = start(helps)
    assert end_descendants([worker.pid]) >= 1
    assert not still_running([worker.helper], PATIENCE)
    assert alive(worker.pid)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("helps", MARKED)
def test_a_worker_ends_its_own_helpers(start: Start, helps: Callable[[Path], None]) -> None:
    worker = start(helps, ends=True)
    worker.leave()
    assert not still_running([worker.helper], PATIENCE)


def test_only_helpers_of_the_given_worker_end(start: Start) -> None:
    """A worker that is replaced must not take its siblings' helpers with it."""
    dead, sibling = start(own_session), start(double_fork)
    dead.kill()
    end_marked([dead.token])
    assert not alive(dead.helper)
    assert alive(sibling.helper)


def test_engine_in_a_worker_has_the_marks_of_both(start: Start) -> None:
    """The inner worker marks its own helpers, and the outer worker still finds them."""

    def nested(path: Path) -> None:
        tokens = [new_token() for _ in range(2)]
        assert len(set(tokens)) == 2
        for number, inner in enumerate(tokens):
            if os.fork() == 0:
                os.setsid()
                mark(inner)
                assert new_token() == 0, "and no deeper"
                own_session(path.with_name(f"{number}"))
                os._exit(0)
            os.wait()
        first, second = (int(path.with_name(f"{number}").read_text()) for number in range(2))
        end_marked([tokens[0]])
        assert not alive(first)
        report_json(path, second)

    outer = start(nested)
    outer.kill()
    assert alive(outer.helper)
    assert end_marked([outer.token]) >= 1
    assert not alive(outer.helper)


def keep_forking(path: Path) -> None:
    """Become another process again and again for ten seconds; slowly, because a busy machine needs time to look."""
    if os.fork():
        return
    os.setsid()
    report_json(path, os.getpid())
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
    """It is held by a pidfd or, without one, recognized by its start time."""
    worker = start(own_session)
    seen = descendants._read_process(worker.helper)
    assert seen is not None
    other = seen._replace(started=seen.started - 1)
    for _ in range(2):
        assert not descendants._kill(other)
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert alive(worker.helper)


def test_helpers_are_ended_without_pidfds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    worker = start(double_fork)
    worker.kill()
    assert end_marked([worker.token]) >= 1
    assert not still_running([worker.helper], PATIENCE)


def test_resource_tracker_may_finish(start: Start) -> None:
    """It unlinks the shared memory of its processes once they have ended; if it were killed, it could not."""
    code = "import time; 'multiprocessing.resource_tracker'; time.sleep(60)"

    def tracker(path: Path) -> None:
        report_json(path, subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid)

    worker = start(tracker)
    time.sleep(0.1)  # until it has executed
    worker.kill()
    assert end_marked([worker.token]) == 0
    assert alive(worker.helper)
    os.kill(worker.helper, signal.SIGKILL)


@pytest.mark.long
def test_mark_needs_no_descriptor_and_sets_no_limit() -> None:
    """In a separate process, because a mark is permanent."""
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
    processes = len(descendants._list_processes())
    assert min(times) < 0.005 + processes * 400e-6


def test_no_search_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("looked"))
    assert end_marked([]) == end_marked([0]) == end_descendants([]) == 0


def test_search_does_nothing_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_LINUX", False)
    assert new_token() == 0
    mark(0)
    assert end_marked([1]) == end_descendants([os.getpid()]) == end_own_descendants() == 0


def test_search_without_permissions_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> object:
        raise PermissionError

    for module, name in ((os, "listdir"), (os, "pidfd_open"), (cores, "FileIO"), (descendants.resource, "setrlimit")):
        monkeypatch.setattr(module, name, forbidden)
    mark(new_token())
    assert end_marked([1]) == end_descendants([1]) == end_own_descendants() == 0
    mark(0)


def test_helpers_stay_unless_ended(start: Start) -> None:
    """The helpers of these tests exist unless they are ended."""
    worker = start(double_fork)
    worker.kill()
    assert still_running([worker.helper], 0.1) == [worker.helper]
