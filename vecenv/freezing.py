"""Frozen copies of environments of any kind: copies of their processes, made by ``fork``. Experimental.

``freeze`` makes a worker fork. The copy waits, and shares with the worker all memory to which neither of them writes.
``thaw`` makes the copy fork in turn, and the new process replaces the worker of a row. So even the state of C code is kept.

Only memory is copied. So freezing a worker with threads, child processes, a GPU, timers, shared memory, sockets, pipes, or
files open for writing raises an error that gives the reason. Files open for reading are reopened in the copy at the same
position, because otherwise both processes would share one position. ``random`` reseeds its generator in each fork, so the
copy restores the generator's state.

A copy is not a child of the worker, because an environment's ``os.wait()`` could reap it there. It ends with the caller
through the workers' lifeline, and has its own token, stack file and pidfd.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import random
import select
import signal
import stat
import sys
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from gymnasium.utils import seeding

from vecenv.errors import NotRestorable, WorkerDied, format_seconds
from vecenv.front.arguments import milliseconds_until
from vecenv.link.channel import Channel, ChannelClosed, WorkerEnd
from vecenv.link.messages import Failure, Op, Outcome, Reply, decode, encode, summary
from vecenv.link.own_generators import OwnGenerators
from vecenv.state.capture import find_layers, reachable_objects
from vecenv.system.cores import Placement, SpinPolicy, read_kernel_file
from vecenv.system.descendants import new_token
from vecenv.system.descriptors import Descriptor, DescriptorOwner, list_open_resources
from vecenv.system.shared_generators import seed_process
from vecenv.system.signals import deferred_signals, suppress_os_errors
from vecenv.system.spawning import set_up_copy
from vecenv.system.supervision import EXIT_CODE_UNKNOWN, ProcessWatch, StackFile, flush_output
from vecenv.worker.main import Ready, WorkerState, make_rows

_READY_SECONDS: Final = 10.0  # a copy takes milliseconds
_CLOSE_SECONDS: Final = 2.0
_GPU_DEVICES: Final = ("/dev/nvidia", "/dev/dri", "/dev/kfd")
_STATELESS_DEVICES: Final = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"})
_MAX_NAMES: Final = 5  # in an error message
_PF_EXITING: Final = 4
_HAS_PROC: Final = os.path.exists("/proc/self/fd")  # at import, because `exists` suppresses a signal handler's TimeoutError

_frozen_by_engine: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Frozen]] = weakref.WeakKeyDictionary()
"""Engine -> its frozen copies."""


CallersFile: TypeAlias = tuple[int, int, int]
"""A file that the caller has open: its number, device and inode. The caller may close it and reuse the number."""


@dataclass(slots=True)
class CopyPlan:
    """The arguments of a copy. The caller holds the files open, and the copy reopens them.

    Attributes:
        caller: The caller's pid.
        reader, writer: The caller's files for the copy's ends of its channel.
        stack_file: The caller's file for the copy's stack.
        token: The mark of the copy, see :mod:`vecenv.system.descendants`.
        row: The row that the copy serves; ``None`` for a copy that waits.
        placement: The cores for the copy.
        seed: The new seed of its generators; ``None``: their states are kept.
    """

    caller: int
    reader: CallersFile
    writer: CallersFile
    stack_file: CallersFile
    token: int
    row: int | None = None
    placement: Placement | None = None
    seed: int | None = None


# -- in a worker ------------------------------------------------------------------------------------------------------


def copy_worker(process: WorkerState, plan: CopyPlan) -> Outcome | None:
    """Fork a worker. The copy waits for requests to fork in turn; each of its forks serves a row.

    Returns:
        The reply of the worker; ``None`` in a copy that serves a row.
    """
    rows = process.rows
    assert rows is not None
    try:
        reason = _explain_unsafe_fork(process)
        is_copy = not reason and _fork(plan.token)
    except Exception as error:  # for example, a file that can no longer be opened
        reason, is_copy = summary(error), False
    if reason:
        return Outcome(failures=[Failure(rows.first, NotRestorable(f"it cannot be frozen: {reason}"), fatal=False)])
    if not is_copy:
        return Outcome()
    try:
        _wait_to_be_copied(process, plan)
    except BaseException:  # the copy must not continue as the original worker
        traceback.print_exc()
        os._exit(1)
    return None


def _wait_to_be_copied(process: WorkerState, plan: CopyPlan) -> None:
    """Fork at each request. Only the forks return: the waiting process exits here."""
    process.channel.close()
    policy = SpinPolicy(0.0, np.zeros(1))
    with contextlib.suppress(ChannelClosed, FileNotFoundError):  # the caller has ended, or another row could not be frozen
        channel = _connect(process, plan)
        _report_ready(channel)
        while True:
            thawed: CopyPlan = pickle.loads(channel.wait(policy)[2] or b"")
            if _fork(thawed.token):
                channel.close()
                _serve_row(process, thawed)
                return
    os._exit(0)


def _serve_row(process: WorkerState, plan: CopyPlan) -> None:
    """Turn a copy into the worker of a row. The worker continues with the environment of the copy."""
    previous, start = process.rows, process.start
    assert previous is not None
    assert plan.row is not None
    assert plan.placement is not None
    start.placement = plan.placement
    cpus = plan.placement.cpus if plan.placement.bound_at_start and plan.placement.cpus is not None else process.cpus
    os.sched_setaffinity(0, cpus)
    process.channel = _connect(process, plan)
    process.rows = make_rows(previous.env_fns, plan.row, plan.row, start.plan, start.plan.layout.view(start.arena.buffer))
    process.rows.take_over(previous)
    if plan.seed is not None:
        _reseed(process.rows.envs[0], plan.seed)
    process.inherited = list_open_resources()
    process.exit = os._exit  # only the original process cleans up at the interpreter's exit
    _report_ready(process.channel)


def _reseed(env: Any, seed: int) -> None:
    """Seed the generator of an environment, and the shared generators that it uses."""
    base = env.unwrapped
    generator, base._np_random_seed = seeding.np_random(seed)
    own = getattr(base, "_np_random", None)
    if isinstance(own, np.random.Generator):  # in place, because the environment may refer to it elsewhere, too
        bits: Any = own.bit_generator
        bits.__init__(np.random.SeedSequence(seed))
    else:
        base._np_random = generator
    if isinstance(env, OwnGenerators):
        env.seed_generators(seed)
    else:
        seed_process(np.random.SeedSequence(seed))()


def _connect(process: WorkerState, plan: CopyPlan) -> WorkerEnd:
    """Open the channel and the stack file of a copy.

    Raises:
        FileNotFoundError: The caller has ended, or has closed them because the copy is no longer needed.
    """
    assert process.rows is not None
    process.rows.forked.clear()
    owner = DescriptorOwner(None)  # the descriptors stay open until the process ends

    def reopen(file: CallersFile, flags: int) -> Descriptor:
        found = os.open(f"/proc/{plan.caller}/fd/{file[0]}", os.O_PATH | os.O_CLOEXEC)  # O_PATH: no effect on the file
        try:
            if _identify(found)[1:] != file[1:]:
                raise FileNotFoundError(f"descriptor {file[0]} of process {plan.caller} is a different file now")
            return owner.open(os.open, f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
        finally:
            os.close(found)

    reader, writer = reopen(plan.reader, os.O_RDONLY), reopen(plan.writer, os.O_WRONLY)
    process.start.stack_file = StackFile.from_descriptor(reopen(plan.stack_file, os.O_RDWR | os.O_APPEND))
    process.start.stack_file.install_handlers(env_threads=False)
    return WorkerEnd((reader, writer), blocks=plan.placement is None or not plan.placement.spin)


def _identify(number: int) -> CallersFile:
    status = os.fstat(number)
    return number, status.st_dev, status.st_ino


def _report_ready(channel: WorkerEnd) -> None:
    channel.send(Reply.READY, 0, pickle.dumps(Ready(os.getpid(), [], [])))


# -- forking ----------------------------------------------------------------------------------------------------------


def _fork(token: int) -> bool:
    """Copy this process by forking twice, so that the copy is not its child. Return ``True`` in the copy."""
    flush_output()  # otherwise each copy would write the buffered output
    random_state = random.getstate()
    with contextlib.ExitStack() as closing:
        reopened = _reopen_files(closing)
        if child := os.fork():
            os.waitpid(child, 0)
            return False
        try:
            if os.fork():
                os._exit(0)
            set_up_copy(token)
            random.setstate(random_state)  # `random` reseeds its generator in every fork
            for fresh, numbers in reopened:
                for number in numbers:
                    os.dup2(fresh, number, os.get_inheritable(number))
        except BaseException:  # the copy must not continue as the original process
            traceback.print_exc()
            os._exit(1)
    return True


def _reopen_files(closing: contextlib.ExitStack) -> list[tuple[int, list[int]]]:
    """Reopen the files and folders that are open only for reading, except descriptors 0 to 2, at their positions.

    ``closing`` closes the new descriptors.

    Returns:
        Pairs: a new descriptor, and the descriptors that it replaces.
    """
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for number in sorted(int(name) for name, _ in list_open_resources() if name.isdigit()):
        with contextlib.suppress(OSError):
            status, flags = os.fstat(number), _open_flags(number)
            has_position = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
            if number > 2 and has_position and flags & os.O_ACCMODE == os.O_RDONLY:
                groups[status.st_dev, status.st_ino, flags, os.lseek(number, 0, os.SEEK_CUR)].append(number)
    reopened = []
    for (_, _, flags, place), numbers in groups.items():
        while numbers:
            shared = _find_duplicates(numbers, place)
            fresh = os.open(f"/proc/self/fd/{numbers[0]}", flags | os.O_CLOEXEC)
            closing.callback(os.close, fresh)
            os.lseek(fresh, place, os.SEEK_SET)
            reopened.append((fresh, shared))
            numbers = [number for number in numbers if number not in shared]
    return reopened


def _find_duplicates(numbers: list[int], place: int) -> list[int]:
    """Return the first of these descriptors, and those that share its position ``place``; only the first if a directory."""
    if len(numbers) == 1 or stat.S_ISDIR(os.fstat(numbers[0]).st_mode):
        return numbers[:1]
    os.lseek(numbers[0], place + 1, os.SEEK_SET)
    shared = [number for number in numbers if os.lseek(number, 0, os.SEEK_CUR) == place + 1]
    os.lseek(numbers[0], place, os.SEEK_SET)
    return shared


def _open_flags(number: int) -> int:
    return int(read_kernel_file(f"/proc/self/fdinfo/{number}").partition("flags:")[2].split()[0], 8)


def _explain_unsafe_fork(process: WorkerState) -> str:
    """Return the reason why a copy of this process would not continue like the original; empty if there is none."""
    if _count_threads() > 1:
        _stop_library_threads()
    if (threads := _count_threads()) > 1:
        return f"it has {threads} threads, and a copy would have only one"
    acquired = list_open_resources() - process.inherited
    for _, file in acquired:
        if file.startswith(_GPU_DEVICES):
            return f"it uses a GPU ({file}), and a copy of its memory lacks the GPU's state"
    files = {file for number, file in acquired if number.isdigit() and _is_shared(int(number), file)}
    if files:
        return f"copies would share the descriptors that it has open for writing: {_join_names(files)}"
    memory = {file for addresses, file in acquired if not addresses.isdigit()}
    if memory := memory | set(_objects_in_shared_memory(process)):
        return f"copies would share memory that they write to: {_join_names(memory)}"
    if children := _child_pids():
        return f"it has started processes, which a copy would share: pid {', '.join(children)}"
    for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
        if signal.getitimer(timer)[0]:
            return "it has a running timer, which a copy would lack"
    return ""


def _join_names(names: set[str]) -> str:
    shown = sorted(name.removesuffix(" (deleted)") for name in names)
    return ", ".join(shown[:_MAX_NAMES]) + (f" and {len(shown) - _MAX_NAMES} more" if len(shown) > _MAX_NAMES else "")


def _is_shared(number: int, file: str) -> bool:
    """True if copies would share the state of an open file."""
    if not file.startswith("/"):  # a socket, a pipe, an eventfd
        return not file.startswith("anon_inode:[pidfd]")
    if file.startswith("/memfd:") and file in read_kernel_file("/proc/self/maps"):  # a library was loaded from this file
        return False
    with contextlib.suppress(OSError, IndexError):
        if stat.S_ISCHR(os.fstat(number).st_mode):
            return file not in _STATELESS_DEVICES and not file.startswith("/dev/pts/")
        return _open_flags(number) & os.O_ACCMODE != os.O_RDONLY
    return False


def _objects_in_shared_memory(process: WorkerState) -> Iterator[str]:
    """Yield the places in an environment that refer to shared memory mapped before it was built, except the arena."""
    arena_address = np.frombuffer(process.start.arena.buffer, np.uint8).ctypes.data
    mapped = [tuple(int(end, 16) for end in addresses.split("-")) for addresses, _ in process.inherited if "-" in addresses]
    ranges = [(low, high) for low, high in mapped if not low <= arena_address < high]
    assert process.rows is not None
    for value, where in reachable_objects(find_layers(process.rows.envs[0])).values() if ranges else ():
        address = _data_address(value)
        if any(low <= address < high for low, high in ranges):
            yield f"{where} ({type(value).__name__})"


def _data_address(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.ctypes.data
    if isinstance(value, mmap.mmap) and not value.closed:
        return int(np.frombuffer(value, np.uint8).ctypes.data)
    if isinstance(value, ctypes.Array | ctypes.Structure | ctypes._SimpleCData):
        return ctypes.addressof(value)
    return 0


def _count_threads() -> int:
    """Count the threads, except exiting ones: a joined thread may stay listed for a moment."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        fields = read_kernel_file(f"/proc/self/task/{thread}/stat").rpartition(")")[2].split()
        count += bool(fields) and not int(fields[6]) & _PF_EXITING
    return count


