"""Ends the programs that environments started, also those that left their worker's process group.

A process group covers the helpers that stay in it. A helper that was started with ``start_new_session=True``, called
``setsid`` or forked twice has left the group, and its parent may be gone as well, so neither the group nor its descent leads
to it. Therefore a worker marks itself when it starts (:func:`mark`), and the kernel hands the mark to all that it starts,
across ``fork`` and ``exec``, whatever environment and descriptors they are given. The mark is the soft limit of
``RLIMIT_LOCKS``, which Linux has not enforced since 2.4.25, set to a number that serves as a name. ``/proc/PID/limits``
shows it as long as a process exists (:func:`end_marked`).

A worker is *not* the adopter of its orphans (``PR_SET_CHILD_SUBREAPER``). Orphans that end would stay its zombies until it
ends itself, because only it could reap them; ``os.wait()`` in an environment would meet processes that it does not know, and
a daemon that waits for its parent to become 1 would wait for ever.

Limits: a program that another service started on request (``docker run``, ``systemd-run``) is out of reach, and so is all
that left its group when the whole program is killed by SIGKILL: the kernel ends the workers' groups, and no more. Where
``/proc`` or the resource limit is missing (macOS, some sandboxes), only process groups end. Nothing here raises, except what
a signal handler raises, and that at the end.
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

from vecenv.system.cores import kernel_file
from vecenv.system.uninterrupted import Uninterrupted

if sys.platform != "win32":
    import resource

_LINUX: Final = sys.platform.startswith("linux")
_RLIMIT_LOCKS: Final = 10  # without a name in Python, because nothing has enforced it for twenty years
_FIRST: Final = 1 << 62  # of the tokens; smaller limits are not ours
_INNER: Final = (1 << 22) - 1  # these bits tell the workers of an engine inside a worker apart
_ROUNDS: Final = 10  # of looking and ending: a helper may have forked while it was being ended
_LOOKS_FOR_NOTHING: Final = 3
_GONE_SECONDS: Final = 0.5  # until what was sent SIGKILL has ended; longer only in an uninterruptible call of the kernel

_own = 0  # the token of this process, once it is marked


class _Process(NamedTuple):
    pid: int
    parent: int
    started: int  # ticks since the machine was
    ended: bool


def new_token() -> int:
    """What to mark one worker with, from the process that starts it; 0 where there can be no mark.

    The token of an engine's worker that is itself inside a worker begins as the outer one's, so that its helpers belong to
    both. An engine one level further in has no marks of its own: its helpers belong to the workers around it.
    """
    around = _mark_of("self")
    if around < _FIRST:
        return _FIRST | secrets.randbits(39) << 22 if _LINUX else 0
    return 0 if around & _INNER else around | 1 + secrets.randbelow(_INNER)


# -- in the worker ------------------------------------------------------------------------------------------------------


def mark(token: int) -> None:
    """Mark this process, before its environments are built, and with it all that will be started here."""
    global _own
    _own = token
    if token:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(_RLIMIT_LOCKS, (token, resource.getrlimit(_RLIMIT_LOCKS)[1]))


def end_own() -> int:
    """In a worker, when its environments are closed: end all that has its mark; returns how many processes that were."""
    if not _LINUX:
        _tell_the_group()
    return end_marked([_own] if _own else [])


def _tell_the_group() -> None:
    """Where its members are not known: all but this process are asked. The process that started it can kill what is left."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no leader of a group; not the main thread; no groups
        if os.getpgrp() == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(os.getpid(), signal.SIGTERM)


# -- in the process that started it ---------------------------------------------------------------------------------------


def end_marked(tokens: Collection[int]) -> int:
    """End what workers with these tokens left behind, once they were reaped; returns how many processes.

    What is a child of this process is reaped: where it adopts orphans, as the first process of a container does, nothing
    else does that. Takes about as long for a thousand tokens as for one.
    """
    wanted = frozenset(tokens) - {0}

    def find(table: dict[int, _Process]) -> Iterator[_Process]:
        own = table.get(os.getpid())
        for process in table.values():
            if own is not None and process.started >= own.started:  # what is older is not worth a look
                found = _mark_of(process.pid)
                if found in wanted or found & ~_INNER in wanted:
                    yield process

    return _end_all(find) if wanted else 0


