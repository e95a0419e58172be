"""Converts what a pool takes and returns: checked actions in, Gymnasium's observations, rewards, flags and infos out.

Every action is checked and copied before it may reach C++. A pool reads as many actions as it has environments from whatever
memory it is given, and indexes tables with what it finds: a short array ends the interpreter, a wrong shape is read as
garbage, an action out of range reads beyond a table. So the checks of shape, dtype and integer range are matters of memory
safety, and cannot be turned off. Floats out of bounds, or not finite, are the environment's affair, as in Gymnasium.

A pool answers with a list of arrays, one a state key, whose first axis is the environments of that batch. The arrays are
fresh and belong to the caller, so most of them are handed on as they are; what has to be computed (float64
rewards, the two flags, the masks of infos) is computed with as few numpy calls as it takes, because at a hundred thousand
batches a second those calls are all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from vecenv.backends.envpool.task import Task
from vecenv.front.driver import Stepped

__all__ = [
    "ActionChecker", "Array", "Infos", "Latest", "PlayerBatch", "PlayerRows", "PlayerSorter", "SingleRows", "States",
]  # fmt: skip

_FEW = 64  # up to so many actions, looking each up in a set is faster than a numpy reduction

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = list[Array]
Infos: TypeAlias = dict[str, Any]
Latest: TypeAlias = tuple[Array, bytes]
"""The environments whose rows were taken last, int32, which ``send`` means by default; and the bytes of the same as intp."""


class RowReader:
    """Reads the answers of one kind of pool.

    Args:
        state_keys: Names of the arrays in an answer.
        observation_space: Of one environment.
    """

    def __init__(self, state_keys: Sequence[str], observation_space: gymnasium.Space[Any]) -> None:
        index = {key: i for i, key in enumerate(state_keys)}
        self._env_id = index["info:env_id"]
        self._reward, self._done, self._trunc = index["reward"], index["done"], index["trunc"]
        self._terminated = index.get("terminated")
        self._game_over = index.get("info:terminated")
        self._template, self._leaves = _observation_plan(index, observation_space)
        # where an observation is one of the pool's arrays, as most are
        self._array = self._leaves[0][0] if self._template is None and self._leaves[0][1] is None else None
        self._infos = {**_tree(index, "info"), "elapsed_step": index["elapsed_step"]}
        self._infos.pop("players", None)
        self._flat_infos = [(key, f"_{key}", i) for key, i in self._infos.items() if isinstance(i, int)]
        self._nested_infos = {key: plan for key, plan in self._infos.items() if not isinstance(plan, int)}
        self._ones = np.ones(0, dtype=np.bool_)
        # indices of what makes observations and infos; the rest are rewards and flags
        self.visible = [i for i, key in enumerate(state_keys) if key.partition(":")[0] in ("obs", "info", "elapsed_step")]

    # -- flags and rewards -----------------------------------------------------------------------------------

    def env_ids(self, states: States) -> Array:
        """Which environments these rows are of, int32 of shape ``(b,)``."""
        return states[self._env_id]

    def rewards(self, states: States) -> Array:
        """Rewards, float64 of shape ``(b,)``."""
        return states[self._reward].astype(np.float64)

    def flags(self, states: States) -> tuple[Array, Array, Array]:
        """``(terminated, truncated, over)``, bool of shape ``(b,)``; the first two are the caller's own.

        The pool reports an episode that ends on its last allowed step as truncated only. Where it says more (a state key
        ``terminated`` in EnvPool 1.2.7, an info ``terminated`` in Atari), both flags can be True, as with Gymnasium's
        ``TimeLimit``.
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
        """The arrays of an observation, in the order of the space; each of shape ``(b, *leaf_shape)``."""
        return [states[i] if cast is None else cast(states[i]) for i, cast in self._leaves]

    def build(self, leaves: Sequence[Any]) -> Any:
        """The observation that consists of these leaves: an array, or nested dicts of them."""
        return leaves[0] if self._template is None else _fill(self._template, iter(leaves))

    def observations(self, states: States) -> Any:
        """The observations of an answer."""
        return self.build(self.leaves(states)) if self._array is None else states[self._array]

    def row(self, leaves: Sequence[Array], i: int) -> Any:
        """One environment's observation, copied: a view of one row would keep the whole batch in memory."""
        return self.build([leaf[i].copy() for leaf in leaves])

    # -- infos -----------------------------------------------------------------------------------------------

    def infos(self, states: States, rows: Array) -> Infos:
        """All infos of a batch, each with its mask; every row has every key. All masks are the caller's own.

        Args:
            states: The pool's arrays.
            rows: Environment of each row, intp, for ``env_id``; the caller's own.
        """
        if len(self._ones) != len(rows):
            self._ones = np.ones(len(rows), dtype=np.bool_)
        mask = self._ones.copy
        infos: Infos = {}
        for key, mask_key, i in self._flat_infos:
            infos[key] = states[i]
            infos[mask_key] = mask()
        for key, plan in self._nested_infos.items():
            infos[key] = _scatter(plan, states, slice(None), len(self._ones))
            infos[f"_{key}"] = mask()
        infos["env_id"] = rows
        return infos

    def scattered_infos(self, states: States, rows: Array, num_rows: int) -> Infos:
        """Infos of some rows in arrays for ``num_rows``; the others are zero, and False in the masks.

        Args:
            states: An answer, or a selection of it, with ``len(rows)`` rows.
            rows: Where these go.
            num_rows: Length of the result.
        """
        return _scatter(self._infos, states, rows, num_rows)


