"""Lays out the shared memory: spaces become named fields, fields become numpy views.

This module makes no system calls. The caller runs :meth:`Layout.for_spaces` once and sends the layout to the workers. Both
sides call the same :meth:`Layout.view` over the same memory. Every leaf of a space is one contiguous array over all
environments, row i for environment i, on a 64-byte boundary, so that returning a batch is one copy per leaf.

A :class:`Tree` describes the structure of a (nested) space. It splits a value into leaves and builds a value from leaves,
for one environment or for a batch, with the containers that Gymnasium uses (``dict``, ``tuple``).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector.utils import create_shared_memory

Array: TypeAlias = npt.NDArray[Any]

ALIGNMENT: Final = 64
INFO_BYTES: Final = 4096
"""Room for one environment's numeric infos: about 500 numbers. Infos that do not fit are pickled."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a space: its name in error texts, its dtype, and its shape for one environment."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def flat(self) -> bool:
        """True if a memoryview can write one environment's array: it has one axis and native byte order."""
        return len(self.shape) == 1 and self.dtype.isnative


@dataclass(frozen=True, slots=True)
class Tree:
    """The structure of a space of fixed size. It has either a ``leaf`` or ``children``, by key (``keyed``) or by index."""

    leaf: Leaf | None = None
    children: tuple[tuple[Any, Tree], ...] = ()
    keyed: bool = False

    def leaves(self) -> Iterator[Leaf]:
        """Yield all leaves, in the order of the space."""
        if self.leaf is not None:
            yield self.leaf
        for _, child in self.children:
            yield from child.leaves()

    def build(self, arrays: Iterator[Array]) -> Any:
        """Build a value in the containers of the space from one array per leaf."""
        if self.leaf is not None:
            return next(arrays)
        parts = {key: child.build(arrays) for key, child in self.children}
        return parts if self.keyed else tuple(parts.values())

    def map(self, function: Callable[[Array], Array], value: Any) -> Any:
        """Apply ``function`` to every leaf of a value, and return the results in the containers of the space."""
        if self.leaf is not None:
            return function(value)
        parts = {key: child.map(function, value[key]) for key, child in self.children}
        return parts if self.keyed else tuple(parts.values())

    def match(self, value: Any, rows: int | None = None) -> list[Array] | None:
        """Return the leaves of ``value`` if container types, shapes and dtypes match this tree exactly, else ``None``.

        With ``rows``, the value is a batch of that many rows; without, it is the value of one environment, in which a leaf
        of shape ``()`` is a numpy scalar of exactly the leaf's dtype.
        """
        found: list[Any] = []
        return found if self._collect_matching(value, rows, found) else None

    def _collect_matching(self, value: Any, rows: int | None, found: list[Any]) -> bool:
        leaf = self.leaf
        if leaf is not None:
            shape = leaf.shape if rows is None else (rows, *leaf.shape)
            kind = np.generic if rows is None and not shape else np.ndarray
            if not isinstance(value, kind) or value.dtype != leaf.dtype or value.shape != shape:
                return False
            found.append(value)
            return True
        if len(self.children) != (len(value) if isinstance(value, dict if self.keyed else tuple) else -1):
            return False
        keys = value if self.keyed else range(len(value))
        return all(key in keys and child._collect_matching(value[key], rows, found) for key, child in self.children)


_FIXED: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_GYMNASIUM_FUNCTIONS: Final = {create_shared_memory.dispatch(space) for space in _FIXED}


