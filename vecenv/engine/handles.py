"""Workers, as the caller sees them: how each gets ready, is written to and read from, and ends.

What a worker was asked and has answered stands in the table of pending requests (:mod:`vecenv.engine.pending`) and nowhere
else. The caller's own share of the environments is a worker like the others (:class:`CallerWorker`): it answers when the
caller waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gymnasium import logger

from vecenv.engine.pending import (
    COMMANDS,
    ONLY_COLUMNS,
    PLAIN,
    Answer,
    Death,
    PendingRequests,
    Request,
    Worker,
    WorkerRequest,
)
from vecenv.errors import EnvError, StartupTimeout
from vecenv.front.arguments import milliseconds
from vecenv.link.channel import CallerEnd, ChannelClosed
from vecenv.link.messages import (
    PLAIN_OUTCOME,
    Failure,
    Op,
    Outcome,
    Reply,
    decode_outcome,
    encode,
    summary,
    unpack_error,
)
from vecenv.system.cores import Placement
from vecenv.system.descendants import end_group, end_marked
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.generators import unwatch, watch
from vecenv.system.spawning import NO_GUARD, Lifeline, Variables, missing_guard
from vecenv.system.supervision import (
    STACK_SIGNALS,
    BlackBox,
    ProcessWatch,
    catches,
    close_process,
    describe_exit,
    innermost,
    reaches_down,
)
from vecenv.worker.keeping import SnapshotRows
from vecenv.worker.main import Ready, answer

if sys.platform != "win32":
    import resource

_PLAIN: Final = int(Reply.PLAIN)
_LAST_MOMENTS: Final = 0.5  # between the end of a worker's pipe and the end of its process
_FIRST_WORD: Final = 0.05  # until a late worker begins to write its stack, if it can
_LAST_WORD: Final = 0.3  # until it has written it, if it has begun, or waits for a core to begin
_OWN_TIME: Final = 0.02  # on a core, within which a worker begins to write, if it can


DESCRIPTORS: Final = 6
"""What a worker costs the caller: two pipes, black box, pidfd, sentinel and, under fork, one more."""
SPARE_DESCRIPTORS: Final = 16
"""For the length of a start."""


@dataclass(slots=True)
class PoolOptions:
    """How to run workers.

    Attributes:
        context: A ``multiprocessing`` context.
        daemon: ``Process.daemon`` of every worker.
        name: Process names are ``Worker<name>-index``.
        start_timeout: Seconds until a worker must have built its environments; ``None``: never.
        max_busy: At most that many workers are busy at a time; ``None``: all of them.
        caller_spin: Seconds for which the caller may poll before it sleeps.
        placements: Where each worker sits.
        variables: Environment variables of each worker.
    """

    context: Any
    daemon: bool
    name: str
    start_timeout: float | None
    max_busy: int | None = None
    caller_spin: float = 0.0
    placements: list[Placement] = field(default_factory=list)
    variables: list[Variables] = field(default_factory=list)


class CallerWorker(Worker):
    """The caller's own share: its environments live in this process and step when the caller waits for them.

    It waits for nothing, and nothing ends it.
    """

    local = True

    def __init__(self, index: int, rows: range, env_rows: SnapshotRows, table: PendingRequests) -> None:
        super().__init__(index, rows, os.getpid(), f"stepped by the caller, pid {os.getpid()}")
        self._rows = env_rows
        self._table = table
        self._looks = 3  # so many of its first messages are watched for draws from the process's generators

    def __repr__(self) -> str:
        return f"CallerWorker(envs={_span(self.rows)})"

    def perform(self, request: Request) -> None:
        """Carry out what a request asks of this worker, and answer it."""
        if self._looks:
            outcome = self._watched(request)
        elif request.parts is None:  # a step of all rows: nearly always
            rows = self._rows
            outcome = rows.step(request.seq, None, rows.actions(None))
            if outcome is PLAIN_OUTCOME:
                request.answers[self.index] = PLAIN
                return
        else:
            outcome = self._carried_out(request)
        seq = request.seq
        if outcome is PLAIN_OUTCOME:
            said = PLAIN
        elif outcome.is_plain():
            said = ONLY_COLUMNS if outcome.columns else PLAIN
        else:
            said = Answer(True, outcome)
        if request.by_row:
            self._table.deliver(seq, self.index, said)
        else:
            request.answers[self.index] = said

    def _watched(self, request: Request) -> Outcome:
        """Carry out one of the first requests: environments that draw from the process's generators are noted."""
        if self._rows.generators is not None:
            self._looks = 0
            return self._carried_out(request)
        self._looks -= 1
        watch(self._rows.saw)
        try:
            return self._carried_out(request)
        finally:
            unwatch()

    def _carried_out(self, request: Request) -> Outcome:
        rows, seq, parts = self._rows, request.seq, request.parts
        if parts is None:
            return rows.step(seq, None, rows.actions(None))
        part = parts[self.index]
        return answer(rows, part.op, seq, part.payload)

    @property
    def envs(self) -> list[Any]:
        """Its environments; ``None`` where one failed."""
        rows = self.__dict__.get("_rows")
        return [] if rows is None else list(rows.envs)

    def close(self) -> Outcome:
        """Close the environments. Idempotent."""
        rows = self.__dict__.get("_rows")
        return Outcome() if rows is None else rows.close()

    def forget(self) -> None:
        """Let go of the environments, which are closed, and of the shared memory."""
        rows = self.__dict__.pop("_rows", None)
        if rows is not None:
            rows.forget()


