"""``assert_identical`` compares arrays of other libraries as it does numpy's: JAX's and torch's are of this kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from vecenv.testing import assert_identical


class Foreign:
    """An array as JAX's are: comparing two gives an array, which is neither true nor false."""

    def __init__(self, *values: float, dtype: Any = np.float32) -> None:
        self.content = np.array(values, dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.content

    def __eq__(self, other: object) -> Any:
        return self.content == np.asarray(other)

    __hash__ = None  # type: ignore[assignment]


def test_the_same_bits_are_identical() -> None:
    assert_identical({"seen": [Foreign(1, np.nan)]}, {"seen": [Foreign(1, np.nan)]})


@pytest.mark.parametrize(
    "other", [Foreign(1, 3), Foreign(1, 2, 2), Foreign(1, 2, dtype=np.float64), np.array([1, 2], np.float32)]
)
def test_others_differ(other: Any) -> None:
    with pytest.raises(AssertionError, match="seen"):
        assert_identical(other, Foreign(1, 2), "seen")


def test_so_does_a_zero_of_another_sign() -> None:
    with pytest.raises(AssertionError):
        assert_identical(Foreign(0.0), Foreign(-0.0))
