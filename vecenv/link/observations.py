"""Stores for the observations of a batch, with one interface, and the functions with which a worker fills them.

* :class:`SharedStore`: spaces of fixed size, in shared memory. The worker checks the shape of every leaf and writes it
  once, in place; the caller copies the leaves or returns views of them. :class:`LendingStore` lends large batches instead.
* :class:`PickledStore`: all other spaces (``Text``, ``OneOf``, ``Graph``, ``Sequence``, custom ones), and every space with
  ``shared_memory=False``. The worker checks each observation, replies carry them, and Gymnasium's ``concatenate`` builds
  the batch.
* :class:`RegisteredStore`: custom spaces with shared-memory functions that their author registered with Gymnasium.

The store classes are the caller's side, the ``make_*`` functions the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
from gymnasium import Space, spaces, wrappers
from gymnasium.vector.utils import (
    concatenate,
    create_empty_array,
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from vecenv.errors import ObservationError, SnapshotMismatch, envs_text
from vecenv.link.own_generators import OwnGenerators
from vecenv.shm import SharedArrays, Tree, fixed_tree
from vecenv.shm.layout import Array, Leaf
from vecenv.shm.lending import Lender
from vecenv.state.snapshots import Row
from vecenv.system.signals import call_with_fallback, raise_if_from_handler

WRITTEN: Final = object()
"""The result of an :data:`ObservationWriter` that wrote the observation into its store, so the reply need not carry it."""

ObservationWriter: TypeAlias = Callable[[int, Any], Any]
"""``write(k, observation)`` checks the observation of a worker's row k. It either stores the observation and returns
:data:`WRITTEN`, or returns the value to send."""

_WarnFn: TypeAlias = Callable[[str, str], None]

_PASS_OBSERVATIONS_ON: Final = frozenset({  # unchanged, and without keeping them, which subclasses may do
    OwnGenerators, wrappers.TimeLimit, wrappers.Autoreset, wrappers.PassiveEnvChecker, wrappers.OrderEnforcing,
    wrappers.RecordEpisodeStatistics, wrappers.TransformAction, wrappers.ClipAction, wrappers.RescaleAction,
    wrappers.StickyAction, wrappers.TransformReward, wrappers.ClipReward, wrappers.NormalizeReward,
})  # fmt: skip


class Store(Protocol):
    """The interface of all stores."""

    observations: Any
    must_renew: bool = False
    """True if :meth:`renew` has to be called before a message that may change observations."""

    def accept(self, row: int, observation: Any) -> None:
        """Store the observation of one row, received in a reply."""
        raise AssertionError("observations in shared memory are never part of a reply")

    def batch(self, copy: bool) -> Any:
        """Return the whole batch, in the containers of Gymnasium's batched space; with ``copy``, one that never changes."""

    def copy(self) -> Any:
        """Return a copy of the whole batch, in memory of its own."""
        return self.batch(copy=True)

    def take(self, rows: Array) -> Any:
        """Return a new batch with the observations of some rows."""

    def row(self, row: int) -> Any:
        """Return a copy of one row."""

    def set_row(self, row: int, observation: Any) -> None:
        """Replace the observation of one row."""

    def renew(self, *, keep: bool = True) -> None:
        """Switch to a free batch. Without ``keep``, a row is undefined until a worker or :meth:`restore_rows` writes it."""
        return

    def pin(self) -> Any:
        """Return the whole batch, which does not change until the next :meth:`pin`; ``None`` if that is impossible."""
        return None

    def restore_rows(self, rows: Collection[int]) -> None:
        """Restore the previous observations of these rows: the current ones are undefined or incomplete."""
        return

    def validate(self, observation: Any) -> None:
        """Raise if the observation does not fit the space; change nothing."""

    def require_received(self, rows: Iterable[int]) -> None:
        """Raise ``ValueError`` if one of these rows has no observation yet. In shared memory, it has zeros."""
        return


