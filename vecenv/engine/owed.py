"""What is owed: one table of everything that was asked and not taken yet, keyed by sequence number.

Who else would have to remember what a call is in the middle of asks this table. A call is made when its :class:`Flight` is
in the table, and not before: what it is about has been written by then, what has still to be said to whom follows from the
flight. An answer is looked up by its number and put where it belongs; putting it there twice does no harm. What a call gives
to its caller is computed from answers that stay where they are, and the very last thing it does is to put the table in place
as it is *after* the answer has been taken (:attr:`Owed.after`). So an exception may come out of any line in between, a
Ctrl-C, a time limit: either the call was never made, or its answer is still owed, and the same wait gives it.

Nothing here does anything: this is data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from vecenv.errors import WorkerDied
from vecenv.front.phases import Phase
from vecenv.link.messages import Failure, Op, Outcome
from vecenv.shm.layout import Array

__all__ = [
    "ABSENT", "ALL", "AS_IT_IS", "COLUMNS", "COMMANDS", "NOTHING", "ONLY_COLUMNS", "PLAIN", "Answer", "Death", "Flight",
    "Owed", "Part", "ReadyRow", "Result", "Round", "Worker",
]  # fmt: skip

COMMANDS: Final = {
    Op.STEP: "step", Op.STEP_SOME: "step", Op.RESET: "reset", Op.RESET_SOME: "reset", Op.REBUILD_SOME: "reset",
    Op.CALL: "call", Op.SET_ATTR: "set_attr", Op.EXEC: "exec_func", Op.CLOSE: "close", Op.SET_NEXT: "set_next_options",
    Op.SAVE: "save", Op.PROVE: "save", Op.CHECK: "load", Op.LOAD: "load",
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


class Worker(Protocol):
    """What steps some rows: the calling process, a process of its own, a host on another machine."""

    index: int
    rows: range
    pid: int
    who: str
    exitcode: int | None
    death: Death | None
    overdue: bool
    """It was late, and nobody has heard from it since."""
    paid: bool
    """Its restart has been taken from the budget."""

    @property
    def local(self) -> bool:
        """It is the calling process, which nobody ends."""

    def stack(self) -> str:
        """Where it is, as far as that can be known."""

    def is_stopped(self) -> bool:
        """By SIGSTOP."""

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


class Part:
    """One worker's part of a flight that is not the same for all.

    Attributes:
        worker: Who is asked.
        rows: About which environments.
        op: What.
        payload: With what; for those who are not asked by pipe.
        data: The message, encoded.
        written: How many bytes of it each write took.
        uncounted: Environment steps that the counter does not know of yet.
        reference: Of a host's answer, where there is one.
    """

    __slots__ = ("data", "op", "payload", "reference", "rows", "uncounted", "worker", "written")

    def __init__(self, worker: Worker, rows: Sequence[int], op: Op, payload: Any = None) -> None:
        self.worker = worker
        self.rows = rows
        self.op = op
        self.payload = payload
        self.data: bytes | None = None
        self.written: list[int] = []
        self.uncounted = 0
        self.reference: Any = None

    @property
    def told(self) -> bool:
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
"""The result of a round in which nobody had anything to say, the same one every time: nobody writes into it."""
COLUMNS: Final = Result(columns=True)
"""Likewise of a round in which all that was said lies in shared memory."""


ALL: Final = -1
"""Stands for a worker's index: all of them, or rows that no worker is asked about."""


class Round:
    """Answers on their way to the caller: those of a whole flight, or of one of its workers, and how far they have got.

    What is done about failures cannot be done twice, and takes long. So each step of it is noted here when it is done.

    Attributes:
        command, by_row, mask, seeds, options: Of the flight.
        rows: Which environments these answers are about.
        lost: Of those, the ones that had failed before and were not asked.
        result: The answers, read.
        raised: (env, exception) of each failure, made and on record.
        todo, rebuilt, rebuild: How far rebuilding has got (:mod:`vecenv.engine.recovery`).
        settled: What had failed is raised or rebuilt, and everything is where the caller is to see it.
        entries: Of rows that are received one by one: they, ready.
    """

    def __init__(self, flight: Flight, rows: Sequence[int], lost: Sequence[int]) -> None:
        self.command = flight.command
        self.by_row = flight.by_row
        self.mask = flight.mask
        self.seeds = flight.seeds
        self.options = flight.options
        self.rows = rows
        self.lost = lost
        self.result: Result | None = None
        self.raised: list[tuple[int, Exception]] | None = None
        self.records: list[Any] = []  # for the ledger, and not there yet
        self.verdict: Exception | None = None
        self.todo: set[int] | None = None
        self.rebuilt: set[int] = set()
        self.rebuild: Flight | None = None
        self.settled = False
        self.entries: list[ReadyRow] | None = None


