"""Shared helpers of the contract: the names of the calls, and comparisons of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., None])

CALLS: dict[str, str] = {}
"""The call of each test function, in the order of the tests."""


def call(name: str) -> Callable[[F], F]:
    """Register the call that a test is about, which is a row of the table."""

    def decorate(test: F) -> F:
        assert name not in CALLS.values(), f"{name} has two tests"
        CALLS[test.__name__] = name
        return test

    return decorate


def call_name(test: Any) -> str:
    """Return the call that a test is about."""
    return CALLS[test.__name__]


def to_numpy(batch: Any) -> Any:
    """Copy a batch to numpy, in the same containers."""
    if isinstance(batch, Mapping):
        return {key: to_numpy(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(to_numpy(value) for value in batch)
    return np.array(batch)


def copy_rows(batch: Any, rows: Any) -> Any:
    """Copy some rows of a batch to numpy."""
    if isinstance(batch, Mapping):
        return {key: copy_rows(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(copy_rows(value, rows) for value in batch)
    return np.asarray(batch)[np.asarray(rows, np.intp)]


def in_flight(envs: Any) -> float:
    """Return the number of rows that were sent and not received."""
    return float(envs.stats()["in_flight"])


def differs(one: Any, other: Any) -> bool:
    """True if two batches of observations differ."""
    if isinstance(one, Mapping):
        return any(differs(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return any(map(differs, one, other))
    return not np.array_equal(np.asarray(one), np.asarray(other))


def assert_masks(infos: Mapping[Any, Any], where: str = "infos") -> None:
    """Assert that every key has its mask, a bool for each row, at every level."""
    keys = [key for key in infos if not (isinstance(key, str) and key.startswith("_") and key[1:] in infos)]
    for key in keys:
        assert f"_{key}" in infos, f"{where}[{key!r}] has no mask"
        mask = np.asarray(infos[f"_{key}"])
        assert mask.dtype == np.bool_
        if isinstance(infos[key], Mapping):
            assert_masks(infos[key], f"{where}[{key!r}]")
        else:
            assert len(infos[key]) == len(mask)
