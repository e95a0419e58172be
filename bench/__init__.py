"""Benchmarks of the engine, for a source checkout. ``bench/README.md`` lists their commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def seconds_per_unit(units: float, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Call ``run``, which does ``units`` units of work, and return the seconds per unit."""
    start = clock()
    run()
    return (clock() - start) / units


def run_interleaved(runs: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Run each function once per round and return its results by name.

    Every other round runs in reverse order, so that a machine that slows down or speeds up favours no function.
    """
    results: dict[str, list[_T]] = {name: [] for name in runs}
    for index in range(rounds):
        names = list(runs)
        if index % 2:
            names.reverse()
        for name in names:
            results[name].append(runs[name]())
    return results
