"""What was asked and is not taken yet: one table of requests, keyed by sequence number.

This table is the only place that records which call is in progress. A call is made when its :class:`Request` is in the
table, and not before: everything that it is about is written by then, and what still has to be sent follows from the
request. An answer is looked up by its number and put where it belongs; to put it there twice does no harm. What a call gives
to its caller is computed from answers that stay where they are. The guard (:func:`vecenv.front.vector_env.exclusive`) then
replaces the table by the one that :attr:`~vecenv.front.driver.Driver.next_pending` holds, by one store. So a signal handler
may raise anywhere: either the call was not made, or its answer is pending and the same wait gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from vecenv.errors import WorkerDied
from vecenv.front.driver import Call, Driver, Phase
from vecenv.link.messages import Failure, Op, Outcome
from vecenv.shm.layout import Array

COMMANDS: Final = {
    Op.STEP: "step", Op.STEP_SOME: "step", Op.RESET: "reset", Op.RESET_SOME: "reset", Op.REBUILD_SOME: "reset",
    Op.CALL: "call", Op.SET_ATTR: "set_attr", Op.EXEC: "exec_func", Op.CLOSE: "close", Op.SET_NEXT: "set_next_options",
    Op.SAVE: "save", Op.PROVE: "save", Op.CHECK: "load", Op.LOAD: "load",
    Op.FREEZE: "freeze",
}  # fmt: skip

_PHASES: Final = {"step": Phase.WAITING_STEP, "reset": Phase.WAITING_RESET}


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended. Not an exception: one that was raised would keep the frames of the program alive."""

    text: str
    worker: int
    envs: tuple[int, ...]
    pid: int | None
    exitcode: int | None
    command: str
    kind: type[WorkerDied] = WorkerDied

    def error(self, text: str = "") -> WorkerDied:
        """A new exception."""
        return self.kind(
            text or self.text, worker=self.worker, envs=self.envs, pid=self.pid, exitcode=self.exitcode, command=self.command
        )


class Worker:
    """What steps some rows: the calling process, a process of its own, a host on another machine.

    Attributes:
        local: It is the calling process, which is never ended.
        death: How it ended.
        overdue: An answer did not come in time: ``close()`` is less patient then.
        paid: Its restart has been taken from the budget.
    """

    local = False

    def __init__(self, index: int, rows: range, pid: int, label: str) -> None:
        self.index, self.rows, self.pid, self.label = index, rows, pid, label
        self.death: Death | None = None
        self.exitcode: int | None = None
        self.overdue = self.paid = False

    def stack(self) -> str:
        """Where it is, as far as that can be known."""
        return ""

    def is_stopped(self) -> bool:
        """By SIGSTOP, as far as that can be known."""
        return False

    def signal(self, number: int) -> None:
        """Send it a signal."""

    def mark_dead(self, reason: str = "") -> None:
        """End it for good: whatever it was asked is answered by its death."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one worker said.

    Attributes:
        columns: There are infos or final observations in shared memory.
        outcome: What did not fit there; of the caller's own share.
        sealed: The same, as it came from a process (:mod:`vecenv.link.messages`).
        death: There will never be an answer.
    """

    columns: bool = False
    outcome: Outcome | None = None
    sealed: bytes | None = None
    death: Death | None = None
    lost: Mapping[int, str] = field(default_factory=dict)  # a host's rows that only a reset brings back
    error: Any = None  # what a host's request failed of as a whole, packed


PLAIN: Final = Answer()
"""The answer of a worker that has nothing to say."""
ONLY_COLUMNS: Final = Answer(columns=True)
"""The answer of a worker that has written all it has to say into shared memory."""


@dataclass(slots=True, eq=False)
class WorkerRequest:
    """One worker's part of a request that is not the same for all.

    Attributes:
        worker: The worker that is asked.
        rows: About which environments.
        op: What.
        payload: With what; for workers that are not asked by pipe.
        data: The message, encoded.
        written: How many bytes of it each write took.
        reference: Of a host's answer, where there is one.
    """

    worker: Worker
    rows: Sequence[int]
    op: Op
    payload: Any = None
    data: bytes | None = None
    written: list[int] = field(default_factory=list)
    reference: Any = None

    @property
    def sent(self) -> bool:
        """Whether all of the message is written."""
        return self.data is not None and sum(self.written) == len(self.data)