def _tree(index: Mapping[str, int], prefix: str) -> dict[str, Any]:
    """The state keys ``"obs:a.b"`` under a prefix, as nested dicts of their indices."""
    tree: dict[str, Any] = {}
    for key, i in index.items():
        first, *path = key.replace(":", ".").split(".")
        if first == prefix:
            at, *inner = tree, *path[:-1]
            for part in inner:
                at = at.setdefault(part, {})
            at[path[-1] if path else ""] = i
    return tree


def _observation_plan(
    index: Mapping[str, int], space: gymnasium.Space[Any]
) -> tuple[dict[str, Any] | None, list[tuple[int, Callable[[Array], Array] | None]]]:
    """The nesting of an observation (``None`` for a single array), and where its leaves come from."""
    leaves: list[tuple[int, Callable[[Array], Array] | None]] = []

    def walk(found: Any, within: gymnasium.Space[Any]) -> Any:
        if isinstance(within, spaces.Dict):
            return {key: walk(found[key], inner) for key, inner in within.spaces.items()}
        while isinstance(found, dict):
            (found,) = found.values()
        leaves.append((found, _caster(within)))
        return None

    return walk(_tree(index, "obs"), space), leaves


def _caster(space: gymnasium.Space[Any]) -> Callable[[Array], Array] | None:
    """What makes a leaf's dtype that of the batched space: int64 for Discrete, int8 for MultiBinary."""
    if isinstance(space, spaces.Discrete):
        dtype = space.dtype
        return lambda array: array.astype(dtype)
    if isinstance(space, spaces.MultiBinary):
        return lambda array: array.view(np.int8)
    return None


def _fill(template: dict[str, Any], leaves: Iterator[Any]) -> dict[str, Any]:
    return {key: next(leaves) if inner is None else _fill(inner, leaves) for key, inner in template.items()}


def _scatter(plan: dict[str, Any], states: States, rows: Any, num_rows: int) -> Infos:
    infos: Infos = {}
    for key, where in plan.items():
        if isinstance(where, int):
            values = states[where]
            dtype = np.intp if key == "env_id" else values.dtype
            infos[key] = np.zeros((num_rows, *values.shape[1:]), dtype=dtype)
            infos[key][rows] = values
        else:
            infos[key] = _scatter(where, states, rows, num_rows)
        infos[f"_{key}"] = mask = np.zeros(num_rows, dtype=np.bool_)
        mask[rows] = True
    return infos


# -- actions ---------------------------------------------------------------------------------------------------------


