"""Infos as records: how the values of a dict that repeats lie in shared memory.

A schema's number is a hash of its definition, so that workers need not agree with each other.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import numpy as np

from vecenv.shm.layout import INFO_BYTES

__all__ = ["BY_PICKLE", "NO_INFO", "Definition", "Schema", "define", "number_of"]

NO_INFO: Final = 0
BY_PICKLE: Final = 1

# key -> ("s", type name) for a scalar, ("a", dtype, shape) for an array, or a nested definition
Definition: TypeAlias = tuple[tuple[Any, Any], ...]


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


class Schema:
    """A definition, compiled for both directions.

    Attributes:
        columns: Of each value of a record, in the order of the info and of the dicts in it: (dtype and shape, offset).
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.number = number_of(definition)
        self.columns: list[tuple[tuple[np.dtype[Any], tuple[int, ...]], int]] = []
        self.size = 0
        self._struct = struct.Struct("=" + "".join(self._compile(definition)))
        self.fits = self._struct.size <= INFO_BYTES
        self._keys = tuple(key for key, _ in definition)
        self._key_types = tuple(map(type, self._keys))
        self._types = tuple(_type_of(spec) for _, spec in definition)
        self._flat = all(spec[0] == "s" for _, spec in definition)

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

    def write(self, info: Mapping[Any, Any], record: memoryview) -> bool:
        """Write ``info`` into its record; ``False``, and nothing of use written, if it does not follow this schema."""
        keys = tuple(info)
        # True and 1.0 are equal to 1, and each has a mask of another name
        if keys != self._keys or tuple(map(type, keys)) != self._key_types:
            return False
        if tuple(map(type, info.values())) != self._types:
            return False
        values: list[Any] = list(info.values()) if self._flat else []
        if not self._flat and not _collect(info, self.definition, values):
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


def _collect(info: Mapping[Any, Any], definition: Definition, values: list[Any]) -> bool:
    for (key, spec), name in zip(definition, info, strict=True):
        value: Any = info[name]
        kind = type(value)
        if key != name or type(key) is not type(name) or kind is not _type_of(spec):
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
