"""Conversion of actions and results: checked arrays for the pool, Gymnasium's arrays for the caller.

Every action is checked and copied before it reaches C++. A pool reads one action per environment from the memory that it
receives, and uses it as an index into tables: a short array crashes the interpreter, an array of the wrong shape is read as
garbage, and an action out of range reads beyond a table. So the checks of shape, dtype and integer range cannot be turned
off. Floats that are out of bounds or not finite are passed on to the environment, as in Gymnasium.

A pool returns one fresh array per state key, with the rows of a batch. Most arrays are returned to the caller unchanged. The
rest (float64 rewards, terminations, intp indices, masks of infos) is built with few NumPy calls, because these dominate the
time at 100,000 batches per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from vecenv.backends.envpool.task import Task
from vecenv.front.arguments import shape_error
from vecenv.front.driver import Stepped
from vecenv.shm import fixed_tree

_MAX_SET_LOOKUPS = 64  # the largest number of actions for which lookups in a set beat a NumPy reduction
_MAX_SET_SIZE = 4096  # the largest number of choices for which such a set is built

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = list[Array]
Infos: TypeAlias = dict[str, Any]
Latest: TypeAlias = tuple[Array, bytes]
"""The int32 ids of the rows returned last, which ``send`` uses by default, and the bytes of the same ids as intp."""


def _nest_indices(index: Mapping[str, int], prefix: str) -> dict[str, Any]:
    """Return the indices of the state keys with a prefix, as nested dicts: ``"obs:a.b"`` is at ``["a"]["b"]``."""
    tree: dict[str, Any] = {}
    for key, i in index.items():
        first, *path = key.replace(":", ".").split(".")
        if first == prefix:
            level, *parents = tree, *path[:-1]
            for part in parents:
                level = level.setdefault(part, {})
            level[path[-1] if path else ""] = i
    return tree


def _observation_leaves(tree: Any, space: gymnasium.Space[Any]) -> list[tuple[int, Any]]:
    """Return the state index of each leaf of an observation, and the dtype to cast it to (``None`` for a Box: no cast)."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, inner in space.spaces.items() for leaf in _observation_leaves(tree[key], inner)]
    while isinstance(tree, dict):  # an array may be nested in dicts of one key, which is "" for the state key "obs"
        (tree,) = tree.values()
    return [(tree, None if isinstance(space, spaces.Box) else space.dtype)]


def _scatter(plan: dict[str, Any], states: States, rows: Any, num_rows: int) -> Infos:
    """Return infos for ``num_rows`` rows from the arrays of some ``rows``; the others are zero and masked out.

    ``plan`` has the index in ``states`` of each info, as nested dicts.
    """
    infos: Infos = {}
    for key, source in plan.items():
        if isinstance(source, int):
            values = states[source]
            dtype = np.intp if key == "env_id" else values.dtype
            infos[key] = np.zeros((num_rows, *values.shape[1:]), dtype=dtype)
            infos[key][rows] = values
        else:
            infos[key] = _scatter(source, states, rows, num_rows)
        infos[f"_{key}"] = mask = np.zeros(num_rows, dtype=np.bool_)
        mask[rows] = True
    return infos


# -- actions ---------------------------------------------------------------------------------------------------------


