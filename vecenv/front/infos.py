"""The dict of arrays with masks that vector environments return for infos, read row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_PYTHON_NUMBERS = "?ld"  # dtypes (bool, int64, float64) that Gymnasium gives a column of Python's bool, int and float


def own_keys(infos: Mapping[Any, Any]) -> list[Any]:
    """The keys of a dict of arrays that are not the mask of another key."""
    return [key for key in infos if not (isinstance(key, str) and key.startswith("_") and _unmasked(key, infos))]


def _unmasked(key: str, infos: Mapping[Any, Any]) -> bool:
    return key[1:] in infos or (key[1:].isdigit() and int(key[1:]) in infos)


def info_rows(infos: Mapping[Any, Any], count: int) -> list[dict[Any, Any]]:
    """One info an environment, of the dict of arrays with masks that vector environments return.

    Numbers that Gymnasium has put into a column of bool, int64 or float64 are Python's again.
    """
    rows: list[dict[Any, Any]] = [{} for _ in range(count)]
    for key in own_keys(infos):
        mask = infos.get(f"_{key}")
        for row in range(count) if mask is None else np.flatnonzero(mask).tolist():
            rows[row][key] = _at(infos[key], row)
    return rows


def info_row(infos: Mapping[Any, Any], row: int) -> dict[Any, Any]:
    """One environment's info of them; as :func:`info_rows`."""
    info: dict[Any, Any] = _at(infos, row)
    return info


def _at(column: Any, row: int) -> Any:
    if isinstance(column, dict):
        masks = {key: column.get(f"_{key}") for key in own_keys(column)}
        return {key: _at(column[key], row) for key, mask in masks.items() if mask is None or mask[row]}
    value = column[row]
    if isinstance(value, np.generic) and column.dtype.char in _PYTHON_NUMBERS:
        return value.item()
    # (a copy, so that a kept row does not keep the whole column)
    return value.copy() if isinstance(value, np.ndarray) and not column.dtype.hasobject else value
