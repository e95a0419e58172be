"""What a vector environment is to do about failures, how often, and what it says about that."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vecenv.front.deadlines import seconds_of

__all__ = ["FREE_RESTARTS", "STEPS_PER_RESTART", "Policy", "RestartBudget", "RestartLog"]

FREE_RESTARTS: Final = 5
"""Restarts that an environment, or a worker process, has in a period however few steps it makes."""
STEPS_PER_RESTART: Final = 1000
"""Steps of these environments that allow one restart more."""

_log = logging.getLogger("vecenv")


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about failures.

    Attributes:
        restart: Rebuild what was lost and go on; otherwise raise.
        restart_limit, restart_period: See :class:`RestartBudget`.
        step_timeout: Seconds until a reset or a step is taken to hang; ``None``: never.
        start_timeout: Seconds a worker has for building its environments; ``None``: as long as it takes.
        gymnasiums_words: Log what environments raise as Gymnasium's class does, before it is raised. Programs that were
            written for that class, and its own tests, count these lines, though no worker is shut down here.
    """

    restart: bool = False
    restart_limit: int | None = None
    restart_period: float = 60.0
    step_timeout: float | None = None
    start_timeout: float | None = 60.0
    gymnasiums_words: bool = False

    @classmethod
    def of(
        cls, on_failure: str, restart_limit: int | None, restart_period: float, step_timeout: Any, start_timeout: Any,
        *, gymnasiums_words: bool = False,
    ) -> Policy:  # fmt: skip
        """From the options of a vector environment."""
        return cls(
            on_failure == "restart", restart_limit, restart_period, seconds_of(step_timeout, "step_timeout"),
            seconds_of(start_timeout, "start_timeout"), gymnasiums_words,
        )  # fmt: skip


class RestartBudget:
    """How many restarts there may be within some seconds (Erlang's intensity and period).

    Without a limit each environment, and each worker process that dies, has a budget of its own: five restarts, and one more
    for every 1,000 steps that its environments made since the oldest of its restarts in the period. One that cannot work is
    given up soon, whatever the number of the others; one that fails now and then goes on, however fast it is.

    Args:
        limit: Restarts of all environments together within ``period``; ``None``: as above.
        period: Seconds.
        steps: How many steps each environment has made.
        clock: For tests.
    """

    def __init__(
        self,
        limit: int | None,
        period: float,
        steps: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit = limit
        self.period = period
        self.causes: collections.deque[str] = collections.deque(maxlen=5)
        self._steps = steps
        self._clock = clock
        self._spent: collections.deque[tuple[float, tuple[int, ...], float]] = collections.deque()  # when, rows, their steps

    def spend(self, cause: str = "", rows: Sequence[int] = ()) -> bool:
        """Take one restart of these rows; ``False`` if the budget is used up."""
        now, whose = self._clock(), tuple(rows)
        while self._spent and now - self._spent[0][0] > self.period:
            self._spent.popleft()
        if cause:
            self.causes.append(cause)
        count, allowed = self._balance(whose)
        if count >= allowed:
            return False
        self._spent.append((now, whose, self._steps()))
        return True

    def _balance(self, whose: tuple[int, ...]) -> tuple[int, float]:
        """How many restarts these rows had in the period, and how many they may have."""
        if self.limit is not None:
            return len(self._spent), self.limit
        steps = [made for _, rows, made in self._spent if rows == whose]
        made = (self._steps() - steps[0]) * len(whose) if steps else 0.0
        return len(steps), FREE_RESTARTS + made // STEPS_PER_RESTART

    def refusal(self, rows: Sequence[int]) -> str:
        """Why there is no further restart of these rows, and what can be done about it."""
        causes = "\n".join(f"- {cause}" for cause in self.causes)
        if self.limit is not None:
            return (
                f"more than {self.limit} restarts within {self.period:g} seconds, which is the budget that restart_limit "
                f"and restart_period set; the last causes:\n{causes}"
            )
        _, allowed = self._balance(tuple(rows))
        return (
            f"{envs_text(rows)} needed more than {allowed:.0f} restarts within {self.period:g} seconds. By default an "
            f"environment, or a worker process, has {FREE_RESTARTS}, and one more for every {STEPS_PER_RESTART:,} steps; "
            f"restart_limit=N allows N restarts of all environments together instead. The last causes:\n{causes}"
        )


def envs_text(rows: Sequence[int]) -> str:
    """``env 3`` or ``envs 4-7``: contiguous rows."""
    return f"env {rows[0]}" if len(rows) == 1 else f"envs {rows[0]}-{rows[-1]}"


class RestartLog:
    """Says each restart and its cause by :mod:`logging`, as the logger ``vecenv``, until there are too many to read.

    Python's warnings would be the wrong way: a program may have made exceptions of them, in the middle of a restart.

    Args:
        most: Lines within ``period``. Those that come after are counted, and the next line gives the count.
        period: Seconds.
        clock: For tests.
    """

    def __init__(self, most: int = 5, period: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._period = period
        self._clock = clock
        self._began = -float("inf")
        self._said = 0
        self._unsaid = 0

    def say(self, cause: str) -> None:
        """One restart, before it is made."""
        now = self._clock()
        if now - self._began >= self._period:
            self._began, self._said = now, 0
        if self._said >= self._most:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._said = self._unsaid, 0, self._said + 1
        more = f" (and {unsaid} restarts more since the last of these lines)" if unsaid else ""
        _log.warning("vecenv restarts what failed: %s%s", cause, more)