@dataclass(slots=True)
class Result:
    """What a round of answers amounts to, apart from what lies in shared memory; tables by environment."""

    columns: bool = False
    infos: dict[int, Any] = field(default_factory=dict)
    finals: dict[int, Any] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[tuple[Failure, Worker]] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    errors: list[tuple[Exception, Any]] = field(default_factory=list)  # of whole hosts, and their records


NOTHING: Final = Result()
"""The result where there is nothing but numbers in shared memory: one object for all, which is never written to."""
COLUMNS: Final = Result(columns=True)
"""Likewise of a round in which all that was said lies in shared memory."""


ALL: Final = -1
"""Stands for a worker's index: all of them, or rows that no worker is asked about."""


class Settlement:
    """Answers on their way to the caller: those of a whole request, or of one of its workers, and how far they have got.

    What is done about failures cannot be repeated and takes long, so each step is noted here when it is done.

    Attributes:
        request, command: The request, and its command.
        rows: Which environments these answers are about.
        lost: Of those, the ones that had failed before and were not asked.
        result: The answers, read.
        raised: (env, exception) of each failure, made and on record.
        records: For the ledger, and not there yet.
        error: The exception that is the answer.
        todo, rebuilt, rebuild: How far rebuilding has got (:mod:`vecenv.engine.recovery`).
        settled: What had failed is raised or rebuilt, and everything is where the caller is to see it.
        ready: Of rows that are received one by one: those that ``recv`` may give.
    """

    def __init__(self, request: Request, rows: Sequence[int], lost: Sequence[int]) -> None:
        self.request = request
        self.command = request.command
        self.rows = rows
        self.lost = lost
        self.result: Result | None = None
        self.raised: list[tuple[int, Exception]] | None = None
        self.records: list[Any] = []
        self.error: Exception | None = None
        self.todo: set[int] | None = None
        self.rebuilt: set[int] = set()
        self.rebuild: Request | None = None
        self.settled = False
        self.ready: Sequence[int] | None = None


class Request:
    """One question to some workers, and their answers.

    Attributes:
        seq: Its number.
        command: ``"step"``, ``"reset"``, ``"call"``, ``"set_attr"``, ``"set_next_options"``, ``"exec_func"``, ``"save"``,
            ``"load"`` or ``"rebuild"``.
        workers: The workers that are asked.
        parts: By the worker's index, what each is asked; ``None``: all the same, :attr:`data`, about all their rows.
        sent: Of a request without parts: the bytes that each write to a worker process took, in their order.
        answers: By the worker's index.
        by_row: The answers are taken row by row, by ``recv``.
        steps, resets: Rows that are stepped or reset by it.
        sequel: (result, deadline, timeout) -> what the caller gets, of a call that makes something of its answers.
        episodes: With spare workers, of a reset: by row, the episodes that it begins.
    """

    # Defaults of attributes that a plain step does not set.
    parts: dict[int, WorkerRequest] | None = None
    data: bytes = b""
    sent: list[int]
    by_row: bool = False
    lost: Sequence[int] = ()  # rows that had failed before and were left out, to be rebuilt
    mask: Array | None = None
    seeds: Sequence[Any] | None = None
    options: Any = None
    sequel: Any = None
    episodes: Any = None
    steps: int = 0
    resets: int = 0

    def __init__(self, seq: int, command: str, workers: Sequence[Worker]) -> None:
        self.seq = seq
        self.command = command
        self.workers = workers
        self.answers: dict[int, Answer] = {}

    @property
    def phase(self) -> Phase:
        """The phase of the vector environment while this is pending."""
        return _PHASES.get(self.command, Phase.WAITING_CALL)

    @property
    def answered(self) -> bool:
        """Whether all workers that were asked have answered."""
        return len(self.answers) - (ALL in self.answers) == len(self.workers)

    def missing(self) -> list[Worker]:
        """The workers that have not answered."""
        return [worker for worker in self.workers if worker.index not in self.answers]

    def awaits(self, worker: Worker) -> bool:
        """Whether a worker was asked and has not answered."""
        index = worker.index
        if index in self.answers:
            return False
        if self.parts is None:
            return any(other is worker for other in self.workers)
        part = self.parts.get(index)
        return part is not None and part.worker is worker

    def rows_of(self, worker: Worker) -> Sequence[int]:
        """The environments that a worker is asked about."""
        return worker.rows if self.parts is None else self.parts[worker.index].rows

    def rows_at(self, index: int) -> Sequence[int]:
        """The environments that the worker of this index was asked about, or that were lost before (:data:`ALL`)."""
        if index == ALL:
            return self.lost
        if self.parts is not None:
            return self.parts[index].rows
        return next(worker.rows for worker in self.workers if worker.index == index)

    def __repr__(self) -> str:
        return f"Request({self.seq}, {self.command}, {len(self.answers)} of {len(self.workers)} answered)"


