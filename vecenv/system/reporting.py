"""Warnings and log messages that cannot end a call.

A filter may turn warnings into exceptions: ``python -W error``, or a package of environments that sets one when it is
imported. Raised in the middle of a call, such an exception would lose the call's result or leave workers running. So the
engine uses :func:`warn` while a result is pending; if warnings are exceptions, it logs instead. A warning about arguments,
before anything has changed, may raise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import gymnasium

_log = logging.getLogger("vecenv")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn like Gymnasium; log as ``vecenv`` if a filter turns warnings into exceptions."""
    try:
        gymnasium.logger.warn("%s", text, category=category)
    except Warning:
        _log.warning("%s", text)


def log_error(text: str) -> None:
    """Report an error like Gymnasium, which warns for that; log as ``vecenv`` if a filter turns warnings into exceptions."""
    try:
        gymnasium.logger.error("%s", text)
    except Warning:
        _log.error("%s", text)


class RestartLog:
    """A log line for each restart and its cause, as ``vecenv``, up to a number of lines per period.

    Args:
        most: Lines within ``period``. Further restarts are counted, and the next line gives their number.
        period: Seconds.
        clock: For tests.
    """

    def __init__(self, most: int = 5, period: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._period = period
        self._clock = clock
        self._began = -float("inf")
        self._lines = 0
        self._held_back = 0
        self._latest_cause = ""

    def log(self, cause: str) -> None:
        """Report a restart before it happens."""
        now = self._clock()
        if now - self._began >= self._period:
            self._began, self._lines = now, 0
        if self._lines >= self._most:
            self._held_back, self._latest_cause = self._held_back + 1, cause
            return
        held_back, self._held_back, self._lines = self._held_back, 0, self._lines + 1
        more = f" (and {held_back} restarts more since the last of these lines)" if held_back else ""
        _log.warning("vecenv restarts what failed: %s%s", cause, more)

    def close(self) -> None:
        """Report the restarts that were counted since the last line."""
        held_back, self._held_back = self._held_back, 0
        if held_back:
            times = f"{held_back} more times" if held_back > 1 else "once more"
            text = f"vecenv restarted what failed {times} since the last of these lines; the latest: {self._latest_cause}"
            _log.warning("%s", text)
