"""Reports that a worker has been at one request for long: without a timeout a wait may never end.

There is no thread for it. The process that waits looks now and then at what each worker is busy with, and reports what it
finds twice, a minute apart. So a step costs nothing, and a program that waits for nothing gets no report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from vecenv.engine.handles import ProcessWorker, command_of
from vecenv.engine.pending import PendingRequests
from vecenv.system.supervision import place

__all__ = ["Watchdog"]

_REPORT_AFTER: Final = [60.0, 600.0]
"""Seconds after which a request is told of, once each."""
_LOOK_EVERY: Final = [5.0]
"""Seconds between two looks at the workers."""

_log = logging.getLogger("vecenv")
_DOING: Final = {"step": "stepping", "reset": "resetting"}


class Watchdog:
    """Tells by :mod:`logging`, as the logger ``vecenv``, what is late.

    Args:
        table: The table of pending requests.
        processes: The workers of now.

    Attributes:
        bounded: Commands that have a timeout of their own, ``step_timeout``, and are not told of.
        next_look: By ``time.perf_counter()``.
        longest: Milliseconds to sleep at most before the next look.
    """

    def __init__(self, table: PendingRequests, processes: Callable[[], Sequence[ProcessWorker]]) -> None:
        self.bounded: Iterable[str] = ()
        self.next_look = 0.0
        self.longest = _LOOK_EVERY[0] * 1000
        self._table, self._processes = table, processes
        self._seen: dict[tuple[int, int], tuple[float, int]] = {}  # (worker, request) -> when it was first seen, times told

    def milliseconds(self, deadline: float) -> float:
        """How long to sleep at most before the next look, and not beyond ``deadline`` (``time.monotonic()``)."""
        return min(self.longest, max(deadline - time.monotonic(), 0.0) * 1000)

    def look(self) -> None:
        """Look at what each worker is busy with, once its pipe is empty; tell what has taken too long."""
        now = time.perf_counter()
        self.next_look = now + _LOOK_EVERY[0]
        seen, self._seen = self._seen, {}
        for worker in self._processes():
            while worker.death is None and worker.receive():
                pass
            request = self._table.oldest_of(worker)
            if worker.death is not None or request is None:
                continue
            if request.parts is not None and not request.parts[worker.index].sent:  # it waits for its turn
                continue
            began, reported = seen.get((worker.index, request.seq), (now, 0))
            late = reported < len(_REPORT_AFTER) and now - began >= _REPORT_AFTER[reported]
            self._seen[worker.index, request.seq] = began, reported + late
            command = command_of(request, worker)
            if late and command not in self.bounded:
                self._report(worker, list(request.rows_of(worker)), command, now - began)

    def _report(self, worker: ProcessWorker, rows: list[int], command: str, seconds: float) -> None:
        several = ", ".join(map(str, rows[:8])) + ", ..." * (len(rows) > 8)
        envs = f"env {rows[0]} has" if len(rows) == 1 else f"envs {several} have"
        where = f", at {found}" if (found := place(worker.stack())) else ", stopped by SIGSTOP" * worker.is_stopped()
        way_out = f"; {way}" if (way := _way_out(command)) else ""
        doing = _DOING.get(command, f"busy with {command}")
        _log.warning("%s been %s for %.0f s%s (%s)%s", envs, doing, seconds, where, worker.label, way_out)


def _way_out(command: str) -> Any:
    if command in _DOING:
        return "step_timeout= ends it"
    return "call_wait(timeout=) stops waiting" if command == "call" else ""