class ProcessWorker(Worker):
    """A worker process, seen from the caller."""

    def __init__(
        self, index: int, rows: range, process: Any, channel: CallerEnd, black_box: BlackBox, held: DescriptorOwner,
        table: PendingRequests, token: int, with_caller: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(index, rows, process.pid, f"worker {index}, pid {process.pid}")
        self.process = process
        self.channel = channel
        self.black_box = black_box
        self.held = held  # the descriptors of these two, and the pidfd
        self.with_caller = with_caller
        self.forked = process._popen.method == "fork"  # it has the caller's own classes
        self.token = token  # by which what its environments started is known
        self.starting = True
        self.asked_to_close = False
        self.ended_for = ""  # why the caller has killed it
        self._table = table
        self.watch = ProcessWatch(process, held)
        self._poll = select.poll()
        self._poll.register(channel.fd, select.POLLIN)
        self._poll.register(self.watch.descriptor, select.POLLIN)

    def __repr__(self) -> str:
        state = "dead" if self.death else "busy" if self._table.is_pending(self) else "idle"
        return f"ProcessWorker({self.index}, envs={_span(self.rows)}, pid={self.pid}, {state})"

    def send(self, part: WorkerRequest) -> bool:
        """Write what is left of a part's message; false if the pipe is full. A dead worker's parts count as sent."""
        if self.death is not None:
            self._table.mark_lost(self, self.death)
            return True
        assert part.data is not None
        try:
            return self.channel.write(part.data, part.written)
        except ChannelClosed:
            self.mark_dead()
            return True

    def take_plain(self, request: Request, expected: bytes) -> None:
        """Take in the plain answer to a request if it is there; anything else is left to :meth:`receive`."""
        try:
            if self.channel.take(expected):
                request.answers[self.index] = PLAIN
                self.channel.raw.clear()  # as `drop` does, of a message in one chunk
        except ChannelClosed:
            self.mark_dead()

    def receive(self) -> bool:
        """Take in one reply if it is there; true if there was one, or if the worker turned out to be dead."""
        if self.death is not None:
            self._table.mark_lost(self, self.death)
            return False
        try:
            message = self.channel.read()
        except ChannelClosed:
            self.mark_dead()
            return True
        if message is None:
            return False
        word, seq, payload = message
        if payload is not None:
            self._table.deliver(seq, self.index, Answer(True, sealed=payload))
            self.channel.bytes_pickled += len(payload)
            self.channel.drop()
            return True
        answer = PLAIN if word == _PLAIN else ONLY_COLUMNS
        request = self._table.pending.requests.get(seq)
        if request is not None and not request.by_row:
            request.answers[self.index] = answer
        else:
            self._table.deliver(seq, self.index, answer)
        self.channel.raw.clear()  # as `drop` does, of a message in one chunk
        return True

    def wait(self, timeout_ms: float | None) -> bool:
        """Sleep until there is something to receive or the worker has ended; false when the time is up."""
        events = self.watch.sleep(self._poll, timeout_ms) if self.watch.asks else self._poll.poll(timeout_ms)
        if not events:
            return False
        ended = self.channel.fd not in dict(events)
        if ended and not self.receive():  # and nothing in the pipe: what it wrote before it ended has been taken in
            self.mark_dead()
        return True

    def mark_dead(self, reason: str = "") -> None:
        """Find out how the worker ended; everything it was asked is lost."""
        if self.death is None:
            busy = self._table.oldest_of(self)
            command = "start" if self.starting else "idle" if busy is None else command_of(busy, self)
            if not self.watch.has_ended(_LAST_MOMENTS):  # whatever it is that has no pipe any more, it is no worker
                self.signal(signal.SIGKILL)
                reason = reason or "it closed its pipe, and was ended for that"
            self.exitcode = self.watch.exit_code()
            stack = innermost(self.black_box.read()) if (self.exitcode or 0) < 0 else ""
            where = f"worker {self.index} (pid {self.pid}, {envs_text(self.rows)})"
            doing = {"idle": "while idle", "start": "during its start"}.get(command, f"during {command}")
            text = f"{where} died {doing}: {reason or self.ended_for or describe_exit(self.exitcode)}"
            if stack:
                text += f"\nits last Python stack:\n{stack}"
            end_group([self.pid])
            self.death = Death(text, self.index, tuple(self.rows), self.pid, self.exitcode, command)
        self._table.mark_lost(self, self.death)
        self.watch.close()
        self.channel.close()

    def stack(self) -> str:
        """The Python stack of a worker that is late, from its black box; empty if it cannot be had. Does it no harm."""
        looking = self.looking_for_stack()
        while True:
            try:
                time.sleep(next(looking))
            except StopIteration as found:
                return found.value  # type: ignore[no-any-return]

    def looking_for_stack(self) -> Generator[float, None, str]:
        """As :meth:`stack`, for a caller that has its own way to sleep: yields the seconds until it is to look again."""
        stack = ""
        for number in STACK_SIGNALS:
            if not stack and not self.is_stopped() and catches(self.pid, number):
                stack = yield from self._stack_on(number)
        self.black_box.clear()
        return innermost(stack)

    def _stack_on(self, number: int) -> Generator[float, None, str]:
        """What the worker writes when it gets this signal. Empty: its main thread is in C code, or had no core to run on."""
        self.black_box.expect()
        stack, asked, ran = "", time.monotonic(), self._seconds_run()
        self.signal(number)
        while (waited := time.monotonic() - asked) < _LAST_WORD and not reaches_down(stack):
            yield 0.002
            stack = self.black_box.read()
            if not stack and waited > _FIRST_WORD and (self._state() != "R" or self._seconds_run() - ran > _OWN_TIME):
                break
        return stack

    def _seconds_run(self) -> float:
        """For how long its main thread has had a core; 0 where the kernel does not tell."""
        with contextlib.suppress(OSError, IndexError, ValueError, NameError), open(f"/proc/{self.pid}/schedstat") as file:
            return int(file.read().split()[0]) * 1e-9
        return 0.0

    def partly_sent(self) -> bool:
        """Whether a message to it is written in part: what is written next is taken for the rest of it."""
        return any(
            part.worker is self and part.written and not part.sent
            for request in self._table.requests.values()
            for part in (request.parts or {}).values()
        )

    def ask_to_close(self) -> None:
        """Ask it to close its environments; heard after what it is busy with. Once, whatever interrupts it."""
        if self.asked_to_close or self.channel.closed:
            return
        # a message that was written in part would swallow this one; such a worker is not asked
        self.asked_to_close = True
        with contextlib.suppress(ChannelClosed):
            if not self.partly_sent():
                self.channel.write(encode(Op.CLOSE, CLOSING), [])

    def signal(self, number: int) -> None:
        """Send a signal to the worker process."""
        self.watch.signal(number)

    def is_stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP); only known on Linux."""
        return self._state() in ("T", "t")

    def _state(self) -> str:
        """The kernel's letter for what the process does (R: it runs or waits for a core); empty where it does not tell."""
        # NameError: at the interpreter's exit there is no open() any more
        with contextlib.suppress(OSError, IndexError, NameError), open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
        return ""

    def release(self) -> None:
        """Close everything the caller holds of an ended worker. Idempotent."""
        self.watch.close()
        self.channel.close()
        self.held.close()
        if self.exitcode is None:
            self.exitcode = self.watch.exit_code()
        close_process(self.process)


