"""Info dicts as numeric columns in shared memory, from which the caller builds Gymnasium's dict of arrays with masks.

Infos with the same keys, types and shapes share a schema. The worker writes the schema's number, and packs the values into
the environment's record with one ``struct.pack_into``. The caller copies each key's values from the records of all
environments at once. A worker sends each schema's definition with its first use, and again after a reset of all its
environments. The number is a hash of the definition, so workers need not coordinate. An info without a schema (strings,
objects, ever-changing keys, more values than fit into a record) is pickled. A result with such an info is merged value by
value, by :class:`vecenv.front.infos.InfoMerger`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from vecenv.front.infos import InfoMerger, RowInfos, object_column
from vecenv.link.messages import Definition
from vecenv.shm.layout import INFO_BYTES, Array

NO_INFO: Final = 0
BY_PICKLE: Final = 1
_MAX_SCHEMAS: Final = 64  # a worker that needs more has keys that do not recur
_MAX_PLANS: Final = 128  # per reader, which makes a plan for every combination of schemas that occurs in a result

_SCALAR_FORMATS: Final[dict[type, str]] = {
    int: "q", float: "d", bool: "?",
    np.int8: "b", np.int16: "h", np.int32: "i", np.int64: "q",
    np.uint8: "B", np.uint16: "H", np.uint32: "I", np.uint64: "Q",
    np.float16: "e", np.float32: "f", np.float64: "d",
}  # fmt: skip
Places: TypeAlias = tuple[tuple[Any, Any, int, int], ...]
"""For each value of an info: its key, an example, and its offset and size in a record."""
_SCALAR_TYPES: Final[dict[str, type]] = {kind.__name__: kind for kind in _SCALAR_FORMATS}


@lru_cache(256)
def _column_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a dtype, or ``None`` if arrays of this dtype cannot be written as columns."""
    return dtype.str if dtype.kind in "biuf" and dtype.itemsize <= 8 and dtype.isnative else None


def _flatten(info: Any, values: list[Any]) -> Definition | None:
    """Append the values of ``info`` to ``values`` and return its definition; ``None`` if it cannot be written as columns."""
    if type(info) is not dict:  # reading other mappings may have side effects
        return None
    entries: list[tuple[Any, Any]] = []
    for key, value in info.items():
        # `final_obs` becomes an array of objects at every level; a key `_x` would overwrite the mask of a key `x`
        if type(key) not in (str, int) or key == "final_obs" or f"_{key}" in info:
            return None
        kind = type(value)
        if kind in _SCALAR_FORMATS:
            values.append(value)
            entries.append((key, ("s", kind.__name__)))
        elif kind is np.ndarray:
            if value.nbytes > INFO_BYTES or (name := _column_dtype_name(value.dtype)) is None:
                return None
            values.append(value.tobytes())
            entries.append((key, ("a", name, value.shape)))
        else:
            nested = _flatten(value, values)
            if nested is None:
                return None
            entries.append((key, ("d", nested)))
    return tuple(entries)


class Schema:
    """A definition, compiled for writing and reading.

    Attributes:
        number: A 64-bit hash, equal in all processes, never :data:`NO_INFO` or :data:`BY_PICKLE`.
        columns: ((dtype, shape), offset) of each value in a record, in the order of the info and its nested dicts.
        size: Bytes of all values; a record holds at most :data:`INFO_BYTES`.
        pack: A function that writes the values into a buffer, beginning at an offset.
        has_chunks: True if the info, or the ``final_info`` in it, has ``chunk_steps``.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.number = int.from_bytes(blake2b(repr(definition).encode(), digest_size=8).digest(), "little") | 2
        self.columns: list[tuple[tuple[np.dtype[Any], tuple[int, ...]], int]] = []
        self.size = 0
        self._struct = struct.Struct("=" + "".join(self._compile(definition)))
        self.pack = self._struct.pack_into
        self._keys = tuple(key for key, _ in definition)
        final_keys = {key for name, spec in definition if name == "final_info" and spec[0] == "d" for key, _ in spec[1]}
        self.has_chunks = "chunk_steps" in final_keys.union(self._keys)
        self._key_types = tuple(map(type, self._keys))
        self.is_nested = any(spec[0] == "d" for _, spec in definition)
        self._types = tuple(_SCALAR_TYPES[spec[1]] if spec[0] == "s" else None for _, spec in definition)

    def _compile(self, definition: Definition) -> Iterator[str]:
        """Append the columns of the values, and yield the parts of the struct format."""
        for _, spec in definition:
            if spec[0] == "d":
                yield from self._compile(spec[1])
                continue
            if spec[0] == "s":
                dtype, shape, part = np.dtype(_SCALAR_TYPES[spec[1]]), (), _SCALAR_FORMATS[_SCALAR_TYPES[spec[1]]]
            else:
                dtype, shape = np.dtype(spec[1]), spec[2]
                part = f"{math.prod(shape) * dtype.itemsize}s"
            self.columns.append(((dtype, shape), self.size))
            self.size += struct.calcsize("=" + part)
            yield part

    def matches_scalars(self, info: Mapping[Any, Any]) -> bool:
        """True if ``info`` follows this schema and all its values are scalars. Faster than :func:`_flatten`."""
        if tuple(map(type, info.values())) != self._types or tuple(info) != self._keys:
            return False
        return tuple(map(type, info)) == self._key_types  # True and 1.0 equal 1, but their masks have other names

    def locate_values(self, info: Mapping[Any, Any]) -> Places:
        """Return the places of an info's values, for a schema without nested dicts."""
        places = zip(info.items(), self.columns, strict=True)
        return tuple((*item, offset, dtype.itemsize * math.prod(shape)) for item, ((dtype, shape), offset) in places)

    def read(self, record: memoryview) -> dict[Any, Any]:
        """Restore the info, with its original types."""
        return _rebuild_info(self.definition, iter(self._struct.unpack_from(record, 0)))


