"""A budget of restarts. Once it is used up, failed environments are no longer restarted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from vecenv.errors import envs_text, format_seconds

FREE_RESTARTS: Final = 5
"""The number of restarts that an environment or a worker process may have in a period without having made steps."""
STEPS_PER_RESTART: Final = 1000
"""The number of environment steps that earn one more restart."""


class _SpentRestart(NamedTuple):
    time: float
    rows: tuple[int, ...]
    mean_steps: float
    cause: str


class RestartBudget:
    """A budget of restarts within a period of time, like the intensity and period of a supervisor in Erlang.

    By default, each environment, and each worker process that dies, has its own budget: five restarts, and one more for
    every 1,000 steps that its environments made since the oldest of its restarts in the period. So an environment that
    always fails soon uses up its budget, however many others there are; one that fails rarely continues, however fast it is.

    Args:
        limit: Restarts of all environments together within ``period``; infinite for no limit, or ``None`` for the default
            described above.
        period: Seconds.
        mean_steps: Returns the mean number of steps per environment. It is used as the number of every single environment.
    """

    def __init__(self, limit: float | None, period: float, mean_steps: Callable[[], float]) -> None:
        self.limit = limit
        self.period = period
        self._mean_steps = mean_steps
        self._spent: deque[_SpentRestart] = deque()

    def spend(self, cause: str, rows: Sequence[int] = ()) -> bool:
        """Spend one restart of these rows; return ``False`` if the budget is used up."""
        now, own_rows = time.monotonic(), tuple(rows)
        while self._spent and now - self._spent[0].time > self.period:
            self._spent.popleft()
        count, allowed = self._count_and_limit(own_rows)
        if count >= allowed:
            return False
        self._spent.append(_SpentRestart(now, own_rows, self._mean_steps(), cause))
        return True

    def refund(self, count: int) -> None:
        """Cancel the latest ``count`` restarts that :meth:`spend` allowed, because they will not take place."""
        for _ in range(count):
            self._spent.pop()

    def _count_and_limit(self, own_rows: tuple[int, ...]) -> tuple[int, float]:
        """Return the number of restarts of these rows in the period, and the number allowed."""
        if self.limit is not None:
            return len(self._spent), self.limit
        steps_at_restarts = [spent.mean_steps for spent in self._spent if spent.rows == own_rows]
        steps_since = (self._mean_steps() - steps_at_restarts[0]) * len(own_rows) if steps_at_restarts else 0.0
        return len(steps_at_restarts), FREE_RESTARTS + steps_since // STEPS_PER_RESTART

    def explain_exhaustion(self, cause: str, rows: Sequence[int]) -> str:
        """Explain why these rows cannot be restarted after ``cause``, and what can be done about it."""
        own_rows = tuple(rows)
        earlier = [spent.cause for spent in self._spent if self.limit is not None or spent.rows == own_rows]
        causes = "\n".join(f"- {each}" for each in [*earlier, cause][-5:])
        if self.limit is not None:
            return (
                f"more than {self.limit} restarts within {format_seconds(self.period)} were needed, which "
                f"on_failure=Restart(limit=, period=) does not allow; the last causes:\n{causes}"
            )
        _, allowed = self._count_and_limit(own_rows)
        return (
            f"{envs_text(rows)} needed more than {allowed:.0f} restarts within {format_seconds(self.period)}. By default, "
            f"an environment or a worker process has {FREE_RESTARTS} restarts, and one more for every "
            f"{STEPS_PER_RESTART:,} steps; on_failure=Restart(limit=N) allows N restarts of all environments together "
            f"instead. The last causes:\n{causes}"
        )
