"""Infos in a fixed form: columns with masks, which compiled programs can carry.

Gymnasium's infos are whatever environments say, whenever they say it. A program needs to know beforehand: ``info_spec`` is a
(nested) dict of shapes and dtypes for one environment, and every key becomes a column with a mask ``_key``, Gymnasium's own
form. Keys outside the specification are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vecenv.errors import ObservationError

__all__ = ["InfoColumn", "InfoColumns"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class InfoColumn:
    """One number or array an environment may report, by its place in the info dict."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        return "info" + "".join(f"[{key!r}]" for key in self.path)


class InfoColumns:
    """All columns of a specification.

    Args:
        spec: Key -> a dict of the same kind, anything with ``shape`` and ``dtype`` (``jax.ShapeDtypeStruct``), or a dtype,
            which stands for one number.

    Raises:
        TypeError: Something else, or a key that is no str.
        ValueError: A key that begins with an underscore: those are the masks'.
    """

    def __init__(self, spec: Mapping[str, Any] | None) -> None:
        self.columns: list[InfoColumn] = []
        self._collect(spec or {}, ())

    def _collect(self, spec: Any, path: tuple[str, ...]) -> None:
        if isinstance(spec, Mapping):
            for key, part in spec.items():
                if not isinstance(key, str):
                    raise TypeError(f"Keys of info_spec must be str, got {key!r}.")
                if key.startswith("_"):
                    raise ValueError(f"info_spec[{key!r}]: keys that begin with an underscore are the masks.")
                self._collect(part, (*path, key))
            return
        if not path:
            raise TypeError(f"info_spec must be a dict of names, got {type(spec).__name__}.")
        plain = isinstance(spec, type | str | np.dtype)  # scalar types have attributes called shape and dtype, too
        try:
            shape = () if plain else tuple(spec.shape)
            dtype = np.dtype(spec if plain else spec.dtype)
        except (TypeError, AttributeError) as error:
            raise TypeError(
                f"info_spec{list(path)} must be a dtype or something with shape and dtype, got {spec!r}."
            ) from error
        if dtype.kind not in "biuf":
            raise TypeError(f"info_spec{list(path)} must be of numbers or bools, got {dtype}.")
        self.columns.append(InfoColumn(path, shape, dtype))

    def build(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """``arrays`` (a column and its mask, in turn) as a dict of Gymnasium's form."""
        built: dict[str, Any] = {}
        for column, values, mask in zip(self.columns, arrays[::2], arrays[1::2], strict=True):
            place = built
            for key in column.path[:-1]:
                place = place.setdefault(key, {})
            place[column.path[-1]], place["_" + column.path[-1]] = values, mask
        return built

    def read(self, infos: Mapping[str, Any], rows: int) -> list[Array]:
        """Columns and masks of ``rows`` environments, ``[(rows, ...), (rows,)]`` in turn.

        What an episode ended on (``final_info``, in same-step mode) goes before what the next one began with.

        Raises:
            ObservationError: A value does not have the shape or the kind of dtype that was specified.
        """
        read: list[Array] = []
        final = infos.get("final_info") or {}
        ended = infos.get("_final_info")
        for column in self.columns:
            values, mask = np.zeros((rows, *column.shape), column.dtype), np.zeros(rows, np.bool_)
            _fill(column, infos, values, mask)
            if ended is not None:
                values[ended], mask[ended] = 0, False
                _fill(column, final, values, mask)
            read += [values, mask]
        return read


def _fill(column: InfoColumn, infos: Mapping[str, Any], values: Array, mask: Array) -> None:
    """Write the rows of a column that ``infos`` has."""
    for key in column.path[:-1]:
        infos = infos.get(key, {})
        if not isinstance(infos, Mapping):
            raise ObservationError(f"{column.name}: got {type(infos).__name__} at {key!r}, wanted a dict.")
    *_, key = column.path
    if key not in infos:
        return
    found = np.asarray(infos[key])
    there = np.asarray(infos.get("_" + key, np.ones(len(mask), np.bool_)))
    if found.dtype != object and found.shape == values.shape and np.can_cast(found.dtype, column.dtype, "same_kind"):
        values[there] = found[there]
        mask |= there
        return
    for row in np.flatnonzero(there).tolist():
        value = np.asarray(found[row] if found.ndim else found)
        if value.shape != column.shape or not np.can_cast(value.dtype, column.dtype, "same_kind"):
            raise ObservationError(
                f"{column.name} of env {row}: got {value.dtype}{list(value.shape)}, the info_spec says "
                f"{column.dtype}{list(column.shape)}."
            )
        values[row], mask[row] = value, True