class Pending:
    """Everything that was asked and is not taken yet. The guard replaces it as a whole.

    Attributes:
        requests: By number, in order. One call at most that is answered as a whole, or any number that are answered by row;
            and the ``"rebuild"`` requests that are made on the way to answer those.
        arrived: (number, worker's index) of the answers to requests by row, in the order in which they came.
        settlements: By (number, worker's index, or :data:`ALL`): what is done about answers that are being looked at. They
            are not the requests' own: the frames of an exception hold requests, and settlements hold exceptions.
        ready: Rows that were answered and not received, the earliest first.
        infos, finals: By row: the infos and the last observations that came by pickle with those that are ready.
        latest: The rows of the latest ``recv``, which ``send`` means by default.
        steps, resets: Of environments, whose answers were taken.
        episodes: With spare workers, the episodes that rows are in (:class:`vecenv.engine.spares.EpisodeTable`).
    """

    # Defaults of attributes that nothing writes into: in place of them, a dict of its own is put there.
    arrived: dict[tuple[int, int], Request] = {}  # noqa: RUF012
    settlements: dict[tuple[int, int], Settlement] = {}  # noqa: RUF012
    ready: Sequence[int] = ()
    infos: dict[int, Any] = {}  # noqa: RUF012
    finals: dict[int, Any] = {}  # noqa: RUF012
    episodes: Any = None
    requests: dict[int, Request]
    latest: Array
    steps: int
    resets: int