def end_descendants(pids: Collection[int]) -> int:
    """End all that descends from these living processes, themselves not included; returns how many processes that were."""

    def find(table: dict[int, _Process]) -> Iterator[_Process]:
        children: defaultdict[int, list[_Process]] = defaultdict(list)
        for process in table.values():
            children[process.parent].append(process)
        ahead = list(pids)
        while ahead:
            below = children.pop(ahead.pop(), [])
            ahead += [process.pid for process in below]
            yield from (process for process in below if process.pid not in pids)

    return _end_all(find) if pids else 0


def end_group(pids: Iterable[int]) -> None:
    """Kill what is left in the process groups that (ended) workers led: the helpers that their environments started.

    To be called before a leader is reaped: until then no other process can have its number.
    """
    for pid in pids:
        with contextlib.suppress(OSError, AttributeError):
            os.killpg(pid, signal.SIGKILL)


# -- finding and ending -------------------------------------------------------------------------------------------------


def _mark_of(pid: int | str) -> int:
    """The number that serves as a mark; 0 where there is none."""
    soft = kernel_file(f"/proc/{pid}/limits").partition("\nMax file locks")[2].split(maxsplit=1)[:1]
    return int(soft[0]) if soft and soft[0].isdigit() else 0


def _look() -> dict[int, _Process]:
    """Every process there is, by its pid."""
    found: list[_Process | None] = []
    with contextlib.suppress(OSError):
        found = [_look_at(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    return {process.pid: process for process in found if process is not None}


def _look_at(pid: int) -> _Process | None:
    fields = kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return _Process(pid, int(fields[1]), int(fields[19]), fields[0] in "ZX") if len(fields) >= 20 else None


def _is_still(process: _Process) -> bool:
    now = _look_at(process.pid)
    return now is not None and now.started == process.started and not now.ended


def _end_all(find: Callable[[dict[int, _Process]], Iterable[_Process]]) -> int:
    """Look and end, until a look finds nothing; a look during which a process forked may have missed the child."""
    count = 0
    again = _LOOKS_FOR_NOTHING
    for _ in range(_ROUNDS if _LINUX else 0):
        with Uninterrupted():
            newest = _newest_pid()
            if killed := _end([process for process in find(_look()) if not _stays(process.pid)]):
                count += killed
                continue
            again -= 1
            if not again or _newest_pid() == newest:
                break
    return count


def _newest_pid() -> str:
    return kernel_file("/proc/loadavg").rpartition(" ")[2]


def forkserver_pid() -> int | None:
    """The fork server of this program; ``None``: it does not run."""
    server = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    pid: int | None = getattr(server, "_forkserver_pid", None)
    return pid


def _stays(pid: int) -> bool:
    """This process; its own fork server, from which later workers come; and ``multiprocessing``'s resource trackers.

    A tracker ends by itself when all that it serves have ended, and unlinks what they left behind.
    """
    if pid in (os.getpid(), forkserver_pid()):
        return True
    return "multiprocessing.resource_tracker" in kernel_file(f"/proc/{pid}/cmdline")


def _end(processes: Collection[_Process]) -> int:
    """Kill processes, and wait until they are gone; returns how many there were to kill."""
    count = sum(_kill(process) for process in processes if not process.ended)
    deadline = time.monotonic() + _GONE_SECONDS
    while count and any(map(_is_still, processes)) and time.monotonic() < deadline:
        time.sleep(0.001)
    for process in processes:
        with contextlib.suppress(OSError):  # it is another process's child, unless this one adopts orphans
            os.waitpid(process.pid, os.WNOHANG)
    return count


def _kill(process: _Process) -> bool:
    """Whether it was there to kill. A process id that is used anew is never signalled."""
    descriptor = -1
    try:
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, a sandbox, or no descriptor left
            descriptor = os.pidfd_open(process.pid)
        if not _is_still(process):
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
