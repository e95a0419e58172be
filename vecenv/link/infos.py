"""Info dicts, in and out: Gymnasium's dict of arrays with masks, by way of numeric columns in shared memory.

An info whose keys, types and shapes repeat has a :class:`Schema`. The worker writes its values into the environment's own
record with one ``struct.pack_into`` and notes the schema's number; the caller turns whole columns of records into arrays,
one copy a key, whatever the number of environments. A schema's number is a hash of its definition, so workers need not
agree with each other; a worker tells the definition once, when it first uses it. An info that has no schema (strings,
objects, changing keys without end, more than the record holds) travels as it is, and only the steps in which one does are
merged environment by environment with :func:`add_info`, which is ``gymnasium.vector.VectorEnv._add_info`` in behaviour: the
first environment that has a key decides the dtype of its column.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import numpy as np

from vecenv.shm.layout import INFO_BYTES, Array

__all__ = ["BY_PICKLE", "NO_INFO", "Definition", "InfoReader", "InfoWriter", "add_info", "shown"]

NO_INFO: Final = 0
BY_PICKLE: Final = 1

# key -> ("s", type name) for a scalar, ("a", dtype, shape) for an array, or a nested definition
Definition: TypeAlias = tuple[tuple[Any, Any], ...]

_MAX_SCHEMAS: Final = 64  # a worker that needs more than this has keys that do not repeat
_MAX_PLANS: Final = 256  # remembered by a reader: keys that come and go make a new combination of schemas at every step
_MAX_VIEWS: Final = 4096

_SCALARS: Final[dict[type, str]] = {
    int: "q", float: "d", bool: "?",
    np.int8: "b", np.int16: "h", np.int32: "i", np.int64: "q",
    np.uint8: "B", np.uint16: "H", np.uint32: "I", np.uint64: "Q",
    np.float16: "e", np.float32: "f", np.float64: "d",
}  # fmt: skip
_BY_NAME: Final[dict[str, type]] = {kind.__name__: kind for kind in _SCALARS}


def define(info: Mapping[Any, Any]) -> Definition | None:
    """The definition of ``info``, or ``None`` if it cannot be written as columns."""
    if type(info) is not dict:  # other mappings may do anything when they are looked at
        return None
    entries: list[tuple[Any, Any]] = []
    for key, value in info.items():
        # `final_obs` is an array of objects at every level; `x` beside `_x` would write into the mask of `x`
        if type(key) not in (str, int) or key == "final_obs" or f"_{key}" in info:
            return None
        kind = type(value)
        if kind in _SCALARS:
            entries.append((key, ("s", kind.__name__)))
        elif kind is np.ndarray:
            if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8 or not value.dtype.isnative:
                return None
            entries.append((key, ("a", value.dtype.str, value.shape)))
        elif kind is dict:
            nested = define(value)
            if nested is None:
                return None
            entries.append((key, ("d", nested)))
        else:
            return None
    return tuple(entries)


def number_of(definition: Definition) -> int:
    """A 64-bit name for a definition, the same in every process, never :data:`NO_INFO` or :data:`BY_PICKLE`."""
    return int.from_bytes(blake2b(repr(definition).encode(), digest_size=8).digest(), "little") | 2


@dataclass(frozen=True, slots=True)
class Column:
    """One value of a record: where it stands in the info and in the record."""

    path: tuple[Any, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    kind: type | None  # Python or numpy scalar type; None for an array


class Schema:
    """A definition, compiled for both directions."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.number = number_of(definition)
        self.columns: list[Column] = []
        self._format = ["="]
        self.size = 0
        self._compile(definition, ())
        self._struct = struct.Struct("".join(self._format))
        self.fits = self._struct.size <= INFO_BYTES
        self._keys = tuple(key for key, _ in definition)
        self._key_types = tuple(map(type, self._keys))
        self._types = tuple(_type_of(spec) for _, spec in definition)
        self._flat = all(spec[0] == "s" for _, spec in definition)

    def _compile(self, definition: Definition, path: tuple[Any, ...]) -> None:
        for key, spec in definition:
            here = (*path, key)
            if spec[0] == "d":
                self._compile(spec[1], here)
            elif spec[0] == "s":
                kind = _BY_NAME[spec[1]]
                self._column(here, np.dtype(kind), (), kind, _SCALARS[kind])
            else:
                dtype = np.dtype(spec[1])
                size = int(np.prod(spec[2], dtype=np.int64)) * dtype.itemsize
                self._column(here, dtype, spec[2], None, f"{size}s")

    def _column(
        self, path: tuple[Any, ...], dtype: np.dtype[Any], shape: tuple[int, ...], kind: type | None, fmt: str
    ) -> None:
        self.columns.append(Column(path, dtype, shape, self.size, kind))
        self._format.append(fmt)
        self.size += struct.calcsize("=" + fmt)

    def write(self, info: Mapping[Any, Any], record: memoryview) -> bool:
        """Write ``info`` into its record; ``False``, and nothing of use written, if it does not follow this schema."""
        keys = tuple(info)
        # True and 1.0 are equal to 1, and each has a mask of another name
        if keys != self._keys or tuple(map(type, keys)) != self._key_types:
            return False
        if tuple(map(type, info.values())) != self._types:
            return False
        values: list[Any] = []
        if self._flat:
            values = list(info.values())
        elif not _collect(info, self.definition, values):
            return False
        try:
            self._struct.pack_into(record, 0, *values)
        except (struct.error, OverflowError):  # an int beyond 64 bits
            return False
        return True

    def read(self, record: memoryview) -> dict[Any, Any]:
        """The info again, with the very types it had."""
        info: dict[Any, Any] = {}
        values = self._struct.unpack_from(record, 0)
        _restore(self.definition, info, iter(values))
        return info


