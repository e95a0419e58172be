"""Infos on their way out of a worker: into the records of its rows, or, where they have no schema, by pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vecenv.link.schemas import BY_PICKLE, Definition, Schema, define, number_of
from vecenv.shm.layout import Array

__all__ = ["InfoWriter"]

_MAX_SCHEMAS: Final = 64  # a worker that needs more than this has keys that do not repeat


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

    def send_new(self, schemas: dict[int, Definition]) -> None:
        """Add to ``schemas`` the definitions used for the first time since the last call."""
        if self._news:
            schemas.update(self._news)
            self._news.clear()
