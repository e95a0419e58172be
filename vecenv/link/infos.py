"""Info dicts, in and out: Gymnasium's dict of arrays with masks, by way of numeric columns in shared memory.

An info whose keys, types and shapes repeat has a schema. The worker writes its values into the environment's own record with
one ``struct.pack_into`` and notes the schema's number; the caller turns whole columns of records into arrays, one copy per
key for any number of environments. A worker sends the definition of a schema once, when it first uses it. A schema's number
is a hash of its definition, so that workers need not agree with each other. An info that has no schema (strings, objects,
keys that change without end, more than a record holds) travels as it is. Only the steps with such an info are merged
environment by environment, by :func:`add_info`, which behaves as ``gymnasium.vector.VectorEnv._add_info``: the first
environment that has a key decides the dtype of its column.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import numpy as np

from vecenv.link.messages import Definition, shown
from vecenv.shm.layout import INFO_BYTES, Array

NO_INFO: Final = 0
BY_PICKLE: Final = 1
_MAX_SCHEMAS: Final = 64  # a worker that needs more than this has keys that do not repeat
_MOST_PLANS: Final = 128  # kept by a reader: keys that come and go make a new combination of schemas at every step

_SCALARS: Final[dict[type, str]] = {
    int: "q", float: "d", bool: "?",
    np.int8: "b", np.int16: "h", np.int32: "i", np.int64: "q",
    np.uint8: "B", np.uint16: "H", np.uint32: "I", np.uint64: "Q",
    np.float16: "e", np.float32: "f", np.float64: "d",
}  # fmt: skip
_BY_NAME: Final[dict[str, type]] = {kind.__name__: kind for kind in _SCALARS}


@lru_cache(256)
def _numeric(dtype: np.dtype[Any]) -> str | None:
    """The name of a dtype whose arrays can be written as columns."""
    return dtype.str if dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isnative else None


def _take_apart(info: Any, values: list[Any]) -> Definition | None:
    """The definition of ``info``, whose values are added to ``values``; ``None`` if it cannot be written as columns."""
    if type(info) is not dict:  # other mappings may do anything when they are looked at
        return None
    entries: list[tuple[Any, Any]] = []
    for key, value in info.items():
        # `final_obs` is an array of objects at every level; `x` beside `_x` would write into the mask of `x`
        if type(key) not in (str, int) or key == "final_obs" or f"_{key}" in info:
            return None
        kind = type(value)
        if kind in _SCALARS:
            values.append(value)
            entries.append((key, ("s", kind.__name__)))
        elif kind is np.ndarray:
            if (name := _numeric(value.dtype)) is None:
                return None
            values.append(value.tobytes())
            entries.append((key, ("a", name, value.shape)))
        else:
            nested = _take_apart(value, values)
            if nested is None:
                return None
            entries.append((key, ("d", nested)))
    return tuple(entries)


class Schema:
    """A definition, compiled for both directions.

    Attributes:
        number: A 64-bit name for it, the same in every process, never :data:`NO_INFO` or :data:`BY_PICKLE`.
        columns: Of each value of a record, in the order of the info and of the dicts in it: (dtype and shape, offset).
        pack: Writes the values into a record, from an offset on.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.number = int.from_bytes(blake2b(repr(definition).encode(), digest_size=8).digest(), "little") | 2
        self.columns: list[tuple[tuple[np.dtype[Any], tuple[int, ...]], int]] = []
        self.size = 0
        self._struct = struct.Struct("=" + "".join(self._compile(definition)))
        self.pack = self._struct.pack_into
        self._keys = tuple(key for key, _ in definition)
        self._key_types = tuple(map(type, self._keys))
        self._types = tuple(_BY_NAME[spec[1]] if spec[0] == "s" else None for _, spec in definition)

    def _compile(self, definition: Definition) -> Iterator[str]:
        """The columns of the values, and the parts of their format."""
        for _, spec in definition:
            if spec[0] == "d":
                yield from self._compile(spec[1])
                continue
            if spec[0] == "s":
                dtype, shape, part = np.dtype(_BY_NAME[spec[1]]), (), _SCALARS[_BY_NAME[spec[1]]]
            else:
                dtype, shape = np.dtype(spec[1]), spec[2]
                part = f"{math.prod(shape) * dtype.itemsize}s"
            self.columns.append(((dtype, shape), self.size))
            self.size += struct.calcsize("=" + part)
            yield part

    def has_scalars_of(self, info: Mapping[Any, Any]) -> bool:
        """Whether ``info`` follows this schema and has nothing but scalars; quicker than to take it apart."""
        if tuple(map(type, info.values())) != self._types or tuple(info) != self._keys:
            return False
        return tuple(map(type, info)) == self._key_types  # True and 1.0 are equal to 1, and each has a mask of another name

    def read(self, record: memoryview) -> dict[Any, Any]:
        """The info again, with the very types it had."""
        return _restored(self.definition, iter(self._struct.unpack_from(record, 0)))


