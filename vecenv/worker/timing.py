"""How long a worker's environments take, by samples: two looks at the clock take a tenth of a step of a CartPole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from vecenv.shm.layout import Array

__all__ = ["StepClock", "clock"]

_LONG: Final = 1e-3  # seconds; a message that takes as long is followed by one that is timed, too
_UNTIMED_MOST: Final = 31
_SAMPLE_EVERY: Final = 64  # in every so many messages that are timed, the environments are timed one by one
clock: Final = time.perf_counter


class StepClock:
    """Which messages are timed, and what that amounts to.

    The shorter messages are, the fewer of them are timed, but one in 32 at least, so that a single long one cannot stand for
    very many.

    Args:
        each: Seconds of each row's latest step that was timed.
        seconds, steps: Cells of shared memory for what this worker has spent stepping, and for how many steps.

    Attributes:
        untimed: Messages to come that are not timed.
    """

    def __init__(self, each: Array, seconds: Any, steps: Any) -> None:
        self.untimed = 0
        self._each, self._seconds, self._steps = each, seconds, steps
        self._counted = 0  # messages that were timed
        self._weight = 1  # for how many the next one that is timed stands

    def of_each(self, steps: list[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
        """The rows' step functions for a message that is timed: now and then each by itself."""
        if self._counted % _SAMPLE_EVERY < _SAMPLE_EVERY - 1:
            return steps
        return [self._timed(k, step) for k, step in enumerate(steps)]

    def count(self, elapsed: float, steps: int) -> None:
        """Count a message that was timed, once for itself and once for each before it that was not."""
        self._seconds[0] += self._weight * elapsed
        self._steps[0] += self._weight * steps
        self.untimed = min(_UNTIMED_MOST, int(_LONG / max(elapsed, 1e-9)))
        self._weight = self.untimed + 1
        self._counted += 1

    def add(self, elapsed: float, each: Iterable[tuple[int, float]]) -> None:
        """Time that was spent outside of the messages that are counted, and how long single rows took in it."""
        self._seconds[0] += elapsed
        for k, seconds in each:
            self._each[k] = seconds

    def _timed(self, k: int, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        times = self._each

        def timed(action: Any) -> Any:
            began = clock()
            result = step(action)
            times[k] = clock() - began
            return result

        return timed