def require_fitting_observation(store: Store, row: int, row_state: Row) -> None:
    """Raise if the observation in a snapshot does not fit the space of the store.

    Raises:
        SnapshotMismatch: The observation does not fit.
    """
    if not row_state.used:
        return
    try:
        store.validate(row_state.observation)
    except Exception as error:
        raise_if_from_handler(error, partial(store.validate, row_state.observation))
        text = f"it is of {row_state.kind.env_id}, and its observation does not fit this environment: {error}"
        raise SnapshotMismatch(f"env {row}: the snapshot does not fit: {text}") from error


class SharedStore(Store):
    """A store in shared memory, for spaces of fixed size."""

    def __init__(self, tree: Tree, leaves: Sequence[Array]) -> None:
        self._tree = tree
        self._use(leaves)

    def _use(self, leaves: Sequence[Array]) -> None:
        self._leaves = list(leaves)
        self.observations: Any = self._tree.build(iter(self._leaves))

    def batch(self, copy: bool) -> Any:
        return self.copy() if copy else self.observations

    def copy(self) -> Any:
        if self._tree.leaf is not None:
            return self.observations.copy()
        return self._tree.build(iter([leaf.copy() for leaf in self._leaves]))

    def take(self, rows: Array) -> Any:
        return self._tree.build(iter([leaf[rows] for leaf in self._leaves]))

    def row(self, row: int) -> Any:
        return self._tree.build(iter([leaf[row].copy() for leaf in self._leaves]))

    def set_row(self, row: int, observation: Any) -> None:
        for leaf, value in zip(self._leaves, flatten(self._tree, observation), strict=True):
            leaf[row] = value

    def clear_row(self, row: int) -> None:
        """Set one row to zeros, the state before the first reset."""
        for leaf in self._leaves:
            leaf[row] = 0

    def validate(self, observation: Any) -> None:
        for rows, leaf in zip(self._leaves, flatten(self._tree, observation), strict=True):
            if not _fits_row(leaf, rows):
                raise ObservationError(f"got {_describe(leaf)}, expected an array of shape {rows.shape[1:]} ({rows.dtype})")


class LendingStore(SharedStore):
    """A shared store that lends batches to the program instead of copying them, as :mod:`vecenv.shm.lending` describes.

    Only whole batches are lent or pinned, and only while no worker is about to write into them.
    """

    def __init__(self, tree: Tree, arrays: SharedArrays, lender: Lender) -> None:
        assert arrays.observations is not None
        self._lender, self._cell, self._in_place = lender, arrays.current, arrays.in_place
        self._batches = [arrays.observations, *arrays.spare_observations]
        self._current = 0
        self._previous: int | None = None  # the batch before, if rows of the current one may be undefined
        self._pinned: int | None = None
        super().__init__(tree, self._batches[0])

    def batch(self, copy: bool) -> Any:
        self._previous = None
        if not copy or not self._lender.is_useful() or not self._can_renew():
            return super().batch(copy)
        self.must_renew = True
        return self._tree.build(iter(self._lender.lend(self._current)))

    def pin(self) -> Any:
        self._pinned = None
        if not self._can_renew():
            return None
        self.must_renew, self._pinned = True, self._current
        return self.observations

    def _can_renew(self) -> bool:
        return not self._in_place[0] and self._lender.has_free(self._current, self._pinned)

    def renew(self, *, keep: bool = True) -> None:
        old, new = self._current, self._lender.take_free(self._current, self._pinned)
        if keep and new != old:
            for source, target in zip(self._batches[old], self._batches[new], strict=True):
                target[...] = source
        self._cell[0] = new
        self._use(self._batches[new])
        self._current, self._previous = new, None if keep else old
        self.must_renew = False  # last, so that the next call repeats an interrupted one

    def restore_rows(self, rows: Collection[int]) -> None:
        if self._previous is not None and rows:
            for source, target in zip(self._batches[self._previous], self._leaves, strict=True):
                target[list(rows)] = source[list(rows)]

    def set_row(self, row: int, observation: Any) -> None:
        if self.must_renew:
            self.renew()
        super().set_row(row, observation)

    def clear_row(self, row: int) -> None:
        if self.must_renew:
            self.renew()
        super().clear_row(row)


