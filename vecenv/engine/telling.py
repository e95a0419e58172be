"""Telling workers what is owed, as far as pipes take it and workers may be busy.

What has been told stands in the table of what is owed: how much of each message each write took. So telling can be
interrupted anywhere, and goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Sequence
from itertools import repeat
from os import write
from typing import Final

from vecenv.engine.handles import ProcessWorker
from vecenv.engine.owed import Flight, Owed, Part
from vecenv.link.messages import Op

__all__ = ["HEAD_START", "Telling"]

HEAD_START: Final = 20.0
"""Milliseconds without progress in which a worker may take in a message longer than its pipe."""


class Telling:
    """Tells worker processes what is owed.

    Args:
        owed: The table.
        max_busy: At most so many workers are busy at a time; ``None``: all of them.

    Attributes:
        behind: Something in the table may not have been told yet.
        outs: The descriptors that messages are written to.
    """

    def __init__(self, owed: Owed, max_busy: int | None) -> None:
        self.behind = False
        self.outs: tuple[int, ...] = ()
        self._owed = owed
        self._max_busy = max_busy
        self._processes: Sequence[ProcessWorker] = ()

    def settle(self, processes: Sequence[ProcessWorker]) -> None:
        """These are the workers now."""
        self._processes = processes
        self.outs = tuple(worker.channel.out for worker in processes)

    def plain_step(self, flight: Flight) -> None:
        """Make a call that says the same to everybody: a step of all rows, with actions in shared memory."""
        told = flight.told
        self.behind = True
        self._owed.flights[flight.seq] = flight
        if self._max_busy is None:
            try:
                told.extend(map(write, self.outs, repeat(flight.data)))  # as `write_once` does
                self.behind = False
                return
            except OSError:  # somebody is gone: found out below
                pass
        self.pump(HEAD_START)

    def ask(self, flight: Flight, others: Sequence[Flight] = (), *, alone: bool = False) -> None:
        """Make a call, of which ``others`` are the rest; ``alone``: nothing else is owed from then on."""
        behind, self.behind = self.behind, True
        self._owed.enter(flight, others, alone=alone)
        if not behind and self._max_busy is None and self._tell_all(flight) and all(map(self._tell_all, others)):
            self.behind = False
        else:
            self.pump(HEAD_START)

    def _tell_all(self, flight: Flight) -> bool:
        """Tell what a flight asks, where nothing else has still to be told; false if a pipe was full."""
        for part in (flight.parts or {}).values():
            worker = part.worker
            if isinstance(worker, ProcessWorker) and not worker.tell(part):
                return False
        return True

    def pump(self, patience_ms: float = 0.0) -> None:
        """Tell what has still to be told, in order, as far as pipes take it and workers may be busy.

        Args:
            patience_ms: How long to wait where a worker that is reading has not made room.
        """
        while full := self._tell():
            poll = select.poll()
            for worker in full:
                poll.register(worker.channel.out, select.POLLOUT)
                poll.register(worker.channel.fd, select.POLLIN)
            if not poll.poll(patience_ms):
                return
            for worker in full:
                while worker.receive() and worker.death is None:
                    pass

    def _tell(self) -> list[ProcessWorker]:
        """One round of telling; returns who reads and has not made room for all that it is to be told."""
        full: list[ProcessWorker] = []
        behind = False
        stuck: set[int] = set()
        room = self._room()
        for flight in list(self._owed.flights.values()):
            if flight.parts is None:
                if len(flight.told) == len(self.outs) or not self._processes:
                    continue
                _split(flight)
            assert flight.parts is not None
            for index, part in flight.parts.items():
                worker = part.worker
                if not isinstance(worker, ProcessWorker) or index in flight.answers or part.told:
                    continue
                if index in stuck or (room <= 0 and part.op <= Op.REBUILD_SOME and not part.written):
                    stuck.add(index)
                    behind = True
                    continue
                if worker.tell(part):
                    room -= part.op <= Op.REBUILD_SOME and index not in flight.answers
                    continue
                stuck.add(index)
                behind = True
                if self._owed.oldest_of(worker) is flight:
                    full.append(worker)
        self.behind = behind
        return full

    def _room(self) -> int:
        """How many more workers may become busy."""
        if self._max_busy is None:
            return len(self._processes) + 1
        busy = sum(
            1
            for flight in self._owed.flights.values()
            for index, part in (flight.parts or {}).items()
            if part.written and index not in flight.answers and part.op <= Op.REBUILD_SOME
        )
        return self._max_busy - busy


def _split(flight: Flight) -> None:
    """Give a flight that was told to some only, all at once, a part for each: the rest is told one by one."""
    parts: dict[int, Part] = {}
    told = iter(flight.told)
    for worker in flight.workers:
        part = parts[worker.index] = Part(worker, worker.rows, Op.STEP)
        if not worker.local:
            part.data = flight.data
            with contextlib.suppress(StopIteration):
                part.written.append(next(told))
    flight.parts = parts