def _child_pids() -> list[str]:
    """Return the pids of the running children of this process."""
    files = map(str, Path("/proc/self/task").glob("*/children"))
    pids = [pid for file in files for pid in read_kernel_file(file).split()]
    return [pid for pid in pids if read_kernel_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])]


def _stop_library_threads() -> None:
    """Fork once: libraries that support forks, such as OpenBLAS, end their threads before a fork."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


# -- in the caller ----------------------------------------------------------------------------------------------------


class _CopyPopen:
    """A ``Popen`` object, as in ``multiprocessing``, for a process that ``multiprocessing`` did not start."""

    def __init__(self, pid: int, method: str, pidfd: Descriptor) -> None:
        self.pid, self.method, self._pidfd = pid, method, pidfd
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None and (not self._pidfd or connection.wait([self._pidfd.number], timeout)):
            code = EXIT_CODE_UNKNOWN
            with contextlib.suppress(ChildProcessError):  # it is a child only if this process adopts orphans
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if pid else code
            self.returncode = code
        return self.returncode

    def poll(self) -> int | None:
        return self.wait(0.0)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress_os_errors():
            if self._pidfd:
                signal.pidfd_send_signal(self._pidfd.number, number)

    def close(self) -> None:
        self._pidfd.close()


class CopiedProcess(BaseProcess):
    """A process forked by another one, with the interface of a ``multiprocessing`` process.

    Its exit code is known only if the caller adopts orphans, as the first process of a container does.
    """

    def __init__(self, pid: int, method: str, name: str, owner: DescriptorOwner) -> None:
        super().__init__(name=name, daemon=True)
        pidfd = owner.open(os.pidfd_open, pid)
        self._popen = _CopyPopen(pid, method, pidfd)
        self._sentinel = pidfd.number

    def close(self) -> None:
        """Close the pidfd. A known exit code is kept."""
        self._popen.close()


class _Copy:
    """The caller's side of a copy: its channel, stack file and token, and, when it is ready, its process."""

    def __init__(self, pool: Any) -> None:
        self.descriptors = pool.descriptors.child()
        self.channel = Channel(self.descriptors)
        pool.channels.add(self.channel)
        self.stack_file = StackFile(self.descriptors)
        self.token = new_token()
        self.process: CopiedProcess | None = None
        self.caller_pid = os.getpid()

    def plan(self, row: int | None = None, placement: Placement | None = None, seed: int | None = None) -> CopyPlan:
        """Return the arguments of the copy."""
        reader, writer = (_identify(end.number) for end in self.channel.worker_ends)
        return CopyPlan(self.caller_pid, reader, writer, _identify(self.stack_file.fd), self.token, row, placement, seed)

    def await_ready(self, method: str, name: str, source: ProcessWatch) -> CopiedProcess:
        """Wait until the process is ready, and return it.

        Args:
            method, name: Start method and name of the process.
            source: Watches the process that forks it.

        Raises:
            WorkerDied: It ended or was not ready in time, or the process that forks it has ended.
        """
        deadline = time.monotonic() + _READY_SECONDS
        poll = select.poll()
        poll.register(self.channel.fd, select.POLLIN)
        poll.register(source.descriptor, select.POLLIN)
        with contextlib.suppress(ChannelClosed, ProcessLookupError):
            while (message := self.channel.receive()) is None:
                if self.channel.fd not in dict(poll.poll(milliseconds_until(deadline))):
                    break
            if message is not None:
                ready: Ready = pickle.loads(decode(message)[2] or b"")
                self.process = CopiedProcess(ready.pid, method, name, self.descriptors)
                self.channel.close_worker_ends()
                return self.process
        limit = format_seconds(_READY_SECONDS)
        raise WorkerDied(f"{name} could not be started as a copy: it ended, or was not ready within {limit}")

    def end(self) -> None:
        """End the process and close its descriptors, except in a forked child. Idempotent."""
        if os.getpid() != self.caller_pid:
            return
        if self.process is not None:
            self.process.kill()
            self.process.join(_CLOSE_SECONDS)
            self.process.exitcode  # noqa: B018 - reaps it if this process adopts orphans
        self.channel.close()
        self.descriptors.close()