def flatten(tree: Tree, observation: Any) -> list[Any]:
    """Return the leaves of an observation in a list."""
    leaves: list[Any] = []
    tree.map(lambda leaf: leaves.append(leaf) or leaf, observation)  # type: ignore[func-returns-value]
    return leaves


class PickledStore(Store):
    """A store in the caller's memory, for observations that arrive in replies."""

    def __init__(self, space: Space[Any], num_envs: int) -> None:
        self._space, self._rows = space, range(num_envs)
        self._latest: dict[int, Any] = {}  # by row; a row has none before its first reset
        # as in Gymnasium before the first reset; None for a custom space
        self.observations: Any = create_empty_array(space, n=num_envs, fn=np.zeros)

    def accept(self, row: int, observation: Any) -> None:
        self._latest[row] = observation

    def batch(self, copy: bool) -> Any:
        self.observations = self._concatenate(self._rows, self.observations)
        return deepcopy(self.observations) if copy else self.observations

    def take(self, rows: Array) -> Any:
        out: Any = create_empty_array(self._space, n=len(rows), fn=np.zeros)
        # a tuple batch would hold the stored observations themselves, which the caller must not be able to change
        return deepcopy(self._concatenate(rows.tolist(), out))

    def _concatenate(self, rows: Iterable[int], out: Any) -> Any:
        with np.errstate(over="ignore"):  # the worker has warned that values became infinite
            return concatenate(self._space, [self._latest[row] for row in rows], out)

    def row(self, row: int) -> Any:
        return deepcopy(self._latest.get(row))

    set_row = accept

    def validate(self, observation: Any) -> None:
        _make_check(self._space)(0, observation)

    def require_received(self, rows: Iterable[int]) -> None:
        if missing := [row for row in rows if row not in self._latest]:
            raise ValueError(f"no observation of {envs_text(missing)} yet: reset all environments before using a reset_mask")


class RegisteredStore(Store):
    """A store in shared memory, for a custom space with shared-memory functions registered with Gymnasium."""

    def __init__(self, space: Space[Any], num_envs: int, context: Any) -> None:
        self._space = space
        self.memory = create_shared_memory(space, n=num_envs, ctx=context)
        self.observations: Any = read_from_shared_memory(space, self.memory, n=num_envs)
        self._num_envs = num_envs

    def batch(self, copy: bool) -> Any:
        self.observations = read_from_shared_memory(self._space, self.memory, n=self._num_envs)
        return deepcopy(self.observations) if copy else self.observations

    def take(self, rows: Array) -> Any:
        def pick(batch: Any) -> Any:
            return tuple(batch[row] for row in rows) if isinstance(batch, tuple) else batch[rows]

        return _map_parts(self._space, self.batch(copy=True), pick)

    def row(self, row: int) -> Any:
        return _map_parts(self._space, self.batch(copy=False), lambda batch: deepcopy(batch[row]))

    def set_row(self, row: int, observation: Any) -> None:
        write_to_shared_memory(self._space, row, observation, self.memory)

    def validate(self, observation: Any) -> None:
        write_to_shared_memory(self._space, 0, observation, create_shared_memory(self._space, n=1))