def _restored(definition: Definition, values: Iterator[Any]) -> dict[Any, Any]:
    info: dict[Any, Any] = {}
    for key, spec in definition:
        if spec[0] == "d":
            info[key] = _restored(spec[1], values)
        elif spec[0] == "s":
            info[key] = _BY_NAME[spec[1]](next(values))
        else:
            info[key] = np.frombuffer(next(values), np.dtype(spec[1])).reshape(spec[2]).copy()
    return info


class InfoWriter:
    """The worker's side: writes the infos of some rows.

    Args:
        schemas: uint64 ``(k,)``, the rows' schema numbers.
        records: uint8 ``(k, INFO_BYTES)``.
    """

    def __init__(self, schemas: Array, records: Array) -> None:
        self._numbers = schemas
        self._records = [memoryview(record).cast("B") for record in records]
        self._known: dict[Definition, Schema] = {}
        self._last: list[Schema | None] = [None] * len(self._records)
        self._news: dict[int, Definition] = {}

    def write(self, index: int, info: Any) -> bool:
        """Write a row's info; ``False`` if it has to travel by pickle (the row is then marked so)."""
        schema = self._last[index]
        if schema is not None and type(info) is dict and schema.has_scalars_of(info):
            values = list(info.values())
        else:
            values = []
            definition = _take_apart(info, values)
            if schema is None or schema.definition != definition:
                schema = None if definition is None else self._schema_of(definition)
        try:
            if schema is not None:
                schema.pack(self._records[index], 0, *values)
                self._last[index] = schema
                self._numbers[index] = schema.number
                return True
        except (struct.error, OverflowError):  # an int beyond 64 bits, or more than a record holds
            pass
        self._numbers[index] = BY_PICKLE
        return False

    def _schema_of(self, definition: Definition) -> Schema | None:
        schema = self._known.get(definition)
        if schema is None and len(self._known) < _MAX_SCHEMAS:
            schema = self._known[definition] = Schema(definition)
            if schema.size <= INFO_BYTES:
                self._news[schema.number] = definition
        return schema

    def send_new(self, schemas: dict[int, Definition]) -> None:
        """Add to ``schemas`` the definitions used for the first time since the last call."""
        schemas.update(self._news)
        self._news.clear()


_Plan: TypeAlias = dict[Any, tuple[str, Any, "_Plan", Any, dict[int, Any]]]
"""Key -> (name of its mask, dtype and shape, a dict's own plan, column of all records, and all by schema)"""