def fixed_tree(space: Space[Any], name: str = "observation") -> Tree | None:
    """Return the tree of a space with values of one fixed size, or ``None`` for every other space.

    Spaces of fixed size are ``Box``, ``Discrete``, ``MultiDiscrete``, ``MultiBinary`` (and subclasses that did not register
    functions of their own with Gymnasium), and nested ``Dict`` and ``Tuple`` spaces of these. ``Text``, ``OneOf``,
    ``Graph``, ``Sequence`` and custom spaces have no fixed size.
    """
    if isinstance(space, spaces.Dict):
        return _branch([(key, fixed_tree(sub, f"{name}[{key!r}]")) for key, sub in space.spaces.items()], keyed=True)
    if isinstance(space, spaces.Tuple):
        return _branch([(i, fixed_tree(sub, f"{name}[{i}]")) for i, sub in enumerate(space.spaces)], keyed=False)
    if isinstance(space, _FIXED) and create_shared_memory.dispatch(type(space)) in _GYMNASIUM_FUNCTIONS:
        # by its name, because the dtype of an unpickled space equals NumPy's own, but is a different object
        return Tree(leaf=Leaf(name, np.dtype(np.dtype(space.dtype).str), tuple(space.shape or ())))
    return None


def _branch(children: Sequence[tuple[Any, Tree | None]], keyed: bool) -> Tree | None:
    fixed = tuple((key, child) for key, child in children if child is not None)
    return Tree(children=fixed, keyed=keyed) if len(fixed) == len(children) else None


@dataclass(frozen=True, slots=True)
class Field:
    """One array in the shared memory."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def view(self, buffer: Any) -> Array:
        """Return a writeable view of this field over ``buffer``."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if count == 0:
            return np.zeros(self.shape, self.dtype)
        return np.frombuffer(buffer, self.dtype.str, count, self.offset).reshape(self.shape)  # see `fixed_tree`


@dataclass(slots=True)
class SharedArrays:
    """Plain numpy views over the shared memory; row i belongs to environment i.

    Attributes:
        actions: Leaves of the batched action space, or ``None`` if actions are pickled.
        observations: Leaves of the batched observation space, or ``None`` if observations are pickled.
        spare_observations: The leaves of each spare batch.
        current: int32 ``(1,)``: the number of the batch that workers write observations to; 0: ``observations``.
        in_place: bool ``(1,)``: True if an environment writes observations into the shared memory itself.
        final_observations: The last observations of episodes, for same-step autoreset, or ``None``.
        final: bool ``(n,)``: True if a row's ``final_observations`` belong to the current reply.
        rewards, terminations, truncations: float64, bool, bool ``(n,)``.
        requested: uint32 ``(n,)``: the number of the row's latest rebuild, or message about only some rows of its worker.
        info_schemas: uint64 ``(n,)``: the schema of a row's info; 0: no info; 1: a pickled info.
        infos: uint8 ``(n, INFO_BYTES)``: the values of these infos.
        worker_time, worker_steps: float64, an entry per worker, the last for the caller: the seconds that steps took, and
            the number of steps. Short messages are sampled, and the latest of them may not be included yet.
        running: int32, an entry per worker: the environment that it is calling, or called last in the message that it is
            executing, as an index among its own; -1: none. After building, the last one built, until the first message. With
            several ``env_threads`` always -1. It identifies the environment in which a worker died or hangs.
        step_time: float64 ``(n,)``: seconds of the last sampled step of each environment.
        no_spin_until: float64 ``(1,)``: no process spins before this time (:class:`vecenv.system.cores.SpinPolicy`).
    """

    actions: list[Array] | None
    observations: list[Array] | None
    spare_observations: list[list[Array]]
    current: Array
    in_place: Array
    final_observations: list[Array] | None
    final: Array
    rewards: Array
    terminations: Array
    truncations: Array
    requested: Array
    info_schemas: Array
    infos: Array
    worker_time: Array
    worker_steps: Array
    running: Array
    step_time: Array
    no_spin_until: Array


