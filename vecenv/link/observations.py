"""Keeps the observations of a batch: three stores with one interface, each with a worker's side and the caller's side.

* :class:`SharedStore`: spaces of fixed size lie in shared memory; the worker writes every leaf once, in place, after
  checking its shape, and the caller copies a leaf at a time or gives out the views themselves;
* :class:`PickledStore`: all other spaces (``Text``, ``OneOf``, ``Graph``, ``Sequence``, custom ones), and every space under
  ``shared_memory=False``: the reply carries the value, Gymnasium's ``concatenate`` makes the batch;
* :class:`RegisteredStore`: custom spaces whose author registered shared-memory functions with Gymnasium: it calls those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import (
    concatenate,
    create_empty_array,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from vecenv.errors import ObservationError
from vecenv.shm import Tree
from vecenv.shm.layout import Array, Leaf

KEPT: Final = object()
Put: TypeAlias = Callable[[int, Any], Any]
"""``put(k, observation)`` keeps the observation of a worker's k-th row and returns :data:`KEPT`, or the value to be sent."""

_Warn: TypeAlias = Callable[[str, str], None]


class Store(Protocol):
    """The caller's side of a store."""

    observations: Any

    def accept(self, row: int, observation: Any) -> None:
        """Take an observation that came in a reply."""
        raise AssertionError("observations in shared memory never travel in a reply")

    def batch(self, copy: bool) -> Any:
        """The whole batch, in the containers of Gymnasium's batched space."""

    def take(self, rows: Array) -> Any:
        """A fresh batch of some rows."""

    def row(self, row: int) -> Any:
        """A fresh copy of one environment's observation."""

    def put_row(self, row: int, observation: Any) -> None:
        """Set one row from the caller's side."""

    def require(self, observation: Any) -> None:
        """Refuse an observation that no row can have, by an exception; nothing is changed."""


class SharedStore(Store):
    """Observations of fixed size, in shared memory."""

    def __init__(self, tree: Tree, leaves: Sequence[Array]) -> None:
        self._tree = tree
        self._leaves = list(leaves)
        self.observations: Any = tree.build(iter(self._leaves))

    def batch(self, copy: bool) -> Any:
        if not copy:
            return self.observations
        if self._tree.leaf is not None:
            return self.observations.copy()
        return self._tree.build(iter([leaf.copy() for leaf in self._leaves]))

    def take(self, rows: Array) -> Any:
        return self._tree.build(iter([leaf[rows] for leaf in self._leaves]))

    def row(self, row: int) -> Any:
        return self._tree.build(iter([leaf[row].copy() for leaf in self._leaves]))

    def put_row(self, row: int, observation: Any) -> None:
        for leaf, value in zip(self._leaves, flat_of(self._tree, observation), strict=True):
            leaf[row] = value

    def blank(self, row: int) -> None:
        """Set one row to zeros, as before the first reset."""
        for leaf in self._leaves:
            leaf[row] = 0

    def require(self, observation: Any) -> None:
        require_leaves(self._leaves, flat_of(self._tree, observation))


def flat_of(tree: Tree, observation: Any) -> list[Any]:
    """The leaves of one observation."""
    flat: list[Any] = []
    tree.map(lambda leaf: flat.append(leaf) or leaf, observation)  # type: ignore[func-returns-value]
    return flat


def require_leaves(batches: Sequence[Array], leaves: Sequence[Any]) -> None:
    """Refuse leaves that are no row of their batch."""
    for batch, leaf in zip(batches, leaves, strict=True):
        if np.shape(leaf) != batch.shape[1:] or not np.can_cast(np.asarray(leaf).dtype, batch.dtype, "same_kind"):
            raise ObservationError(f"got {_brief(leaf)}, wanted an array of shape {batch.shape[1:]} ({batch.dtype})")


def _one_row(space: Space[Any], observation: Any) -> None:
    """Refuse an observation that Gymnasium cannot make a batch of, by an exception."""
    concatenate(space, [observation], create_empty_array(space, n=1, fn=np.zeros))  # type: ignore[arg-type]


