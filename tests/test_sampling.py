"""``sampling.py``: which cases of a product run by default, and that no case is missing."""

from __future__ import annotations

import itertools
from typing import Any

from sampling import each_once, each_pair

AXES = ["abc", [True, False], range(4)]


def runs(cells: list[Any]) -> list[tuple[Any, ...]]:
    return [cell.values for cell in cells if not cell.marks]


def test_the_product_is_complete() -> None:
    for cells in (each_once(*AXES), each_pair(*AXES)):
        assert [cell.values for cell in cells] == list(itertools.product(*AXES))
        assert all([mark.name for mark in cell.marks] in ([], ["slow"]) for cell in cells)


def test_the_keys_of_a_mapping_are_its_names() -> None:
    cells = each_once({"one": {"a": 1}, "two": {}}, [True])
    assert [(cell.id, cell.values) for cell in cells] == [("one-True", ({"a": 1}, True)), ("two-True", ({}, True))]


def test_each_value_occurs() -> None:
    cells = runs(each_once(*AXES))
    assert len(cells) == 4
    assert [set(column) for column in zip(*cells, strict=True)] == [set(axis) for axis in AXES]


def test_each_pair_of_values_meets() -> None:
    cells = runs(each_pair(*AXES))
    assert 12 <= len(cells) < 18
    for one, other in itertools.combinations(range(3), 2):
        assert {(cell[one], cell[other]) for cell in cells} == set(itertools.product(AXES[one], AXES[other]))