class ActionChecker:
    """Turns a batch of actions into arrays that a pool may have.

    Args:
        space: Of one environment: Discrete, Box, or (nested) Dict of them.
        keys: The pool's names for the actions, without those of environment ids; for a Dict space the last parts of a
            dotted name are its keys.
        dtypes: What the pool wants, one a key.
    """

    def __init__(self, space: gymnasium.Space[Any], keys: Sequence[str], dtypes: Sequence[npt.DTypeLike]) -> None:
        self._leaves: list[tuple[tuple[str, ...], _Discrete | _Box]] = []
        for (path, inner), dtype in zip(_paths(space, keys), dtypes, strict=True):
            kind: Any = _Discrete if isinstance(inner, spaces.Discrete) else _Box if isinstance(inner, spaces.Box) else None
            if kind is None:
                raise TypeError(f"actions of the space {inner} are not supported")
            self._leaves.append((path, kind(inner, np.dtype(dtype), ".".join(path))))
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


def _as_array(value: Any, what: str) -> Array:
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{what} are not an array of numbers: {error}") from error


class _Discrete:
    """Integers from ``start`` to ``start + n - 1``, one per environment."""

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
            last = self._start + self._count - 1
            wrong = np.flatnonzero((array < self._start) | (array > last))
            got = f"got {array[wrong].tolist()} for envs {ids[wrong].tolist()}"
            raise ValueError(f"{self._what} must be from {self._start} to {last}; {got}")
        return array.astype(self._dtype)

    def dummy(self, n: int) -> Array:
        return np.full(n, self._start, dtype=self._dtype)


class _Box:
    """Arrays, one per environment. The range of integers is checked in any case: environments index tables with them."""

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
            within = ((array >= self._low) & (array <= self._high)).all(axis=tuple(range(1, array.ndim)))
            if not within.all():
                bounds = f"from {self._low.min()} to {self._high.max()}"
                wrong = ids[~within].tolist()
                raise ValueError(f"{self._what} must be within the bounds of the space ({bounds}): see envs {wrong}")
        return array.astype(self._dtype, order="C")

    def dummy(self, n: int) -> Array:
        inside = np.clip(np.zeros(self._shape, dtype=self._dtype), self._low, self._high)
        return np.broadcast_to(inside, (n, *self._shape)).copy()


# -- rows of pools with one player an environment ---------------------------------------------------------------------


class SingleRows:
    """Rows of pools with one player per environment.

    Attributes:
        check: Actions as the pool takes them.
    """

    def __init__(self, task: Task) -> None:
        self.reader = RowReader(task.state_keys, task.observation_space)
        self.check = ActionChecker(task.action_space, task.action_keys[2:], task.action_dtypes[2:])

    def begin(self) -> None:
        """A new pool."""

    def keep(self, held: Any) -> None:
        """Keep what is held beside indices (:meth:`answer`): nothing. It may be done again."""

    def payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        """What the pool's ``_send`` takes."""
        return [ids, ids, *actions]

    def filler(self, ids: Array) -> list[Array]:
        """The same, with some action for environments that will not look at it."""
        return [ids, ids, *self.check.dummy(len(ids))]

    def cut_out(self, states: States, first: int, last: int) -> States:
        """Copies of the rows of environments from ``first`` to before ``last``."""
        return [array[first:last].copy() for array in states]

    def ordered(self, batches: list[States], all_ids: Array, ended: Array) -> tuple[Stepped, Any]:
        """The answer of all environments, in their order; and what is held once it was taken."""
        joined: States = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
        order = np.argsort(self.reader.env_ids(joined))
        return self._stepped([array[order] for array in joined], all_ids.astype(np.intp), ended), (all_ids,)

    def answer(self, states: States, ended: Array) -> tuple[Stepped, Latest, Any]:
        """The answer of these rows; their environments; and what is held once it was taken.

        Args:
            states: Rows of the pool.
            ended: bool, one per environment; updated in place.
        """
        ids = self.reader.env_ids(states)
        rows = ids.astype(np.intp)  # indexing with it is ten times as fast as with int32
        latest = ids, rows.tobytes()
        return self._stepped(states, rows, ended), latest, latest

    def _stepped(self, states: States, rows: Array, ended: Array) -> Stepped:
        reader = self.reader
        infos = reader.infos(states, rows)
        terminated, truncated, ended[rows] = reader.flags(states)
        return reader.observations(states), reader.rewards(states), terminated, truncated, infos


