"""Benchmarks of the engine, for a source checkout. ``bench/README.md`` lists their commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def seconds_per(unit: float, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the duration of a call divided by ``unit``, the number of units of work in it."""
    began = clock()
    run()
    return (clock() - began) / unit


def take_turns(runs: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Run each function once per round and return its results by name.

    Every other round runs in reverse order, so that a drift of the machine's speed within a round favours no function.
    """
    results: dict[str, list[_T]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            results[name].append(runs[name]())
    return results