class Frozen:
    """An environment in its state at the time of freezing: a waiting copy of its process. :meth:`close` ends it.

    It belongs to the vector environment that made it, on this machine and in this program, and cannot be pickled. It ends
    with that vector environment, with the last reference to it, or, as a context manager, with the block.

    Attributes:
        env: The index of the environment that was copied.
        observation: Its last observation.
        info: Its latest info if that lay in shared memory, as infos of numbers and arrays usually do; otherwise ``{}``.
        method: Start method of its process.
        beside: Data about the environment, added by a vector environment that is built on the engine.
    """

    beside: Any = None

    def __init__(self, engine: Any, row: int) -> None:
        self.env = row
        self.observation = engine.store.row(row)
        self.info = engine.info_reader.row_info(row)
        self._info_record = engine.arrays.info_schemas[row], engine.arrays.infos[row].copy()
        worker = engine.pool.processes[row]
        self._copy, self._watch, self.method = _Copy(engine.pool), worker.watch, str(worker.process._popen.method)
        self._engine = weakref.ref(engine)
        self._began = time.monotonic()
        weakref.finalize(self, self._copy.end)

    @property
    def pid(self) -> int:
        """The pid of the waiting process, also after its end; 0 before it is ready."""
        return (self._copy.process and self._copy.process.pid) or 0

    @property
    def bytes(self) -> int:
        """Bytes of memory that only this copy has; 0 after its end."""
        with suppress_os_errors():
            lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
            return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))
        return 0

    @property
    def closed(self) -> bool:
        """True after :meth:`close`, and after the end of its vector environment."""
        return self._copy.channel.closed or not len(self._copy.descriptors)

    def _await_ready(self) -> Frozen:
        self._copy.await_ready(self.method, f"vecenv-frozen-{self.env}", self._watch)
        return self

    def _require_usable(self, engine: Any) -> ProcessWatch:
        """Return a watch on the copy. Raise if it is closed, has ended, or belongs to another vector environment."""
        if self._engine() is not engine:
            raise ValueError(f"{self!r} belongs to another vector environment")
        if self.closed:
            raise ValueError(f"{self!r} cannot be thawed any more")
        watch = ProcessWatch(self._copy.process, self._copy.descriptors)
        if watch.has_ended():
            watch.close()
            text = f"the frozen copy of env {self.env} (pid {self.pid}) has ended, and cannot be thawed any more"
            raise WorkerDied(text, pid=self.pid, envs=[self.env], command="thaw")
        return watch

    def close(self) -> None:
        """End the copy. Thawed environments continue. Idempotent."""
        with deferred_signals():
            self._copy.end()

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a Frozen is a process of this program and cannot be pickled; save() returns a snapshot that can")

    def __repr__(self) -> str:
        age = time.monotonic() - self._began
        state = "closed" if self.closed else f"pid {self.pid}, {age:.1f} s old, {self.bytes / 2**20:.1f} MiB"
        return f"Frozen(env {self.env}, {state})"


