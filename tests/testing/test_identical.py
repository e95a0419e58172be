"""Tests of ``assert_identical``: it compares arrays of NumPy and other libraries, such as JAX and torch, bit for bit."""

from __future__ import annotations

import copy
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import python_output

from vecenv.testing import assert_identical


class ForeignArray:
    """An array like those of JAX: ``==`` returns an array, which has no truth value."""

    def __init__(self, *values: float, dtype: Any = np.float32) -> None:
        self.content = np.array(values, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.content

    def __eq__(self, other: object) -> Any:
        return self.content == np.asarray(other)

    def __repr__(self) -> str:
        return f"ForeignArray{self.content.tolist()}"

    __hash__ = None  # type: ignore[assignment]


VALUES: list[Any] = [
    np.array([1.0, np.nan, -0.0]),
    {"a": (1, "x"), "b": np.array([None, {"c": 1}], dtype=object)},
    float("nan"),
    np.float32("nan"),
    None,
    {"observation": [ForeignArray(1, np.nan)]},
    deque([np.array([1.0, np.nan]), np.zeros(2)], maxlen=3),
]
DIFFERENT_PAIRS: list[tuple[Any, Any]] = [
    (np.zeros(2), np.zeros(3)),
    (np.zeros(2), np.zeros(2, np.float32)),
    (np.array([0.0]), np.array([-0.0])),
    (np.float32(1), np.float64(1)),
    (np.array([0.0], np.longdouble), np.array([-0.0], np.longdouble)),
    (1, True),
    (1, 1.0),
    ((1,), [1]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 1, "b": 1}),
    ((1,), (1, 2)),
    (deque([np.zeros(2)]), deque([np.ones(2)])),
    (np.array([None], dtype=object), np.array([1], dtype=object)),
    ("x", "y"),
    (ForeignArray(1, 3), ForeignArray(1, 2)),
    (ForeignArray(1, 2, 2), ForeignArray(1, 2)),
    (ForeignArray(1, 2, dtype=np.float64), ForeignArray(1, 2)),
    (np.array([1, 2], np.float32), ForeignArray(1, 2)),
    (ForeignArray(0.0), ForeignArray(-0.0)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_copies_are_identical(value: Any) -> None:
    assert_identical(value, copy.deepcopy(value))


@pytest.mark.skipif(np.finfo(np.longdouble).nmant != 63, reason="long doubles have no padding here")
@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_padding_of_long_doubles_is_not_compared(dtype: Any) -> None:
    one, other = np.full(3, 1.5, dtype), np.full(3, 1.5, dtype)
    one.view(np.uint8).reshape(-1, 16)[:, 10:] = 0
    other.view(np.uint8).reshape(-1, 16)[:, 10:] = 255
    assert one.tobytes() != other.tobytes()
    assert_identical(one, other)
    assert_identical(one[0], other[0])


@pytest.mark.parametrize(("one", "other"), DIFFERENT_PAIRS, ids=repr)
def test_different_values_are_not_identical_in_either_order(one: Any, other: Any) -> None:
    with pytest.raises(AssertionError, match="the label"):
        assert_identical(one, other, "the label")
    with pytest.raises(AssertionError, match="the label"):
        assert_identical(other, one, "the label")


OPTIMIZED_PROGRAM = """
from test_identical import DIFFERENT_PAIRS, assert_identical
for one, other in DIFFERENT_PAIRS:
    try:
        assert_identical(one, other)
    except AssertionError:
        print("different")
"""


def test_python_without_assert_statements_finds_differences() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    assert python_output("-O", "-c", OPTIMIZED_PROGRAM, PYTHONPATH=path).split() == ["different"] * len(DIFFERENT_PAIRS)
