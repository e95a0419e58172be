"""Warnings and log messages that cannot interrupt a call.

A filter may turn warnings into exceptions, for example that of ``python -W error``, or one that a package sets on import.
Raised in the middle of a call, such an exception would lose the call's result or leave workers running. So the engine uses
:func:`warn`, which logs instead of raising, while a request is pending. Warnings about arguments may raise, because nothing
has changed yet.
"""

from __future__ import annotations

import logging
import time
from typing import Final

import gymnasium

_PERIOD_SECONDS: Final = 10.0
_MAX_LINES: Final = 5  # per period

_log = logging.getLogger("vecenv")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn through Gymnasium's logger. If warnings are turned into exceptions, log to ``vecenv``."""
    try:
        gymnasium.logger.warn("%s", text, category=category)
    except Warning:
        _log.warning("%s", text)


def log_error(text: str) -> None:
    """Report an error through Gymnasium's logger, which warns. If warnings are turned into exceptions, log to ``vecenv``."""
    try:
        gymnasium.logger.error("%s", text)
    except Warning:
        _log.error("%s", text)


class RestartLog:
    """A log of restarts and their causes, in the logger ``vecenv``, with a limited number of lines per period.

    Restarts beyond the limit are counted, and the next line gives their number.
    """

    def __init__(self) -> None:
        self._began = -float("inf")
        self._lines = 0
        self._num_suppressed = 0
        self._latest_cause = ""

    def log(self, cause: str) -> None:
        """Log a restart that is about to happen, or count it if the limit is reached."""
        now = time.monotonic()
        if now - self._began >= _PERIOD_SECONDS:
            self._began, self._lines = now, 0
        if self._lines >= _MAX_LINES:
            self._num_suppressed, self._latest_cause = self._num_suppressed + 1, cause
            return
        num_suppressed, self._num_suppressed, self._lines = self._num_suppressed, 0, self._lines + 1
        restarts = f"{num_suppressed} more restart{'s' * (num_suppressed > 1)}"
        more = f" (and {restarts} since the last such line)" if num_suppressed else ""
        _log.warning("vecenv restarts after a failure: %s%s", cause, more)

    def close(self) -> None:
        """Log the number and latest cause of the restarts since the last line, if there were any."""
        num_suppressed, self._num_suppressed = self._num_suppressed, 0
        if num_suppressed:
            failures = f"{num_suppressed} more failures" if num_suppressed > 1 else "another failure"
            text = "vecenv restarts after %s since the last such line; the latest: %s"
            _log.warning(text, failures, self._latest_cause)