def explain_unfreezable(engine: Any) -> str:
    """Return the reason why the environments of an engine cannot be frozen; empty if there is none."""
    if not (sys.platform.startswith("linux") and hasattr(os, "pidfd_open") and _HAS_PROC):
        return f"it needs Linux, pidfds and /proc, and this system is {sys.platform}"
    if not engine.pool.processes or len(engine.pool.processes) < engine.num_envs:
        return "each environment needs its own process (num_workers=None)"
    return ""


def frozen_stats(engine: Any) -> dict[str, float]:
    """Return the number of an engine's waiting copies, and the bytes of memory that only they use; empty without copies."""
    copies = [copy for copy in _frozen_by_engine.get(engine, ()) if not copy.closed]
    return {"frozen": float(len(copies)), "frozen_bytes": float(sum(copy.bytes for copy in copies))} if copies else {}


def freeze(engine: Any, rows: list[int]) -> list[Frozen]:
    """Return frozen copies of some rows; see :meth:`vecenv.AsyncVectorEnv.freeze`. It takes milliseconds.

    Signal handlers are deferred: a copy opens the caller's files by their numbers, which must not change meanwhile.
    """
    engine.require_intact(rows)
    copies: dict[int, Frozen] = {}
    with deferred_signals():
        try:
            copies.update((row, Frozen(engine, row)) for row in rows)
            engine.exchange.send_call(
                "freeze", Op.RUN,
                lambda worker: (copy_worker, copies[worker.rows[0]]._copy.plan()) if worker.rows[0] in copies else None,
            )  # fmt: skip
            engine.exchange.finish_call(_READY_SECONDS)
            frozen = [copy._await_ready() for copy in copies.values()]
        except BaseException:
            for copy in copies.values():  # not later, because the exception refers to them while the program keeps it
                copy.close()
            raise
        _frozen_by_engine.setdefault(engine, weakref.WeakSet()).update(frozen)
    return frozen


