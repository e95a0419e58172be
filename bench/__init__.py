"""Measurements of the engine from a source checkout; ``bench/README.md`` lists their commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")


def seconds_per(unit: float, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call per unit of the work that it did."""
    began = clock()
    run()
    return (clock() - began) / unit


def take_turns(runs: Mapping[str, Callable[[], _T]], rounds: int) -> dict[str, list[_T]]:
    """Run each function once per round and return its results by name.

    Every other round runs in reverse order, so that a drift within a round favours none of them.
    """
    found: dict[str, list[_T]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            found[name].append(runs[name]())
    return found