class Flight:
    """One question to some workers, and what they answered.

    Attributes:
        seq: Its number.
        command: ``"step"``, ``"reset"``, ``"call"``, ``"set_attr"``, ``"set_next_options"``, ``"exec_func"``, ``"save"``,
            ``"load"`` or ``"rebuild"``.
        workers: Who is asked.
        parts: By the worker's index, what each is asked; ``None``: all the same, :attr:`data`, about all their rows.
        told: Of a flight without parts: what each write to a worker process took, in their order.
        answers: By the worker's index.
        by_row: The answers are taken row by row, by ``recv``.
        sequel: (result, timeout) -> what the caller gets, of a call that makes something of its answers, or asks once more.
    """

    # What most flights leave alone: a plain step sets none of it.
    parts: dict[int, Part] | None = None
    data: bytes = b""
    told: list[int]
    by_row: bool = False
    lost: Sequence[int] = ()  # rows that had failed before and were left out, to be rebuilt
    mask: Array | None = None
    seeds: Sequence[Any] | None = None
    options: Any = None
    sequel: Any = None
    uncounted: int = 0  # environment steps that the counter does not know of yet ...
    unreset: int = 0  # ... or resets

    def __init__(self, seq: int, command: str, workers: Sequence[Worker]) -> None:
        self.seq = seq
        self.command = command
        self.workers = workers
        self.answers: dict[int, Answer] = {}

    @property
    def phase(self) -> Phase:
        """What the vector environment is in the middle of while this is owed."""
        return _PHASES.get(self.command, Phase.WAITING_CALL)

    @property
    def answered(self) -> bool:
        """Whether everybody who was asked has answered."""
        return len(self.answers) - (ALL in self.answers) == len(self.workers)

    def missing(self) -> list[Worker]:
        """Who has not answered."""
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
        """Which environments a worker is asked about."""
        return worker.rows if self.parts is None else self.parts[worker.index].rows

    def rows_at(self, index: int) -> Sequence[int]:
        """Which environments the worker of this index was asked about, or which were lost before (:data:`ALL`)."""
        if index == ALL:
            return self.lost
        if self.parts is not None:
            return self.parts[index].rows
        return next(worker.rows for worker in self.workers if worker.index == index)

    def __repr__(self) -> str:
        return f"Flight({self.seq}, {self.command}, {len(self.answers)} of {len(self.workers)} answered)"


ABSENT: Final = object()
"""No info, or no last observation, came by pickle with a row."""

ReadyRow = tuple[int, "tuple[Any, Any] | None"]
"""A row that was answered and not received, and the (info, final observation) that came with it by pickle, or neither."""

Rounds = dict[tuple[int, int], Round]
After = tuple[dict[int, Flight], dict[tuple[int, int], Flight], list[ReadyRow], Array, Rounds]

AS_IT_IS: Final[After | None] = None
"""The table does not change."""


