"""Checks of arguments: each returns the value in the form that is used, or raises before anything has happened."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.rows import Array

__all__ = ["check_options", "env_ids", "reset_ids"]


def check_options(
    num_envs: Any,
    batch_size: Any,
    num_threads: Any,
    max_episode_steps: Any,
    validate: Any,
    render_mode: Any,
    mode: AutoresetMode,
) -> tuple[int, int]:
    """``num_envs`` and ``batch_size`` as integers, if all of these make sense.

    Raises:
        TypeError: Not an integer where one is needed.
        ValueError: Out of range; names the accepted values.
    """
    num_envs = _positive("num_envs", num_envs)
    batch_size = num_envs if batch_size is None else _positive("batch_size", batch_size)
    if num_envs % batch_size:
        fit = [size for size in range(1, num_envs + 1) if num_envs % size == 0]
        raise ValueError(f"batch_size must divide num_envs={num_envs} (one of {fit}), got {batch_size}")
    if num_threads is not None:
        _positive("num_threads", num_threads)
    if max_episode_steps is not None:
        _positive("max_episode_steps", max_episode_steps)
    if validate not in ("safe", "full"):
        raise ValueError(f"validate must be 'safe' or 'full', got {validate!r}")
    if render_mode not in (None, "rgb_array"):
        raise ValueError(f"render_mode must be 'rgb_array' or None, got {render_mode!r}")
    if mode is AutoresetMode.SAME_STEP and batch_size < num_envs:
        raise ValueError(
            "same-step autoreset needs all environments in one batch (batch_size=None): with first-ready batches, rows "
            "that wait for their resets would leave batches short. Use next-step autoreset"
        )
    return num_envs, batch_size


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not 1 <= number < 2**31:
        raise ValueError(f"{name} must be from 1 to 2**31 - 1, got {number}")
    return number


def env_ids(env_id: Any, num_envs: int) -> Array:
    """Environment indices as a fresh int32 array of shape ``(k,)``, k at least 1.

    Raises:
        ValueError: Not a sequence of distinct integers from 0 to ``num_envs - 1``.
    """
    ids = np.asarray(env_id)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        raise ValueError(f"env_id must be a sequence of at least one integer, got {env_id!r}")
    wide = ids.astype(np.int64)
    # one comparison for both ends: negative numbers become huge without their sign
    if np.maximum.reduce(wide.view(np.uint64)) >= num_envs:
        raise ValueError(f"env_id must lie within 0..{num_envs - 1}, got {ids.tolist()}")
    seen = np.zeros(num_envs, dtype=np.bool_)
    seen[wide] = True
    if np.count_nonzero(seen) != len(wide):
        raise ValueError(f"env_id must not name an environment twice, got {ids.tolist()}")
    return wide.astype(np.int32)


def reset_ids(options: Any, num_envs: int) -> Array | None:
    """The environments of ``options["reset_mask"]``, ``None`` without one. The options are not changed.

    Raises:
        TypeError, ValueError: As Gymnasium's vector environments; ValueError for any other option, of which EnvPool has
            none.
    """
    if options is None:
        return None
    unknown = sorted(str(key) for key in options if key != "reset_mask")
    if unknown:
        raise ValueError(f"EnvPool's environments take no reset options, got {unknown}; only 'reset_mask' is known")
    if "reset_mask" not in options:
        return None
    mask = options["reset_mask"]
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return np.flatnonzero(mask).astype(np.int32)
