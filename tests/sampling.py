"""Samples of the parameters of tests, for the default run and for ``.ci/run``; other cases are marked ``long`` or ``slow``.

Two examples:

    @pytest.mark.parametrize(("mode", "num_workers"), each_once(MODES, WORKERS))  # other cases are slow

    @pytest.mark.sampled(3)  # three of the cases that would run by default; the others are long
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_LEFT_OUT = -1
"""The key of values that a sample leaves out; the key of other values is their ``id``."""


def each_pair(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of the axes. All cases are slow except for a few that contain every pair of values of two axes."""
    return _product(axes, 2)


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """Return the product of the axes. All cases are slow except for a few that contain every value of every axis."""
    return _product(axes, 1)


def _product(axes: tuple[Iterable[Any], ...], strength: int) -> list[Any]:
    """Return the product of the axes. A few cases contain every combination of ``strength`` values; the others are slow."""
    named_axes = [
        list(axis.items()) if isinstance(axis, Mapping) else [(_value_name(value), value) for value in axis] for axis in axes
    ]
    cells = list(itertools.product(*(range(len(axis)) for axis in named_axes)))
    chosen = _covering_cells(cells, strength)
    product = []
    for cell in cells:
        names, values = zip(*(axis[index] for axis, index in zip(named_axes, cell, strict=True)), strict=True)
        marks = [] if cell in chosen else [pytest.mark.slow]
        product.append(pytest.param(*values, id="-".join(names), marks=marks))
    return product


def _value_name(value: Any) -> str:
    return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)


def _covering_cells(cells: list[tuple[int, ...]], strength: int) -> set[tuple[int, ...]]:
    """Return a few cells with all combinations of ``strength`` values. Each step adds the cell with the most new ones."""

    def combinations(cell: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(cell), strength))

    missing = set().union(*map(combinations, cells))
    chosen = set()
    while missing:
        best = max(cells, key=lambda cell: len(combinations(cell) & missing))
        chosen.add(best)
        missing -= combinations(best)
    return chosen


def sample_parameter(
    items: Iterable[pytest.Item], name: str, left_out: Sequence[Any] = (), *, all_values: bool = True, mark: str = "slow"
) -> None:
    """Choose a sample of the values of one parameter, and mark all other cases of the tests with ``mark``.

    Args:
        items: Tests. Those without the parameter stay unmarked.
        name: The name of the parameter or of the fixture with parameters.
        left_out: Values that are never chosen.
        all_values: Each test runs with every value at least once. If false, each combination of a test's other parameters
            runs with one value, and the next test begins with the next value.
        mark: The name of the marker for cases that are not chosen.
    """
    tests: dict[tuple[Path, Any, str], dict[tuple[Any, ...], dict[int, pytest.Item]]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if name in params:
            test = item.path, getattr(item, "cls", None), getattr(item, "originalname", item.name)
            case = tuple(sorted((other, id(value)) for other, value in params.items() if other != name))
            value = params[name]
            tests.setdefault(test, {}).setdefault(case, {})[_LEFT_OUT if value in left_out else id(value)] = item
    for number, cases in enumerate(tests.values()):
        rows = list(cases.values())  # for each combination of the other parameters, the items by value
        values = list(dict.fromkeys(value for row in rows for value in row if value != _LEFT_OUT))
        begin, length = (0, max(len(rows), len(values))) if all_values else (number, len(rows))
        chosen = set()
        for i in range(begin, begin + length if values else begin):
            value = values[(i + i // len(values)) % len(values)]  # the shift avoids a correlation with other parameters
            chosen.add(id(rows[(i - begin) % len(rows)].get(value)))
        for row in rows:
            for item in row.values():
                if id(item) not in chosen:
                    item.add_marker(getattr(pytest.mark, mark))


def sample_marked(items: Iterable[pytest.Item], left_out: Collection[str]) -> None:
    """Mark as ``long`` the cases of a test that its marker ``sampled`` omits.

    ``sampled(3)`` keeps three cases, each the one with the most values that no earlier one has. ``sampled("id", ...)``
    keeps these cases, or all cases if none of these is collected.

    Args:
        items: Tests. Those without the marker stay unmarked.
        left_out: Markers of cases that do not run by default, and that are never part of a sample.
    """
    tests: dict[tuple[Path, Any, str], list[pytest.Function]] = {}
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker and isinstance(item, pytest.Function) and not any(item.get_closest_marker(name) for name in left_out):
            tests.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        names = marker.args
        if isinstance(names[0], int):
            kept = _choose_different(cases, names[0])
        else:
            kept = [case for case in cases if case.callspec.id in names] or cases
        for case in cases:
            if case not in kept:
                case.add_marker(pytest.mark.long)


def limit_long_cases(items: Iterable[pytest.Item], count: int) -> None:
    """Mark as ``slow`` all ``long`` cases of a test except for ``count`` cases with different values."""
    tests: dict[tuple[Path, Any, str], list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "long" in marks and "slow" not in marks and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests.setdefault((item.path, item.cls, item.originalname), []).append(item)
    for cases in tests.values():
        kept = set(map(id, _choose_different(cases, count)))
        for case in cases:
            if id(case) not in kept:
                case.add_marker(pytest.mark.slow)


def _choose_different(cases: Sequence[pytest.Function], count: int) -> list[pytest.Function]:
    """Return ``count`` cases. Each step adds the case with the most values that no earlier one has."""
    kept: list[pytest.Function] = []
    covered: set[tuple[str, int]] = set()
    rest = [(case, {(name, id(value)) for name, value in case.callspec.params.items()}) for case in cases]
    while rest and len(kept) < count:
        best = max(rest, key=lambda candidate: len(candidate[1] - covered))
        rest.remove(best)
        kept.append(best[0])
        covered |= best[1]
    return kept