def _rebuild_info(definition: Definition, values: Iterator[Any]) -> dict[Any, Any]:
    info: dict[Any, Any] = {}
    for key, spec in definition:
        if spec[0] == "d":
            info[key] = _rebuild_info(spec[1], values)
        elif spec[0] == "s":
            info[key] = _SCALAR_TYPES[spec[1]](next(values))
        else:
            info[key] = np.frombuffer(next(values), np.dtype(spec[1])).reshape(spec[2]).copy()
    return info


class InfoWriter:
    """The worker's side, which writes infos into shared memory.

    Args:
        schemas: uint64 ``(k,)``, the rows' schema numbers.
        records: uint8 ``(k, INFO_BYTES)``.
        learners: Empty, or one callback per row. When two successive infos of a row follow the same schema, and it has no
            nested dicts, the callback gets the schema's number and the places of the values.
    """

    def __init__(self, schemas: Array, records: Array, learners: Sequence[Callable[[int, Places], None]] = ()) -> None:
        self._numbers = schemas.data  # a memoryview writes a single number in a fraction of the time that an array takes
        self._learners = learners
        self._learned: list[Schema | None] = [None] * len(schemas)
        self._records = [memoryview(record).cast("B") for record in records]
        self._schemas: dict[Definition, Schema] = {}
        self._last: list[Schema | None] = [None] * len(self._records)
        self._unsent: dict[int, Definition] = {}

    def write(self, index: int, info: Any) -> bool:
        """Write a row's info. If it has to be pickled, mark the row accordingly and return ``False``."""
        schema = self._last[index]
        if schema is not None and type(info) is dict and schema.matches_scalars(info):
            values = list(info.values())
        else:
            values = []
            definition = _flatten(info, values)
            if schema is None or schema.definition != definition:
                schema = None if definition is None else self._get_schema(definition)
        try:
            if schema is not None:
                schema.pack(self._records[index], 0, *values)
                if self._learners and schema is self._last[index] is not self._learned[index] and not schema.is_nested:
                    self._learned[index] = schema
                    self._learners[index](schema.number, schema.locate_values(deepcopy(info)))
                self._last[index] = schema
                self._numbers[index] = schema.number
                return True
        except (struct.error, OverflowError):  # an int beyond 64 bits, or more than a record holds
            pass
        self._numbers[index] = BY_PICKLE
        return False

    def _get_schema(self, definition: Definition) -> Schema | None:
        schema = self._schemas.get(definition)
        if schema is None and len(self._schemas) < _MAX_SCHEMAS:
            schema = self._schemas[definition] = Schema(definition)
            if schema.size <= INFO_BYTES:
                self._unsent[schema.number] = definition
        return schema

    def repeat_definitions(self) -> None:
        """Treat all definitions as new: an interrupted caller may have lost the reply with one of them."""
        sendable = [schema for schema in self._schemas.values() if schema.size <= INFO_BYTES]
        self._unsent.update((schema.number, schema.definition) for schema in sendable)

    def add_new_definitions(self, definitions: dict[int, Definition]) -> None:
        """Add the new definitions to ``definitions``, and no longer treat them as new."""
        definitions.update(self._unsent)
        self._unsent.clear()


_Plan: TypeAlias = dict[Any, tuple[str, Any, "_Plan", Any, dict[int, Any]]]
"""Key -> (name of its mask, (dtype, shape), plan of a nested dict, column in the first schema, columns by schema number)"""


