"""Workers, seen from the caller: what they were asked, what they answered, how they died.

Of each worker two queues are kept: ``asked`` (messages without an answer yet) and ``replies`` (answers nobody has fetched
yet). A worker that died says so through ``death``; everything it had been asked is lost and answered by that. The caller's
own share of the environments is a worker like the others (:class:`CallerWorker`): it answers when somebody waits for it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import cloudpickle

from vecenv.channel import Channel, ChannelClosed, Message
from vecenv.errors import EnvError, WorkerDied
from vecenv.failure import BlackBox, DeathWatch, describe_exit, end_group, innermost, reaches_down, summary, unpack
from vecenv.protocol import Op, Reply
from vecenv.rows import EnvRows, Failure, Outcome
from vecenv.wire import load
from vecenv.worker import answer

__all__ = ["COMMANDS", "Answer", "AnyWorker", "CallerWorker", "Desk", "ProcessWorker", "Request"]

_PLAIN: Final = int(Reply.PLAIN)
_LAST_MOMENTS: Final = 0.5  # between the end of a worker's pipe and the end of its process
_FIRST_WORD: Final = 0.05  # until a late worker begins to write its stack, if it can
_LAST_WORD: Final = 0.3  # until it has written it, if it has begun, or waits for a core to begin
_REAP: Final = 0.5  # for the exit code of a process that has ended
COMMANDS: Final = {
    Op.STEP: "step", Op.STEP_SOME: "step", Op.RESET: "reset", Op.RESET_SOME: "reset", Op.REBUILD_SOME: "reset",
    Op.CALL: "call", Op.SET_ATTR: "set_attr", Op.EXEC: "exec_func", Op.CLOSE: "close",
}  # fmt: skip


@dataclass(slots=True)
class Request:
    """A message on its way: which rows it is about, for the worker that gets it."""

    seq: int
    op: Op
    rows: Sequence[int]
    payload: Any = None


@dataclass(slots=True)
class Answer:
    """The answer to one request. ``outcome`` is ``None`` for a plain one; ``death`` says that there will never be one."""

    request: Request
    columns: bool = False
    outcome: Outcome | None = None
    death: WorkerDied | None = None


class Desk:
    """What all kinds of worker have: their rows, the two queues, and ``who`` they are in texts."""

    who: str

    def __init__(self, index: int, rows: range) -> None:
        self.index = index
        self.rows = rows
        self.asked: deque[Request] = deque()
        self.replies: deque[Answer] = deque()
        self.death: WorkerDied | None = None

    @property
    def rung(self) -> bool:
        """Whether all that is asked is one plain step."""
        return False

    @property
    def owes(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self.asked)


class _Interrupted(EnvError):
    """Ctrl-C came while the caller was stepping its own share."""


class CallerWorker(Desk):
    """The caller's own share: its environments live in this process and step when somebody waits for them."""

    local: Literal[True] = True
    exitcode: int | None = None

    def __init__(self, index: int, rows: range, env_rows: EnvRows) -> None:
        super().__init__(index, rows)
        self._rows = env_rows
        self.pid = os.getpid()
        self.overdue = False
        self.who = f"stepped by the caller, pid {self.pid}"
        self._step = Answer(Request(0, Op.STEP, rows))  # the plain step and its answers, used again and again
        self._step_columns = Answer(self._step.request, columns=True)

    def __repr__(self) -> str:
        return f"CallerWorker(envs={_span(self.rows)}, asked={len(self.asked)})"

    def post(self, request: Request) -> None:
        if request.op in (Op.STEP, Op.STEP_SOME):  # an environment may keep its action and write into it
            request.payload = deepcopy(request.payload)
        self.asked.append(request)

    def ring(self, data: bytes, seq: int) -> None:
        """Ask for a step of all rows with actions in shared memory; ``data`` is for those who get it by pipe."""
        self._step.request.seq = seq
        self.asked.append(self._step.request)

    def receive(self) -> bool:
        """Carry out the oldest request now."""
        if not self.asked:
            return False
        request = self.asked.popleft()
        try:
            if request is self._step.request:
                outcome = self._rows.step(None, self._rows.actions(None))
            else:
                outcome = answer(self._rows, request.op, request.seq, lambda: request.payload)
        except KeyboardInterrupt as error:  # in the middle of somebody's step: nobody knows how far it got
            failures = [Failure(row, _Interrupted(f"interrupted: {error!r}")) for row in request.rows]
            self.replies.append(Answer(request, True, Outcome(failures=failures)))
            raise
        plain = outcome.is_plain()
        if plain and request is self._step.request:
            self.replies.append(self._step_columns if outcome.columns else self._step)
        else:
            self.replies.append(Answer(request, outcome.columns or not plain, None if plain else outcome))
        return True

    def close(self) -> Outcome:
        return self._rows.close()