class InfoReader:
    """The caller's side: makes Gymnasium's dict of arrays out of rows, their records and the infos that came by pickle.

    It keeps every schema that it learns, because each is sent once; a worker has a limited number. Its plans can be made
    again, and all are forgotten at once when there are too many.

    Args:
        schemas: uint64 ``(n,)``.
        records: uint8 ``(n, INFO_BYTES)``.
        ragged: Values of one key that do not go together become an object array.
    """

    def __init__(self, schemas: Array, records: Array, *, ragged: bool = False) -> None:
        self._ragged = ragged
        self._numbers = schemas
        self._records = records
        self._schemas: dict[int, Schema] = {}
        self._plans: dict[Any, _Plan | None] = {}
        self._all_rows = np.ones(len(schemas), np.bool_)

    def learn(self, definitions: Mapping[int, Definition]) -> None:
        """Take in the definitions that a worker sent."""
        for number, definition in definitions.items():
            if number not in self._schemas:
                self._schemas[number] = Schema(definition)

    def export(self, rows: Any, known: set[int]) -> tuple[Array, Array, dict[int, Definition]]:
        """What a reader elsewhere needs of some rows, to write it into arrays of its own.

        Args:
            rows: An index of rows, as of an array.
            known: Numbers of schemas that the other reader has; those that it gets now are added.

        Returns:
            uint64 ``(k,)``, the rows' schema numbers; uint8 ``(k, used)``, as much of their records as any schema in use
            fills; the definitions that are new.
        """
        numbers = self._numbers[rows]
        present = {int(numbers[0])} if (numbers == numbers[0]).all() else set(np.unique(numbers).tolist())
        schemas = {number: self._schemas[number] for number in present if number > BY_PICKLE}
        used = max((schema.size for schema in schemas.values()), default=0)
        news = {number: schemas[number].definition for number in schemas.keys() - known}
        known.update(news)
        return numbers, np.ascontiguousarray(self._records[rows, :used]), news

    def one(self, row: int) -> dict[Any, Any]:
        """The info of one row that did not come by pickle."""
        number = int(self._numbers[row])
        return self._schemas[number].read(memoryview(self._records[row])) if number > BY_PICKLE else {}

    def read(
        self, rows: Array | None, count: int, pickled: Mapping[int, Mapping[Any, Any]], final_obs: Mapping[int, Any]
    ) -> dict[Any, Any]:
        """The infos of ``count`` rows.

        Args:
            rows: Which environments, in the order of the result; ``None`` for all of them.
            count: Length of every array in the result.
            pickled: Position in the result -> info, for the rows that came by pickle.
            final_obs: Position -> last observation of the episode that ended in this step.
        """
        if pickled:
            return self._one_by_one(rows, count, pickled, final_obs)
        numbers = self._numbers if rows is None else self._numbers[rows]
        key: Any = numbers[:1].tobytes()  # as bytes: for few rows an operation of NumPy costs more than all the rest
        alike = numbers.tobytes() == key * count
        if not alike:
            key = tuple(dict.fromkeys(numbers.tolist()))  # as they first appear, which is the order of the keys
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan([int(numbers[0])] if alike else key)
        plan = self._plans[key]
        if plan is None:
            return self._one_by_one(rows, count, pickled, final_obs)
        infos: dict[Any, Any] = {}
        if alike:
            _fill(infos, plan, rows, self._all_rows[:count])
        else:
            _fill_by_schema(infos, plan, rows, numbers)
        for position, observation in final_obs.items():
            add_info(infos, {"final_obs": observation}, position, count, position)
        return infos

    def _plan(self, numbers: Sequence[int]) -> _Plan | None:
        """One plan for rows that follow these schemas; ``None`` where the order of environments decides a dtype."""
        plan: _Plan = {}
        for number in numbers:
            if number != NO_INFO:
                schema = self._schemas[number]
                if not self._add_to(plan, schema.definition, number, iter(schema.columns)):
                    return None
        return None if _has_mask_conflict(plan) else plan

    def _add_to(self, plan: _Plan, definition: Definition, number: int, columns: Iterator[Any]) -> bool:
        """Add a schema's keys to those of others; false where a key has two types."""
        for key, spec in definition:
            column, offset = (None, 0) if spec[0] == "d" else next(columns)
            view = column and self._view(offset, *column)
            _, other, children, _, views = plan.setdefault(key, (f"_{key}", column, {}, view, {}))
            if column != other or (column is None and not self._add_to(children, spec[1], number, columns)):
                return False
            views[number] = view
        return True

    def _view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The column at ``offset`` of all records."""
        return self._records.reshape(-1).view(_record_type(offset, dtype, shape))["v"]

    def _one_by_one(
        self, rows: Array | None, count: int, pickled: Mapping[int, Mapping[Any, Any]], final_obs: Mapping[int, Any]
    ) -> dict[Any, Any]:
        infos: dict[Any, Any] = {}
        for position in range(count):
            row = position if rows is None else int(rows[position])
            info: Mapping[Any, Any] = pickled[position] if position in pickled else self.one(row)
            if position in final_obs:
                info = {**info, "final_obs": final_obs[position]}
            add_info(infos, info, position, count, row, ragged=self._ragged)
        return infos


@lru_cache(4096)
def _record_type(offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.dtype[Any]:
    return np.dtype({"names": ["v"], "formats": [(dtype, shape)], "offsets": [offset], "itemsize": INFO_BYTES})


def _fill(infos: dict[Any, Any], plan: _Plan, rows: Array | None, all_rows: Array) -> None:
    """Fill ``infos`` by whole columns, from rows that all follow one schema."""
    for key, (mask, column, children, view, _) in plan.items():
        if column is None:
            infos[key] = {}
            _fill(infos[key], children, rows, all_rows)
        else:
            infos[key] = view.copy() if rows is None else view[rows]
        infos[mask] = all_rows.copy()  # takes a tenth of the time of `np.ones`, which is written in Python


def _fill_by_schema(infos: dict[Any, Any], plan: _Plan, rows: Array | None, numbers: Array) -> None:
    """Fill ``infos`` by whole columns, from rows that follow several schemas."""
    for key, (mask, column, children, _, views) in plan.items():
        if column is None:
            infos[key] = {}
            _fill_by_schema(infos[key], children, rows, numbers)
        else:
            dtype, shape = column
            infos[key] = np.zeros((len(numbers), *shape), dtype)
        infos[mask] = np.zeros(len(numbers), np.bool_)
        for number, view in views.items():
            chosen = numbers == number
            infos[mask] |= chosen
            if column is not None:
                infos[key][chosen] = view[chosen if rows is None else rows[chosen]]


def _has_mask_conflict(plan: _Plan) -> bool:
    if len({mask for mask, *_ in plan.values()}) < len(plan):  # 1 and "1" have one mask
        return True
    return any(mask in plan or _has_mask_conflict(children) for mask, _, children, *_ in plan.values())


def add_info(infos: dict[Any, Any], info: Any, position: int, count: int, env: int, *, ragged: bool = False) -> None:
    """Merge one environment's info into ``infos`` in place, as ``gymnasium.vector.VectorEnv._add_info`` does.

    Args:
        infos: The dict of arrays so far.
        info: The environment's info.
        position: Its row in the arrays.
        count: Length of the arrays.
        env: Index of the environment, for the note on errors.
        ragged: A column in which values of several shapes or dtypes meet becomes one of objects, as they are.

    Raises:
        Whatever numpy raises for a value that does not fit the column that an earlier environment began, or the info itself
        when it is looked at; a note names the environment, and the key.
    """
    if not isinstance(info, Mapping):  # environments return what they like
        error = AttributeError(f"{type(info).__name__!r} object has no attribute 'items'")
        error.add_note(f"env {env} returned an info that is no dict but {shown(info)}")
        raise error
    try:
        parts = list(info.items())
    except Exception as error:
        error.add_note(f"env {env}: its info, a {type(info).__name__}, cannot be read")
        raise
    for key, value in parts:
        try:
            array = _merge(infos, key, value, position, count, env, ragged)
            name = f"_{key}"
        except Exception as error:
            if not getattr(error, "__notes__", None):
                where = f"env {env}, info key {shown(key)}"
                error.add_note(f"{where}: {shown(value)} does not go with the environments before it")
            raise
        mask = infos.get(name)
        if mask is None:
            mask = np.zeros(count, np.bool_)
        mask[position] = True
        infos[key], infos[name] = array, mask


def _merge(infos: dict[Any, Any], key: Any, value: Any, position: int, count: int, env: int, ragged: bool) -> Any:
    if isinstance(key, str) and key == "final_obs":
        array = infos[key] if key in infos else np.full(count, None, dtype=object)
        array[position] = value
        return array
    if isinstance(value, dict):
        nested = infos.get(key, {})
        if isinstance(nested, dict):
            if value:
                add_info(nested, value, position, count, env, ragged=ragged)
            return nested
        if not ragged:
            if not value:
                return nested
            # the columns of two environments cannot be one
            raise AttributeError(f"{type(nested).__name__!r} object has no attribute 'get'")
    array = infos[key] if key in infos else _new_column(value, count)
    if ragged and not _goes_into(array, value, position):
        array = _objects(array, infos.get(f"_{key}"), count)
    array[position] = value
    return array


def _goes_into(column: Any, value: Any, position: int) -> bool:
    """Whether a column keeps a value as it is."""
    if not isinstance(column, np.ndarray):
        return False
    if column.dtype == object:
        return True
    if not isinstance(value, (np.ndarray, np.generic, int, float)):
        return False
    own = np.asarray(value)
    return own.shape == column.shape[1:] and np.can_cast(own.dtype, column.dtype, "same_kind")


def _new_column(value: Any, count: int) -> Array:
    kind = type(value)
    if kind in (int, float, bool) or issubclass(kind, np.number):
        return np.zeros(count, dtype=kind)
    if isinstance(value, np.ndarray):
        return np.zeros((count, *value.shape), dtype=value.dtype)
    return np.full(count, None, dtype=object)


def _objects(column: Any, mask: Array | None, count: int) -> Array:
    """A column whose values are the environments' own: those of the rows in ``mask``, ``None`` in others."""
    objects = np.full(count, None, dtype=object)
    if mask is not None:
        for position in np.flatnonzero(mask).tolist():
            objects[position] = column[position] if isinstance(column, np.ndarray) else _of_one(column, position)
    return objects


def _of_one(columns: dict[Any, Any], position: int) -> dict[Any, Any]:
    """One environment's part of a dict of columns."""
    return {
        key: _of_one(column, position) if isinstance(column, dict) else column[position]
        for key, column in columns.items()
        if f"_{key}" in columns and columns[f"_{key}"][position]
    }