def _map_parts(space: Space[Any], batch: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the parts of a batch that belong to spaces other than ``Dict`` and ``Tuple``."""
    if isinstance(space, spaces.Dict):
        return {key: _map_parts(sub, batch[key], function) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_map_parts(sub, part, function) for sub, part in zip(space.spaces, batch, strict=True))
    return function(batch)


def has_dynamic_part(space: Space[Any]) -> bool:
    """True if ``space`` is or contains a ``Text``, ``OneOf``, ``Graph`` or ``Sequence``."""
    if isinstance(space, spaces.Dict):
        return any(has_dynamic_part(sub) for sub in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return any(has_dynamic_part(sub) for sub in space.spaces)
    return isinstance(space, (spaces.Text, spaces.OneOf, spaces.Graph, spaces.Sequence))


def make_observation_writer(tree: Tree, leaves: Sequence[Array], first_env: int, warn: _WarnFn) -> ObservationWriter:
    """Return a function that checks an observation and writes it into row k of every leaf.

    It raises :class:`~vecenv.errors.ObservationError` for a wrong structure or shape, and for a value that the dtype of the
    space cannot hold (2.7 for an int, 300 for a uint8). It calls ``warn`` if the cast to a smaller float makes a value
    infinite.

    Args:
        tree: Structure of one observation.
        leaves: One array per leaf, with a row per environment of the worker.
        first_env: Index of the environment in row 0, for error messages.
        warn: Called with the field and the message.
    """
    write = _make_node_writer(tree, iter(leaves), first_env, warn, "observation")

    def write_row(k: int, observation: Any) -> Any:
        write(k, observation)
        return WRITTEN

    return write_row


def _make_row_caster(tree: Tree, first_env: int, warn: _WarnFn, count: int) -> ObservationWriter:
    """Return a writer that checks and casts like :func:`make_observation_writer`'s, but returns the observation to send."""
    leaves = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in tree.leaves()]
    write = _make_node_writer(tree, iter(leaves), first_env, warn, "observation")

    def cast_row(k: int, observation: Any) -> Any:
        write(k, observation)
        return tree.build(iter([leaf[k].copy() for leaf in leaves]))

    return cast_row


def make_reply_writer(space: Space[Any], first_env: int, warn: _WarnFn, count: int, *, copies: bool) -> ObservationWriter:
    """Return a writer that checks an observation and returns it to be sent; with ``copies``, a copy of it if possible.

    An observation of fixed size is always copied, and cast to the dtypes of the space.
    """
    if (tree := fixed_tree(space)) is not None:
        return _make_row_caster(tree, first_env, warn, count)

    def make_leaf_check(leaf: Leaf) -> Callable[[int, Any], object]:
        return _make_leaf_writer(leaf, np.zeros((count, *leaf.shape), leaf.dtype), first_env, warn)

    check = _make_check(space, make_leaf_check)

    def check_row(k: int, observation: Any) -> Any:
        try:
            check(k, observation)
        except ObservationError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as reason:
            got = f"got {_describe(observation)}, expected {space}"
            raise ObservationError(f"env {first_env + k}: observation does not fit its space: {got} ({reason})") from reason
        if not copies:
            return observation
        return call_with_fallback(partial(deepcopy, observation), lambda _: observation, Exception)

    return check_row


def _make_check(
    space: Space[Any], make_leaf_check: Callable[[Leaf], Callable[[int, Any], object]] | None = None,
    field: str = "observation",
) -> Callable[[int, Any], object]:  # fmt: skip
    """Return a function that raises if ``concatenate`` refuses an observation of row k, but copies no array that fits.

    ``make_leaf_check`` returns a function that checks the values which the cast to the dtype of a leaf may change.
    """
    function, parts = concatenate.dispatch(type(space)), getattr(space, "spaces", ())
    if function in (concatenate.dispatch(spaces.Dict), concatenate.dispatch(spaces.Tuple)):
        keyed = isinstance(parts, dict)
        keys = parts if keyed else range(len(parts))
        checks = [(key, _make_check(parts[key], make_leaf_check, f"{field}[{key!r}]")) for key in keys]

        def check_parts(k: int, observation: Any) -> None:
            for key, check_part in checks:
                check_part(k, observation[key])
            if not keyed and len(observation) != len(checks):
                raise ValueError(f"expected a tuple of {len(checks)}")

        return check_parts
    batch: Any = create_empty_array(space, n=1, fn=np.zeros)
    stacks = function is concatenate.dispatch(spaces.Box)
    tree = fixed_tree(space, field) if stacks else None
    check_leaf = make_leaf_check(tree.leaf) if make_leaf_check and tree and tree.leaf else None

    def check(k: int, observation: Any) -> None:
        if stacks and _fits_row(observation, batch, "safe"):
            return
        if not (stacks and _fits_row(observation, batch)):
            concatenate(space, [observation], batch)
        elif check_leaf is not None:
            check_leaf(k, observation)

    return check


