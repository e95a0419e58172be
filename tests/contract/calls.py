"""Shared helpers of the contract: the names of the calls, and comparisons of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., None])

CALLS: dict[str, str] = {}
"""The call that each test function covers, in the order of the tests."""


def call(name: str) -> Callable[[F], F]:
    """Register ``name``, a row of the table, as the call that a test covers."""

    def decorate(test: F) -> F:
        assert name not in CALLS.values(), f"{name} has two tests"
        CALLS[test.__name__] = name
        return test

    return decorate


def call_name(test: Any) -> str:
    """Return the name of the call that a test covers."""
    return CALLS[test.__name__]


def to_numpy(batch: Any) -> Any:
    """Copy the arrays of a batch to numpy arrays, in the same containers."""
    if isinstance(batch, Mapping):
        return {key: to_numpy(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(to_numpy(value) for value in batch)
    return np.array(batch)


def copy_rows(batch: Any, rows: Any) -> Any:
    """Copy some rows of a batch to numpy arrays, in the same containers."""
    if isinstance(batch, Mapping):
        return {key: copy_rows(value, rows) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(copy_rows(value, rows) for value in batch)
    return np.asarray(batch)[np.asarray(rows, np.intp)]


def count_in_flight(envs: Any) -> float:
    """Return the number of rows that were sent and not received."""
    return float(envs.stats()["in_flight"])


def differs(first: Any, second: Any) -> bool:
    """True if two batches of observations differ."""
    if isinstance(first, Mapping):
        return any(differs(first[key], second[key]) for key in first)
    if isinstance(first, tuple):
        return any(map(differs, first, second))
    return not np.array_equal(np.asarray(first), np.asarray(second))


def assert_masks(infos: Mapping[Any, Any], where: str = "infos") -> None:
    """Assert that every key at every level has a mask with a bool for each row."""
    keys = [key for key in infos if not (isinstance(key, str) and key.startswith("_") and key[1:] in infos)]
    for key in keys:
        assert f"_{key}" in infos, f"{where}[{key!r}] has no mask"
        mask = np.asarray(infos[f"_{key}"])
        assert mask.dtype == np.bool_
        if isinstance(infos[key], Mapping):
            assert_masks(infos[key], f"{where}[{key!r}]")
        else:
            assert len(infos[key]) == len(mask)