class ActionChecker:
    """A converter of batches of actions to arrays that are safe for a pool.

    Args:
        space: The action space of one environment: Discrete, Box, or a (nested) Dict of them.
        keys: The names of the pool's action arrays, except those of environment ids. For a Dict space, a dotted name ends
            with the path of keys in the space.
        dtypes: The dtypes of the pool's arrays, one per key.
    """

    def __init__(self, space: gymnasium.Space[Any], keys: Sequence[str], dtypes: Sequence[npt.DTypeLike]) -> None:
        self._leaves: list[tuple[tuple[str, ...], _LeafChecker]] = []
        for (path, inner), dtype in zip(_paths(space, keys), dtypes, strict=True):
            if not isinstance(inner, spaces.Discrete | spaces.Box):
                raise TypeError(f"actions of the space {inner} are not supported")
            self._leaves.append((path, _LeafChecker(inner, np.dtype(dtype), _name(path))))
        self._single = self._leaves[0][1] if not isinstance(space, spaces.Dict) else None

    def __call__(self, actions: Any, ids: Array) -> list[Array]:
        """Check and copy actions.

        Args:
            actions: The actions of ``len(ids)`` environments: an array or any input of ``numpy.asarray``; for a Dict space
                a dict of them.
            ids: The environments of the actions, for error messages.

        Returns:
            Fresh C-contiguous arrays, in the order and with the dtypes that the pool requires.

        Raises:
            ValueError: The actions have the wrong shape or are out of range.
            TypeError: The actions are not numbers, are floats where the pool expects integers, or lack a key.
        """
        if self._single is not None:
            return [self._single(actions, ids)]
        parts = [_get_part(actions, path) for path, _ in self._leaves]
        return [check(value, ids) for (_, check), value in zip(self._leaves, parts, strict=True)]

    def dummy_actions(self, n: int) -> list[Array]:
        """Return valid actions for ``n`` environments that ignore them."""
        return [check.dummy_actions(n) for _, check in self._leaves]


def _paths(space: gymnasium.Space[Any], keys: Sequence[str]) -> list[tuple[tuple[str, ...], gymnasium.Space[Any]]]:
    """Return, for each of the pool's arrays, its path within an action and the space there."""
    if not isinstance(space, spaces.Dict):
        return [((), space)]
    paths = []
    for key in keys:
        path = tuple(key.replace(":", ".").split("."))
        if path[0] not in space.spaces:
            path = path[1:]
        inner: Any = space
        for part in path:
            inner = inner.spaces[part]
        paths.append((path, inner))
    return paths


def _get_part(actions: Any, path: tuple[str, ...]) -> Any:
    """Return the part of nested dicts at a path; raise ``TypeError`` if there is none."""
    for depth, part in enumerate(path):
        if not isinstance(actions, Mapping):
            raise TypeError(f"{_name(path[:depth])} must be a dict, got {type(actions).__name__}")
        if part not in actions:
            raise TypeError(f"{_name(path[:depth])} have no {part!r}; they have {sorted(map(str, actions))}")
        actions = actions[part]
    return actions


def _name(path: tuple[str, ...]) -> str:
    """Return the name of a part of the actions in error messages."""
    return f"actions[{'.'.join(path)!r}]" if path else "actions"


class _LeafChecker:
    """A checker of one action array: one number per environment for a Discrete space, one array per environment for a Box.

    The range of integers is always checked, because environments index tables with them.
    """

    def __init__(self, space: spaces.Discrete | spaces.Box, dtype: np.dtype[Any], name: str) -> None:
        if isinstance(space, spaces.Discrete):
            low, high = int(space.start), int(space.start + space.n - 1)
            self._allowed = set(range(low, high + 1)) if space.n <= _MAX_SET_SIZE else set()
            self._shape: tuple[int, ...] = ()
            self._low, self._high = np.asarray(low, dtype), np.asarray(high, dtype)
        else:
            self._allowed = set()
            self._shape = tuple(int(length) for length in space.shape)
            self._low, self._high = space.low.astype(dtype), space.high.astype(dtype)
        # the range of integers that are valid at every position; None for floats
        self._common_range = None if dtype.kind == "f" else (int(self._low.max()), int(self._high.min()))
        self._dtype = dtype
        self._kinds, self._expected = ("fiu", "numbers") if dtype.kind == "f" else ("iu", "integers")
        self._name = name

    def __call__(self, value: Any, ids: Array) -> Array:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._name} are not an array of numbers: {error}") from error
        if array.shape != (shape := ids.shape + self._shape):
            if self._shape != (1,) or array.shape != ids.shape:
                raise shape_error(self._name, array.shape, shape)
            array = array.reshape(-1, 1)
        if array.dtype.kind not in self._kinds:
            raise TypeError(f"{self._name} must be {self._expected}, got {array.dtype}")
        if self._common_range is not None:
            if self._allowed and len(ids) <= _MAX_SET_LOOKUPS:
                valid = self._allowed.issuperset(array.tolist())
            else:
                low, high = self._common_range
                valid = low <= np.minimum.reduce(array, None) and np.maximum.reduce(array, None) <= high
            if not valid:
                self._require_within(array, ids)
        return array.astype(self._dtype, "C")

    def _require_within(self, array: Array, ids: Array) -> None:
        wrong = ~((array >= self._low) & (array <= self._high)).reshape(len(ids), -1).all(axis=1)
        if wrong.any():
            low, high = (bound.min() if np.ptp(bound) == 0 else bound.tolist() for bound in (self._low, self._high))
            raise ValueError(
                f"{self._name} must be from {low} to {high}; got {array[wrong].tolist()} for envs {ids[wrong].tolist()}"
            )

    def dummy_actions(self, n: int) -> Array:
        valid_action = np.clip(np.zeros(self._shape, dtype=self._dtype), self._low, self._high)
        return np.broadcast_to(valid_action, (n, *self._shape)).copy()


