"""What a vector environment is to do about failures."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vecenv.front.deadlines import seconds_of

__all__ = ["Policy", "RestartBudget"]


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about failures.

    Attributes:
        restart: Rebuild what was lost and go on; otherwise raise.
        restart_limit, restart_period: At most so many restarts within so many seconds.
        step_timeout: Seconds until a reset or a step is taken to hang; ``None``: never.
        start_timeout: Seconds a worker has for building its environments; ``None``: as long as it takes.
    """

    restart: bool = False
    restart_limit: int = 5
    restart_period: float = 60.0
    step_timeout: float | None = None
    start_timeout: float | None = 60.0

    @classmethod
    def of(cls, on_failure: str, restart_limit: int, restart_period: float, step_timeout: Any, start_timeout: Any) -> Policy:
        """From the options of a vector environment."""
        return cls(
            on_failure == "restart", restart_limit, restart_period, seconds_of(step_timeout, "step_timeout"),
            seconds_of(start_timeout, "start_timeout"),
        )  # fmt: skip


class RestartBudget:
    """So many restarts within so many seconds (Erlang's intensity and period).

    Args:
        limit: Restarts allowed within ``period``.
        period: Seconds.
        clock: For tests.
    """

    def __init__(self, limit: int, period: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.period = period
        self._clock = clock
        self._spent: collections.deque[float] = collections.deque()
        self.causes: collections.deque[str] = collections.deque(maxlen=5)

    def spend(self, cause: str = "") -> bool:
        """Take one restart; ``False`` if the budget is used up."""
        now = self._clock()
        while self._spent and now - self._spent[0] > self.period:
            self._spent.popleft()
        if cause:
            self.causes.append(cause)
        if len(self._spent) >= self.limit:
            return False
        self._spent.append(now)
        return True