def _type_of(spec: Any) -> type:
    if spec[0] == "s":
        return _BY_NAME[spec[1]]
    return np.ndarray if spec[0] == "a" else dict


def _is_of(value: Any, spec: Any) -> bool:
    return type(value) is _type_of(spec)


def _collect(info: Mapping[Any, Any], definition: Definition, values: list[Any]) -> bool:
    for (key, spec), name in zip(definition, info, strict=True):
        value: Any = info[name]
        if key != name or type(key) is not type(name) or not _is_of(value, spec):
            return False
        if spec[0] == "s":
            values.append(value)
        elif spec[0] == "a":
            if value.shape != spec[2] or value.dtype.str != spec[1]:
                return False
            values.append(value.tobytes())
        elif len(value) != len(spec[1]) or not _collect(value, spec[1], values):
            return False
    return True


def _restore(definition: Definition, info: dict[Any, Any], values: Any) -> None:
    for key, spec in definition:
        if spec[0] == "d":
            nested: dict[Any, Any] = {}
            _restore(spec[1], nested, values)
            info[key] = nested
        elif spec[0] == "s":
            info[key] = _BY_NAME[spec[1]](next(values))
        else:
            info[key] = np.frombuffer(next(values), np.dtype(spec[1])).reshape(spec[2]).copy()


class InfoWriter:
    """The worker's side: writes the infos of some rows.

    Args:
        schemas: uint64 ``(k,)``, the rows' schema numbers.
        records: uint8 ``(k, INFO_BYTES)``.
    """

    def __init__(self, schemas: Array, records: Array) -> None:
        self._numbers = schemas
        self._records = [memoryview(record).cast("B") for record in records]
        self._known: dict[int, Schema] = {}
        self._last: list[Schema | None] = [None] * len(self._records)
        self._news: dict[int, Definition] = {}

    def write(self, index: int, info: Mapping[Any, Any]) -> bool:
        """Write a row's info; ``False`` if it has to travel by pickle (the row is then marked so)."""
        if type(info) is not dict:
            self._numbers[index] = BY_PICKLE
            return False
        schema = self._last[index]
        if schema is None or not schema.write(info, self._records[index]):
            schema = self._schema_for(info)
            if schema is None or not schema.write(info, self._records[index]):
                self._numbers[index] = BY_PICKLE
                return False
            self._last[index] = schema
        self._numbers[index] = schema.number
        return True

    def _schema_for(self, info: Mapping[Any, Any]) -> Schema | None:
        definition = define(info)
        if definition is None:
            return None
        number = number_of(definition)
        schema = self._known.get(number)
        if schema is None:
            if len(self._known) >= _MAX_SCHEMAS:
                return None
            schema = Schema(definition)
            self._known[number] = schema
            if schema.fits:
                self._news[number] = definition
        return schema if schema.fits else None

    def tell(self, told: dict[int, Definition]) -> None:
        """Add to ``told`` the definitions used for the first time since the last call."""
        if self._news:
            told.update(self._news)
            self._news.clear()


_Columns: TypeAlias = list[Any]  # of (key, name of its mask, column or the columns of a dict)
_Plan: TypeAlias = Any  # nested: key -> ("d", {...}, numbers) | ("c", dtype, shape, {number: offset})


