"""Ends the programs that environments started, including those outside of their worker's process group.

A helper program that was started with ``start_new_session=True`` or called ``setsid`` has left the group, and one that
forked twice has lost its parent. So each worker marks itself (:func:`mark`): it sets the soft limit of ``RLIMIT_LOCKS``,
which Linux has not enforced since 2.4.25, to a token. Children inherit it across ``fork`` and ``exec``, and
``/proc/PID/limits`` shows it.

Workers do not adopt orphans (``PR_SET_CHILD_SUBREAPER``): ended orphans would stay zombies, ``os.wait()`` in an environment
would return unknown processes, and a daemon that waits until its parent is pid 1 would wait forever.

Programs started by another service (``docker run``, ``systemd-run``) survive. Everything outside of the process groups
also survives a SIGKILL of the whole program. Without ``/proc`` or the limit (macOS, some sandboxes), only process groups are
ended. No function here raises, but a signal handler that was deferred to the end of a search may.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from vecenv.system.cores import read_kernel_file
from vecenv.system.signals import deferred_signals, suppress_os_errors

if sys.platform != "win32":
    import resource

_LINUX: Final = sys.platform.startswith("linux")
_RLIMIT_LOCKS: Final = 10  # the resource module has no name for it
_SMALLEST_TOKEN: Final = 1 << 62  # a smaller limit is not a token
_INNER_BITS: Final = (1 << 22) - 1  # these bits distinguish the workers of an engine inside a worker
_MAX_SEARCHES: Final = 10  # more than one, because a helper may fork while it is being killed
_MAX_EMPTY_SEARCHES: Final = 3  # after these, stop, even if processes are still being created
_KILL_SECONDS: Final = 0.5  # time for processes to end after SIGKILL; only uninterruptible system calls take longer

_own_token = 0  # set by mark()


class _Process(NamedTuple):
    pid: int
    parent: int
    started: int  # ticks since the machine booted
    ended: bool


def new_token() -> int:
    """Return a new token for a worker or helper process to be started; 0: none, as on systems other than Linux.

    In an engine inside a worker, the token has the high bits of the outer worker's token, so that helpers belong to both. An
    engine nested one level deeper has no tokens of its own: its helpers belong to the workers around it.
    """
    outer = _read_token("self")
    if outer < _SMALLEST_TOKEN:
        return _SMALLEST_TOKEN | secrets.randbits(39) << 22 if _LINUX else 0
    return 0 if outer & _INNER_BITS else outer | 1 + secrets.randbelow(_INNER_BITS)


# -- in the worker ------------------------------------------------------------------------------------------------------


def mark(token: int) -> None:
    """Mark this process and all that it starts from now on. Call this before building environments."""
    global _own_token
    _own_token = token
    if token:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(_RLIMIT_LOCKS, (token, resource.getrlimit(_RLIMIT_LOCKS)[1]))


def end_own_descendants() -> int:
    """End all other processes with this one's mark; return the number killed. Outside of Linux, send SIGTERM to its group.

    Call this after closing the environments.
    """
    if not _LINUX:
        _terminate_group()
    return end_marked([_own_token] if _own_token else [])


def _terminate_group() -> None:
    """Send SIGTERM to the rest of the process group, on systems where processes cannot be listed.

    The process that started this one can kill those that remain, with :func:`end_group`.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):  # not in the main thread, or this system has no groups
        if os.getpgrp() == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(os.getpid(), signal.SIGTERM)


# -- in the process that started the worker -------------------------------------------------------------------------------


def end_marked(tokens: Collection[int]) -> int:
    """End all processes with these tokens, except this one and those that must survive; return the number killed.

    Those that are children of this process are reaped: if it adopts orphans, as the first process of a container does, no
    other process reaps them. The call takes about as long for a thousand tokens as for one.
    """
    owners = frozenset(tokens) - {0}

    def find(table: dict[int, _Process]) -> Iterator[_Process]:
        own = table.get(os.getpid())
        for process in table.values():
            if own is not None and process.started >= own.started:  # an older process cannot have one of the tokens
                token = _read_token(process.pid)
                if token in owners or token & ~_INNER_BITS in owners:
                    yield process

    return _kill_until_none_found(find) if owners else 0