# -- several players an environment ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlayerBatch:
    """One answer of a pool, in order of environments; n rows, k players at most.

    Attributes:
        env_ids: int32, shape ``(n,)``, ascending.
        mask: Which players there are, bool, shape ``(n, k)``.
        envs: The pool's arrays of environments by state key, shape ``(n, ...)``.
        players: Its arrays of players (``reward``, ``obs``, ...), shape ``(n, k, ...)``; zero where there is no player. A
            view of the pool's array where it came in order and complete.
    """

    env_ids: Array
    mask: Array
    envs: dict[str, Array]
    players: dict[str, Array]


class PlayerSorter:
    """Sorts the answers of one pool.

    Args:
        state_keys: Names of the arrays in an answer.
        state_specs: The pool's ``spec.state_array_spec``: an array whose shape begins with -1 is of players.
        max_num_players: k.
    """

    def __init__(self, state_keys: Sequence[str], state_specs: Mapping[str, Any], max_num_players: int) -> None:
        self._keys = list(state_keys)
        self._of_players = [tuple(state_specs[key].shape[:1]) == (-1,) for key in self._keys]
        self._env_id = self._keys.index("info:env_id")
        self._players_env_id = self._keys.index("info:players.env_id")
        self._player_id = self._keys.index("info:players.id") if "info:players.id" in self._keys else None
        self._k = max_num_players

    def __call__(self, states: States) -> PlayerBatch:
        """Sort an answer.

        Raises:
            ValueError: It has more players of one environment than there may be, or players of an environment that is not
                in it.
        """
        env_order, env_ids = _sorted(states[self._env_id])
        player_order, owners = _sorted(states[self._players_env_id])
        n, k = len(env_ids), self._k
        row = np.searchsorted(env_ids, owners)
        if (row == n).any() or (env_ids[np.minimum(row, n - 1)] != owners).any():
            raise ValueError(f"players of environments {np.setdiff1d(owners, env_ids).tolist()}, which are not in the batch")
        slot = self._slots(states, player_order, row, n)
        complete = len(owners) == n * k and np.array_equal(row * k + slot, np.arange(n * k))
        mask = np.zeros((n, k), dtype=np.bool_)
        mask[row, slot] = True
        envs, players = {}, {}
        for key, array, of_players in zip(self._keys, states, self._of_players, strict=True):
            if not of_players:
                envs[key] = array if env_order is None else array[env_order]
                continue
            array = array if player_order is None else array[player_order]
            if complete:
                players[key] = array.reshape(n, k, *array.shape[1:])
            else:
                players[key] = np.zeros((n, k, *array.shape[1:]), dtype=array.dtype)
                players[key][row, slot] = array
        return PlayerBatch(env_ids, mask, envs, players)

    def flatten(self, actions: Array, env_ids: Array, mask: Array) -> list[Array]:
        """What the pool's ``_send`` takes.

        Args:
            actions: Shape ``(n, k, ...)``, in the pool's dtype; entries without a player are left out.
            env_ids: int32, shape ``(n,)``.
            mask: Which players act, bool, shape ``(n, k)``.

        Returns:
            ``[env_id, players.env_id, actions]`` of lengths n, p and p, where p players act.
        """
        owners = np.repeat(env_ids, mask.sum(axis=1)).astype(np.int32)
        return [env_ids.astype(np.int32), owners, np.ascontiguousarray(actions[mask])]

    def cut_out(self, states: States, first: int, last: int) -> States:
        """Copies of the rows of some environments, in the order of the answer, and of their players.

        Args:
            states: An answer.
            first, last: Environments from the ``first`` to before the ``last``.
        """
        chosen = states[self._env_id][first:last]
        theirs = np.isin(states[self._players_env_id], chosen)
        return [
            array[theirs] if of_players else array[first:last].copy()
            for array, of_players in zip(states, self._of_players, strict=True)
        ]

    def _slots(self, states: States, player_order: Array | None, row: Array, n: int) -> Array:
        """Which of its environment's players each row is: its number where the pool says so, else its place."""
        counts = np.bincount(row, minlength=n)
        if counts.max(initial=0) > self._k:
            raise ValueError(f"{counts.max()} players in one environment; there may be {self._k}")
        if self._player_id is not None:
            numbers = states[self._player_id]
            return numbers if player_order is None else numbers[player_order]
        starts = np.cumsum(counts) - counts
        return np.arange(len(row)) - starts[row]


