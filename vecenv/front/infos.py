"""The infos of a result: by row, or merged into Gymnasium's dict of arrays.

A driver returns the infos of a result as :class:`RowInfos`: one info per row, exactly as the environment returned it.
Merging is the last step of ``step``, ``reset`` and ``recv``; :func:`vecenv.infos_by_row` skips it.

Merging follows ``gymnasium.vector.VectorEnv._add_info``: the first environment that has a key decides the dtype of its
column. If that dtype cannot represent a later value, Gymnasium casts or truncates the value, or raises. Here the column gets
a dtype that can represent all of its values, or becomes an object array of the values themselves, so that none is changed.
As in Gymnasium, an info's own ``_x`` is lost if there is also an ``x``, because ``infos["_x"]`` is the mask of ``x``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vecenv.errors import InfoError
from vecenv.system.reporting import warn
from vecenv.system.signals import call_with_fallback

Array = npt.NDArray[Any]

_PYTHON_NUMBERS: Final = "?ld"  # dtype codes of bool, int64 and float64, which Gymnasium uses for Python's bool, int, float
_ID_KEYS: Final = ("env_id", "_env_id")
_WIDENED_TOGETHER: Final = ("iufc", "U", "S", "M", "m")  # groups of dtype kinds: a column is widened only within its group
_MAX_REPR_CHARACTERS: Final = 80


class RowInfos:
    """The infos of one result. They may lie in shared memory: read them before the rows are stepped again.

    Attributes:
        env_ids: The environment of each row in a result of ``recv``; ``None`` if the result has all environments, in order.
    """

    __slots__ = ("env_ids",)
    env_ids: Array | None

    def rows(self) -> list[Any]:
        """Return one info per row, as the environment returned it, in new dicts."""
        raise NotImplementedError

    def row(self, position: int) -> Any:
        """Return the info of one row of the result; see :meth:`rows`."""
        return self.rows()[position]

    def values(self, key: str, defaults: Array) -> list[Any]:
        """Return the value of a key in each row; where a row lacks it, that of ``defaults``."""
        return [info.get(key, default) for info, default in zip(self.rows(), defaults, strict=True)]

    def merged(self) -> dict[Any, Any]:
        """Return Gymnasium's dict of arrays with masks. The arrays are new.

        Raises:
            InfoError: An info is not a dict.
        """
        raise NotImplementedError

    def executed_steps(self) -> npt.NDArray[np.int64] | int:
        """Return the number of environment steps that each row represents; see :func:`executed_steps`."""
        rows = self.rows()
        final_infos = [row.get("final_info") if isinstance(row, dict) else None for row in rows]
        counts = [_chunk_steps(info) or _chunk_steps(final) for info, final in zip(rows, final_infos, strict=True)]
        return np.array([1 if count is None else count for count in counts], np.int64) if any(counts) else 1


class ColumnInfos(RowInfos):
    """Infos that a library returns as a dict of arrays.

    Args:
        columns: The dict; :meth:`merged` returns it unchanged.
        count: The number of rows.
        env_ids: The environments of the rows, if the dict has them as ``"env_id"``.
    """

    __slots__ = ("_columns", "_count")

    def __init__(self, columns: dict[Any, Any], count: int, env_ids: Array | None) -> None:
        self.env_ids = env_ids
        self._columns, self._count = columns, count

    def rows(self) -> list[Any]:
        return info_rows(self._own_columns(), self._count)

    def row(self, position: int) -> Any:
        return _value_at(self._own_columns(), position)

    def merged(self) -> dict[Any, Any]:
        return self._columns

    def executed_steps(self) -> npt.NDArray[np.int64] | int:
        return executed_steps(self._columns, self._count)

    def _own_columns(self) -> dict[Any, Any]:
        if self.env_ids is None:  # without env_ids, these keys may come from an environment
            return self._columns
        return {key: value for key, value in self._columns.items() if key not in _ID_KEYS}


class ListedInfos(RowInfos):
    """Infos in a list, one per row. :meth:`rows` returns this list, not new dicts."""

    __slots__ = ("_listed",)

    def __init__(self, listed: list[Any], env_ids: Array | None = None) -> None:
        self.env_ids = env_ids
        self._listed = listed

    def rows(self) -> list[Any]:
        return self._listed


# -- merging -------------------------------------------------------------------------------------------------------------


class InfoMerger:
    """A merger of the infos of single environments. It warns once per key if Gymnasium would have changed a value."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def merge(self, infos: Sequence[Any], env_ids: Sequence[int]) -> dict[Any, Any]:
        """Merge the infos of some environments into one dict of arrays.

        Args:
            infos: One per row.
            env_ids: The environment of each row, for errors and warnings.

        Raises:
            InfoError: An info is not a dict, or reading it raises.
        """
        for env, info in zip(env_ids, infos, strict=True):
            if not isinstance(info, Mapping):
                raise InfoError(
                    f"env {env} returned an info that is not a dict but {short_repr(info)}: it cannot be merged with those "
                    "of other environments. `error.result` is the result of the call, with one info per row"
                )
        return self._merge(infos, range(len(infos)), len(infos), env_ids, "infos")

    def _merge(
        self, infos: Sequence[Any], positions: Sequence[int], count: int, env_ids: Sequence[int], path: str
    ) -> dict[Any, Any]:
        """Merge dicts that belong to the given positions among ``count`` rows."""
        columns: dict[Any, tuple[list[int], list[Any]]] = {}
        mask_names: dict[Any, dict[str, list[int]]] = {}  # key that is not a plain string -> name of its mask -> positions
        for position, info in zip(positions, infos, strict=True):
            for key, value in info.items() if type(info) is dict else _read_items(info, env_ids[position]):
                if key in columns:
                    where, values = columns[key]
                else:
                    where, values = columns[key] = [], []
                if type(key) is not str or (mask_names and key in mask_names):  # 1 == True, but their masks differ
                    initial = {f"_{str.__str__(key)}": where.copy()} if where and key not in mask_names else {}
                    mask_names.setdefault(key, initial).setdefault(_mask_name(key, env_ids[position]), []).append(position)
                where.append(position)
                values.append(value)
        masks = {f"_{key}" for key in columns if type(key) is str}.union(*mask_names.values())
        merged: dict[Any, Any] = {}
        for key, (where, values) in columns.items():
            subpath = f"{path}[{short_repr(key)}]"
            if key in masks:
                self._warn(subpath, f"{subpath} of env {env_ids[where[0]]} is dropped: that key is the mask of another key")
                merged.setdefault(key, np.zeros(count, np.bool_))
            else:
                merged[key] = self._column(key, where, values, count, env_ids, subpath)
            for name, masked in mask_names[key].items() if key in mask_names else ((f"_{key}", where),):
                if name not in merged:
                    merged[name] = np.zeros(count, np.bool_)
                merged[name][masked] = True
        return merged

    def _column(self, key: Any, where: list[int], values: list[Any], count: int, env_ids: Sequence[int], path: str) -> Any:
        """Return the column of one key: an array of ``count`` rows, or a dict of such columns."""
        if isinstance(key, str) and key == "final_obs":
            return object_column(where, values, count)
        first, kind = values[0], type(values[0])
        kinds = set(map(type, values))
        if all(issubclass(each, dict) for each in kinds):
            return self._merge(values, where, count, env_ids, path)
        has_spans = np.timedelta64 in kinds  # a number, but its class has no unit
        if kind in (int, float, bool) or (issubclass(kind, np.number) and not has_spans):
            shape, dtype = (), np.dtype(kind)
            alike = len(kinds) == 1
        elif isinstance(first, np.ndarray):
            shape, dtype = first.shape, first.dtype
            alike = all(isinstance(value, np.ndarray) and (value.shape, value.dtype) == (shape, dtype) for value in values)
        else:
            return object_column(where, values, count)
        if not alike:
            return self._mixed_column(where, values, count, env_ids, path, dtype, shape)
        column = np.zeros((count, *shape), dtype)
        if column.ndim > 1:
            for position, value in zip(where, values, strict=True):
                column[position] = value
            return column
        try:
            column[where] = np.array(values, dtype)
        except OverflowError:  # an int beyond 64 bits
            return object_column(where, values, count)
        return column

    def _mixed_column(
        self, where: list[int], values: list[Any], count: int, env_ids: Sequence[int], path: str, dtype: np.dtype[Any],
        shape: tuple[int, ...],
    ) -> Array:  # fmt: skip
        """Return a column for values of several types. ``dtype`` and ``shape`` are those of the first value."""
        parts = [np.asarray(value) if isinstance(value, _NUMPY_COMPATIBLE_TYPES) else None for value in values]
        column: Array | None = None
        if all(part is not None and part.shape == shape for part in parts):
            kinds = [part.dtype for part in parts if part is not None]
            for target in (dtype, _widest(kinds)):
                if target is not None and all(part is not None and _survives_cast(part, target) for part in parts):
                    column = np.zeros((count, *shape), target)
                    column[where] = np.array([part for part in parts if part is not None], target)
                    break
        if column is None:
            column = object_column(where, values, count)
        if column.dtype != dtype and path not in self._warned:
            for position, value in zip(where, values, strict=True):
                if (stored := _value_in_gymnasium(value, dtype, shape)) is not None:
                    text = (
                        f"{path}: env {env_ids[position]} returned {short_repr(value)}, but the first value, from env "
                        f"{env_ids[where[0]]}, has dtype {dtype}: Gymnasium would store {short_repr(stored)}, vecenv uses "
                        f"dtype {column.dtype}. Return the same type in every environment"
                    )
                    self._warn(path, text)
                    break
        return column

    def _warn(self, path: str, text: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            warn(text)


def _read_items(info: Mapping[Any, Any], env: int) -> list[tuple[Any, Any]]:
    """Return the items of a mapping that is not a plain dict; raise ``InfoError`` if its own methods raise."""

    def fail(error: BaseException) -> list[tuple[Any, Any]]:
        text = f"env {env}: its info of type {type(info).__name__} cannot be read ({type(error).__name__})"
        raise InfoError(text) from error

    return call_with_fallback(lambda: list(info.items()), fail, Exception)


def _mask_name(key: Any, env: int) -> str:
    def fail(error: BaseException) -> str:
        raise InfoError(f"env {env}: its info has a key of type {type(key).__name__} that cannot be formatted") from error

    return call_with_fallback(lambda: f"_{key}", fail, Exception)


_NUMPY_COMPATIBLE_TYPES: Final = (bool, int, float, np.generic, np.ndarray)


def object_column(where: Sequence[int], values: Sequence[Any], count: int) -> Array:
    """Return an object array that holds values at some positions, and ``None`` elsewhere."""
    column = np.full(count, None, dtype=object)
    for position, value in zip(where, values, strict=True):
        column[position] = value
    return column


def _widest(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any] | None:
    """Return a dtype for values of all these dtypes; ``None`` for a mix of kinds, such as numbers and text."""
    if not any(all(dtype.kind in kinds for dtype in dtypes) for kinds in _WIDENED_TOGETHER):
        return None
    return np.result_type(*dtypes)


def _survives_cast(values: Array, dtype: np.dtype[Any]) -> bool:
    """True if an array is unchanged after a cast to ``dtype`` and back."""
    if values.dtype.hasobject or dtype.hasobject:
        return values.dtype == dtype
    try:
        with np.errstate(all="ignore"):
            back = values.astype(dtype).astype(values.dtype)
    except (TypeError, ValueError, OverflowError):
        return False
    # a number must not become text or a bool, although "5" and True would survive the round trip
    kinds_match = (
        values.dtype.kind == dtype.kind
        or {values.dtype.kind, dtype.kind} <= set("iufc")
        or (values.dtype.kind == "b" and dtype.kind in "iufc")
    )
    return kinds_match and back.tobytes() == values.tobytes()


def _value_in_gymnasium(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return the value that Gymnasium's column would hold; ``None`` if it is equal, or if Gymnasium would raise."""
    cell = np.zeros((1, *shape), dtype)
    try:
        with np.errstate(all="ignore"):
            cell[0] = value
            return None if np.array_equal(cell[0], value) else cell[0]
    except Exception:
        return None


def short_repr(value: Any) -> str:
    """Return a value's ``repr``, shortened for messages."""
    kind = type(value).__name__
    text = call_with_fallback(
        lambda: repr(value), lambda error: f"a {kind} without a repr ({type(error).__name__})", Exception
    )
    return text if len(text) <= _MAX_REPR_CHARACTERS else f"{text[:_MAX_REPR_CHARACTERS]}..."


# -- splitting a dict of arrays ------------------------------------------------------------------------------------------


def own_keys(infos: Mapping[Any, Any]) -> list[Any]:
    """Return the keys of a dict of arrays that are not the mask of another key."""
    others = {f"_{key}" for key in infos if type(key) is not str}
    return [key for key in infos if not (isinstance(key, str) and key[:1] == "_" and (key[1:] in infos or key in others))]


def info_rows(infos: Mapping[Any, Any], count: int) -> list[dict[Any, Any]]:
    """Split a dict of arrays with masks into one info per row.

    Use it for vector environments of other libraries; for those of this package see :func:`vecenv.infos_by_row`. Numbers
    from columns of bool, int64 or float64, in which Gymnasium stores Python numbers, become Python numbers again.
    """
    rows: list[dict[Any, Any]] = [{} for _ in range(count)]
    for key in own_keys(infos):
        mask = infos.get(f"_{key}")
        for row in range(count) if mask is None else _rows_with_values(mask):
            rows[row][key] = _value_at(infos[key], row)
            if mask is not None and np.ndim(mask) == 2:  # a flag per agent
                rows[row][f"_{key}"] = mask[row].copy()
    return rows


def _rows_with_values(mask: Array) -> list[int]:
    return np.flatnonzero(mask.any(1) if np.ndim(mask) == 2 else mask).tolist()


def executed_steps(infos: Mapping[Any, Any], count: int) -> npt.NDArray[np.int64] | int:
    """Return the number of environment steps that each row of a result represents.

    It is 1, unless the environment executes chunks of actions (:class:`vecenv.wrappers.ActionChunks`).

    Args:
        infos: Infos of the result.
        count: Number of its rows.

    Returns:
        int64 ``(count,)``, or 1 for all rows.
    """
    parts = [part for part in (infos, infos.get("final_info")) if isinstance(part, Mapping) and _has_chunk_steps(part)]
    if not parts:
        return 1
    steps = np.ones(count, np.int64)
    for part in parts:
        mask = part["_chunk_steps"]
        steps[mask] = part["chunk_steps"][mask]
    return steps


def count_steps(info: Any) -> int:
    """Return the number of environment steps that one step of a row executed: several for a chunk of actions."""
    return _chunk_steps(info) or 1


def _has_chunk_steps(infos: Mapping[Any, Any]) -> bool:
    """True if a dict of arrays has the steps of action chunks. An environment's own entry of that name may be anything."""
    steps = infos.get("chunk_steps")
    return isinstance(steps, np.ndarray) and steps.ndim == 1 and steps.dtype.kind in "iu" and "_chunk_steps" in infos


def _chunk_steps(info: Any) -> int | None:
    steps = info.get("chunk_steps") if isinstance(info, dict) else None
    return int(steps) if isinstance(steps, int | np.integer) else None


def _value_at(column: Any, row: int) -> Any:
    if isinstance(column, dict):
        masks: dict[Any, Any] = {key: column.get(f"_{key}") for key in own_keys(column)}
        values = {key: _value_at(column[key], row) for key, mask in masks.items() if mask is None or np.any(mask[row])}
        return values | {f"_{key}": masks[key][row].copy() for key in values if np.ndim(masks[key]) == 2}
    value = column[row]
    if isinstance(value, np.generic) and column.dtype.char in _PYTHON_NUMBERS:
        return value.item()
    # a copy, because a view would keep the whole column alive
    return value.copy() if isinstance(value, np.ndarray) and not column.dtype.hasobject else value
