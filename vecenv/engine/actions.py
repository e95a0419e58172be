"""Actions on their way in: one vectorised write into shared memory, or, for anything else Gymnasium accepts, the values.

An environment gets what ``gymnasium.vector.utils.iterate`` would give it: the type, dtype and shape that the caller passed.
Only a batch whose containers, dtypes and shapes are the action space's to the letter can take the fast way without
changing that; lists, generators, other dtypes, ``Text`` and the like go by pickle. Either way everything is checked before
anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Final

import numpy as np
from gymnasium import Space, logger, spaces
from gymnasium.error import CustomSpaceError
from gymnasium.vector.utils import batch_space, iterate

from vecenv.front.arguments import wrong_shape
from vecenv.shm import Tree
from vecenv.shm.layout import Array

__all__ = ["ActionStage"]


class ActionStage:
    """Puts batches of actions where the workers find them.

    Args:
        single_space: Action space of one environment.
        space: Its batch.
        num_envs: Number of environments.
        tree: Structure of one action of fixed size, else ``None``.
        leaves: The shared arrays, a row per environment.
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
        """Stage one action for every environment; ``None`` if they are in shared memory, else the actions themselves.

        Raises:
            TypeError, ValueError: The structure is wrong, or there are too few or too many. Nothing was written.
        """
        if actions.__class__ is np.ndarray and actions.shape == self._shape:
            dtype = actions.dtype
            if dtype is self._dtype or dtype == self._dtype:  # `==` is three times the price, and samples of a space need it
                self._leaves[0][...] = actions
                return None
        if self._tree is not None:
            exact = self._tree.exact(actions, self._num_envs)
            if exact is not None:
                for leaf, values in zip(self._leaves, exact, strict=True):
                    leaf[...] = values
                return None
        return self._split(actions, self._num_envs)

    def put_some(self, actions: Any, rows: Array) -> list[Any] | None:
        """Stage one action for each of ``rows``, in their order; results as of :meth:`put`."""
        count = len(rows)
        if self._tree is not None:
            exact = self._tree.exact(actions, count)
            if exact is not None:
                for leaf, values in zip(self._leaves, exact, strict=True):
                    leaf[rows] = values
                return None
        return self._split(actions, count)

    def _split(self, actions: Any, count: int) -> list[Any]:
        space = self._spaces.get(count)
        if space is None:
            space = self._spaces[count] = batch_space(self._single_space, count)
        _check_counts(self._single_space, space, actions, count, "actions")
        if not self._warned and hasattr(actions, "__array__") and not isinstance(actions, np.ndarray):
            self._warned = True
            logger.warn(
                f"actions are a {type(actions).__module__.partition('.')[0]} {type(actions).__name__}, and so is what each "
                "environment gets, as in Gymnasium; many take NumPy's values only. Pass numpy.asarray(actions): faster, too"
            )
        try:
            items = list(iterate(space, actions))
        except CustomSpaceError as error:  # Gymnasium makes one of whatever is raised, a signal handler's exception as well
            if error.__cause__ is None or isinstance(error.__cause__, TypeError):
                raise
            raise error.__cause__  # noqa: B904 - it is the one that was raised
        if len(items) != count:
            raise ValueError(f"got {len(items)} actions for {count} environments; nothing was sent")
        return items


def _check_counts(single: Space[Any], space: Space[Any], actions: Any, count: int, name: str) -> None:
    """Every leaf of a structured batch has a row per environment; ``zip`` would silently drop what one leaf has too many.

    What holds the parts may be anything that has them by their keys, as for ``iterate``: a list is as good as a tuple.
    """
    if isinstance(space, spaces.Dict) and isinstance(single, spaces.Dict):
        parts = [_part(actions, key) for key in space.spaces]
        if any(part is _MISSING for part in parts):
            got = f"a dict with {list(actions)}" if isinstance(actions, dict) else type(actions).__name__
            raise ValueError(f"{name}: got {got}, wanted a dict with {list(space.spaces)}; nothing was sent")
        for key, part in zip(space.spaces, parts, strict=True):
            _check_counts(single.spaces[key], space.spaces[key], part, count, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple) and isinstance(single, spaces.Tuple):  # of others, a batch is a tuple as well
        size = len(space.spaces)
        parts = [_part(actions, index) for index in range(size)]
        if any(part is _MISSING for part in parts) or (isinstance(actions, Sized) and len(actions) != size):
            length = f" of {len(actions)}" if isinstance(actions, Sized) else ""
            raise ValueError(f"{name}: got a {type(actions).__name__}{length}, wanted a tuple of {size}; nothing was sent")
        for index, part in enumerate(parts):
            _check_counts(single.spaces[index], space.spaces[index], part, count, f"{name}[{index}]")
    elif not _can_iterate(actions) or getattr(actions, "shape", None) == ():
        got = "a scalar" if getattr(actions, "shape", None) == () else f"{type(actions).__name__} {actions!r}"
        raise TypeError(f"{name}: got {got}, wanted {count}, one per environment; nothing was sent")
    elif isinstance(actions, Sized) and len(actions) != count:
        raise ValueError(f"{name}: got {len(actions)}, wanted {count}, one per environment; nothing was sent")
    elif type(single) in _ARRAYS and (shape := _shape_of(actions)) not in (None, wanted := (count, *(single.shape or ()))):
        raise wrong_shape(name, shape, wanted)


_ARRAYS: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
_MISSING: Final = object()


def _can_iterate(actions: Any) -> bool:
    """Whether ``iter`` takes it: also what has no ``__iter__``, but items by their index."""
    return isinstance(actions, Iterable) or hasattr(type(actions), "__getitem__")


def _shape_of(actions: Any) -> tuple[int, ...] | None:
    """The shape of an array; ``None``: it is none. What is in a list goes to the environments as it is, as in Gymnasium."""
    shape = getattr(actions, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) and getattr(actions, "dtype", None) != np.dtype(object) else None


def _part(actions: Any, key: Any) -> Any:
    try:
        return actions[key]
    except (KeyError, IndexError, TypeError, ValueError):  # ValueError: an array without such a field
        return _MISSING
