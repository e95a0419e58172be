"""Observations from several hosts: one array a leaf a host, kept as it came, copied once on its way to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vecenv.link.observations import flat_of, require_leaves
from vecenv.shm import Tree
from vecenv.shm.layout import Array

__all__ = ["PartsStore"]


class PartsStore:
    """A :class:`~vecenv.link.observations.Store` of what hosts sent.

    A part is a host's share of a leaf: the array of its latest answer, perhaps a read-only view of memory it does not own.
    It is let go of when the next one comes.

    Args:
        tree: Structure of one observation.
        leaves: The whole batch, for a caller that wants the same arrays every time.
        shares: The rows of each host.
    """

    def __init__(self, tree: Tree, leaves: Sequence[Array], shares: Sequence[range]) -> None:
        self._tree = tree
        self._leaves = list(leaves)
        self._shares = list(shares)
        self._parts = [self._place(host) for host in range(len(shares))]
        self._owner = np.repeat(np.arange(len(shares)), [len(rows) for rows in shares])

    @property
    def observations(self) -> Any:
        """The whole batch, the same arrays every time."""
        return self.batch(copy=False)

    def accept(self, row: int, observation: Any) -> None:
        raise AssertionError("observations of fixed size come by parts")

    def put_part(self, host: int, rows: Sequence[int] | None, leaves: Sequence[Array]) -> None:
        """Take what a host sent of ``rows``, counted from its first; ``None``: of all."""
        if rows is None:
            self._parts[host] = list(leaves)
            return
        for part, values in zip(self._own(host), leaves, strict=True):
            part[rows] = values

    def batch(self, copy: bool) -> Any:
        if copy:
            return self._tree.build(iter([np.concatenate(parts) for parts in zip(*self._parts, strict=True)]))
        for host in range(len(self._shares)):
            self._settle(host)
        return self._tree.build(iter(self._leaves))

    def take(self, rows: Array) -> Any:
        owners = self._owner[rows]
        turns = (np.flatnonzero(np.diff(owners)) + 1).tolist()
        taken = [np.empty((len(rows), *leaf.shape[1:]), leaf.dtype) for leaf in self._leaves]
        for begin, end in zip([0, *turns], [*turns, len(rows)], strict=True):
            host = int(owners[begin])
            local = rows[begin:end] - self._shares[host].start
            for out, part in zip(taken, self._parts[host], strict=True):
                np.take(part, local, axis=0, out=out[begin:end], mode="clip")  # "raise" would copy once more
        return self._tree.build(iter(taken))

    def row(self, row: int) -> Any:
        host = int(self._owner[row])
        local = row - self._shares[host].start
        return self._tree.build(iter([part[local].copy() for part in self._parts[host]]))

    def put_row(self, row: int, observation: Any) -> None:
        host = int(self._owner[row])
        for part, value in zip(self._own(host), flat_of(self._tree, observation), strict=True):
            part[row - self._shares[host].start] = value

    def require(self, observation: Any) -> None:
        require_leaves(self._leaves, flat_of(self._tree, observation))

    def _place(self, host: int) -> list[Array]:
        """Where the rows of a host lie in the whole batch."""
        rows = self._shares[host]
        return [leaf[rows.start : rows.stop] for leaf in self._leaves]

    def _settle(self, host: int) -> None:
        """Move a host's parts into the whole batch, unless they are there."""
        place = self._place(host)
        for target, part in zip(place, self._parts[host], strict=True):
            if not np.shares_memory(target, part):
                target[...] = part
        self._parts[host] = place

    def _own(self, host: int) -> list[Array]:
        """A host's parts as arrays that may be written to."""
        if not all(part.flags.writeable for part in self._parts[host]):
            self._parts[host] = [part.copy() for part in self._parts[host]]
        return self._parts[host]
