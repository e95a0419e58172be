"""Configuration of the tests, and the fixture ``nothing_left_behind``, which fails tests that leak resources.

``nothing_left_behind`` compares four things before and after each test: processes, open descriptors, threads
and entries of ``/dev/shm``. By default init adopts orphans, which could then not be recognized. So this
process declares itself the adopter of its descendants (``PR_SET_CHILD_SUBREAPER``): orphaned grandchildren
stay descendants of this process, whatever session they run in.

:func:`_tolerated_resources` lists all exceptions, each with its reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from sampling import limit_long_cases, sample_marked

SETTLE_SECONDS = 2.0
MIN_SETTLE_ROUNDS = 20  # on a busy machine, few collections may fit into that time
KINDS = ("processes", "descriptors", "threads", "shared_memory")
_TEST_FAILED = pytest.StashKey[bool]()
_LINUX = sys.platform == "linux"
_PR_SET_CHILD_SUBREAPER = 36
_LIBRARIES_WITH_NATIVE_THREADS = ("torch", "tensorflow", "ray._raylet")


# Threads that never end, such as those of JAX's backend, make every later fork of their process unsafe, and JAX warns about
# each. So the tests of these folders run last, in this order: afterwards no process forks, including xdist's workers. A test
# of the contract runs with the tests of its backend.
PERMANENT_THREAD_FOLDERS = ("backends", "distributed", "jax")
DESELECTED_MARKS = {"long", "slow", "soak"}
CASES_IN_CI = 2  # the number of ``long`` cases per test that .ci/run includes
ALL_CASES_IN_CI = ("test_readme.py",)


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("any load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any load")
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # under `pytest &` in a script; children would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist's hook of the same name, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark samples of cases, deselect :data:`DESELECTED_MARKS` without ``-m``, and run tests with permanent threads last."""
    sample_marked(items, DESELECTED_MARKS)
    limit_long_cases([item for item in items if item.path.name not in ALL_CASES_IN_CI], CASES_IN_CI)
    if not _LINUX:
        _deselect({"linux"}, config, items)
    if not config.getoption("markexpr"):
        _deselect(DESELECTED_MARKS, config, items)
    items.sort(key=_folder_position)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            # tests of one file share a process, to reuse the compiled programs and clusters of earlier tests
            if _folder_position(item) and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {_test_folder(item)}"))


def _deselect(marks: set[str], config: pytest.Config, items: list[pytest.Item]) -> None:
    deselected = [item for item in items if marks & {mark.name for mark in item.iter_markers()}]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        deselected_ids = set(map(id, deselected))
        items[:] = [item for item in items if id(item) not in deselected_ids]


def _folder_position(item: pytest.Item) -> int:
    """Return the position of a test's folder in :data:`PERMANENT_THREAD_FOLDERS`, from 1, or 0 for other folders."""
    folder = _test_folder(item)
    return PERMANENT_THREAD_FOLDERS.index(folder) + 1 if folder in PERMANENT_THREAD_FOLDERS else 0


def _test_folder(item: pytest.Item) -> str:
    """Return the folder of a test, or, for a test of the contract, the folder of its backend."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return getattr(params.get("backend"), "folder", "") or item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_finish() -> None:
    """Exempt all existing objects from garbage collection, so that the collections of ``nothing_left_behind`` are fast."""
    if _is_jax_backend_running():
        raise pytest.UsageError("importing a test module started JAX's backend, which makes every later fork unsafe")
    gc.collect()
    gc.freeze()


def _is_jax_backend_running() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Record whether the test itself failed, for ``nothing_left_behind``."""
    report = yield
    if report.when == "call":
        item.stash[_TEST_FAILED] = report.failed
    return report


# --- resources of a process ---------------------------------------------------------------------


