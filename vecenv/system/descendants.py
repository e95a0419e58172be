"""Ending the programs that environments started, also those in a session of their own.

A process group covers the helpers that stay in it. A helper that was started with ``start_new_session=True``, called
``setsid`` or forked twice has left the group, and its parent may be gone as well. Two things find it:

* *descent*: while a worker lives, whoever descends from it by ``/proc`` (:func:`snapshot`), held by pidfds, so that a
  process id that is used anew is never signalled;
* *marks*: a worker marks itself when it starts (:func:`adopt`), twice, because a mark has to survive what its child does.
  A variable in ``os.environ`` comes along when another program is executed; a mapped page whose file has the token for its
  name comes along with a fork, where ``/proc/*/environ`` still shows what the forking program was started with. Both are
  found after the worker was killed from outside (:func:`end_marked`), in one look at ``/proc`` for any number of workers.

A worker is *not* the adopter of its orphans (``PR_SET_CHILD_SUBREAPER``), unless it is asked for. Orphans that end would
stay its zombies until it ends itself, because only it could reap them: an environment that starts a program through a shell
in each episode would fill the process table. ``os.wait()`` in an environment would meet processes that it does not know,
and a daemon that waits for its parent to become 1 would wait for ever. Processes that are our own ask for it.

The limits. Out of reach is a helper that lost both marks and its descent: executed with an emptied environment
(``env={}``, ``sudo``) *and* in a session of its own *and* orphaned, because whoever started it ended or because the worker
was killed from outside. So is what another service started on request (``docker run``, ``systemd-run``). And when the whole
program is killed by SIGKILL nobody is left to look: then the kernel ends the workers' groups, and no more.

Off Linux everything here does nothing, but that :func:`end_own` tells the process group to end. Nothing here raises, except
what a signal handler does, and that at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from io import FileIO
from typing import Final, NamedTuple

from vecenv.system.uninterrupted import Uninterrupted

__all__ = ["MARK", "Descendants", "adopt", "end_descendants", "end_marked", "end_own", "new_token", "reap_group", "snapshot"]

MARK: Final = "VECENV_WORKER"
"""The variable that a worker's helpers inherit: the tokens of all workers around them, the outermost first."""

_LINUX: Final = sys.platform.startswith("linux")
_PAGE_NAME: Final = "vecenv-worker-"
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_GET_CHILD_SUBREAPER: Final = 37
_ROUNDS: Final = 10  # of looking and ending: a helper may have forked while it was being ended
_LOOKS_FOR_NOTHING: Final = 3
_GONE_SECONDS: Final = 0.5  # until what was sent SIGKILL has ended; longer only in an uninterruptible call of the kernel


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int
    started: int  # ticks since the machine was
    ended: bool


def new_token() -> str:
    """What one worker is marked with; nobody can guess it."""
    return secrets.token_hex(8)


# -- in the worker ------------------------------------------------------------------------------------------------------


def adopt(token: str, *, orphans: bool = False) -> None:
    """In a worker, before its environments are built: mark what will be started here.

    Args:
        token: Of this worker alone.
        orphans: Also become the parent of descendants whose own parents end; see above for why that is not always done.
    """
    if not _LINUX:
        return
    around = os.environ.get(MARK)  # a worker of an engine that lives in a worker
    os.environ[MARK] = f"{around}:{token}" if around else token
    with contextlib.suppress(OSError, AttributeError):
        _map_a_page(f"{_PAGE_NAME}{token}")
    if orphans:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _map_a_page(name: str) -> None:
    """Through ctypes: ``mmap.mmap`` would keep a descriptor, and its page could be unmapped by the garbage collector."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        call = ctypes.CDLL(None).mmap
        call.restype = ctypes.c_void_p
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        nothing, private = 0, 2  # PROT_NONE: nobody can even read it by mistake
        call(None, os.sysconf("SC_PAGE_SIZE"), nothing, private, descriptor, 0)
    finally:
        os.close(descriptor)


def end_own(token: str) -> int:
    """In a worker, when its environments are closed: end its descendants, its process group and what it has marked.

    Returns:
        How many processes were ended.
    """

    if not _LINUX:
        _tell_the_group()

    def find(table: dict[int, _Process]) -> list[_Process]:
        own = os.getpid()
        led = [process for process in table.values() if process.group == own]
        return [*_below(table, [own]), *_marked(table, {token}), *led]

    return _end_all(find)


def _tell_the_group() -> None:
    """Where it is not known who is in it: all but ourselves are asked. Whoever started us can kill what is left."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no leader of a group; not the main thread; no groups
        if os.getpgrp() == os.getpid():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.killpg(os.getpid(), signal.SIGTERM)


