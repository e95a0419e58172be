"""Sends pending requests to workers, subject to pipe capacity and ``max_concurrency``.

The table of requests records how many bytes of each message each write took. So sending can be interrupted anywhere, and
goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Sequence
from itertools import repeat
from os import write
from typing import Final

from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import PendingRequests, Request, WorkerRequest
from vecenv.link.messages import Op

__all__ = ["HEAD_START", "Sender"]

HEAD_START: Final = 20.0
"""Milliseconds without progress in which a worker may take in a message longer than its pipe."""


class Sender:
    """Sends pending requests to worker processes.

    Args:
        table: The table.
        max_busy: At most so many workers are busy at a time; ``None``: all of them.

    Attributes:
        behind: Something in the table may not have been sent yet.
        outs: The descriptors that messages are written to.
    """

    def __init__(self, table: PendingRequests, max_busy: int | None) -> None:
        self.behind = False
        self.outs: tuple[int, ...] = ()
        self._table = table
        self._max_busy = max_busy
        self._processes: Sequence[ProcessWorker] = ()

    def settle(self, processes: Sequence[ProcessWorker]) -> None:
        """These are the workers now."""
        self._processes = processes
        self.outs = tuple(worker.channel.out for worker in processes)

    def plain_step(self, request: Request) -> None:
        """Make a call that says the same to all workers: a step of all rows, with actions in shared memory."""
        sent = request.sent
        self.behind = True
        self._table.pending.requests[request.seq] = request
        if self._max_busy is None:
            try:
                sent.extend(map(write, self.outs, repeat(request.data)))  # as `write_once` does
                self.behind = False
                return
            except OSError:  # somebody is gone: found out below
                pass
        self.pump(HEAD_START)

    def ask(self, request: Request, others: Sequence[Request] = (), *, alone: bool = False) -> None:
        """Make a call, of which ``others`` are the rest; ``alone``: nothing else is pending from then on."""
        behind, self.behind = self.behind, True
        self._table.enter(request, others, alone=alone)
        if not behind and self._max_busy is None and self._send_all(request) and all(map(self._send_all, others)):
            self.behind = False
        else:
            self.pump(HEAD_START)

    def _send_all(self, request: Request) -> bool:
        """Send a request, where nothing else has still to be sent; false if a pipe was full."""
        for part in (request.parts or {}).values():
            worker = part.worker
            if isinstance(worker, ProcessWorker) and not worker.send(part):
                return False
        return True

    def pump(self, patience_ms: float = 0.0) -> None:
        """Send what has still to be sent, in order, as far as pipes take it and workers may be busy.

        Args:
            patience_ms: How long to wait where a worker that is reading has not made room.
        """
        while full := self._send():
            poll = select.poll()
            for worker in full:
                poll.register(worker.channel.out, select.POLLOUT)
                poll.register(worker.channel.fd, select.POLLIN)
            if not poll.poll(patience_ms):
                return
            for worker in full:
                while worker.receive() and worker.death is None:
                    pass

    def _send(self) -> list[ProcessWorker]:
        """Send once; returns the workers that read and have not made room for all of their messages."""
        full: list[ProcessWorker] = []
        behind = False
        stuck: set[int] = set()
        room = self._room()
        for request in list(self._table.requests.values()):
            if request.parts is None:
                if len(request.sent) == len(self.outs) or not self._processes:
                    continue
                _split(request)
            assert request.parts is not None
            for index, part in request.parts.items():
                worker = part.worker
                if not isinstance(worker, ProcessWorker) or index in request.answers or part.sent:
                    continue
                if index in stuck or (room <= 0 and part.op <= Op.REBUILD_SOME and not part.written):
                    stuck.add(index)
                    behind = True
                    continue
                if worker.send(part):
                    room -= part.op <= Op.REBUILD_SOME and index not in request.answers
                    continue
                stuck.add(index)
                behind = True
                if self._table.oldest_of(worker) is request:
                    full.append(worker)
        self.behind = behind
        return full

    def _room(self) -> int:
        """How many more workers may become busy."""
        if self._max_busy is None:
            return len(self._processes) + 1
        busy = sum(
            1
            for request in self._table.requests.values()
            for index, part in (request.parts or {}).items()
            if part.written and index not in request.answers and part.op <= Op.REBUILD_SOME
        )
        return self._max_busy - busy


def _split(request: Request) -> None:
    """Give a request that was sent to some workers only a part for each: the rest is sent one by one."""
    parts: dict[int, WorkerRequest] = {}
    sent = iter(request.sent)
    for worker in request.workers:
        part = parts[worker.index] = WorkerRequest(worker, worker.rows, Op.STEP)
        if not worker.local:
            part.data = request.data
            with contextlib.suppress(StopIteration):
                part.written.append(next(sent))
    request.parts = parts