class PickledStore:
    """Observations that travel in the replies."""

    def __init__(self, space: Space[Any], num_envs: int) -> None:
        self._space = space
        self._last: list[Any] = [None] * num_envs
        self._known = [False] * num_envs
        # None for a custom space, zeros otherwise, as Gymnasium has it before the first reset
        self.observations: Any = create_empty_array(space, n=num_envs, fn=np.zeros)

    def accept(self, row: int, observation: Any) -> None:
        self._last[row] = observation
        self._known[row] = True

    def batch(self, copy: bool) -> Any:
        self._require(range(len(self._last)))
        self.observations = self._concatenate(self._last, self.observations, range(len(self._last)))
        return deepcopy(self.observations) if copy else self.observations

    def take(self, rows: Array) -> Any:
        chosen = rows.tolist()
        self._require(chosen)
        out = create_empty_array(self._space, n=len(chosen), fn=np.zeros)
        return self._concatenate([self._last[row] for row in chosen], out, chosen)

    def row(self, row: int) -> Any:
        return deepcopy(self._last[row])

    def put_row(self, row: int, observation: Any) -> None:
        self.accept(row, observation)

    def require(self, observation: Any) -> None:
        _one_row(self._space, observation)

    def _require(self, rows: Sequence[int]) -> None:
        missing = [row for row in rows if not self._known[row]]
        if missing:
            raise ValueError(f"envs {missing} have no observation yet: reset all environments once before a reset_mask")

    def _concatenate(self, items: Sequence[Any], out: Any, rows: Sequence[int]) -> Any:
        try:
            return concatenate(self._space, items, out)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            for row, item in zip(rows, items, strict=True):
                try:
                    _one_row(self._space, item)
                except Exception as reason:
                    raise ObservationError(
                        f"env {row}: observation does not fit its space: got {_brief(item)}, wanted {self._space} ({reason})"
                    ) from error
            raise


class RegisteredStore(Store):
    """Observations of a custom space, in shared memory by the functions its author registered with Gymnasium."""

    def __init__(self, space: Space[Any], num_envs: int, context: Any, spares: int = 0) -> None:
        self._space = space
        self.memory = create_shared_memory(space, n=num_envs + spares, ctx=context)
        self.observations: Any = read_from_shared_memory(space, self.memory, n=num_envs)
        self._num_envs = num_envs

    def batch(self, copy: bool) -> Any:
        self.observations = read_from_shared_memory(self._space, self.memory, n=self._num_envs)
        return deepcopy(self.observations) if copy else self.observations

    def take(self, rows: Array) -> Any:
        whole = self.batch(copy=True)
        return tuple(whole[row] for row in rows) if isinstance(whole, tuple) else whole[rows]

    def row(self, row: int) -> Any:
        return deepcopy(self.batch(copy=False)[row])

    def put_row(self, row: int, observation: Any) -> None:
        write_to_shared_memory(self._space, row, observation, self.memory)

    def require(self, observation: Any) -> None:
        write_to_shared_memory(self._space, 0, observation, create_shared_memory(self._space, n=1))


def has_dynamic_part(space: Space[Any]) -> bool:
    """Whether Gymnasium's own ``Text``, ``OneOf``, ``Graph`` or ``Sequence`` occurs anywhere in ``space``."""
    if isinstance(space, spaces.Dict):
        return any(has_dynamic_part(sub) for sub in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return any(has_dynamic_part(sub) for sub in space.spaces)
    return isinstance(space, (spaces.Text, spaces.OneOf, spaces.Graph, spaces.Sequence))


def tree_writer(tree: Tree, leaves: Sequence[Array], first: int, warn: _Warn) -> Put:
    """A function that writes one environment's observation into row k of every leaf, shape-checked.

    Args:
        tree: Structure of one observation.
        leaves: One array per leaf, row k for the worker's k-th environment.
        first: Index of the environment in row 0, for error texts.
        warn: Called with (field, text) when a value had to be changed to fit the dtype of its space.

    The returned function raises :class:`~vecenv.errors.ObservationError` for a wrong structure or shape, and for a value
    that the dtype of the space cannot hold (2.7 for an int, 300 for a uint8), as SyncVectorEnv does. A float that overflows
    to infinity in a smaller float is reported through ``warn``.
    """
    write = _writer(tree, iter(leaves), first, warn, "observation")

    def put(k: int, observation: Any) -> Any:
        write(k, observation)
        return KEPT

    return put


def checked_value(tree: Tree, first: int, warn: _Warn, count: int) -> Put:
    """As :func:`tree_writer`, but the observation is sent: it is checked and cast in memory of the worker's own."""
    leaves = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in tree.leaves()]
    write = _writer(tree, iter(leaves), first, warn, "observation")

    def put(k: int, observation: Any) -> Any:
        write(k, observation)
        return tree.build(iter([leaf[k].copy() for leaf in leaves]))

    return put


class _ArrayRow:
    """A row with several axes: a slice takes an array of its dtype and shape, and nothing else."""

    __slots__ = ("_dtype", "_row", "_shape")

    def __init__(self, row: Array, dtype: np.dtype[Any]) -> None:
        self._row, self._dtype, self._shape = row, dtype, row.shape

    def __setitem__(self, where: slice, observation: Any) -> None:
        # equal dtypes are not the same where the space has come here by pickle
        if observation.__class__ is not np.ndarray or observation.shape != self._shape or observation.dtype != self._dtype:
            raise TypeError
        self._row[...] = observation


