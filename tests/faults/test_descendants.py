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
from observe import FAULTS, PATIENCE, alive, remaining, wait_for

from vecenv.system import cores, descendants
from vecenv.system.descendants import end_descendants, end_marked, end_own, mark, new_token

pytestmark = [*FAULTS, pytest.mark.linux]

Start = Callable[..., "Worker"]


class Worker:
    """A process that starts a helper, says who it is, and waits to be told to end or to be killed."""

    def __init__(self, pid: int, helper: int, token: int, pipe: int) -> None:
        self.pid, self.helper, self.token, self._pipe = pid, helper, token, pipe

    def leave(self) -> None:
        """Let it come to its own end."""
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


def say(path: Path, pid: int) -> None:
    path.with_suffix(".part").write_text(str(pid))
    path.with_suffix(".part").rename(path)


def sleeps(path: Path) -> None:
    """What a helper does that was only forked."""
    say(path, os.getpid())
    time.sleep(60)
    os._exit(0)


def own_session(path: Path) -> None:
    say(path, subprocess.Popen(["sleep", "60"], start_new_session=True).pid)


def own_session_without_environment(path: Path) -> None:
    say(path, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env={}).pid)


def orphan_of_a_shell(path: Path) -> None:
    subprocess.run(["sh", "-c", f"setsid sleep 60 & echo $! > {path}.part; mv {path}.part {path}"], check=True)


def fork_and_setsid(path: Path) -> None:
    if os.fork() == 0:
        os.setsid()
        sleeps(path)


def double_fork(path: Path) -> None:
    """A daemon as in the books: it has no descriptors and no parent."""
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
            say(path, os.getpid())
            os.execvp("sleep", ["sleep", "60"])
        os._exit(0)
    os.waitpid(child, 0)


def family(path: Path) -> None:
    """A helper whose own child left the environment behind."""
    if os.fork() == 0:
        os.setsid()
        say(path, subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env={}).pid)
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
    """Fork a worker whose environment starts a helper."""
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
                    end_own()
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


@pytest.mark.parametrize("helps", MARKED)
def test_helpers_of_a_worker_that_was_killed_are_found_by_its_mark(start: Start, helps: Callable[[Path], None]) -> None:
    worker = start(helps)
    worker.kill()
    assert alive(worker.helper)
    assert end_marked([new_token(), worker.token]) >= 1
    assert not remaining([worker.helper], PATIENCE)
    assert end_marked([worker.token]) == 0


@pytest.mark.parametrize("helps", DESCENDED)
def test_descendants_of_a_living_worker_end_and_it_lives(start: Start, helps: Callable[[Path], None]) -> None:
    worker = start(helps)
    assert end_descendants([worker.pid]) >= 1
    assert not remaining([worker.helper], PATIENCE)
    assert alive(worker.pid)


@pytest.mark.parametrize("helps", MARKED)
def test_a_worker_ends_its_own_helpers(start: Start, helps: Callable[[Path], None]) -> None:
    worker = start(helps, ends=True)
    worker.leave()
    assert not remaining([worker.helper], PATIENCE)


def test_only_those_of_the_worker_in_question_end(start: Start) -> None:
    """A worker that is replaced must not cost its siblings their helpers."""
    dead, sibling = start(own_session), start(double_fork)
    dead.kill()
    end_marked([dead.token])
    assert not alive(dead.helper)
    assert alive(sibling.helper)


def test_an_engine_in_a_worker_belongs_to_both(start: Start) -> None:
    """The worker inside marks its own helpers, and the worker around them still finds them."""

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
        say(path, second)

    outer = start(nested)
    outer.kill()
    assert alive(outer.helper)
    assert end_marked([outer.token]) >= 1
    assert not alive(outer.helper)


def restless(path: Path) -> None:
    """A helper that is always another process, for ten seconds; slowly, since a busy machine takes its time to look."""
    if os.fork():
        return
    os.setsid()
    say(path, os.getpid())
    for _ in range(50):
        time.sleep(0.2)
        if os.fork():
            os._exit(0)


def test_a_helper_that_forks_while_it_is_ended_does_not_escape(start: Start) -> None:
    worker = start(restless)
    worker.kill()
    assert end_marked([worker.token]) >= 1
    assert end_marked([worker.token]) == 0


def test_a_process_id_that_is_used_anew_is_never_signalled(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether held by a pidfd or, without one, known by when it was started."""
    worker = start(own_session)
    seen = descendants._look_at(worker.helper)
    assert seen is not None
    other = seen._replace(started=seen.started - 1)
    for _ in range(2):
        assert not descendants._kill(other)
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert alive(worker.helper)


def test_without_pidfds_they_are_ended_as_well(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    worker = start(double_fork)
    worker.kill()
    assert end_marked([worker.token]) >= 1
    assert not remaining([worker.helper], PATIENCE)


def test_a_resource_tracker_may_finish_what_it_is_there_for(start: Start) -> None:
    """It unlinks the shared memory of those it served once they are gone; killed, it could not."""
    code = "import time; 'multiprocessing.resource_tracker'; time.sleep(60)"

    def tracker(path: Path) -> None:
        say(path, subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid)

    worker = start(tracker)
    time.sleep(0.1)  # until it has executed
    worker.kill()
    assert end_marked([worker.token]) == 0
    assert alive(worker.helper)
    os.kill(worker.helper, signal.SIGKILL)


@pytest.mark.long
def test_a_mark_costs_no_descriptor_and_limits_nothing() -> None:
    """In a process of its own, because a mark stays."""
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


def test_looking_takes_little_where_there_is_nothing() -> None:
    tokens = [new_token() for _ in range(1000)]
    times = []
    for _ in range(20):
        began = time.process_time()
        assert end_marked(tokens) == 0
        assert end_descendants([2**22 + 1]) == 0
        times.append(time.process_time() - began)
    processes = len(descendants._look())
    assert min(times) < 0.005 + processes * 400e-6


def test_nothing_to_look_for_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("looked"))
    assert end_marked([]) == end_marked([0]) == end_descendants([]) == 0


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descendants, "_LINUX", False)
    assert new_token() == 0
    mark(0)
    assert end_marked([1]) == end_descendants([os.getpid()]) == end_own() == 0


def test_a_system_that_forbids_everything_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> object:
        raise PermissionError

    for module, name in ((os, "listdir"), (os, "pidfd_open"), (cores, "FileIO"), (descendants.resource, "setrlimit")):
        monkeypatch.setattr(module, name, forbidden)
    mark(new_token())
    assert end_marked([1]) == end_descendants([1]) == end_own() == 0
    mark(0)


def test_helpers_stay_where_nobody_asks(start: Start) -> None:
    """What these tests look for is there to be found."""
    worker = start(double_fork)
    worker.kill()
    assert remaining([worker.helper], 0.1) == [worker.helper]