class ProcessWorker(Desk):
    """A worker process, seen from the caller."""

    local: Literal[False] = False

    def __init__(
        self,
        index: int,
        rows: range,
        process: Any,
        channel: Channel,
        black_box: BlackBox,
        watch: DeathWatch,
        with_caller: bool = False,
    ) -> None:
        super().__init__(index, rows)
        self.process = process
        self.channel = channel
        self.black_box = black_box
        self.pid: int = process.pid
        self.who = f"worker {index}, pid {self.pid}"
        self.exitcode: int | None = None
        self.overdue = False  # an answer did not come in time; close() is less patient then
        self.with_caller = with_caller
        self._step = Answer(Request(0, Op.STEP, rows))  # the plain step and its answers, used again and again
        self._step_columns = Answer(self._step.request, columns=True)
        self._watch = watch
        self.descriptor = watch.add(self.pid, process.sentinel, self)
        self._poll = select.poll()
        self._poll.register(channel.fd, select.POLLIN)
        self._poll.register(self.descriptor, select.POLLIN)

    def __repr__(self) -> str:
        state = "dead" if self.death else "busy" if self.asked else "idle"
        return f"ProcessWorker({self.index}, envs={_span(self.rows)}, pid={self.pid}, {state})"

    def post(self, request: Request) -> None:
        """Send a request. To a dead worker it is answered at once, by its death."""
        if self.death is None:
            payload = None
            if request.payload is not None:
                try:
                    payload = pickle.dumps(request.payload, pickle.HIGHEST_PROTOCOL)
                except Exception:
                    payload = cloudpickle.dumps(request.payload)
            try:
                self.channel.send(request.op, request.seq, payload)
            except ChannelClosed:
                self.bury()
        request.payload = None
        self.asked.append(request)
        while (message := self.channel.early()) is not None:
            self._take(message)
        if self.death is not None:
            self._lose_all()

    @property
    def rung(self) -> bool:
        return len(self.asked) == 1 and self.asked[0] is self._step.request

    def take_plain(self, expected: bytes) -> None:
        """Take in the plain answer to :meth:`ring` if it is there; anything else is left to :meth:`receive`."""
        try:
            if self.channel.take(expected):
                self.asked.clear()
                self.replies.append(self._step)
        except ChannelClosed:
            self.bury()

    def ring(self, data: bytes, seq: int) -> None:
        """Ask for a step of all rows with actions in shared memory: nothing but ``data``, the encoded message."""
        if self.death is None:
            self._step.request.seq = seq
            try:
                self.channel.ring(data)
                self.asked.append(self._step.request)
            except ChannelClosed:
                self.bury()
        if self.death is not None:
            self.replies.append(Answer(self._step.request, death=self.death))

    def receive(self) -> bool:
        """Take in one reply if it is there; true if there was one, or if the worker turned out to be dead."""
        if self.death is not None:
            return False
        try:
            message = self.channel.receive()
        except ChannelClosed:
            self.bury()
            return True
        if message is None:
            return False
        self._take(message)
        return True

    def _take(self, message: Message) -> None:
        word, seq, payload = message
        if not self.asked or self.asked[0].seq != seq:
            return  # the answer to a question that was given up; never given to another one
        request = self.asked.popleft()
        if payload is None and request is self._step.request:
            self.replies.append(self._step if word == _PLAIN else self._step_columns)
            return
        outcome = None if payload is None else load(payload)
        self.replies.append(Answer(request, word != Reply.PLAIN, outcome))

    def wait(self, timeout: float | None) -> bool:
        """Sleep until there is something to receive or the worker has ended; false when the time is up."""
        events = self._poll.poll(None if timeout is None else max(timeout, 0.0) * 1000)
        if not events:
            return False
        ended = all(descriptor == self.descriptor for descriptor, _ in events)
        if ended and not self.receive():  # and nothing in the pipe: what it wrote before it ended has been taken in
            self.bury()
        return True

    def bury(self, reason: str = "") -> None:
        """Find out how the worker ended; everything it was asked is lost."""
        if self.death is not None:
            return
        command = COMMANDS[self.asked[0].op] if self.asked else "idle"
        if not self._watch_says_dead():  # whatever it is that has no pipe any more, it is no worker
            self.signal(signal.SIGKILL)
            reason = reason or "it closed its pipe, and was ended for that"
        self.exitcode = self._reap()
        stack = innermost(self.black_box.read()) if (self.exitcode or 0) < 0 else ""
        where = f"worker {self.index} (pid {self.pid}, {envs_text(self.rows)})"
        doing = "while idle" if command == "idle" else f"during {command}"
        text = f"{where} died {doing}: {reason or describe_exit(self.exitcode)}"
        if stack:
            text += f"\nits last Python stack:\n{stack}"
        self.death = WorkerDied(
            text, worker=self.index, envs=list(self.rows), pid=self.pid, exitcode=self.exitcode, command=command
        )
        self._lose_all()
        end_group([self.pid])
        self._watch.remove(self.descriptor)
        self.channel.close()

    def _watch_says_dead(self) -> bool:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(_LAST_MOMENTS * 1000))

    def _lose_all(self) -> None:
        while self.asked:
            self.replies.append(Answer(self.asked.popleft(), death=self.death))

    def _reap(self) -> int | None:
        """The exit code: never by join(), which a forked helper that holds the sentinel can delay."""
        deadline = time.monotonic() + _REAP
        while time.monotonic() < deadline:
            code: int | None = self.process.exitcode
            if code is not None:
                return code
            time.sleep(0.001)
        return None

    def stack(self) -> str:
        """The Python stack of a worker that is late, from its black box; empty if it cannot be had."""
        before = self.black_box.size()
        self.signal(signal.SIGUSR1)
        stack, patience, asked = "", _FIRST_WORD, time.monotonic()
        while time.monotonic() < asked + patience and not reaches_down(stack):
            time.sleep(0.002)
            stack = self.black_box.read(before)
            if stack or self._state() == "R":  # on a busy machine it may have to wait, also in the middle of a line
                patience = _LAST_WORD
        return innermost(stack)

    def signal(self, number: int) -> None:
        """Send a signal to the worker process."""
        self._watch.signal(self.descriptor, self.pid, number)

    def is_stopped(self) -> bool:
        """Whether somebody stopped the process (SIGSTOP); only known on Linux."""
        return self._state() in ("T", "t")

    def _state(self) -> str:
        """The kernel's letter for what the process does (R: it runs or waits for a core); empty where it does not tell."""
        # NameError: at the interpreter's exit there is no open() any more
        with contextlib.suppress(OSError, IndexError, NameError), open(f"/proc/{self.pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
        return ""

    def release(self) -> None:
        """Close everything the caller holds of an ended worker."""
        if self.death is None:
            self._watch.remove(self.descriptor)
        self.channel.close()
        self.black_box.close()
        if self.exitcode is None:
            self.exitcode = self._reap()
        with contextlib.suppress(ValueError, AttributeError):
            self.process.close()


AnyWorker: TypeAlias = CallerWorker | ProcessWorker


def envs_text(rows: range) -> str:
    return f"env {rows[0]}" if len(rows) == 1 else f"envs {_span(rows)}"


def _span(rows: range) -> str:
    return f"{rows[0]}-{rows[-1]}" if len(rows) > 1 else f"{rows[0]}" if len(rows) else "none"


def raise_ready(error: Any, note: str) -> Exception:
    """The exception of a failure, whichever way it came, with its note.

    One that is no ``Exception`` (``sys.exit`` in an environment of the caller's own share) gets a stand-in.
    """
    if not isinstance(error, BaseException):
        return unpack(error, note)
    if isinstance(error, Exception):
        error.add_note(note)
        return error
    stand_in = EnvError(f"{note}: {summary(error)}")
    stand_in.__cause__ = error
    return stand_in
