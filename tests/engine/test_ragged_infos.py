"""``ragged_infos=True``: infos whose values do not go together become object arrays with masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from envs import Options, info_env, opened
from hypothesis import given, settings
from hypothesis import strategies as st

from vecenv.link.infos import add_info
from vecenv.testing import assert_identical


def stepped(infos: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    with opened([info_env([info]) for info in infos], **engine) as envs:
        envs.reset(seed=0)
        return envs.step(envs.action_space.sample())[4]


def test_arrays_of_different_shapes_are_kept_as_they_are(engine: Options) -> None:
    infos = [{"actions": np.zeros((2, 3))}, {"actions": np.ones((4, 3))}, {}, {"actions": np.full(1, 7.0)}]
    said = stepped(infos, ragged_infos=True, **engine)
    assert said["actions"].dtype == object
    assert said["actions"].shape == (4,)
    assert said["_actions"].tolist() == [True, True, False, True]
    for row in (0, 1, 3):
        assert_identical(said["actions"][row], infos[row]["actions"])
    assert said["actions"][2] is None


def test_without_it_they_are_an_error_as_in_gymnasium(engine: Options) -> None:
    with pytest.raises(ValueError, match="broadcast"):
        stepped([{"actions": np.zeros((2, 3))}, {"actions": np.ones((4, 3))}], **engine)


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],  # Gymnasium makes 2 of it
        [np.zeros(3), np.ones(1)],  # Gymnasium makes three of it
        [1, "text"],
        [{"a": 1}, 5],
        [5, {"a": 1}],
        [{"a": np.zeros(2)}, {"a": np.zeros(3)}],
        [np.zeros(2, np.int8), np.full(2, 0.5)],
        [1, [1, [2]]],
    ],
    ids=str,
)
def test_nothing_is_cast_broadcast_or_lost(values: list[Any]) -> None:
    said = stepped([{"key": value} for value in values], ragged_infos=True, num_workers=0)
    column = said["key"]
    if isinstance(column, dict):
        assert_identical([column["a"][row] for row in range(2)], [value["a"] for value in values])
    else:
        assert column.dtype == object
        for got, value in zip(column, values, strict=True):
            if isinstance(value, np.ndarray):
                assert_identical(got, value)
            else:
                assert got == value
    assert said["_key"].tolist() == [True, True]


def test_what_goes_together_is_as_ever() -> None:
    infos = [{"a": 1.5, "b": np.arange(3), "c": {"d": True}}, {"a": 2, "b": np.arange(3), "c": {}}]
    assert_identical(stepped(infos, ragged_infos=True, num_workers=0), stepped(infos, num_workers=0))


VALUES = st.one_of(
    st.booleans(), st.integers(-5, 5), st.floats(-1, 1), st.text(max_size=2),
    st.lists(st.floats(-1, 1), max_size=3).map(np.array),
    st.dictionaries(st.sampled_from("xy"), st.integers(0, 3), max_size=2),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("ab"), VALUES, max_size=2), min_size=1, max_size=5))
def test_every_value_can_be_had_back(infos: list[dict[str, Any]]) -> None:
    said: dict[str, Any] = {}
    for row, info in enumerate(infos):
        add_info(said, info, row, len(infos), row, ragged=True)

    def value(column: Any, row: int) -> Any:
        if isinstance(column, dict):
            return {key: value(column[key], row) for key in column if f"_{key}" in column and column[f"_{key}"][row]}
        return column[row]

    for row, info in enumerate(infos):
        for key, given_value in info.items():
            got = value(said[key], row)
            if isinstance(given_value, np.ndarray):
                assert isinstance(got, np.ndarray)
                assert_identical(np.asarray(got, given_value.dtype), given_value)
                assert np.shape(got) == given_value.shape
            else:
                assert got == given_value
        assert not any(said[f"_{key}"][row] for key in "ab" if key not in info and f"_{key}" in said)
