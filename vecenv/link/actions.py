"""Batches of actions for the workers.

An environment gets the same action as from ``gymnasium.vector.utils.iterate``: the type, dtype and shape are those that the
caller passed. Shared memory preserves them only if a batch has exactly the containers, dtypes and shapes of the action
space. Otherwise (lists, generators, other dtypes, ``Text``) the actions are sent in the messages. In both cases, the
structure of the batch is checked before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Final

import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import batch_space, iterate

from vecenv.front.arguments import shape_error
from vecenv.shm import Tree
from vecenv.shm.layout import Array


class ActionStage:
    """A staging area for batches of actions, in shared memory if possible.

    Args:
        single_space: Action space of one environment.
        space: Action space of the whole batch.
        num_envs: Number of environments.
        tree: Structure of one action if its size is fixed, else ``None``.
        leaves: The arrays in shared memory, one row per environment; ``None`` without a ``tree``.
    """

    def __init__(
        self, single_space: Space[Any], space: Space[Any], num_envs: int, tree: Tree | None, leaves: list[Array] | None
    ) -> None:
        self._single_space = single_space
        self._spaces = {num_envs: space}
        self._num_envs = num_envs
        self._tree = tree
        self._leaves = leaves or []
        self._warned = False
        leaf = tree.leaf if tree is not None else None  # an action space of one array: the common case
        self._dtype = leaf.dtype if leaf is not None else None
        self._shape = (num_envs, *leaf.shape) if leaf is not None else None

    def put(self, actions: Any) -> list[Any] | None:
        """Stage one action for every environment. Return ``None`` if they are in shared memory, else a list of the actions.

        Raises:
            TypeError, ValueError: The structure is wrong, or there are too few or too many actions. Nothing was written.
            Exception: Raised by Gymnasium's ``iterate``, or by the actions while they are iterated over.
        """
        if actions.__class__ is np.ndarray and actions.shape == self._shape:
            dtype = actions.dtype
            if dtype is self._dtype or dtype == self._dtype:  # `is` is faster, but False for samples of a copied space
                self._leaves[0][...] = actions
                return None
        return self.put_some(actions, ..., self._num_envs)

    def put_some(self, actions: Any, rows: Any, count: int) -> list[Any] | None:
        """Stage one action for each of the ``count`` rows, in the order of ``rows``; return the same as :meth:`put`."""
        if self._tree is not None:
            arrays = self._tree.match(actions, count)
            if arrays is not None:
                for leaf, values in zip(self._leaves, arrays, strict=True):
                    leaf[rows] = values
                return None
        return self._split(actions, count)

    def _split(self, actions: Any, count: int) -> list[Any]:
        space = self._spaces.get(count)
        if space is None:
            space = self._spaces[count] = batch_space(self._single_space, count)
        check_batch(self._single_space, space, actions, count, "actions")
        if not self._warned and hasattr(actions, "__array__") and not isinstance(actions, np.ndarray):
            self._warned = True
            logger.warn(
                f"actions are a {type(actions).__module__.partition('.')[0]} {type(actions).__name__}, and each environment "
                "gets a part of the same type, as in Gymnasium. Many environments accept only NumPy values. Pass "
                "numpy.asarray(actions), which is also faster"
            )
        try:
            items = list(iterate(space, actions))
        except CustomSpaceError as error:  # Gymnasium converts every exception to this, even a signal handler's
            if error.__cause__ is None or isinstance(error.__cause__, TypeError):
                raise
            raise error.__cause__  # noqa: B904 - the original exception
        if len(items) != count:
            raise ValueError(f"got {len(items)} actions for {count} environments; nothing was sent")
        return items


def check_batch(single: Space[Any], space: Space[Any], actions: Any, count: int, name: str) -> None:
    """Raise unless a batch has the structure of its space and one row per environment.

    As in ``iterate``, any container that can be indexed by the keys is accepted, for example a list in place of a tuple.
    """
    if isinstance(space, spaces.Dict) and isinstance(single, spaces.Dict):
        parts = [_get_part(actions, key) for key in space.spaces]
        if any(part is _MISSING for part in parts):
            got = f"a dict with {list(actions)}" if isinstance(actions, dict) else type(actions).__name__
            raise ValueError(f"{name}: got {got}, expected a dict with {list(space.spaces)}; nothing was sent")
        for key, part in zip(space.spaces, parts, strict=True):
            check_batch(single.spaces[key], space.spaces[key], part, count, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple) and isinstance(single, spaces.Tuple):  # other spaces can have Tuple batches
        size = len(space.spaces)
        parts = [_get_part(actions, index) for index in range(size)]
        if any(part is _MISSING for part in parts) or (isinstance(actions, Sized) and len(actions) != size):
            length = f" of {len(actions)}" if isinstance(actions, Sized) else ""
            raise ValueError(f"{name}: got {type(actions).__name__}{length}, expected a tuple of {size}; nothing was sent")
        for index, part in enumerate(parts):
            check_batch(single.spaces[index], space.spaces[index], part, count, f"{name}[{index}]")
    elif not _can_iterate(actions) or getattr(actions, "shape", None) == ():
        got = "a scalar" if getattr(actions, "shape", None) == () else f"{type(actions).__name__} {actions!r}"
        raise TypeError(f"{name}: got {got}, expected a batch of {count}, one per environment; nothing was sent")
    elif isinstance(actions, Sized) and len(actions) != count:
        raise ValueError(f"{name}: got {len(actions)}, expected {count}, one per environment; nothing was sent")
    elif type(single) in _ARRAY_SPACES:
        expected = (count, *(single.shape or ()))
        if (shape := _get_shape(actions)) not in (None, expected):
            raise shape_error(name, shape, expected)


_ARRAY_SPACES: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_MISSING: Final = object()


def _can_iterate(actions: Any) -> bool:
    """True if ``iter`` accepts the actions: a ``__getitem__`` is enough."""
    return isinstance(actions, Iterable) or hasattr(type(actions), "__getitem__")


def _get_shape(actions: Any) -> tuple[int, ...] | None:
    """Return the shape of an array; ``None`` for lists and object arrays: their items reach the environments unchanged."""
    shape = getattr(actions, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) and getattr(actions, "dtype", None) != np.dtype(object) else None


def _get_part(actions: Any, key: Any) -> Any:
    try:
        return actions[key]
    except (KeyError, IndexError, TypeError, ValueError):  # ValueError: an array without such a field
        return _MISSING
