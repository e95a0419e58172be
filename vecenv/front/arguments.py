"""What calls are given, read once for all backends: seeds, reset masks, indices, counts.

Whatever is wrong with them is said before anything is sent, in Gymnasium's words where it has some. Nothing that a caller
passes is changed.
"""

from __future__ import annotations

import operator
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from vecenv.front.gymnasiums import MASK_IS_EMPTY, RESET_MASK, WrongType, WrongValue

_FEW = 64

__all__ = ["check_env_fns", "count_of", "env_ids_of", "reset_mask_of", "seeds_of"]


def check_env_fns(env_fns: Any, name: str) -> None:
    """A sequence of one or more functions that build an environment each.

    Args:
        env_fns: What a vector environment was given.
        name: Its class.

    Raises:
        TypeError: Something else; says what came, and what to write instead.
        ValueError: There is none.
    """
    wanted = f"{name} wants a sequence of functions that build one environment each, as [lambda: gymnasium.make(id)] * 8"
    if isinstance(env_fns, str):
        raise TypeError(f"{wanted}; got the id {env_fns!r}, which vecenv.make_vec({env_fns!r}, 8) takes")
    if not hasattr(env_fns, "__len__") or not hasattr(env_fns, "__getitem__"):
        hint = "; one function is [function] * 8" if callable(env_fns) else ""
        raise TypeError(f"{wanted}; got {env_fns!r}{hint}")
    for index in range(len(env_fns)):
        if not callable(item := env_fns[index]):
            what = f"the environment {item}, built already" if isinstance(item, gymnasium.Env) else repr(item)
            raise TypeError(f"{wanted}; env_fns[{index}] is {what}")
    if not len(env_fns):
        raise ValueError(f"{name} needs at least one env_fn, got {env_fns!r}")


def seeds_of(seed: Any, num_envs: int) -> list[Any]:
    """A seed, or ``None``, for each environment.

    Args:
        seed: An int gives environment i ``seed + i``; a sequence of ``num_envs`` gives each its own; ``None`` none.
        num_envs: Number of environments.

    Raises:
        TypeError: Neither an int nor a sequence.
        ValueError: A sequence of another length.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    if isinstance(seed, str | bytes) or not hasattr(seed, "__len__"):
        raise TypeError(f"seed must be an integer, a sequence of {num_envs} of them, or None; got {type(seed).__name__}")
    if len(seed) != num_envs:
        raise WrongValue(
            f"If seeds are passed as a list the length must match num_envs={num_envs} but got length={len(seed)}."
        )
    return list(seed)


def reset_mask_of(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, Any] | None]:
    """``options["reset_mask"]``, and the other options.

    Gymnasium pops the mask out of the caller's dict, so that its own ``RecordEpisodeStatistics``, which looks for the mask
    after the reset, clears the statistics of everybody. Here the dict stays as it is.

    Returns:
        A copy of the mask, bool ``(num_envs,)``, or ``None``; the options without it, or ``None`` if there were none.

    Raises:
        TypeError: The mask is no NumPy array of bool.
        ValueError: It has another shape, or chooses nobody.
    """
    if options is None or "reset_mask" not in options:
        return None, options
    mask, name = options["reset_mask"], f"{RESET_MASK} must"
    if not isinstance(mask, np.ndarray):
        raise WrongType(f"{name} be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise WrongValue(f"{name} have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise WrongType(f"{name} have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise WrongValue(f"{name} {MASK_IS_EMPTY}, got reset_mask={mask}")
    return mask.copy(), {key: value for key, value in options.items() if key != "reset_mask"}


def env_ids_of(env_id: Any, num_envs: int) -> npt.NDArray[np.intp]:
    """Indices of environments, fresh, ``(k,)``.

    Raises:
        ValueError: Not one or more distinct integers from 0 to ``num_envs - 1``.
    """
    ids = np.asarray(env_id)
    if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
        raise ValueError(f"env_id must be a sequence of int, got {env_id!r}")
    if ids.size == 0:
        raise ValueError("env_id is empty: name at least one environment")
    if len(ids) <= _FEW:  # lists are faster for few, tables for many
        listed = ids.tolist()
        outside = min(listed) < 0 or max(listed) >= num_envs
        twice = len(set(listed)) != len(listed)
    else:
        wide = ids.astype(np.int64)
        # one comparison for both ends: negative numbers become huge without their sign
        outside = bool(np.maximum.reduce(wide.view(np.uint64)) >= num_envs)
        twice = not outside and np.count_nonzero(_table(wide, num_envs)) != len(ids)
    if outside:
        raise ValueError(f"env_id must lie within 0..{num_envs - 1}, got {ids.tolist()}")
    if twice:
        raise ValueError(f"env_id must not name an environment twice, got {ids.tolist()}")
    return ids.astype(np.intp)


def _table(ids: npt.NDArray[np.int64], num_envs: int) -> npt.NDArray[np.bool_]:
    """Which environments are named."""
    named = np.zeros(num_envs, np.bool_)
    named[ids] = True
    return named


def count_of(count: Any, batch_size: int, num_envs: int) -> int:
    """How many environments a ``recv`` is to return: ``count``, or ``batch_size`` for ``None``.

    Raises:
        TypeError: No integer.
        ValueError: Not from 1 to ``num_envs``.
    """
    if count is None:
        return batch_size
    try:
        number = operator.index(count)
    except TypeError:
        raise TypeError(f"count must be an integer or None, got {type(count).__name__}") from None
    if not 1 <= number <= num_envs:
        raise ValueError(f"count must be from 1 to num_envs={num_envs}, got {number}")
    return number