class InfoReader:
    """The caller's side, which builds Gymnasium's dict of arrays from records and pickled infos.

    Schemas are kept, because a worker rarely repeats them and has a limited number of them. Plans can be rebuilt, so all
    are discarded when there are too many.

    Args:
        schemas: uint64 ``(n,)``.
        records: uint8 ``(n, INFO_BYTES)``.

    Attributes:
        merger: Merges a result's infos value by value, if they cannot be merged as columns.
    """

    def __init__(self, schemas: Array, records: Array) -> None:
        self.merger = InfoMerger()
        self._numbers = schemas
        self._records = records
        self._schemas: dict[int, Schema] = {}
        self._plans: dict[Any, _Plan | None] = {}
        self._all_rows = np.ones(len(schemas), np.bool_)

    def learn(self, definitions: Mapping[int, Definition]) -> None:
        """Add the definitions that a worker sent."""
        for number, definition in definitions.items():
            if number not in self._schemas:
                self._schemas[number] = Schema(definition)

    def row_info(self, row: int) -> dict[Any, Any]:
        """Return the info of one row from its record; an empty dict if it has none there."""
        number = int(self._numbers[row])
        return self._schemas[number].read(memoryview(self._records[row])) if number > BY_PICKLE else {}

    def read(
        self, rows: Array | None, count: int, by_row: Mapping[int, Any], final_obs: Mapping[int, Any]
    ) -> dict[Any, Any]:
        """Return the merged infos of ``count`` rows.

        Args:
            rows: Environment indices, in the order of the result; ``None`` for all of them.
            count: Length of every array in the result.
            by_row: Infos outside of shared memory, by environment: those sent as pickles, and those of rebuilt rows.
            final_obs: The last observations of episodes that ended in this step, by environment.

        Raises:
            InfoError: An info is not a dict, or cannot be read.
        """
        if by_row:
            return self._merge_rows(rows, count, by_row, final_obs)
        numbers = self._numbers if rows is None else self._numbers[rows]
        key: Any = numbers[:1].tobytes()  # bytes: with few rows, one NumPy comparison would take longer than the rest
        same_schema = numbers.tobytes() == key * count
        if not same_schema:
            key = tuple(dict.fromkeys(numbers.tolist()))  # in order of appearance, which becomes the order of the keys
        if key not in self._plans:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan([int(numbers[0])] if same_schema else key)
        plan = self._plans[key]
        if plan is None:
            return self._merge_rows(rows, count, by_row, final_obs)
        infos: dict[Any, Any] = {}
        if same_schema:
            _fill_from_one_schema(infos, plan, rows, self._all_rows[:count])
        else:
            _fill_by_schema(infos, plan, rows, numbers)
        if final_obs:
            indices = range(count) if rows is None else rows.tolist()
            positions = [position for position, row in enumerate(indices) if row in final_obs]
            infos["final_obs"] = object_column(positions, [final_obs[indices[position]] for position in positions], count)
            infos["_final_obs"] = np.zeros(count, np.bool_)
            infos["_final_obs"][positions] = True
        return infos

    def _plan(self, numbers: Sequence[int]) -> _Plan | None:
        """Return a plan for rows of these schemas; ``None`` if masks conflict or a key has two types.

        The dtype of a key with two types would depend on the order of the environments.
        """
        plan: _Plan = {}
        for number in numbers:
            if number != NO_INFO:
                schema = self._schemas[number]
                if not self._add_to_plan(plan, schema.definition, number, iter(schema.columns)):
                    return None
        return None if _has_mask_conflict(plan) else plan

    def _add_to_plan(self, plan: _Plan, definition: Definition, number: int, columns: Iterator[Any]) -> bool:
        """Add a schema's keys to a plan. Return ``False`` if a key has two types."""
        for key, spec in definition:
            column_type, offset = (None, 0) if spec[0] == "d" else next(columns)
            view = column_type and self._view(offset, *column_type)
            _, planned_type, children, _, views = plan.setdefault(key, (f"_{key}", column_type, {}, view, {}))
            if column_type != planned_type:
                return False
            if column_type is None and not self._add_to_plan(children, spec[1], number, columns):
                return False
            views[number] = view
        return True

    def _view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return the column at ``offset`` of all records."""
        return self._records.reshape(-1).view(_record_type(offset, dtype, shape))["v"]

    def has_infos(self, rows: Array | None) -> bool:
        """True if one of these rows (``None``: all rows) has an info."""
        return bool((self._numbers if rows is None else self._numbers[rows]).any())

    def has_chunks(self, rows: Array | None) -> bool:
        """True if a record of these rows (``None``: all rows) may have ``chunk_steps``, the number of steps executed."""
        numbers = self._numbers if rows is None else self._numbers[rows]
        return any(number > BY_PICKLE and self._schemas[number].has_chunks for number in set(numbers.tolist()))

    def unmerged(self, rows: Iterable[int], by_row: Mapping[int, Any], final_obs: Mapping[int, Any]) -> list[Any]:
        """Return the infos of some rows unmerged, with their ``final_obs``. For the arguments see :meth:`read`."""
        infos: list[Any] = []
        for row in rows:
            info = by_row[row] if row in by_row else self.row_info(row)
            if row in final_obs:
                info = {**info, "final_obs": final_obs[row]}
            elif type(info) is dict:
                info = info.copy()
            infos.append(info)
        return infos

    def _merge_rows(
        self, rows: Array | None, count: int, by_row: Mapping[int, Any], final_obs: Mapping[int, Any]
    ) -> dict[Any, Any]:
        indices = range(count) if rows is None else rows.tolist()
        return self.merger.merge(self.unmerged(indices, by_row, final_obs), indices)


class WorkerInfos(RowInfos):
    """The infos of one result, in shared memory or in replies.

    Args:
        reader: Reads shared memory.
        rows: Environment indices, in the order of the result; ``None`` for all of them.
        count: Number of rows.
        by_row, final_obs: By environment; see :meth:`InfoReader.read`.
    """

    __slots__ = ("_by_row", "_count", "_final_obs", "_reader")

    def __init__(
        self, reader: InfoReader, rows: Array | None, count: int, by_row: Mapping[int, Any], final_obs: Mapping[int, Any]
    ) -> None:
        self.env_ids = rows
        self._reader, self._count, self._by_row, self._final_obs = reader, count, by_row, final_obs

    def rows(self) -> list[Any]:
        if not (self._by_row or self._final_obs or self._reader.has_infos(self.env_ids)):
            return [{} for _ in range(self._count)]
        rows = range(self._count) if self.env_ids is None else self.env_ids.tolist()
        return self._reader.unmerged(rows, self._by_row, self._final_obs)

    def row(self, position: int) -> Any:
        row = position if self.env_ids is None else int(self.env_ids[position])
        return self._reader.unmerged([row], self._by_row, self._final_obs)[0]

    def merged(self) -> dict[Any, Any]:
        rows = self.env_ids
        infos = self._reader.read(rows, self._count, self._by_row, self._final_obs)
        if rows is not None:
            infos["env_id"], infos["_env_id"] = rows.copy(), rows >= 0
        return infos

    def executed_steps(self) -> npt.NDArray[np.int64] | int:
        if not self._by_row and not self._reader.has_chunks(self.env_ids):
            return 1
        return super().executed_steps()


@lru_cache(4096)
def _record_type(offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.dtype[Any]:
    return np.dtype({"names": ["v"], "formats": [(dtype, shape)], "offsets": [offset], "itemsize": INFO_BYTES})


def _fill_from_one_schema(infos: dict[Any, Any], plan: _Plan, rows: Array | None, all_rows: Array) -> None:
    """Fill ``infos`` with whole columns, from rows that all follow one schema."""
    for key, (mask, column_type, children, view, _) in plan.items():
        if column_type is None:
            infos[key] = {}
            _fill_from_one_schema(infos[key], children, rows, all_rows)
        else:
            infos[key] = view.copy() if rows is None else view[rows]
        infos[mask] = all_rows.copy()  # 10x faster than `np.ones`, which is written in Python


def _fill_by_schema(infos: dict[Any, Any], plan: _Plan, rows: Array | None, numbers: Array) -> None:
    """Fill ``infos`` from rows that follow several schemas, one schema after the other."""
    for key, (mask, column_type, children, _, views) in plan.items():
        if column_type is None:
            infos[key] = {}
            _fill_by_schema(infos[key], children, rows, numbers)
        else:
            dtype, shape = column_type
            infos[key] = np.zeros((len(numbers), *shape), dtype)
        infos[mask] = np.zeros(len(numbers), np.bool_)
        for number, view in views.items():
            selected = numbers == number
            infos[mask] |= selected
            if column_type is not None:
                infos[key][selected] = view[selected if rows is None else rows[selected]]


def _has_mask_conflict(plan: _Plan) -> bool:
    if len({mask for mask, *_ in plan.values()}) < len(plan):  # 1 and "1" have the same mask
        return True
    return any(mask in plan or _has_mask_conflict(children) for mask, _, children, *_ in plan.values())