class InfoReader:
    """The caller's side: makes Gymnasium's dict of arrays out of rows, their records and what came by pickle.

    It keeps every schema that it was told, because it is told once; that is no more than a worker may have. What it makes of
    them can be made again, and is forgotten all at once when there is too much.

    Args:
        schemas: uint64 ``(n,)``.
        records: uint8 ``(n, INFO_BYTES)``.
    """

    def __init__(self, schemas: Array, records: Array) -> None:
        self._numbers = schemas
        self._records = records
        self._schemas: dict[int, Schema] = {}
        self._plans: dict[tuple[int, ...], _Plan | None] = {}
        self._views: dict[tuple[int, str, tuple[int, ...]], Array] = {}
        self._alike: dict[bytes, _Columns | None] = {}
        self._everyone = np.ones(len(schemas), np.bool_)

    def learn(self, definitions: Mapping[int, Definition]) -> None:
        """Take in the definitions a worker announced."""
        for number, definition in definitions.items():
            if number not in self._schemas:
                self._schemas[number] = Schema(definition)

    def export(self, rows: Any, told: set[int]) -> tuple[Array, Array, dict[int, Definition]]:
        """What a reader elsewhere needs of some rows, to write it into arrays of its own.

        Args:
            rows: An index of rows, as of an array.
            told: Schemas that the other reader knows; those it is told now are added.

        Returns:
            uint64 ``(k,)``, the rows' schema numbers; uint8 ``(k, used)``, as much of their records as any schema in use
            fills; the definitions that are new.
        """
        numbers = self._numbers[rows]
        present = {int(numbers[0])} if (numbers == numbers[0]).all() else set(np.unique(numbers).tolist())
        schemas = {number: self._schemas[number] for number in present if number > BY_PICKLE}
        used = max((schema.size for schema in schemas.values()), default=0)
        news = {number: schemas[number].definition for number in schemas.keys() - told}
        told.update(news)
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
        numbers = self._numbers if rows is None else self._numbers[rows]
        if pickled:
            return self._one_by_one(rows, count, pickled, final_obs)
        infos: dict[Any, Any] = {}
        first = numbers[:1].tobytes()  # as bytes: for few rows an operation of NumPy costs more than all the rest
        if numbers.tobytes() == first * count:
            if first not in self._alike:
                _make_room(self._alike, _MAX_PLANS)
                self._alike[first] = self._columns_of(int(numbers[0]))
            columns = self._alike[first]
            if columns is None:
                return self._one_by_one(rows, count, pickled, final_obs)
            _fill(infos, columns, rows, self._everyone[:count])
        else:
            present = tuple(dict.fromkeys(numbers.tolist()))  # as they first appear, which is the order of the keys
            if present not in self._plans:
                _make_room(self._plans, _MAX_PLANS)
                self._plans[present] = _plan([self._schemas[number] for number in present if number != NO_INFO])
            plan = self._plans[present]
            if plan is None:
                return self._one_by_one(rows, count, pickled, final_obs)
            self._build(plan, infos, rows, count, numbers)
        _add_final_obs(infos, final_obs, count)
        return infos

    def _columns_of(self, number: int) -> _Columns | None:
        """What rows that all follow one schema are filled from; ``None`` where only one by one will do."""
        plan = _plan([self._schemas[number]] if number != NO_INFO else [])
        return None if plan is None else self._columns_by(plan, number)

    # no function within a function: one that calls itself is a circle, which would keep the shared memory after close()
    def _columns_by(self, plan: _Plan, number: int) -> _Columns:
        return [
            (key, f"_{key}", self._columns_by(rest[0], number) if what == "d" else self._view(rest[2][number], *rest[:2]))
            for key, (what, *rest) in plan.items()
        ]

    def _build(self, plan: _Plan, infos: dict[Any, Any], rows: Array | None, count: int, numbers: Array) -> None:
        """Fill ``infos`` by whole columns, from rows that follow several schemas."""
        for key, (what, *rest) in plan.items():
            if what == "d":
                children, owners = rest
                value: Any = {}
                self._build(children, value, rows, count, numbers)
            else:
                dtype, shape, owners = rest
                value = np.zeros((count, *shape), dtype)
                for number, offset in owners.items():
                    chosen = numbers == number
                    source = chosen if rows is None else rows[chosen]
                    value[chosen] = self._view(offset, dtype, shape)[source]
            infos[key] = value
            infos[f"_{key}"] = _any_of(numbers, owners)

    def _view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """The column at ``offset`` of all records."""
        name = (offset, dtype.str, shape)
        view = self._views.get(name)
        if view is None:
            record = np.dtype({"names": ["v"], "formats": [(dtype, shape)], "offsets": [offset], "itemsize": INFO_BYTES})
            _make_room(self._views, _MAX_VIEWS)
            view = self._views[name] = self._records.reshape(-1).view(record)["v"]
        return view

    def _one_by_one(
        self,
        rows: Array | None,
        count: int,
        pickled: Mapping[int, Mapping[Any, Any]],
        final_obs: Mapping[int, Any],
    ) -> dict[Any, Any]:
        infos: dict[Any, Any] = {}
        for position in range(count):
            row = position if rows is None else int(rows[position])
            info: Mapping[Any, Any] = pickled[position] if position in pickled else self.one(row)
            if position in final_obs:
                info = {**info, "final_obs": final_obs[position]}
            add_info(infos, info, position, count, row)
        return infos