def thaw(engine: Any, frozen: Frozen, rows: list[int], reseed: bool) -> tuple[Any, dict[str, Any]]:
    """Continue rows from a frozen copy; see :meth:`vecenv.AsyncVectorEnv.thaw`.

    Signal handlers are deferred. If one raises before the workers are replaced, nothing has changed; if during that, a reset
    is needed; if afterwards, only the returned observations and infos are lost.
    """
    if not isinstance(frozen, Frozen):
        raise TypeError(f"`frozen` must be one of the copies that freeze() returned, got {type(frozen).__name__}")
    watch = frozen._require_usable(engine)
    seeds = np.random.SeedSequence().generate_state(len(rows)).tolist() if reseed else [None] * len(rows)
    copies: list[_Copy] = []  # not in the pool yet
    try:
        with deferred_signals():
            _fork_copies(engine, frozen, watch, rows, seeds, copies)
        engine.announce_call(rows, "thaw", (frozen,))
        engine.state.changing = True
        with deferred_signals():
            for row in rows:
                _replace_worker(engine, frozen, row, copies.pop(0))
            engine.failure_log.forget(rows)
            if engine.policy.restart:
                engine.rebuilder.last_good.keep(rows, pin=engine.copies)
            engine.verified -= set(rows)
        engine.state.changing = False
    except BaseException:
        with deferred_signals():
            for copy in copies:
                copy.end()
        raise
    finally:
        watch.close()
    infos = engine.info_reader.merger.merge([frozen.info] * len(rows), rows)
    return engine.store.take(np.array(rows, np.intp)), infos