@dataclass(slots=True)
class Layout:
    """The named fields of the shared memory.

    Attributes:
        num_envs: Number of rows.
        observations: Tree of one observation, ``None`` if observations are pickled.
        actions: Tree of one action, ``None`` if actions are pickled.
        final: True if it has room for final observations.
        fields: Name -> field, in the order of their offsets.
        size: The total number of bytes.
        batches: The fields of each batch of observations, first the usual one, then spare ones.
        pages: The range of bytes of each of these batches; whole pages if there are spare ones.
        recorded: Bytes of actions, rewards and flags. Unused, but flight records of format 6 contain it.
    """

    num_envs: int
    observations: Tree | None
    actions: Tree | None
    final: bool
    fields: dict[str, Field] = field(default_factory=dict)
    size: int = 0
    recorded: int = 0
    batches: list[list[Field]] = field(default_factory=list)
    pages: list[slice] = field(default_factory=list)

    @classmethod
    def for_spaces(
        cls, observations: Tree | None, actions: Tree | None, num_envs: int, num_workers: int, *, final: bool,
        spare_batches: int = 0,
    ) -> Layout:  # fmt: skip
        """Lay out one batch of ``num_envs`` rows, with spare batches. ``num_workers`` includes the caller."""
        layout = cls(num_envs, observations, actions, final and observations is not None)
        for index, leaf in enumerate(actions.leaves() if actions else ()):
            layout._add(f"actions/{index}", leaf.dtype, leaf.shape)
        layout._add("rewards", np.float64)
        layout._add("terminations", np.bool_)
        layout._add("truncations", np.bool_)
        layout.recorded = layout.size
        leaves = list(observations.leaves()) if observations else []
        for prefix in ("observations", *(f"spare_observations_{number}" for number in range(spare_batches))):
            layout._add_batch(prefix, leaves, mmap.PAGESIZE if spare_batches else ALIGNMENT)
        for index, leaf in enumerate(leaves if layout.final else ()):
            layout._add(f"final_observations/{index}", leaf.dtype, leaf.shape)
        layout._add("current", np.int32, rows=1)
        layout._add("in_place", np.bool_, rows=1)
        layout._add("final", np.bool_)
        layout._add("requested", np.uint32)
        layout._add("info_schemas", np.uint64)
        layout._add("infos", np.uint8, (INFO_BYTES,))
        layout._add("worker_time", np.float64, rows=max(num_workers, 1))
        layout._add("worker_steps", np.float64, rows=max(num_workers, 1))
        layout._add("running", np.int32, rows=max(num_workers, 1))
        layout._add("step_time", np.float64)
        layout._add("no_spin_until", np.float64, rows=1)
        return layout

    def _add(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = (), rows: int | None = None) -> None:
        field_dtype = np.dtype(dtype)
        field_shape = (self.num_envs if rows is None else rows, *shape)
        self.fields[name] = Field(field_dtype, field_shape, self.size)
        size = int(np.prod(field_shape, dtype=np.int64)) * field_dtype.itemsize
        self.size += -(-size // ALIGNMENT) * ALIGNMENT

    def _add_batch(self, prefix: str, leaves: Sequence[Leaf], alignment: int) -> None:
        """Add a batch of observations that begins and ends at a multiple of ``alignment``."""
        start = self.size = -(-self.size // alignment) * alignment
        names = [f"{prefix}/{index}" for index in range(len(leaves))]
        for name, leaf in zip(names, leaves, strict=True):
            self._add(name, leaf.dtype, leaf.shape)
        self.size = -(-self.size // alignment) * alignment
        self.batches.append([self.fields[name] for name in names])
        self.pages.append(slice(start, self.size))

    def view(self, buffer: Any) -> SharedArrays:
        """Return numpy views of all fields over ``buffer`` (anything with a writeable buffer of at least ``size`` bytes)."""
        views = {name: field.view(buffer) for name, field in self.fields.items()}

        def leaves(prefix: str) -> list[Array]:
            return [view for name, view in views.items() if name.startswith(prefix + "/")]

        return SharedArrays(
            actions=leaves("actions") if self.actions is not None else None,
            observations=leaves("observations") if self.observations is not None else None,
            spare_observations=[leaves(f"spare_observations_{number}") for number in range(len(self.batches) - 1)],
            final_observations=leaves("final_observations") if self.final else None,
            **{name: view for name, view in views.items() if "/" not in name},
        )
