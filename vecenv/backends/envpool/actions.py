"""Every action is checked and copied before it may reach C++.

A pool reads as many actions as it has environments from whatever memory it is given, and indexes tables with what it finds:
a short array ends the interpreter, a wrong shape is read as garbage, an action out of range reads beyond a table. So the
checks of shape, dtype and integer range are matters of memory safety, and there is no way to turn them off. Floats out of
bounds, or not finite, are the environment's affair, as in Gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from vecenv.backends.envpool.rows import Array

__all__ = ["ActionChecker"]

_FEW = 64  # up to so many actions, looking each up in a set is faster than a numpy reduction


class ActionChecker:
    """Turns a batch of actions into arrays that a pool may have.

    Args:
        space: Of one environment: Discrete, Box, or (nested) Dict of them.
        keys: The pool's names for the actions, without those of environment ids; for a Dict space the last parts of a
            dotted name are its keys.
        dtypes: What the pool wants, one a key.
    """

    def __init__(self, space: gymnasium.Space[Any], keys: Sequence[str], dtypes: Sequence[npt.DTypeLike]) -> None:
        self._leaves = [
            (path, _leaf(inner, np.dtype(dtype), ".".join(path)))
            for (path, inner), dtype in zip(_paths(space, keys), dtypes, strict=True)
        ]
        self._single = self._leaves[0][1] if not isinstance(space, spaces.Dict) else None

    def __call__(self, actions: Any, ids: Array) -> list[Array]:
        """Check and copy.

        Args:
            actions: For ``len(ids)`` environments: an array or anything ``numpy.asarray`` takes; a dict of them for a Dict
                space.
            ids: Whose they are; named in errors.

        Returns:
            Fresh C-contiguous arrays, in the order and with the dtypes that the pool wants.

        Raises:
            ValueError: Wrong shape, out of range.
            TypeError: Not numbers, floats for Discrete, a missing or unknown key.
        """
        if self._single is not None:
            return [self._single(actions, ids)]
        found = [_at(actions, path) for path, _ in self._leaves]
        return [check(value, ids) for (_, check), value in zip(self._leaves, found, strict=True)]

    def dummy(self, n: int) -> list[Array]:
        """Some action for ``n`` environments that will not look at it."""
        return [check.dummy(n) for _, check in self._leaves]


def _paths(space: gymnasium.Space[Any], keys: Sequence[str]) -> list[tuple[tuple[str, ...], gymnasium.Space[Any]]]:
    """Where in an action each of the pool's arrays is, and its space."""
    if not isinstance(space, spaces.Dict):
        return [((), space)]
    found = []
    for key in keys:
        path = tuple(key.replace(":", ".").split("."))
        if path[0] not in space.spaces:
            path = path[1:]
        inner: Any = space
        for part in path:
            inner = inner.spaces[part]
        found.append((path, inner))
    return found


def _at(actions: Any, path: tuple[str, ...]) -> Any:
    for depth, part in enumerate(path):
        if not isinstance(actions, Mapping):
            raise TypeError(f"actions{list(path[:depth]) or ''} must be a dict, got {type(actions).__name__}")
        if part not in actions:
            raise TypeError(f"actions have no {'.'.join(path)!r}; they have {sorted(map(str, actions))}")
        actions = actions[part]
    return actions


def _leaf(space: gymnasium.Space[Any], dtype: np.dtype[Any], name: str) -> _Discrete | _Box:
    if isinstance(space, spaces.Discrete):
        return _Discrete(space, dtype, name)
    if isinstance(space, spaces.Box):
        return _Box(space, dtype, name)
    raise TypeError(f"actions of the space {space} are not supported")


def _as_array(value: Any, what: str) -> Array:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} are not an array of numbers: {error}") from error


class _Discrete:
    """Integers from ``start`` to ``start + n - 1``, one an environment."""

    def __init__(self, space: spaces.Discrete, dtype: np.dtype[Any], name: str) -> None:
        self._start, self._count = int(space.start), int(space.n)
        self._allowed = set(range(self._start, self._start + self._count)) if self._count <= 4096 else set()
        self._dtype = dtype
        self._what = f"actions[{name!r}]" if name else "actions"

    def __call__(self, value: Any, ids: Array) -> Array:
        array = value if type(value) is np.ndarray else _as_array(value, self._what)
        if array.shape != ids.shape:
            raise ValueError(f"{self._what} must have shape {ids.shape}, one for each environment; got {array.shape}")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{self._what} must be integers, got {array.dtype}")
        if len(ids) <= _FEW and self._allowed:
            right = self._allowed.issuperset(array.tolist())
        else:
            # one comparison for both ends: what lies below the start becomes huge without its sign
            offset = (array.astype(np.int64) - self._start).view(np.uint64)
            right = bool(np.maximum.reduce(offset) < self._count)
        if not right:
            self._refuse(array, ids)
        return array.astype(self._dtype)

    def dummy(self, n: int) -> Array:
        return np.full(n, self._start, dtype=self._dtype)

    def _refuse(self, array: Array, ids: Array) -> None:
        last = self._start + self._count - 1
        wrong = np.flatnonzero((array < self._start) | (array > last))
        raise ValueError(
            f"{self._what} must be from {self._start} to {last}; got {array[wrong].tolist()} for envs {ids[wrong].tolist()}"
        )


class _Box:
    """Arrays, one an environment. The range of integers is checked in any case: environments index tables with them."""

    def __init__(self, space: spaces.Box, dtype: np.dtype[Any], name: str) -> None:
        self._shape = tuple(int(length) for length in space.shape)
        self._one = self._shape == (1,)
        self._low, self._high = space.low.astype(dtype), space.high.astype(dtype)
        self._dtype = dtype
        self._kinds = "fiu" if dtype.kind == "f" else "iu"
        self._what = f"actions[{name!r}]" if name else "actions"

    def __call__(self, value: Any, ids: Array) -> Array:
        array = value if type(value) is np.ndarray else _as_array(value, self._what)
        if array.shape != ids.shape + self._shape:
            if not self._one or array.shape != ids.shape:
                raise ValueError(
                    f"{self._what} must have shape {(*ids.shape, *self._shape)}, one row for each environment; "
                    f"got {array.shape}"
                )
            array = array.reshape(-1, 1)
        if array.dtype.kind not in self._kinds:
            wanted = "numbers" if self._dtype.kind == "f" else "integers"
            raise TypeError(f"{self._what} must be {wanted}, got {array.dtype}")
        if self._dtype.kind != "f":
            self._check(array, ids)
        return array.astype(self._dtype, order="C")

    def dummy(self, n: int) -> Array:
        inside = np.clip(np.zeros(self._shape, dtype=self._dtype), self._low, self._high)
        return np.broadcast_to(inside, (n, *self._shape)).copy()

    def _check(self, array: Array, ids: Array) -> None:
        axes = tuple(range(1, array.ndim))
        within = ((array >= self._low) & (array <= self._high)).all(axis=axes)
        if not within.all():
            wrong = ids[~within].tolist()
            bounds = f"from {self._low.min()} to {self._high.max()}"
            raise ValueError(f"{self._what} must be within the bounds of the space ({bounds}): see envs {wrong}")