def _fork_copies(
    engine: Any, frozen: Frozen, watch: ProcessWatch, rows: list[int], seeds: Sequence[int | None], copies: list[_Copy]
) -> None:
    """Make a frozen copy fork once per row; append the new processes to ``copies``. Raise ``WorkerDied`` if it has ended."""
    pool, channel = engine.pool, frozen._copy.channel
    poll = select.poll()
    poll.register(channel.out, select.POLLOUT)
    try:
        for row, seed in zip(rows, seeds, strict=True):
            copies.append(_Copy(pool))
            channel.queue(encode(Op.RUN, 1, pickle.dumps(copies[-1].plan(row, pool.get_placement(row), seed))))
            channel.flush()
        while not channel.flush() and poll.poll(_READY_SECONDS * 1000):  # the pipe was full
            continue
    except ChannelClosed:
        raise WorkerDied(f"{frozen!r} has ended", pid=frozen.pid, envs=[frozen.env], command="thaw") from None
    for row, copy in zip(rows, copies, strict=True):
        copy.await_ready(frozen.method, pool.process_name(row), watch)


def _replace_worker(engine: Any, frozen: Frozen, row: int, copy: _Copy) -> None:
    """Replace the worker of a row with a copy that is ready."""
    pool = engine.pool
    worker = pool.wrap_process(
        row, range(row, row + 1), copy.process, copy.channel, copy.stack_file, copy.descriptors, copy.token
    )
    worker.has_started = True
    pool.replace(pool.processes[row], worker)
    engine.store.set_row(row, frozen.observation)
    engine.arrays.info_schemas[row], engine.arrays.infos[row] = frozen._info_record
