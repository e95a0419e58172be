"""What a pool returns, as Gymnasium's observations, rewards, flags and infos.

A pool answers with a list of arrays, one a state key, whose first axis is the environments of that batch. The arrays are
fresh and belong to whoever holds them, so most of them are handed on as they are; what has to be computed (float64
rewards, the two flags, the masks of infos) is computed with as few numpy calls as it takes, because at a hundred thousand
batches a second those calls are all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

__all__ = ["Array", "Infos", "RowReader", "States"]

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = list[Array]
Infos: TypeAlias = dict[str, Any]


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
        self._infos = _info_plan(index)
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
        ``terminated`` in EnvPool 1.2.7, an info ``terminated`` in Atari), both flags
        can be True, as with Gymnasium's ``TimeLimit``.
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
            infos[key] = _nested(plan, states, len(self._ones))
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


def _observation_plan(
    index: dict[str, int], space: gymnasium.Space[Any]
) -> tuple[dict[str, Any] | None, list[tuple[int, Callable[[Array], Array] | None]]]:
    """The nesting of an observation (``None`` for a single array), and where its leaves come from."""
    tree: dict[str, Any] = {}
    for key, i in index.items():
        if key == "obs" or key.startswith("obs:"):
            *path, last = key.replace(":", ".").split(".")
            at = tree
            for part in path:
                at = at.setdefault(part, {})
            at[last] = i
    leaves: list[tuple[int, Callable[[Array], Array] | None]] = []
    found: Any = tree["obs"]
    if not isinstance(space, spaces.Dict):
        while isinstance(found, dict):
            (found,) = found.values()
        leaves.append((found, _caster(space)))
        return None, leaves

    def walk(at: dict[str, Any], within: spaces.Dict) -> dict[str, Any]:
        template: dict[str, Any] = {}
        for key, inner in within.spaces.items():
            if isinstance(inner, spaces.Dict):
                template[key] = walk(at[key], inner)
            else:
                template[key] = None
                leaves.append((at[key], _caster(inner)))
        return template

    return walk(found, space), leaves


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


def _info_plan(index: dict[str, int]) -> dict[str, Any]:
    """Info name -> where it is, or a plan of the same form for a dict; without the rows of players."""
    plan: dict[str, Any] = {}
    for key, i in index.items():
        if key.startswith("info:") and not key.startswith("info:players."):
            *path, last = key.removeprefix("info:").split(".")
            at = plan
            for part in path:
                at = at.setdefault(part, {})
            at[last] = i
    plan["elapsed_step"] = index["elapsed_step"]
    return plan


def _nested(plan: dict[str, Any], states: States, n: int) -> Infos:
    infos: Infos = {}
    for key, where in plan.items():
        infos[key] = states[where] if isinstance(where, int) else _nested(where, states, n)
        infos[f"_{key}"] = np.ones(n, dtype=np.bool_)
    return infos


def _scatter(plan: dict[str, Any], states: States, rows: Array, num_rows: int) -> Infos:
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
