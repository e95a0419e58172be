"""``sampling.py``: samples contain the promised values, and products contain all cases."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sampling import each_once, each_pair

AXES = ["abc", [True, False], range(4)]


def default_case_values(cells: list[Any]) -> list[tuple[Any, ...]]:
    return [cell.values for cell in cells if not cell.marks]


def test_each_once_and_each_pair_return_the_complete_product() -> None:
    for cells in (each_once(*AXES), each_pair(*AXES)):
        assert [cell.values for cell in cells] == list(itertools.product(*AXES))
        assert all([mark.name for mark in cell.marks] in ([], ["slow"]) for cell in cells)


def test_ids_are_the_keys_of_a_mapping() -> None:
    cells = each_once({"one": {"a": 1}, "two": {}}, [True])
    assert [(cell.id, cell.values) for cell in cells] == [("one-True", ({"a": 1}, True)), ("two-True", ({}, True))]


def test_default_cases_of_each_once_have_every_value() -> None:
    cells = default_case_values(each_once(*AXES))
    assert len(cells) == 4
    assert [set(column) for column in zip(*cells, strict=True)] == [set(axis) for axis in AXES]


def test_default_cases_of_each_pair_have_every_pair_of_values() -> None:
    cells = default_case_values(each_pair(*AXES))
    assert 12 <= len(cells) < 18
    for first, second in itertools.combinations(range(3), 2):
        assert {(cell[first], cell[second]) for cell in cells} == set(itertools.product(AXES[first], AXES[second]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("letter", ["a", pytest.param("b", marks=pytest.mark.slow), "c"])
@pytest.mark.parametrize("number", [1, 2])
def test_sampled_with_a_number_keeps_cases_with_different_values(
    letter: str, number: int, request: pytest.FixtureRequest
) -> None:
    """If another case is selected by its id, it is the whole sample and so is kept, and this test fails."""
    marks = {mark.name for mark in request.node.iter_markers()} & {"long", "slow"}
    is_kept = not marks
    assert is_kept == ((letter, number) in (("a", 1), ("c", 2)))


@pytest.mark.sampled("2", "3")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_sampled_with_ids_keeps_the_named_cases(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("long") is None) == (number > 1)


@pytest.mark.sampled("4")
@pytest.mark.parametrize("number", [1, 2])
def test_sampled_with_ids_keeps_all_cases_if_no_named_one_is_collected(number: int, request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("long") is None


@pytest.mark.long
@pytest.mark.parametrize("number", range(5))
def test_first_cases_of_a_long_test_are_not_slow(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (number < 2)  # CASES_IN_CI of conftest.py
