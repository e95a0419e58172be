"""From device arrays to what the caller asked for: numpy, JAX or torch.

numpy: one fresh, writeable copy an array, in the dtype of its space; Gymnasium's wrappers write into what they are given.
torch: DLPack hands over a buffer without copying it, and torch may write into it. So it gets buffers that nobody else reads:
copies made on the device, next to which the hand-over itself costs nothing. JAX arrays cannot be written to and are given
as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

from vecenv.jax.native.state import PyTree

__all__ = ["from_torch", "info_arrays", "masked_infos", "require_torch", "rows_of", "to_numpy", "to_torch"]


def to_numpy(space: gym.Space[Any], tree: PyTree) -> Any:
    """Observations as ``space`` has them: fresh numpy arrays in its dtypes, in its order of keys."""
    if isinstance(space, spaces.Dict):
        return {key: to_numpy(sub, tree[key]) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_numpy(sub, part) for sub, part in zip(space.spaces, tree, strict=True))
    array = np.array(tree, dtype=space.dtype)
    return array[()] if isinstance(space, spaces.Discrete) else array


def rows_of(space: gym.Space[Any], tree: PyTree, row: int) -> Any:
    """Row ``row`` of a batch of observations (numpy leaves), as one observation of the single ``space``."""
    return to_numpy(space, jax.tree.map(lambda leaf: leaf[row], tree))


def info_arrays(info: PyTree) -> dict[str, Any]:
    """An info dict with numpy arrays for leaves."""
    return {k: info_arrays(v) if isinstance(v, dict) else np.asarray(v) for k, v in info.items()}


def masked_infos(info: dict[str, Any], mask: Any) -> dict[str, Any]:
    """Gymnasium's form of infos: a column and its mask ``_key`` for each key, at every level.

    Args:
        info: Columns ``[n, ...]``, numpy or JAX, nested or not.
        mask: ``bool[n]``: the rows that report them. numpy columns are copied, and zero elsewhere; where no row reports
            anything, there are no keys at all. JAX columns are given as they are.
    """
    out: dict[str, Any] = {}
    on_host = isinstance(mask, np.ndarray)
    if on_host and not mask.any():
        return out
    every = on_host and bool(mask.all())
    for key, column in info.items():
        if isinstance(column, dict):
            out[key] = masked_infos(column, mask)
        elif not on_host:
            out[key] = column
        else:
            out[key] = np.array(column)
            if not every:
                out[key][~mask] = 0
        out[f"_{key}"] = mask.copy() if on_host else mask
    return out


@jax.jit
def _own(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def require_torch() -> None:
    """Raise ``ImportError`` now, not in the first reset, where torch is not installed."""
    try:
        importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError("to='torch' needs torch, not installed here: pip install torch") from error


def to_torch(tree: PyTree) -> Any:
    """torch tensors on the same device, which the caller may write to."""
    import torch

    return jax.tree.map(torch.from_dlpack, _own(tree))


def from_torch(tree: Any) -> Any:
    """Actions from torch: any tensors among the leaves become arrays that later writes to the tensors do not reach."""
    import torch

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.device.type == "cpu":
            return leaf.numpy()  # copied by the call that takes it
        return jnp.copy(jax.dlpack.from_dlpack(leaf.contiguous()))

    return jax.tree.map(convert, tree)