def end_descendants(pids: Collection[int]) -> int:
    """End all descendants of these living processes, except themselves; return the number killed."""

    def find(table: dict[int, _Process]) -> Iterator[_Process]:
        children: defaultdict[int, list[_Process]] = defaultdict(list)
        for process in table.values():
            children[process.parent].append(process)
        unvisited = list(pids)
        while unvisited:
            found = children.pop(unvisited.pop(), [])
            unvisited += [process.pid for process in found]
            yield from (process for process in found if process.pid not in pids)

    return _kill_until_none_found(find) if pids else 0


def end_group(pids: Iterable[int]) -> None:
    """Kill the process groups of workers: the helpers that their environments started, and the workers that still run.

    Call this before the workers are reaped: until then their pids cannot be reused.
    """
    for pid in pids:
        with suppress_os_errors(AttributeError):
            os.killpg(pid, signal.SIGKILL)


# -- finding and ending -------------------------------------------------------------------------------------------------


def _read_token(pid: int | str) -> int:
    """Return the soft limit on file locks of a process, which is its token if it is marked; 0 if it is unknown."""
    soft = read_kernel_file(f"/proc/{pid}/limits").partition("\nMax file locks")[2].split(maxsplit=1)[:1]
    return int(soft[0]) if soft and soft[0].isdigit() else 0


def _list_processes() -> dict[int, _Process]:
    """Return all processes by pid."""
    found: list[_Process | None] = []
    with contextlib.suppress(OSError):
        found = [_read_process(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return {process.pid: process for process in found if process is not None}


def _read_process(pid: int) -> _Process | None:
    fields = read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return _Process(pid, int(fields[1]), int(fields[19]), fields[0] in "ZX") if len(fields) >= 20 else None


def _is_alive(process: _Process) -> bool:
    now = _read_process(process.pid)
    return now is not None and now.started == process.started and not now.ended


def _kill_until_none_found(find: Callable[[dict[int, _Process]], Iterable[_Process]]) -> int:
    """Search and kill until nothing is found. A search that coincides with a fork may miss the child, so it is repeated."""
    count = 0
    empty_searches_left = _MAX_EMPTY_SEARCHES
    for _ in range(_MAX_SEARCHES if _LINUX else 0):
        with deferred_signals():
            newest = _newest_pid()
            if killed := _kill_and_wait([process for process in find(_list_processes()) if not _must_survive(process.pid)]):
                count += killed
                continue
            empty_searches_left -= 1
            if not empty_searches_left or _newest_pid() == newest:
                break
    return count


def _newest_pid() -> str:
    return read_kernel_file("/proc/loadavg").rpartition(" ")[2]


def forkserver_pid() -> int | None:
    """Return the pid of this program's fork server; ``None`` if it is not running."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pid: int | None = getattr(server, "_forkserver_pid", None)
    return pid


def _must_survive(pid: int) -> bool:
    """True for this process, its own fork server (which starts later workers) and the resource trackers.

    A tracker of ``multiprocessing`` ends by itself after its last user, and unlinks the resources that users left behind.
    """
    if pid in (os.getpid(), forkserver_pid()):
        return True
    return "multiprocessing.resource_tracker" in read_kernel_file(f"/proc/{pid}/cmdline")


def _kill_and_wait(processes: Collection[_Process]) -> int:
    """Kill processes, and wait for up to half a second until they have ended; return the number killed."""
    count = sum(_kill(process) for process in processes if not process.ended)
    deadline = time.monotonic() + _KILL_SECONDS
    while count and any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.001)
    for process in processes:
        with contextlib.suppress(OSError):  # it is the child of another process, unless this one adopts orphans
            os.waitpid(process.pid, os.WNOHANG)
    return count


def _kill(process: _Process) -> bool:
    """Kill a process if it is still alive; return ``True`` if it was signalled. A reused pid is never signalled."""
    descriptor = -1
    try:
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, a sandbox, or no free descriptor
            descriptor = os.pidfd_open(process.pid)
        if not _is_alive(process):
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
