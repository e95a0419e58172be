"""Measurements of the engine from a source checkout; ``bench/README.md`` says how to repeat each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def seconds_per(unit: float, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a call takes for each of the units of work that it does."""
    began = clock()
    run()
    return (clock() - began) / unit


def take_turns(runs: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """What each run returns in each round, for candidates in this process.

    Every other round goes the other way, so that what drifts within a round favours none.
    """
    found: dict[str, list[_T]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            found[name].append(runs[name]())
    return found
