"""Actions, checked while a program is traced, so that compiled steps cost nothing for it."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np

from vecenv.jax.native.state import PyTree

__all__ = ["action_spec", "check_action"]


def action_spec(space: gym.Space[Any]) -> PyTree:
    """Shapes and dtypes of one action as JAX sees them."""
    sample = space.sample()
    struct: Any = jax.ShapeDtypeStruct
    return jax.tree.map(lambda leaf: struct(np.shape(leaf), jnp.result_type(np.asarray(leaf))), sample)


def check_action(action: PyTree, spec: PyTree, batch_shape: tuple[int, ...], space: gym.Space[Any]) -> PyTree:
    """``action`` in the dtypes of ``spec``, that of one action of ``space``.

    Raises:
        ValueError: Wrong shape or structure.
        TypeError: Wrong dtype: floats for a Discrete space, say.
    """

    def check(path: Any, spec: Any, leaf: Any) -> Any:
        where = f"action{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, np.ndarray | jax.Array):
            leaf = np.asarray(leaf)
        want = batch_shape + spec.shape
        if leaf.shape != want:
            raise ValueError(f"{where} has shape {leaf.shape}; {math.prod(batch_shape)} environments take {want}.")
        precise = isinstance(leaf, jax.Array) and leaf.dtype == jnp.float64 and spec.dtype == jnp.float32
        if leaf.dtype == spec.dtype or precise:  # in 64-bit mode an action of JAX's keeps its precision
            return leaf
        if not np.can_cast(leaf.dtype, spec.dtype, "same_kind"):
            raise TypeError(f"{where} has dtype {leaf.dtype}, which is no {spec.dtype}.")
        return leaf.astype(spec.dtype)

    if isinstance(spec, jax.ShapeDtypeStruct):
        return check((), spec, action)
    try:
        return jax.tree_util.tree_map_with_path(check, spec, action)
    except (ValueError, TypeError) as error:
        if str(error).startswith("action"):
            raise
        raise ValueError(f"The action must be structured as {space}: {error}") from error
