"""Measurements of the engine from a source checkout; ``bench/README.md`` says how to repeat each."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def seconds_per(unit: float, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes for each of the units of work that it does."""
    began = clock()
    run()
    return (clock() - began) / unit
