"""Actions of agents on their way in: checked here, before anything is sent, and then staged by the engine.

What an environment gets is what the caller passed; only integers are cast to the integer type of their space, so that they
can lie in shared memory, and ``[n, A, 1]`` for ``Discrete`` becomes ``[n, A]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from vecenv.multi_agent.roster import Part, Roster, tree_of
from vecenv.shm import Tree
from vecenv.shm.layout import Array, Leaf

__all__ = ["AgentActions"]

_TAKES: Final = {"i": "biu", "u": "biu", "b": "biu", "f": "biuf"}


class AgentActions:
    """Checks batches of actions against a roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._parts = [(part, tree_of(part.action_space, "actions")) for part in roster.parts]

    def checked(self, actions: Any, rows: Array, alive: Array) -> Any:
        """The actions of environments ``rows``, as the engine takes them.

        Args:
            actions: In the layout of the roster.
            rows: Environment indices, in the order of the batch.
            alive: bool ``[n, A]``: who has to act.

        Raises:
            ValueError, TypeError: Something is missing, or has the wrong shape or dtype.
        """
        if self._roster.layout == "stack":
            part, tree = self._parts[0]
            return _checked(actions, tree, (len(rows), len(part.agents)), "actions")
        if not isinstance(actions, Mapping):
            keys = [part.key for part in self._roster.parts]
            raise TypeError(f"actions: got {type(actions).__name__}, wanted a dict with {keys}; nothing was sent")
        self._require_known(actions)
        self._require_everyone(actions, rows, alive)
        out = {}
        for part, tree in self._parts:
            front = (len(rows), len(part.agents)) if part.axis else (len(rows),)
            if part.key in actions:
                out[part.key] = _checked(actions[part.key], tree, front, f"actions[{part.key!r}]")
            else:
                out[part.key] = tree.build(iter([np.zeros((*front, *leaf.shape), leaf.dtype) for leaf in tree.leaves()]))
        return out

    def _require_known(self, actions: Mapping[Any, Any]) -> None:
        keys = [part.key for part in self._roster.parts]
        unknown = [key for key in actions if key not in keys]
        if unknown:
            raise ValueError(f"actions: unknown keys {unknown}, wanted {keys}; nothing was sent")

    def _require_everyone(self, actions: Mapping[Any, Any], rows: Array, alive: Array) -> None:
        missing = [part for part, _ in self._parts if part.key not in actions]
        texts = [text for part in missing for text in self._waiting(part, rows, alive)]
        if texts:
            raise ValueError(f"actions of live agents are missing: {'; '.join(texts)}; nothing was sent")

    def _waiting(self, part: Part, rows: Array, alive: Array) -> list[str]:
        """Who of ``part`` has to act, and where."""
        texts = []
        for index in part.agents:
            envs = rows[alive[rows, index]].tolist()
            if envs:
                texts.append(f"agent {self._roster.agents[index]!r} in envs {envs}")
        return texts


def _checked(value: Any, tree: Tree, front: tuple[int, ...], name: str) -> Any:
    if tree.leaf is not None:
        return _checked_leaf(value, tree.leaf, front, name)
    if tree.keyed:
        if not isinstance(value, Mapping) or set(value) != {key for key, _ in tree.children}:
            got = f"a dict with {list(value)}" if isinstance(value, Mapping) else type(value).__name__
            raise ValueError(f"{name}: got {got}, wanted a dict with {[key for key, _ in tree.children]}; nothing was sent")
    elif not isinstance(value, tuple) or len(value) != len(tree.children):
        raise ValueError(f"{name}: got {type(value).__name__}, wanted a tuple of {len(tree.children)}; nothing was sent")
    parts = [(key, _checked(value[key], child, front, f"{name}[{key!r}]")) for key, child in tree.children]
    return dict(parts) if tree.keyed else tuple(part for _, part in parts)


def _checked_leaf(value: Any, leaf: Leaf, front: tuple[int, ...], name: str) -> Array:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}; nothing was sent") from error
    wanted = (*front, *leaf.shape)
    if not leaf.shape and array.shape == (*front, 1):
        array = array.reshape(front)
    if array.shape != wanted:
        raise ValueError(f"{name}: got shape {array.shape}, wanted {wanted}; nothing was sent")
    if array.dtype.kind not in _TAKES[leaf.dtype.kind]:
        raise TypeError(f"{name}: got {array.dtype}, wanted {leaf.dtype}; nothing was sent")
    return array.astype(leaf.dtype) if leaf.dtype.kind in "iu" and array.dtype != leaf.dtype else array
