"""Batches cut into rows and put together again: observations and actions by their spaces, states of policies as trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

__all__ = ["count_rows", "join_rows", "map_leaves", "put_rows", "stack_trees", "take_rows", "to_numpy", "tree_row"]


def take_rows(space: Space[Any], batch: Any, places: Sequence[int]) -> Any:
    """Some rows of a batch of elements of a space, in the same form."""
    if isinstance(space, spaces.Dict):
        return {key: take_rows(part, batch[key], places) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(take_rows(part, batch[at], places) for at, part in enumerate(space.spaces))
    if isinstance(batch, tuple | list):
        return tuple(batch[place] for place in places)
    return batch[np.asarray(places, np.intp)]


def put_rows(space: Space[Any], batch: Any, places: Sequence[int], rows: Any) -> Any:
    """A batch with some of its rows replaced; ``batch`` itself stays as it is."""
    if isinstance(space, spaces.Dict):
        return {key: put_rows(part, batch[key], places, rows[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(put_rows(part, batch[at], places, rows[at]) for at, part in enumerate(space.spaces))
    if isinstance(batch, tuple | list):
        of_place = dict(zip(places, rows, strict=True))
        return tuple(of_place.get(place, item) for place, item in enumerate(batch))
    if hasattr(batch, "at"):  # JAX's
        return batch.at[np.asarray(places, np.intp)].set(rows)
    whole = batch.clone() if hasattr(batch, "clone") else batch.copy()
    whole[np.asarray(places, np.intp)] = rows
    return whole


def join_rows(space: Space[Any], batches: Sequence[Any]) -> Any:
    """Batches one after the other."""
    if isinstance(space, spaces.Dict):
        return {key: join_rows(part, [batch[key] for batch in batches]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(join_rows(part, [batch[at] for batch in batches]) for at, part in enumerate(space.spaces))
    if all(isinstance(batch, np.ndarray) for batch in batches):
        return np.concatenate(batches)
    return tuple(item for batch in batches for item in batch)


def count_rows(space: Space[Any], batch: Any) -> set[int]:
    """How many rows the parts of a batch have: one number, where it is a batch.

    Raises:
        TypeError, KeyError, IndexError: It is none, or lacks a part.
    """
    if isinstance(space, spaces.Dict):
        return {count for key, part in space.spaces.items() for count in count_rows(part, batch[key])}
    if isinstance(space, spaces.Tuple):
        return {count for at, part in enumerate(space.spaces) for count in count_rows(part, batch[at])}
    return {len(batch)}


def to_numpy(batch: Any) -> Any:
    """Arrays of torch and JAX as numpy's, wherever they stand; the rest as it is."""
    if isinstance(batch, dict):
        return {key: to_numpy(part) for key, part in batch.items()}
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return tuple(to_numpy(part) for part in batch)
    if hasattr(batch, "detach"):
        return batch.detach().cpu().numpy()
    return np.asarray(batch) if hasattr(batch, "__array__") and not isinstance(batch, np.generic) else batch


def map_leaves(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A function of the leaves of trees of dicts, lists, tuples and ``None``, which have the same form."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {key: map_leaves(function, value, *(other[key] for other in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [map_leaves(function, *each) for each in zip(tree, *others, strict=True)]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        return type(tree)(parts)
    return function(tree, *others)


def tree_row(tree: Any, place: int) -> Any:
    """One row of a tree of arrays."""
    return map_leaves(lambda leaf: leaf[place], tree)


def stack_trees(trees: Sequence[Any]) -> Any:
    """Trees as one, whose leaves have a new first axis; by the library that the leaves are of."""
    return map_leaves(_stack, *trees)


def _stack(*leaves: Any) -> Any:
    if hasattr(leaves[0], "detach"):
        import torch

        return torch.stack(leaves)
    if type(leaves[0]).__module__.partition(".")[0] in ("jax", "jaxlib"):
        import jax.numpy

        return jax.numpy.stack(leaves)
    return np.stack(leaves)