def direct_rows(leaf: Leaf, array: Array) -> list[Any]:
    """For each row of ``array``, what an observation is written into by a slice, which checks dtype and shape in one go.

    Everything else, and every scalar, is refused by a ``TypeError`` or a ``ValueError``.
    """
    if leaf.shape == ():
        return [None] * len(array)
    if leaf.flat:  # a memoryview costs a third of an array, and can do so with one axis only
        return [memoryview(row) for row in array]
    dtype = np.dtype(leaf.dtype.str)  # as numpy's own arrays have it: to compare it with another object takes longer
    return [_ArrayRow(row, dtype) for row in array]


def _misfit(env: int, name: str, got: str, wanted: str) -> ObservationError:
    return ObservationError(f"env {env}: {name}: got {got}, wanted {wanted}")


def _writer(tree: Tree, leaves: Any, first: int, warn: _Warn, name: str) -> Callable[[int, Any], None]:
    if tree.leaf is not None:
        return _leaf_writer(tree.leaf, next(leaves), first, warn)
    parts = [(key, _writer(child, leaves, first, warn, f"{name}[{key!r}]")) for key, child in tree.children]

    def write_dict(k: int, value: Any) -> None:
        try:
            for key, write in parts:
                write(k, value[key])
        except (KeyError, TypeError, IndexError) as error:
            raise _misfit(first + k, name, _brief(value), f"a dict with {[key for key, _ in parts]}") from error

    def write_tuple(k: int, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(parts):
            raise _misfit(first + k, name, _brief(value), f"a tuple of {len(parts)}")
        for index, write in parts:
            write(k, value[index])

    return write_dict if tree.keyed else write_tuple


def _leaf_writer(leaf: Leaf, array: Array, first: int, warn: _Warn) -> Callable[[int, Any], None]:
    dtype = leaf.dtype
    write_any = _converting_writer(leaf, array, first, warn)
    rows = direct_rows(leaf, array)
    exact = {dtype.type, {"i": int, "u": int, "f": float, "b": bool}.get(dtype.kind)}

    def write_scalar(k: int, value: Any) -> None:
        if type(value) in exact:
            try:
                array[k] = value
            except OverflowError as error:
                raise _misfit(first + k, leaf.name, repr(value), str(dtype)) from error
        else:
            write_any(k, value)

    def write_array(k: int, value: Any) -> None:
        try:
            rows[k][:] = value
            return
        except (TypeError, ValueError):
            pass
        write_any(k, value)

    return write_scalar if leaf.shape == () else write_array


def _converting_writer(leaf: Leaf, array: Array, first: int, warn: _Warn) -> Callable[[int, Any], None]:
    """Writes everything but the exact match: converts, checks, casts, and warns if that changed the value."""
    dtype, shape = leaf.dtype, leaf.shape

    def write_any(k: int, value: Any) -> None:
        def misfit(got: str, wanted: str) -> ObservationError:
            return _misfit(first + k, leaf.name, got, wanted)

        try:
            plain = given = np.asarray(value)
            if plain.dtype == object:
                given = np.asarray(value, dtype=dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise misfit(_brief(value), f"{dtype} of shape {shape}: {error}") from error
        if given.shape != shape:
            got = _brief(value) if plain.dtype == object else f"shape {given.shape} ({given.dtype})"
            raise misfit(got, f"shape {shape} ({dtype})")
        try:
            with np.errstate(all="ignore"):
                array[k] = given if given.dtype == dtype else given.astype(dtype)
        except (ValueError, TypeError) as error:
            raise misfit(_brief(value), f"{dtype}: {error}") from error
        if given.dtype == dtype or _survives(given, array[k]):
            return
        where = f"env {first + k}: {leaf.name}:"
        if given.dtype.kind != "f" or dtype.kind != "f":
            raise ObservationError(f"{where} got {_brief(value)}, whose values the {dtype} of the space cannot hold")
        warn(leaf.name, f"{where} {given.dtype} values became infinite in the cast to the {dtype} of the space")

    return write_any


def _survives(given: Array, cast: Array) -> bool:
    """Whether a cast kept the values, apart from the rounding of one float type to a smaller one."""
    if given.dtype.kind == "f" and cast.dtype.kind == "f":
        return bool(np.array_equal(np.isfinite(given), np.isfinite(cast)))
    try:
        return bool(np.array_equal(given, cast))
    except TypeError:
        return True


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} ({value.dtype})"
    if isinstance(value, dict):
        return f"a dict with {list(value)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