def _fits_row(value: Any, rows: Array, casting: Literal["safe", "same_kind"] = "same_kind") -> bool:
    """True if the value has the shape of one row, and ``casting`` allows the cast of its dtype to that of the rows."""
    array = np.asanyarray(value)
    return array.shape == rows.shape[1:] and np.can_cast(array.dtype, rows.dtype, casting)


class _ArrayRow:
    """A row that no memoryview can write; ``row[:] = array`` raises unless dtype and shape are equal."""

    __slots__ = ("_dtype", "_row", "_shape")

    def __init__(self, row: Array, dtype: np.dtype[Any]) -> None:
        self._row, self._dtype, self._shape = row, dtype, row.shape

    def __setitem__(self, _: slice, observation: Any) -> None:
        # `!=`, not `is not`: the dtype of an unpickled space is another object
        if observation.__class__ is not np.ndarray or observation.shape != self._shape or observation.dtype != self._dtype:
            raise TypeError
        self._row[...] = observation


def make_exact_rows(leaf: Leaf, array: Array) -> list[Any]:
    """Return a target for each row of ``array`` that accepts only observations of exactly its dtype and shape.

    ``targets[k][:] = observation`` raises ``TypeError``, ``ValueError`` or, if an object cannot export its buffer,
    ``BufferError`` for everything else, and always for a scalar leaf.
    """
    if leaf.shape == ():
        return [None] * len(array)
    if leaf.flat:  # a memoryview checks dtype and shape in C, five times as fast, but supports only one axis
        return [memoryview(row) for row in array]
    dtype = np.dtype(leaf.dtype.str)  # NumPy's own object for this dtype: comparing an array's dtype with it is faster
    return [_ArrayRow(row, dtype) for row in array]


def _observation_error(env: int, field: str, got: str, expected: str) -> ObservationError:
    return ObservationError(f"env {env}: {field}: got {got}, expected {expected}")


def _make_node_writer(
    tree: Tree, leaves: Iterator[Array], first_env: int, warn: _WarnFn, field: str
) -> Callable[[int, Any], None]:
    """Return a writer for a tree, and advance ``leaves`` by one array per leaf."""
    if tree.leaf is not None:
        return _make_leaf_writer(tree.leaf, next(leaves), first_env, warn)
    writers = [(key, _make_node_writer(child, leaves, first_env, warn, f"{field}[{key!r}]")) for key, child in tree.children]

    def write_dict(k: int, value: Any) -> None:
        try:
            for key, write in writers:
                write(k, value[key])
        except (KeyError, TypeError, IndexError) as error:
            keys = [key for key, _ in writers]
            raise _observation_error(first_env + k, field, _describe(value), f"a dict with {keys}") from error

    def write_tuple(k: int, value: Any) -> None:
        if not isinstance(value, (tuple, list)) or len(value) != len(writers):
            raise _observation_error(first_env + k, field, _describe(value), f"a tuple of {len(writers)}")
        for index, write in writers:
            write(k, value[index])

    return write_dict if tree.keyed else write_tuple


