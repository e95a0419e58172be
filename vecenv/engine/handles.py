"""Workers, as the caller sees them: how each is written to and read from, and how it died.

What a worker was asked and has answered stands in the table of pending requests (:mod:`vecenv.engine.pending`) and nowhere
else. The caller's own share of the environments is a worker like the others (:class:`CallerWorker`): it answers when the
caller waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Generator
from copy import deepcopy
from typing import Any, Final, Literal

from vecenv.engine.episodes import NextEpisode
from vecenv.engine.pending import COMMANDS, ONLY_COLUMNS, PLAIN, Answer, Death, PendingRequests, Request, WorkerRequest
from vecenv.errors import EnvError
from vecenv.link.channel import CallerEnd, ChannelClosed
from vecenv.link.messages import PLAIN_OUTCOME, Outcome, Reply, dumps, dumps_by_value, encode, summary, unpack_error
from vecenv.system.descendants import end_group
from vecenv.system.descriptors import DescriptorOwner
from vecenv.system.generators import unwatch, watch
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
from vecenv.worker.main import answer

__all__ = ["CallerWorker", "ProcessWorker", "command_of", "envs_text", "raise_ready", "staged"]

_PLAIN: Final = int(Reply.PLAIN)
_LAST_MOMENTS: Final = 0.5  # between the end of a worker's pipe and the end of its process
_FIRST_WORD: Final = 0.05  # until a late worker begins to write its stack, if it can
_LAST_WORD: Final = 0.3  # until it has written it, if it has begun, or waits for a core to begin
_OWN_TIME: Final = 0.02  # on a core, within which a worker begins to write, if it can


def staged(part: WorkerRequest, seq: int) -> WorkerRequest:
    """A part made ready to be sent: encoded for a process, and for the caller's own share a copy of its own.

    Raises:
        Exception: The payload cannot be pickled; nothing was sent.
    """
    if part.worker.local:
        if COMMANDS[part.op] == "step":  # an environment may keep its action and write into it
            part.payload = deepcopy(part.payload)
        return part
    payload = None
    if part.payload is not None:
        forked = isinstance(part.worker, ProcessWorker) and part.worker.forked
        payload = dumps(part.payload, by_value=True) if forked else dumps_by_value(part.payload)
    part.data = encode(part.op, seq, payload)
    part.payload = None
    return part


class CallerWorker:
    """The caller's own share: its environments live in this process and step when the caller waits for them."""

    local: Literal[True] = True
    exitcode: int | None = None
    death: Death | None = None
    overdue = False
    paid = False

    def __init__(self, index: int, rows: range, env_rows: SnapshotRows, table: PendingRequests) -> None:
        self.index = index
        self.rows = rows
        self._rows = env_rows
        self._table = table
        self.pid = os.getpid()
        self._looks = 3  # so many of its first messages are watched for draws from the process's generators
        self.label = f"stepped by the caller, pid {self.pid}"

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

    # It waits for nothing, and nothing ends it.

    def stack(self) -> str:
        return ""

    def is_stopped(self) -> bool:
        return False

    def signal(self, number: int) -> None:
        pass

    def mark_dead(self, reason: str = "") -> None:
        pass

    def close(self) -> Outcome:
        """Close the environments. Idempotent."""
        rows = self.__dict__.get("_rows")
        return Outcome() if rows is None else rows.close()

    def forget(self) -> None:
        """Let go of the environments, which are closed, and of the shared memory."""
        rows = self.__dict__.pop("_rows", None)
        if rows is not None:
            rows.forget()


class ProcessWorker:
    """A worker process, seen from the caller."""

    local: Literal[False] = False
    next_episode: NextEpisode | None = None
    place_sent: tuple[int, int] | None = None
    """The row that it was sent, and its next episode's number: see :mod:`vecenv.engine.spares`."""

    def __init__(
        self,
        index: int,
        rows: range,
        process: Any,
        channel: CallerEnd,
        black_box: BlackBox,
        held: DescriptorOwner,
        table: PendingRequests,
        token: int,
        with_caller: bool = False,
    ) -> None:
        self.index = index
        self.rows = rows
        self.death: Death | None = None
        self.process = process
        self.channel = channel
        self.black_box = black_box
        self.held = held  # the descriptors of these two, and the pidfd
        self.pid: int = process.pid
        self.label = f"worker {index}, pid {self.pid}"
        self.exitcode: int | None = None
        self.overdue = False  # an answer did not come in time; close() is less patient then
        self.with_caller = with_caller
        self.forked = process._popen.method == "fork"  # it has the caller's own classes
        self.token = token  # by which what its environments started is known
        self.starting = True
        self.paid = False  # its death is in the budget of restarts
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
        events = self.watch.sleep(self._poll, timeout_ms)
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


def envs_text(rows: range) -> str:
    return f"env {rows[0]}" if len(rows) == 1 else f"envs {_span(rows)}"


def _span(rows: range) -> str:
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