class PendingRequests(Driver):
    """The table, and what can be asked of it. The base of :class:`vecenv.engine.engine.Engine`."""

    pending: Pending
    next_pending: Pending | None

    def __init__(self, num_envs: int) -> None:
        pending = Pending()
        pending.requests, pending.latest, pending.steps, pending.resets = {}, np.arange(num_envs), 0, 0
        self.pending = pending

    @property
    def requests(self) -> dict[int, Request]:
        """See :class:`Pending`."""
        return self.pending.requests

    @property
    def call(self) -> Request | None:
        """The pending call that is answered as a whole."""
        for request in self.pending.requests.values():
            return None if request.by_row or request.command == "rebuild" else request
        return None

    @property
    def phase(self) -> Phase:
        """What the vector environment is in the middle of."""
        call = self.call
        return Phase.DEFAULT if call is None else call.phase

    def enter(self, request: Request, others: Sequence[Request] = (), *, alone: bool = False) -> None:
        """From here on the call is made; ``others`` are the rest of it; ``alone``: all that was pending is dropped."""
        if alone:
            self.pending = self.emptied(self._dropped_steps(), 0, request)
            return
        pending = self.pending
        if request.by_row and pending.arrived is Pending.arrived:
            pending.arrived = {}
        if others:
            pending.requests |= {one.seq: one for one in (request, *others)}
        else:
            pending.requests[request.seq] = request

    def emptied(self, steps: int, resets: int, *requests: Request) -> Pending:
        """A table with nothing but ``requests``, once that many steps and resets were taken."""
        now, then = self.pending, Pending()
        then.requests, then.latest = {request.seq: request for request in requests}, now.latest
        then.steps, then.resets = now.steps + steps, now.resets + resets
        return then

    def _dropped_steps(self) -> int:
        """Steps of rows that arrived and that a reset of all rows drops: they were made."""
        return sum(len(request.rows_at(index)) for (_, index), request in self.pending.arrived.items()
                   if request.command == "step" and index != ALL)  # fmt: skip

    def settlement(self, request: Request, index: int) -> Settlement:
        """How far the answer of one worker, or of :data:`ALL`, has got."""
        found = self.pending.settlements.get((request.seq, index))
        if found is None and request.by_row:
            lost = request.lost if index == ALL else ()
            found = self.note(request, index, Settlement(request, request.rows_at(index), lost))
        elif found is None:
            asked = [row for worker in request.workers for row in request.rows_of(worker)]
            found = self.note(request, index, Settlement(request, [*asked, *request.lost], request.lost))
        return found

    def note(self, request: Request, index: int, settlement: Settlement) -> Settlement:
        """Keep what is done about an answer until that is taken."""
        self.pending.settlements = {**self.pending.settlements, (request.seq, index): settlement}
        return settlement

    def deliver(self, seq: int, index: int, answer: Answer) -> None:
        """Put an answer where it belongs. Idempotent; an answer that is not wanted, or that is there, goes nowhere."""
        request = self.pending.requests.get(seq)
        if request is None:
            return
        if request.by_row and index not in request.answers:
            self.pending.arrived.setdefault((seq, index), request)
        request.answers.setdefault(index, answer)

    def repair(self) -> None:
        """After an interruption: an answer that :meth:`deliver` put into one place only has not come yet."""
        arrived = self.pending.arrived
        for (seq, index), request in list(arrived.items()):
            if index not in request.answers:
                del arrived[seq, index]

    def mark_lost(self, worker: Worker, death: Death) -> None:
        """A worker died: that answers all it was asked. Idempotent."""
        for request in list(self.pending.requests.values()):
            if request.awaits(worker):
                self.deliver(request.seq, worker.index, Answer(death=death))

    def underway(self) -> list[int]:
        """Rows that were sent, by ``send`` or ``reset_async``, and whose answers have not come."""
        rows: list[int] = []
        arrived = self.pending.arrived
        for request in self.pending.requests.values():
            if request.by_row and request.parts:
                answers = request.answers
                for index, part in request.parts.items():
                    if index not in answers and (request.seq, index) not in arrived:
                        rows += part.rows
        return rows

    def waiting(self) -> list[int]:
        """Rows that were sent and not received: those underway, those whose answers arrived, and those ready."""
        rows: list[int] = []
        arrived = self.pending.arrived
        for seq, request in self.pending.requests.items():
            if request.by_row:
                answers = request.answers
                for index, part in (request.parts or {}).items():
                    if index not in answers or (seq, index) in arrived:
                        rows += part.rows
                if request.lost and (ALL not in answers or (seq, ALL) in arrived):
                    rows += request.lost
        rows += self.pending.ready
        return rows

    @property
    def outstanding(self) -> Call:
        call = self.call
        if call is None:
            return Call(Phase.DEFAULT, len(self.waiting()), by_row=True)
        stepped = () if call.phase is Phase.WAITING_CALL else call.workers
        return Call(call.phase, sum(len(call.rows_of(worker)) for worker in stepped) + len(call.lost), by_row=False)

    @property
    def in_flight(self) -> Array:
        return np.array(self.waiting(), np.intp)

    @property
    def idle(self) -> bool:
        """No row is on its way, and none is ready."""
        return not self.pending.ready and not any(request.by_row for request in self.pending.requests.values())

    def is_pending(self, worker: Worker) -> bool:
        """Whether a worker has been asked something that it has not answered."""
        return any(request.awaits(worker) for request in self.pending.requests.values())

    def oldest_of(self, worker: Worker) -> Request | None:
        """The request that a worker is busy with."""
        for request in self.pending.requests.values():
            if request.awaits(worker):
                return request
        return None
