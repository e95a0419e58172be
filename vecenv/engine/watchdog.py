"""Finds requests that take very long: logs them, or notes those that exceed ``step_timeout``.

Without a limit, a wait may never end. There is no thread for this: every few seconds, a waiting process checks the requests
that its workers are executing, and logs those that have not changed for a minute, and again for ten (logger ``vecenv``). So
a step costs nothing extra, and nothing is logged while the program is not waiting.

With ``step_timeout``, waits end at the limit themselves, except those of ``recv`` for some rows while other rows become
ready. For these, the check notes the workers that are late.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from vecenv.engine.worker_process import WorkerProcess
from vecenv.errors import span_text
from vecenv.system.supervision import innermost_location

REPORT_AFTER_SECONDS: Final = [60.0, 600.0]
"""A request is logged once after each of these durations."""
CHECK_INTERVAL_SECONDS: Final = [5.0]

_log = logging.getLogger("vecenv")
_ACTIVITIES: Final = {"step": "stepping", "reset": "resetting"}


class Watchdog:
    """A periodic check of the requests that workers are executing.

    Args:
        step_timeout: Seconds after which a step or a reset is late. ``None``: it is logged instead, like other requests.

    Attributes:
        next_check: The ``time.perf_counter()`` of the next check.
        interval_ms: Milliseconds between checks.
        late: (worker, expected reply) of the steps and resets that the latest check found to be late.
    """

    def __init__(self, step_timeout: float | None) -> None:
        self._step_timeout = step_timeout
        self.next_check = 0.0
        self.interval_ms = CHECK_INTERVAL_SECONDS[0] * 1000
        if step_timeout is not None:
            self.interval_ms = min(self.interval_ms, max(step_timeout * 1000, 50))
        self.late: list[tuple[WorkerProcess, bytes]] = []
        self._busy: dict[tuple[int, bytes], tuple[float, int]] = {}  # (worker, expected reply) -> first found, times logged

    def check(self, workers: Sequence[WorkerProcess]) -> None:
        """Log or note those of ``workers``, all with pending messages, that have been busy with one request for too long."""
        now = time.perf_counter()
        self.next_check = now + self.interval_ms / 1000
        before, self._busy, self.late = self._busy, {}, []
        for worker in workers:
            if worker.channel.poll(0):
                continue
            expected_reply, rows, request = worker.pending[0]
            began, logged = before.get((worker.index, expected_reply), (now, 0))
            is_due = logged < len(REPORT_AFTER_SECONDS) and now - began >= REPORT_AFTER_SECONDS[logged]
            self._busy[worker.index, expected_reply] = began, logged + is_due
            if self._step_timeout is not None and request.command in _ACTIVITIES:
                if now - began >= self._step_timeout:
                    self.late.append((worker, expected_reply))
            elif is_due:
                self._report(worker, sorted(rows), request.command, now - began)

    def take_late(self) -> list[WorkerProcess]:
        """Remove the entries of ``late``; return the workers that have still not replied."""
        late, self.late = self.late, []
        return [
            worker
            for worker, expected_reply in late
            if worker.pending and worker.pending[0][0] == expected_reply and not worker.channel.poll(0)
        ]

    def _report(self, worker: WorkerProcess, rows: list[int], command: str, seconds: float) -> None:
        rows_text = span_text(rows)
        envs = f"env {rows[0]} has" if len(rows) == 1 else f"envs {rows_text} have"
        if len(rows) > 1 and (running := worker.running_row) is not None:
            envs = f"env {running}, of envs {rows_text}, has"
        location = innermost_location(worker.read_stack())
        where = f", at {location}" if location else ", stopped by SIGSTOP" * worker.is_stopped()
        hint = f"; {text}" if (text := _hint(command)) else ""
        activity = _ACTIVITIES.get(command, f"busy with {command}")
        _log.warning("%s been %s for %.0f s%s (%s)%s", envs, activity, seconds, where, worker.label, hint)


def _hint(command: str) -> str:
    if command in _ACTIVITIES:
        return "step_timeout= ends it"
    return "call_wait(timeout=) stops waiting" if command == "call" else ""