def _make_room(cache: dict[Any, Any], limit: int) -> None:
    if len(cache) >= limit:
        cache.clear()


def _fill(infos: dict[Any, Any], columns: _Columns, rows: Array | None, everyone: Array) -> None:
    for key, mask, column in columns:
        if column.__class__ is list:
            infos[key] = {}
            _fill(infos[key], column, rows, everyone)
        else:
            infos[key] = column.copy() if rows is None else column[rows]
        infos[mask] = everyone.copy()  # takes a tenth of the time of `np.ones`, which is written in Python


def _any_of(numbers: Array, owners: Sequence[int]) -> Array:
    mask = np.zeros(len(numbers), np.bool_)
    for number in owners:
        mask |= numbers == number
    return mask


def _plan(schemas: Sequence[Schema]) -> _Plan | None:
    """One plan for rows that follow several schemas, or ``None`` where the order of environments decides a dtype."""
    plan: dict[Any, Any] = {}
    for schema in schemas:
        columns = iter(schema.columns)
        if not _plan_into(plan, schema.definition, schema.number, columns):
            return None
    return None if _mask_conflict(plan) else plan


def _plan_into(plan: dict[Any, Any], definition: Definition, number: int, columns: Any) -> bool:
    for key, spec in definition:
        if spec[0] == "d":
            entry = plan.setdefault(key, ("d", {}, []))
            if entry[0] != "d" or not _plan_into(entry[1], spec[1], number, columns):
                return False
            entry[2].append(number)
        else:
            column: Column = next(columns)
            entry = plan.setdefault(key, ("c", column.dtype, column.shape, {}))
            if entry[0] != "c" or entry[1] != column.dtype or entry[2] != column.shape:
                return False
            entry[3][number] = column.offset
    return True


def _mask_conflict(plan: dict[Any, Any]) -> bool:
    if len({str(key) for key in plan}) < len(plan):  # 1 and "1" have one mask
        return True
    return any(f"_{key}" in plan or (entry[0] == "d" and _mask_conflict(entry[1])) for key, entry in plan.items())


def _add_final_obs(infos: dict[Any, Any], final_obs: Mapping[int, Any], count: int) -> None:
    for position, observation in final_obs.items():
        add_info(infos, {"final_obs": observation}, position, count, position)


def add_info(infos: dict[Any, Any], info: Any, position: int, count: int, env: int) -> None:
    """Merge one environment's info into ``infos`` in place, as ``gymnasium.vector.VectorEnv._add_info`` does.

    Args:
        infos: The dict of arrays so far.
        info: The environment's info.
        position: Its row in the arrays.
        count: Length of the arrays.
        env: Index of the environment, for the note on errors.

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
            array = _merge(infos, key, value, position, count, env)
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


def shown(value: Any) -> str:
    """Its repr, where it has one."""
    try:
        return repr(value)
    except Exception:  # it is the environment's
        return f"a {type(value).__name__}"


def _merge(infos: dict[Any, Any], key: Any, value: Any, position: int, count: int, env: int) -> Any:
    if isinstance(key, str) and key == "final_obs":
        array = infos[key] if key in infos else np.full(count, None, dtype=object)
        array[position] = value
        return array
    if isinstance(value, dict):
        nested = infos.get(key, {})
        if not value:
            return nested
        if not isinstance(nested, dict):  # the columns of two environments cannot be one
            raise AttributeError(f"{type(nested).__name__!r} object has no attribute 'get'")
        add_info(nested, value, position, count, env)
        return nested
    array = infos[key] if key in infos else _new_column(value, count)
    array[position] = value
    return array


def _new_column(value: Any, count: int) -> Array:
    kind = type(value)
    if kind in (int, float, bool) or issubclass(kind, np.number):
        return np.zeros(count, dtype=kind)
    if isinstance(value, np.ndarray):
        return np.zeros((count, *value.shape), dtype=value.dtype)
    return np.full(count, None, dtype=object)