def command_of(request: Request, worker: Any) -> str:
    """What a worker does for a request, in the words of error messages."""
    return request.command if request.parts is None else COMMANDS[request.parts[worker.index].op]


def envs_text(rows: Sequence[int]) -> str:
    """``env 3`` or ``envs 4-7``: contiguous rows."""
    return f"env {rows[0]}" if len(rows) == 1 else f"envs {_span(rows)}"


def _span(rows: Sequence[int]) -> str:
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else f"{rows[0]}" if len(rows) else "none"


def raise_ready(error: Any, note: str) -> Exception:
    """The exception of a failure, whichever way it came, with its note.

    One that is no ``Exception`` (``sys.exit`` in an environment of the caller's own share) gets a stand-in.
    """
    if not isinstance(error, BaseException):
        return unpack_error(error, note)
    if isinstance(error, Exception):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return error
    stand_in = EnvError(f"{note}: {summary(error)}")
    stand_in.__cause__ = error
    return stand_in


# -- starting -----------------------------------------------------------------------------------------------------------

def await_ready(worker: ProcessWorker, deadline: float | None, options: PoolOptions) -> Ready:
    """A worker's first message.

    Raises:
        WorkerDied: It ended before.
        StartupTimeout: It did not come in time.
    """
    while True:
        try:
            message = worker.channel.read()
        except ChannelClosed:
            message = None
            worker.mark_dead()
        if worker.death is not None:
            unguarded = worker.death.exitcode == NO_GUARD
            raise worker.death.error(missing_guard(options.context.get_start_method()) if unguarded else worker.death.text)
        if message is not None:
            ready: Ready = pickle.loads(message[2] or b"")
            worker.starting = False
            worker.channel.drop()
            return ready
        left = milliseconds(deadline)
        if left == 0 or not worker.wait(left):
            stack = worker.stack()
            raise StartupTimeout(
                f"worker {worker.index} (pid {worker.pid}, {envs_text(worker.rows)}) was not ready within "
                f"{options.start_timeout} seconds of its start" + (f"; it is at:\n{stack}" if stack else "")
                + _advice_for_fork(options.context)
            )  # fmt: skip