def _make_leaf_writer(leaf: Leaf, array: Array, first_env: int, warn: _WarnFn) -> Callable[[int, Any], None]:
    """Return a writer for one leaf, with a fast path for values that need no conversion."""
    dtype = leaf.dtype
    convert_and_write = _make_converting_writer(leaf, array, first_env, warn)
    exact_rows = make_exact_rows(leaf, array)
    # Python's numbers only if the dtype holds them all, or raises OverflowError; NumPy 1 wraps integers in smaller dtypes
    exact_types = {dtype.type, {"i8": int, "f8": float, "b1": bool}.get(dtype.str[1:])}

    def write_scalar(k: int, value: Any) -> None:
        if type(value) in exact_types:
            try:
                array[k] = value
            except OverflowError as error:
                raise _observation_error(first_env + k, leaf.name, repr(value), str(dtype)) from error
        else:
            convert_and_write(k, value)

    def write_array(k: int, value: Any) -> None:
        try:
            exact_rows[k][:] = value
            return
        except (TypeError, ValueError, BufferError):
            pass
        convert_and_write(k, value)  # outside `except`, so that its errors have no misleading context

    return write_scalar if leaf.shape == () else write_array


def _make_converting_writer(leaf: Leaf, array: Array, first_env: int, warn: _WarnFn) -> Callable[[int, Any], None]:
    """Return a writer that converts any value, and raises or warns if the space's dtype cannot hold it."""
    dtype, shape = leaf.dtype, leaf.shape

    def convert_and_write(k: int, value: Any) -> None:
        def error(got: str, expected: str) -> ObservationError:
            return _observation_error(first_env + k, leaf.name, got, expected)

        try:
            plain = converted = np.asarray(value)
            if plain.dtype == object:
                converted = np.asarray(value, dtype=np.result_type(dtype, np.float64) if dtype.kind == "f" else dtype)
        except (ValueError, TypeError, OverflowError) as reason:
            raise error(_describe(value), f"{dtype} of shape {shape}: {reason}") from reason
        if converted.shape != shape:
            got = _describe(value) if plain.dtype == object else f"shape {converted.shape} ({converted.dtype})"
            raise error(got, f"shape {shape} ({dtype})")
        try:
            with np.errstate(all="ignore"):
                array[k] = converted if converted.dtype == dtype else converted.astype(dtype)
        except (ValueError, TypeError) as reason:
            raise error(_describe(value), f"{dtype}: {reason}") from reason
        original = converted if dtype.kind == "f" else plain
        if original.dtype == dtype or _is_faithful_cast(original, array[k]):
            return
        where = f"env {first_env + k}: {leaf.name}:"
        if converted.dtype.kind != "f" or dtype.kind != "f":
            example = f" with {_first_changed(original, array[k])}" if isinstance(value, np.ndarray) else ""
            raise ObservationError(f"{where} got {_describe(value)}{example}, which the space's dtype {dtype} cannot hold")
        warn(leaf.name, f"{where} {converted.dtype} values became infinite in the cast to the space's dtype {dtype}")

    return convert_and_write


def _is_faithful_cast(values: Array, cast: Array) -> bool:
    """True if a cast kept all values, apart from rounding to a float type."""
    if values.dtype.kind in "iuf" and cast.dtype.kind == "f":
        return bool(np.array_equal(np.isfinite(values), np.isfinite(cast)))
    try:
        return bool(np.array_equal(values, cast))
    except TypeError:  # not comparable
        return True


def _first_changed(values: Array, cast: Array) -> Any:
    """Return the first value that a cast changed."""
    return values.flat[int(np.argmax(values != cast))]


def _describe(value: Any) -> str:
    """Describe a value for error messages, with at most 60 characters of its repr."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} ({value.dtype})"
    if isinstance(value, dict):
        return f"a dict with {list(value)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def find_buffer_method(env: Any) -> Callable[[Any], None] | None:
    """Return the method that gives an environment a buffer; ``None`` if it has none, or a wrapper may change or keep it."""
    while type(env) in _PASS_OBSERVATIONS_ON:
        env = env.env
    # looked up in the class, because an environment's __getattr__ may return anything
    method = getattr(type(env), "observation_buffer", None)
    return partial(method, env) if callable(method) else None
