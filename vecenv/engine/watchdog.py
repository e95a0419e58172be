"""Logs requests that take very long, unless ``step_timeout`` limits them.

Without a limit, a wait may never end. There is no thread for this: every few seconds, a waiting process checks the requests
that its workers are executing, and logs those that have not changed for a minute, and again for ten (logger ``vecenv``). So
a step costs nothing extra, and nothing is logged while the program is not waiting.
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
        reports_steps: Log steps and resets, too; False if ``step_timeout`` limits them.

    Attributes:
        next_check: The ``time.perf_counter()`` of the next check.
        interval_ms: Milliseconds between checks.
    """

    def __init__(self, *, reports_steps: bool) -> None:
        self._reports_steps = reports_steps
        self.next_check = 0.0
        self.interval_ms = CHECK_INTERVAL_SECONDS[0] * 1000
        self._busy: dict[tuple[int, bytes], tuple[float, int]] = {}  # (worker, expected reply) -> first found, times logged

    def check(self, workers: Sequence[WorkerProcess]) -> None:
        """Log those of ``workers``, all with pending messages, that have been busy with one request for too long."""
        now = time.perf_counter()
        self.next_check = now + CHECK_INTERVAL_SECONDS[0]
        before, self._busy = self._busy, {}
        for worker in workers:
            if worker.channel.poll(0):
                continue
            expected_reply, rows, request = worker.pending[0]
            began, logged = before.get((worker.index, expected_reply), (now, 0))
            late = logged < len(REPORT_AFTER_SECONDS) and now - began >= REPORT_AFTER_SECONDS[logged]
            self._busy[worker.index, expected_reply] = began, logged + late
            if late and (self._reports_steps or request.command not in _ACTIVITIES):
                self._report(worker, sorted(rows), request.command, now - began)

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