def preload(context: Any) -> None:
    """Let a fork server that is not running yet import the engine once, and not every worker anew."""
    if context.get_start_method() != "forkserver":
        return
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    with contextlib.suppress(AttributeError):  # private names: without them it only starts more slowly
        if server._forkserver_pid is None and server._preload_modules == ["__main__"]:
            context.set_forkserver_preload(["__main__", "vecenv.worker.main"])


def require_descriptors(workers: int) -> None:
    """Refuse at once what would fail half-way: CPython itself loses descriptors when it meets the limit in a start."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(FileNotFoundError):
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        if free < DESCRIPTORS * workers + SPARE_DESCRIPTORS:
            raise too_few_descriptors(OSError(errno.EMFILE, ""), workers)


def too_few_descriptors(error: OSError, workers: int) -> OSError:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    need = DESCRIPTORS * workers + SPARE_DESCRIPTORS
    return OSError(
        error.errno,
        f"{os.strerror(error.errno or 0)}: {workers} workers need {need} more open files, and RLIMIT_NOFILE is {soft}; "
        "raise it (ulimit -n), or use fewer workers (num_workers=)",
    )


def _advice_for_fork(context: Any) -> str:
    if context.get_start_method() != "fork" or threading.active_count() < 2:
        return ""
    return (
        f"\n({threading.active_count()} threads were running when it was forked; a lock that one of them held is held for "
        "ever in the child: use context='forkserver')"
    )


# -- ending -------------------------------------------------------------------------------------------------------------

CLOSING: Final = 0
"""The sequence number of the last message; all others are above 0."""

_TERM_GRACE: Final = 0.25  # between SIGTERM and SIGKILL
_KILLED: Final = 5.0  # for the kernel to end what was killed


def end(
    workers: Sequence[ProcessWorker], timeout: float, terminate: bool, failures: list[tuple[Failure, Any]] | None = None
) -> None:
    """End processes within about ``timeout`` seconds, and what their environments started. It can be called again.

    Args:
        workers: The workers.
        timeout: Seconds for their environments' own ``close``.
        terminate: Without asking them first.
        failures: Where to note what environments raised in their ``close``, and in which worker.
    """
    deadline = time.monotonic() + timeout
    alive = [worker for worker in workers if worker.death is None and not worker.watch.has_ended()]
    if not terminate:
        for worker in alive:
            worker.ask_to_close()
        _wait_for_ends([worker for worker in alive if not worker.is_stopped()], deadline, failures)
    late = [worker for worker in alive if not worker.watch.has_ended()]
    for worker in late:
        worker.signal(signal.SIGTERM)
    _wait_for_ends([worker for worker in late if not worker.is_stopped()], time.monotonic() + _TERM_GRACE, failures)
    for worker in alive:
        if not worker.watch.has_ended():
            worker.signal(signal.SIGKILL)
    _wait_for_ends(alive, time.monotonic() + _KILLED, failures)
    end_group(worker.pid for worker in alive)
    for worker in workers:
        worker.watch.exit_code()
    end_marked([worker.token for worker in workers])


def end_unclosed(lifeline: Lifeline, processes: list[Any], owner: int) -> None:
    """The pool was collected, or the program ends, without ``close()``: end what was started."""
    if os.getpid() != owner or not processes:
        return
    lifeline.close()  # the kernel kills the process at the other end
    started = []
    for process in processes:
        with contextlib.suppress(ValueError):  # it is closed
            if process.pid is not None:
                started.append(process)
    for process in started:
        with contextlib.suppress(ValueError, OSError, AttributeError, AssertionError):
            if process.exitcode is None:  # not reaped, so that its number is still its own
                end_group([process.pid])
                os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    for process in started:
        with contextlib.suppress(ValueError, OSError, AttributeError, AssertionError):
            while process.exitcode is None and time.monotonic() < deadline and _may_be_there(process.pid):
                time.sleep(0.001)
        close_process(process)
    processes.clear()


def _may_be_there(pid: int) -> bool:
    """Whether its exit code may still come: not where the kernel has reaped it, if that can be seen."""
    return os.path.exists(f"/proc/{pid}") or not os.path.exists("/proc/self")


def _wait_for_ends(workers: Sequence[ProcessWorker], deadline: float, failures: list[tuple[Failure, Any]] | None) -> None:
    for worker in workers:
        if (descriptor := worker.watch.descriptor) < 0:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        open_end = worker.channel.fd
        if open_end >= 0:
            poll.register(open_end, select.POLLIN)
        while not worker.watch.has_ended() and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in worker.watch.sleep(poll, left * 1000):
                if descriptor == open_end and not _drain(worker, failures):
                    poll.unregister(open_end)
                    open_end = -1
        _drain(worker, failures)


def _drain(worker: ProcessWorker, failures: list[tuple[Failure, Any]] | None) -> bool:
    """Take in what a worker that is ending still says: with a large answer in the pipe it could not end."""
    try:
        while (message := worker.channel.read()) is not None:
            word, seq, payload = message
            if word == Reply.FULL and seq == CLOSING and payload is not None and failures is not None:
                said = decode_outcome(payload)
                failures += [(failure, worker) for failure in said.failures]
                for _, text in said.warnings:
                    logger.warn("%s", f"worker {worker.index} (pid {worker.pid}): {text}")
            worker.channel.drop()
    except ChannelClosed:
        return False
    return True