class Owed:
    """The table.

    Attributes:
        flights: By number, in order: all that was asked and not taken. One call at most that is answered as a whole, or any
            number that are answered by row; and what is asked on the way to answer those (``"rebuild"``).
        landed: (number, worker's index) of the answers to flights by row, in the order in which they came.
        ready: Rows that were answered and not received, the earliest first.
        latest: Whom ``send`` means by default: the rows of the latest ``recv``.
        rounds: (number, worker's index, or :data:`ALL`) of answers that are being looked at.
        after: The five above as they will be when the answer being given has been taken; ``None``: as they are.
        verdict: The exception that is the answer being given; any other leaves it owed.
        caller: The thread that is in a call; 0: nobody.
        calm: The latest call ended by itself.
    """

    def __init__(self, num_envs: int) -> None:
        self.flights: dict[int, Flight] = {}
        self.landed: dict[tuple[int, int], Flight] = {}
        self.ready: list[ReadyRow] = []
        self.latest: Array = np.arange(num_envs)
        self.rounds: Rounds = {}
        self.after: After | None = AS_IT_IS
        self.verdict: BaseException | None = None
        self.caller = 0
        self.calm = True

    @property
    def call(self) -> Flight | None:
        """The call that is owed as a whole."""
        for flight in self.flights.values():
            return None if flight.by_row or flight.command == "rebuild" else flight
        return None

    @property
    def phase(self) -> Phase:
        """What the vector environment is in the middle of."""
        call = self.call
        return Phase.DEFAULT if call is None else call.phase

    def enter(self, flight: Flight, others: Sequence[Flight] = (), *, alone: bool = False) -> None:
        """From here on the call was made; ``others`` are the rest of it; ``alone``: all there was before is dropped."""
        if alone:
            self.flights, self.landed, self.ready, self.rounds = {flight.seq: flight}, {}, [], {}
        elif others:
            self.flights |= {one.seq: one for one in (flight, *others)}
        else:
            self.flights[flight.seq] = flight

    def land(self, seq: int, index: int, answer: Answer) -> None:
        """Put an answer where it belongs. Idempotent; one that nobody asked for, or that is there, goes nowhere."""
        flight = self.flights.get(seq)
        if flight is None:
            return
        if flight.by_row and index not in flight.answers:
            self.landed.setdefault((seq, index), flight)
        flight.answers.setdefault(index, answer)

    def resume(self) -> None:
        """The call before was interrupted: an answer that :meth:`land` put into one place only has not come yet."""
        for (seq, index), flight in list(self.landed.items()):
            if index not in flight.answers:
                del self.landed[seq, index]

    def lose(self, worker: Worker, death: Death) -> None:
        """A worker died: what it was asked is answered by that. Idempotent."""
        for flight in list(self.flights.values()):
            if flight.awaits(worker):
                self.land(flight.seq, worker.index, Answer(death=death))

    def underway(self) -> list[int]:
        """Rows that were sent, by ``send`` or ``reset_async``, and whose answers have not come."""
        rows: list[int] = []
        for flight in self.flights.values():
            if flight.by_row and flight.parts:
                answers = flight.answers
                for index, part in flight.parts.items():
                    if index not in answers and (flight.seq, index) not in self.landed:
                        rows += part.rows
        return rows

    def waiting(self) -> list[int]:
        """Rows that were sent and not received: those underway, those whose answers lie here unread, and those ready."""
        rows: list[int] = []
        landed = self.landed
        for seq, flight in self.flights.items():
            if flight.by_row:
                answers = flight.answers
                for index, part in (flight.parts or {}).items():
                    if index not in answers or (seq, index) in landed:
                        rows += part.rows
                if flight.lost and (ALL not in answers or (seq, ALL) in landed):
                    rows += flight.lost
        if self.ready:
            rows += [row for row, _ in self.ready]
        return rows

    @property
    def in_flight(self) -> int:
        """How many rows were asked to step or to reset, and their answers were not taken."""
        call = self.call
        if call is None or call.phase is Phase.WAITING_CALL:
            return len(self.waiting())
        return sum(len(call.rows_of(worker)) for worker in call.workers) + len(call.lost)

    @property
    def idle(self) -> bool:
        """Nothing is on its way by row, nothing is ready."""
        return not self.ready and not any(flight.by_row for flight in self.flights.values())

    def is_owed(self, worker: Worker) -> bool:
        """Whether a worker has been asked something that it has not answered."""
        return any(flight.awaits(worker) for flight in self.flights.values())

    def oldest_of(self, worker: Worker) -> Flight | None:
        """What a worker is busy with."""
        for flight in self.flights.values():
            if flight.awaits(worker):
                return flight
        return None