# -- in whoever started it ------------------------------------------------------------------------------------------------


class Descendants:
    """Processes, each held by a pidfd where there are pidfds, so that they and nobody else can be ended later."""

    def __init__(self, processes: Iterable[_Process] = ()) -> None:
        self._held: list[tuple[_Process, int]] = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                self._held.append((process, _hold(process)))

    def end(self) -> int:
        """Kill them, wait until they are gone, and let go; returns how many there were."""
        with Uninterrupted():
            return self._end()

    def _end(self) -> int:
        count = sum(_kill(process, descriptor) for process, descriptor in self._held)
        if count:
            deadline = time.monotonic() + _GONE_SECONDS
            adopts = _adopts()
            for process, descriptor in self._held:
                _wait_until_gone(process, descriptor, deadline)
                if adopts:
                    with contextlib.suppress(OSError):  # it is another process's child
                        os.waitpid(process.pid, os.WNOHANG)
        self.close()
        return count

    def close(self) -> None:
        """Let go without ending them. Idempotent."""
        while self._held:
            _, descriptor = self._held.pop()
            if descriptor >= 0:
                os.close(descriptor)

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"Descendants({[process.pid for process, _ in self._held]})"


def snapshot(pids: Collection[int]) -> Descendants:
    """All that descends from these living processes right now, themselves not included.

    To be taken before they are told to end, because descent ends with them; to be given back by :meth:`Descendants.end` or
    :meth:`Descendants.close`.
    """
    if not _LINUX or not pids:
        return Descendants()
    with Uninterrupted():
        return Descendants(_without_trackers(_below(_look(), pids)))


def reap_group(leader: int) -> None:
    """Reap what was killed in the process group of a child that has ended and was reaped: orphans may be ours by now.

    They are where this process is the first of a container, or adopts orphans; there is none beside it that would reap them.
    """
    if not _LINUX or not _adopts():
        return
    deadline = time.monotonic() + _GONE_SECONDS
    with contextlib.suppress(OSError):  # no more children in that group
        while os.waitpid(-leader, os.WNOHANG)[0] or time.monotonic() < deadline:
            time.sleep(0.001)


def end_descendants(pids: Collection[int]) -> int:
    """End all that descends from these living processes, themselves not included; returns how many were ended."""
    return _end_all(lambda table: _below(table, pids)) if pids else 0


def end_marked(tokens: Collection[str]) -> int:
    """End whatever workers with these tokens left behind, once they have ended themselves; returns how many there were.

    To be called by an ancestor of the workers. Takes about as long for a thousand tokens as for one.
    """
    return _end_all(lambda table: _marked(table, frozenset(tokens))) if tokens else 0


# -- finding ------------------------------------------------------------------------------------------------------------


def _look() -> dict[int, _Process]:
    """Every process there is, by its pid."""
    table: dict[int, _Process] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (process := _look_at(int(name))) is not None:
                table[process.pid] = process
    return table


def _look_at(pid: int) -> _Process | None:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    return _Process(pid, int(fields[1]), int(fields[2]), int(fields[19]), fields[0] in b"ZX")


def _read(pid: int, name: str) -> bytes:
    """A file of a process; empty if it is gone or somebody else's."""
    try:
        with FileIO(f"/proc/{pid}/{name}") as file:
            return file.readall()
    except OSError:
        return b""


def _children(table: dict[int, _Process]) -> defaultdict[int, list[_Process]]:
    children: defaultdict[int, list[_Process]] = defaultdict(list)
    for process in table.values():
        children[process.parent].append(process)
    return children


def _below(table: dict[int, _Process], pids: Collection[int]) -> list[_Process]:
    """Whoever descends from ``pids``, the living and the dead, without ``pids``."""
    children = _children(table)
    found: dict[int, _Process] = {}
    ahead = list(pids)
    while ahead:
        for process in children[ahead.pop()]:
            if process.pid not in found and process.pid not in pids:
                found[process.pid] = process
                ahead.append(process.pid)
    return list(found.values())