# -- rows -------------------------------------------------------------------------------------------------------------


class PoolRows:
    """A converter of actions and results, for pools with one player per environment.

    For several players, see :class:`vecenv.multi_agent.player_pool.PlayerRows`.
    """

    check: Any
    """``check(actions, ids)``: returns checked copies of the actions, in the pool's form."""

    def __init__(self, task: Task) -> None:
        self.check = ActionChecker(task.action_space, task.action_keys[2:], task.action_dtypes[2:])
        keys = task.state_keys
        index = {key: i for i, key in enumerate(keys)}
        self._env_id = index["info:env_id"]
        self._reward, self._done, self._trunc = index["reward"], index["done"], index["trunc"]
        self._terminated = index.get("terminated")
        self._game_over = index.get("info:terminated")
        space = task.observation_space
        self._nested = fixed_tree(space) if isinstance(space, spaces.Dict) else None
        self._leaves = _observation_leaves(_nest_indices(index, "obs"), space)
        # the index of an observation that is a single array without a cast, as most are; else None
        self._observation = self._leaves[0][0] if self._nested is None and self._leaves[0][1] is None else None
        self._info_plan = {**_nest_indices(index, "info"), "elapsed_step": index["elapsed_step"]}
        self._info_plan.pop("players", None)
        self._flat_infos = [(key, f"_{key}", i) for key, i in self._info_plan.items() if isinstance(i, int)]
        self._nested_infos = {key: plan for key, plan in self._info_plan.items() if not isinstance(plan, int)}
        self._ones = np.ones(0, dtype=np.bool_)
        # the arrays that the reset of an ended row replaces: observations and infos, but neither rewards nor flags
        self.visible = [i for i, key in enumerate(keys) if key.partition(":")[0] in ("obs", "info", "elapsed_step")]

    def begin(self) -> None:
        """Prepare for a new pool. Pools with one player per environment need no preparation."""

    def store_held(self, held: Any) -> None:
        """Store the players in ``held``, the last value of :meth:`results`. Here, there are none. Safe to repeat."""

    def payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        """Return the argument of the pool's ``_send``, a list of arrays."""
        return [ids, ids, *actions]

    def filler_payload(self, ids: Array) -> list[Array]:
        """Return the argument of the pool's ``_send`` for environments that ignore their actions."""
        return [ids, ids, *self.check.dummy_actions(len(ids))]

    def copy_rows(self, states: States, first: int, last: int) -> States:
        """Copy rows ``first`` to ``last - 1``."""
        return [array[first:last].copy() for array in states]

    def results_in_order(self, batches: list[States], all_ids: Array, ended: Array) -> tuple[Stepped, Any]:
        """Return the results of all environments, sorted by index, and the ids to hold until the next call."""
        joined: States = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
        order = np.argsort(joined[self._env_id])
        return self._build_results([array[order] for array in joined], all_ids.astype(np.intp), ended), (all_ids,)

    def results(self, states: States, ended: Array) -> tuple[Stepped, Latest, Any]:
        """Return the results of these rows, their ids, and the ids to hold until the next call.

        Args:
            states: The pool's arrays for these rows.
            ended: bool, one per environment; updated in place.
        """
        ids = states[self._env_id]
        rows = ids.astype(np.intp)  # indexing with intp is ten times as fast as with int32
        latest = ids, rows.tobytes()
        return self._build_results(states, rows, ended), latest, latest

    def _build_results(self, states: States, rows: Array, ended: Array) -> Stepped:
        infos = self.infos(states, rows)
        terminated, truncated, ended[rows] = self.flags(states)
        observations = self.build(self.leaves(states)) if self._observation is None else states[self._observation]
        return observations, self.rewards(states), terminated, truncated, infos

    # -- flags and rewards -----------------------------------------------------------------------------------

    def rewards(self, states: States) -> Array:
        """Return rewards, float64 of shape ``(b,)``."""
        return states[self._reward].astype(np.float64)

    def flags(self, states: States) -> tuple[Array, Array, Array]:
        """Return ``(terminated, truncated, done)``, bool of shape ``(b,)``; the caller may modify the first two.

        EnvPool reports an episode that ends on its last allowed step as truncated only. Where it also reports termination
        (by a state key ``terminated`` in EnvPool 1.2.7, by an info ``terminated`` in Atari), both flags can be True, as with
        Gymnasium's ``TimeLimit``.
        """
        done = states[self._done]
        truncated = states[self._trunc]
        if self._terminated is not None:
            return states[self._terminated].astype(np.bool_), truncated, done
        terminated = done > truncated
        if self._game_over is not None:
            terminated |= done & (states[self._game_over] != 0)
        return terminated, truncated, done

    # -- observations ----------------------------------------------------------------------------------------

    def leaves(self, states: States) -> list[Array]:
        """Return the arrays of an observation, in the order of the space; each of shape ``(b, *leaf_shape)``."""
        return [states[i] if dtype is None else states[i].astype(dtype) for i, dtype in self._leaves]

    def build(self, leaves: Sequence[Any]) -> Any:
        """Build the observation from these leaves: an array, or nested dicts of them."""
        return leaves[0] if self._nested is None else self._nested.build(iter(leaves))

    def row(self, leaves: Sequence[Array], i: int) -> Any:
        """Return a copy of one environment's observation: a view of one row would keep the whole batch in memory."""
        return self.build([leaf[i].copy() for leaf in leaves])

    # -- infos -----------------------------------------------------------------------------------------------

    def infos(self, states: States, rows: Array) -> Infos:
        """Return all infos of a batch, each with its mask; every row has every key. The caller may modify the masks.

        Args:
            states: The pool's arrays.
            rows: The environment of each row, intp; becomes ``env_id`` of the result.
        """
        if len(self._ones) != len(rows):
            self._ones = np.ones(len(rows), dtype=np.bool_)
        make_mask = self._ones.copy
        infos: Infos = {}
        for key, mask_key, i in self._flat_infos:
            infos[key] = states[i]
            infos[mask_key] = make_mask()
        for key, plan in self._nested_infos.items():
            infos[key] = _scatter(plan, states, slice(None), len(rows))
            infos[f"_{key}"] = make_mask()
        infos["env_id"] = rows
        return infos

    def scattered_infos(self, states: States, rows: Array, num_rows: int) -> Infos:
        """Return infos of some rows in arrays for ``num_rows``; the others are zero, and False in the masks.

        Args:
            states: A batch, or a selection of it, with ``len(rows)`` rows.
            rows: The target rows.
            num_rows: Length of the result.
        """
        return _scatter(self._info_plan, states, rows, num_rows)