@dataclass(frozen=True)
class Resources:
    """The descendants, descriptors, threads and shared memory of this process: descriptions by unique key."""

    processes: dict[tuple[int, float], str] = field(default_factory=dict)
    descriptors: dict[tuple[int, str], str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    shared_memory: dict[str, str] = field(default_factory=dict)

    def new_since(self, before: Resources, kinds: Sequence[str] = KINDS) -> dict[str, list[str]]:
        """Return the descriptions of resources that are neither in ``before`` nor tolerated, by kind."""
        tolerated = _tolerated_resources()
        found = {}
        for kind in kinds:
            earlier = getattr(before, kind)
            new = {key: text for key, text in getattr(self, kind).items() if key not in earlier}
            if texts := [text for key, text in new.items() if not _is_tolerated(kind, key, tolerated)]:
                found[kind] = texts
        return found


def _take_stock() -> Resources:
    return Resources(_processes(), _descriptors(), _threads(), _shared_memory())


def _processes() -> dict[tuple[int, float], str]:
    """Return all descendants. A zombie counts only if this process should have joined it."""
    found = {}
    children_to_join = {process.pid for process in multiprocessing.process._children}
    for process in _descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE and process.pid not in children_to_join:
                _reap_if_adopted(process)
                continue
            if process.status() == psutil.STATUS_ZOMBIE:
                command = "(a multiprocessing child that ended and was never joined)"
            else:
                command = " ".join(process.cmdline()) or process.name()
            found[process.pid, process.create_time()] = f"pid {process.pid}: {command[:200]}"
    return found


def _descendants(pid: int | None = None) -> Iterator[psutil.Process]:
    """Yield all descendants of a process, by default of this one."""
    for child in _children(os.getpid() if pid is None else pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(child)
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):  # psutil reads the parent of every process on the machine, which is far slower
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def _reap_if_adopted(process: psutil.Process) -> None:
    """Reap an orphan that this process has adopted.

    multiprocessing itself reaps ``forkserver`` and ``resource_tracker``, and other zombies are reaped by their parents.
    """
    if process.ppid() != os.getpid() or process.pid in (_forkserver_pid(), _tracker_pid()):
        return
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)


def _descriptors() -> dict[tuple[int, str], str]:
    found = {}
    if not _LINUX:
        return found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not re.fullmatch(r"/proc/\d+/fd", target):  # the descriptor that reads this list
                found[int(name), target] = f"fd {name}: {target}"
    return found


def _threads() -> dict[int, str]:
    ours = {thread.native_id: thread.name for thread in threading.enumerate()}
    if not _LINUX:
        return {tid: name for tid, name in ours.items() if tid is not None}
    found = {}
    for tid in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):
            name = ours.get(tid) or f"native {Path(f'/proc/self/task/{tid}/comm').read_text().strip()}"
            found[tid] = f"thread {tid}: {name}"
    return found


def _shared_memory() -> dict[str, str]:
    if not os.path.isdir("/dev/shm"):
        return {}
    return {name: f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


# --- tolerated resources ------------------------------------------------------------------------


@dataclass(frozen=True)
class ToleratedResources:
    """The resources that a test may leave behind. With ``ray``, these include everything that a running Ray may create."""

    pids: set[int | None]
    descriptors: set[int | None]
    files: set[str]
    native_threads: bool
    ray: bool


def _tolerated_resources() -> ToleratedResources:
    """Return the resources that a test may leave behind.

    1. multiprocessing starts one fork server and one resource tracker per process. Both run until the
    interpreter exits, and use one descriptor here (in later versions, the fork server uses two). They are
    recognized by their pids and descriptors.
    2. JAX, PyTorch, TensorFlow and Ray's gRPC have pools of C++ threads, which can grow at any time, even after
    ``ray.shutdown()``, and never end. Only threads that Python did not start are tolerated, and only if one of
    these libraries is loaded (for JAX: if its backend runs).
    3. A running Ray can start processes and threads and open sockets at any time. While ``ray.is_initialized()``,
    all descendants of Ray's own processes are tolerated, and all descriptors and native threads of this one.
    4. multiprocessing's heap, which contains the shared memory of Gymnasium's own AsyncVectorEnv, keeps its
    (unlinked) files for later use. The heap lists them.
    5. Other programs can create entries of /dev/shm at any time (:func:`_is_foreign`).
    """
    server = multiprocessing.forkserver._forkserver
    ray = sys.modules.get("ray")
    return ToleratedResources(
        pids={_forkserver_pid(), _tracker_pid()},
        descriptors={
            getattr(server, "_forkserver_fd", None),
            getattr(server, "_forkserver_alive_fd", None),
            getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None),
        },
        files=_heap_files(),
        native_threads=_is_jax_backend_running() or any(name in sys.modules for name in _LIBRARIES_WITH_NATIVE_THREADS),
        ray=ray is not None and ray.is_initialized(),
    )


def _heap_files() -> set[str]:
    heap = getattr(sys.modules.get("multiprocessing.heap"), "BufferWrapper", None)
    files = set()
    for arena in getattr(getattr(heap, "_heap", None), "_arenas", ()):
        with contextlib.suppress(OSError):
            files.add(os.readlink(f"/proc/self/fd/{getattr(arena, 'fd', -1)}"))
    return files