def _marked(table: dict[int, _Process], tokens: Collection[str]) -> list[_Process]:
    """Whoever has one of these marks, and whoever descends from them.

    The files that tell are slow to read, and so they are read only of processes that can be meant: younger than we are, and
    adopted by one of our ancestors or by init. What is ending shows its mark no more, but may still have children.
    """
    own = table.get(os.getpid())
    if own is None:
        return []
    adopters = {1} | ({own.pid} if _adopts() else set())
    ancestor = table.get(own.parent)
    while ancestor is not None and ancestor.pid not in adopters:
        adopters.add(ancestor.pid)
        ancestor = table.get(ancestor.parent)
    children = _children(table)
    seen = {own.pid, *adopters}
    roots: set[int] = set()
    ahead = list(adopters)
    while ahead:
        for process in children[ahead.pop()]:
            if process.pid in seen or process.started < own.started:
                continue
            seen.add(process.pid)
            marked = _is_marked(process.pid, tokens)
            if marked:
                roots.add(process.pid)
            elif marked is None:
                ahead.append(process.pid)
    return [table[pid] for pid in roots] + _below(table, roots) if roots else []


def _is_marked(pid: int, tokens: Collection[str]) -> bool | None:
    """``None``: it cannot be known, because it is ending, or somebody else's.

    In this order: a process that executes a program loses the page first, and has no environment for a moment.
    """
    maps = _read(pid, "maps")
    prefix = f"/memfd:{_PAGE_NAME}".encode()
    if prefix in maps and any(prefix + token.encode() in maps for token in tokens):
        return True
    environ = _read(pid, "environ")
    for _ in range(3 if maps else 0):
        if environ:
            break
        time.sleep(0.001)
        environ = _read(pid, "environ")
    if MARK.encode() in environ:
        for entry in environ.split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode() and not _tokens(value).isdisjoint(tokens):
                return True
    return False if environ or maps else None


def _tokens(value: bytes) -> set[str]:
    """What a value of :data:`MARK` says."""
    return set(value.decode(errors="replace").split(":"))


def _adopts() -> bool:
    """Whether orphans among our descendants become our own children."""
    if os.getpid() == 1:
        return True
    answer = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return bool(answer.value)


# -- ending -------------------------------------------------------------------------------------------------------------


def _end_all(find: Callable[[dict[int, _Process]], list[_Process]]) -> int:
    """Look and end, until a look finds nobody; one during which anybody forked may have missed the child."""
    count = 0
    again = _LOOKS_FOR_NOTHING
    for _ in range(_ROUNDS if _LINUX else 0):
        with Uninterrupted():
            newest = _newest_pid()
            others = {process.pid: process for process in find(_look()) if process.pid != os.getpid()}
            if found := _without_trackers(others.values()):
                count += Descendants(found).end()
                continue
            again -= 1
            if not again or _newest_pid() == newest:
                break
    return count


def _newest_pid() -> bytes:
    with contextlib.suppress(OSError), open("/proc/loadavg", "rb") as file:
        return file.read().rpartition(b" ")[2]
    return b""


def _without_trackers(processes: Iterable[_Process]) -> list[_Process]:
    """``multiprocessing``'s resource tracker ends by itself when all it serves have, and unlinks what they left behind.

    This process's own fork server stays, too: later workers come from it, and ``multiprocessing`` itself waits for it. (One
    that started together with a worker has that worker's mark.)
    """
    server = getattr(getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None), "_forkserver_pid", None)
    return [
        process
        for process in processes
        if not process.ended
        and process.pid != server
        and b"multiprocessing.resource_tracker" not in _read(process.pid, "cmdline")
    ]


def _hold(process: _Process) -> int:
    """A pidfd, or -1 where there is none to be had.

    Raises:
        ProcessLookupError: It is gone, or its process id is somebody else's by now.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # an old kernel, a sandbox, or no descriptor left
        descriptor = -1
    if not _is_still(process):
        if descriptor >= 0:
            os.close(descriptor)
        raise ProcessLookupError(process.pid)
    return descriptor


def _is_still(process: _Process) -> bool:
    now = _look_at(process.pid)
    return now is not None and now.started == process.started and not now.ended


def _kill(process: _Process, descriptor: int) -> bool:
    """Whether there was somebody to kill."""
    try:
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        elif _is_still(process):
            os.kill(process.pid, signal.SIGKILL)
        else:
            return False
    except OSError:
        return False
    return True


def _wait_until_gone(process: _Process, descriptor: int, deadline: float) -> None:
    if descriptor >= 0:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
        return
    while _is_still(process) and time.monotonic() < deadline:
        time.sleep(0.002)