def _sorted(ids: Array) -> tuple[Array | None, Array]:
    """The stable order that sorts ``ids`` (``None`` if it is sorted already), and the result."""
    if (ids[1:] >= ids[:-1]).all():
        return None, ids
    order = np.argsort(ids, kind="stable")
    return order, ids[order]


class PlayerRows:
    """Rows of pools with several players per environment: the rows taken say which players there are, and which act.

    Args:
        task: Of the pools.
        num_envs: Number of environments.
        read: Makes the answer of rows, and of which players acted before them and which have to act now, bool ``(n, k)``.
    """

    def __init__(self, task: Task, num_envs: int, read: Callable[[PlayerBatch, Array, Array], Stepped]) -> None:
        self._read = read
        self._sorter = PlayerSorter(task.state_keys, task.state_specs, task.max_num_players)
        self._shape = num_envs, task.max_num_players
        self._dtype = np.dtype(task.action_dtypes[-1])
        self._turns = "info:current_player" in task.state_keys
        self.begin()

    def begin(self) -> None:
        """A new pool, of which nothing is known."""
        self._present, self._acting = np.zeros((2, *self._shape), np.bool_)

    def keep(self, held: Any) -> None:
        """Keep which players there are and act, of the rows taken last. It may be done again."""
        ids, present, acting = held
        self._present[ids], self._acting[ids] = present, acting

    def check(self, actions: Any, ids: Array) -> list[Array]:
        """Actions as an array; the caller has checked them."""
        return [np.asarray(actions)]

    def payload(self, ids: Array, actions: list[Array]) -> list[Array]:
        """What the pool's ``_send`` takes, in the order of environments."""
        order, (given,) = np.argsort(ids), actions
        ids, given = ids[order], given[order]
        acting = self._acting[ids]
        given = np.where(acting.reshape(acting.shape + (1,) * (given.ndim - 2)), given, 0).astype(self._dtype)
        if self._turns:  # EnvPool takes the first player's action for that of whose turn it is
            given[:] = given[np.arange(len(ids)), acting.argmax(axis=1)][:, None]
        return self._sorter.flatten(given, ids, self._present[ids])

    def filler(self, ids: Array) -> list[Array]:
        """The same, with some action for environments that will not look at it."""
        mask = self._present[ids]
        return self._sorter.flatten(np.zeros(mask.shape, self._dtype), ids, mask)

    def cut_out(self, states: States, first: int, last: int) -> States:
        """Copies of the rows of environments from ``first`` to before ``last``, and of their players."""
        return self._sorter.cut_out(states, first, last)

    def ordered(self, batches: list[States], all_ids: Array, ended: Array) -> tuple[Stepped, Any]:
        """The answer of all environments, in their order; and what is held once it was taken."""
        stepped, batch, acting = self._stepped([np.concatenate(parts) for parts in zip(*batches, strict=True)])
        return stepped, (all_ids, batch.mask, acting)

    def answer(self, states: States, ended: Array) -> tuple[Stepped, Latest, Any]:
        """The answer of these rows; their environments; and what is held once it was taken."""
        stepped, batch, acting = self._stepped(states)
        ids, index = batch.env_ids.copy(), batch.env_ids.astype(np.intp)
        stepped[4].update(env_id=index, _env_id=np.ones(len(ids), np.bool_))
        return stepped, (ids, index.tobytes()), (ids, batch.mask, acting)

    def _stepped(self, states: States) -> tuple[Stepped, PlayerBatch, Array]:
        batch = self._sorter(states)
        begins = batch.envs["elapsed_step"] == 0
        done = batch.envs["done"].astype(np.bool_) & ~begins
        acting = batch.mask & ~done[:, None]
        if self._turns:
            acting &= np.arange(batch.mask.shape[1]) == batch.envs["info:current_player"][:, None]
        acted = self._acting[batch.env_ids] & ~begins[:, None]
        return self._read(batch, acted, acting), batch, acting