def _forkserver_pid() -> int | None:
    return getattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", None)


def _tracker_pid() -> int | None:
    return getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)


def _is_tolerated(kind: str, key: object, tolerated: ToleratedResources) -> bool:
    if kind == "processes":
        return key[0] in tolerated.pids or (tolerated.ray and _belongs_to_ray(key[0]))
    if kind == "descriptors":
        return key[0] in tolerated.descriptors or key[1] in tolerated.files or tolerated.ray
    if kind == "threads":
        native = key not in {thread.native_id for thread in threading.enumerate()}
        return native and (tolerated.native_threads or tolerated.ray)
    return _is_foreign(key)


def _belongs_to_ray(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return any(
            name.startswith(("ray::", "raylet", "gcs_server")) or "/ray/" in name
            for ancestor in (process, *process.parents())
            if ancestor.pid != os.getpid()
            for name in ancestor.cmdline()[:2]
        )
    return True  # the process has ended, so it is not left behind


def _is_foreign(name: str) -> bool:
    """True if this entry of /dev/shm was not created by this process or a descendant, as far as can be determined.

    A process that has the entry mapped or open counts as its creator. If there is none, the name decides: this package's
    names begin with ``vecenv``, and a pid in a name is the pid of the creator.
    """
    path = f"/dev/shm/{name}"
    if not os.path.exists(path):
        return True
    own_pids = {os.getpid(), *(process.pid for process in _descendants())}
    holders = {pid for pid in psutil.pids() if _has_open(pid, path)}
    if holders:
        return not holders & own_pids
    other_pids = {int(number) for number in re.findall(r"\d+", name)} - own_pids
    return not name.startswith("vecenv") or any(map(psutil.pid_exists, other_pids))


def _has_open(pid: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        if path in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
            return True
        return any(os.readlink(descriptor) == path for descriptor in Path(f"/proc/{pid}/fd").iterdir())
    return False


# --- the fixture --------------------------------------------------------------------------------


@pytest.fixture
def take_stock() -> Callable[[], Resources]:
    """Return a function that lists the resources of this process, for tests that compare them themselves."""
    return _take_stock


@pytest.fixture
def closes() -> Iterator[Callable[[Any], Any]]:
    """Yield a function that registers an object to be closed at the end of the test: ``envs = closes(...)``."""
    with contextlib.ExitStack() as stack:
        yield lambda envs: stack.enter_context(contextlib.closing(envs))


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, a descriptor, a thread or an entry of /dev/shm behind.

    It is the first fixture to start and the last to end. Before the comparison it drops the references to the values of
    other fixtures, because an array keeps its mapping open, and the mapping keeps its descriptor open. If a test failed,
    only processes count, because its traceback keeps all its objects alive. New resources get :data:`SETTLE_SECONDS` to
    disappear, and a garbage collection, because the finalizer of an unreachable object may release them.
    """
    before = _take_stock()
    yield
    request.node.funcargs.clear()
    kinds = ("processes",) if request.node.stash.get(_TEST_FAILED, False) else KINDS
    deadline = time.monotonic() + SETTLE_SECONDS
    pause, rounds = 0.005, 0
    while leftovers := _take_stock().new_since(before, kinds):
        if time.monotonic() >= deadline and rounds >= MIN_SETTLE_ROUNDS:
            break
        rounds += 1
        if "descriptors" in leftovers or pause > 0.02:  # collecting is slow, and most leftovers disappear without it
            gc.collect()
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    if not leftovers and kinds is KINDS:
        gc.freeze()  # objects that survive a test are permanent, and every collection would traverse them again
    if leftovers:
        _kill_new_processes(before)
        lines = [f"{kind.replace('_', ' ')}: {text}" for kind, texts in leftovers.items() for text in texts]
        pytest.fail(f"left behind, {SETTLE_SECONDS:g} s after the test:\n  " + "\n  ".join(lines), pytrace=False)


def _kill_new_processes(before: Resources) -> None:
    """Kill the processes that this test left behind, so that they do not affect the next test."""
    tolerated = _tolerated_resources()
    for pid, created in set(_processes()) - set(before.processes):
        if not _is_tolerated("processes", (pid, created), tolerated):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created:
                    process.send_signal(signal.SIGKILL)
