"""Seeds and masks of a reset, as keys and episodes of a functional environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from vecenv.jax.native.functional import FunctionalVectorEnv
from vecenv.jax.native.seeding import entropy_seeds, seed_keys
from vecenv.jax.native.state import EnvState

__all__ = ["Mask", "Seeds", "begin"]

Mask: TypeAlias = npt.NDArray[np.bool_]
Seeds: TypeAlias = Sequence[int | None]


def begin(
    functional: FunctionalVectorEnv, state: EnvState | None, seeds: Seeds, mask: Mask | None, before: Seeds
) -> tuple[EnvState, list[int | None]]:
    """Begin episodes in the environments of ``mask``, each by its seed or as the next one of its own stream.

    Args:
        functional: The environments.
        state: Theirs; ``None`` before the first reset, which draws unpredictable seeds where there are none.
        seeds: One or ``None`` for each environment; those outside of ``mask`` are not used.
        mask: Which environments; ``None``: all.
        before: The seeds each was last given.

    Returns:
        The new state, and the seeds each was last given.

    Raises:
        gymnasium.error.ResetNeeded: The first reset is not of all environments.
        gymnasium.error.Error: What a key cannot be made of.
    """
    if state is None:
        if mask is not None and not mask.all():
            raise gym.error.ResetNeeded("The first reset must be of all environments, without reset_mask.")
        drawn = entropy_seeds(functional.num_envs)
        given = [new if seed is None else seed for seed, new in zip(seeds, drawn, strict=True)]
        return functional.begin(seed_keys(given)), list(given)
    seeded = np.fromiter((seed is not None for seed in seeds), np.bool_, len(seeds))
    if mask is not None:
        seeded &= mask
    keys = seed_keys([0 if seed is None else seed for seed in seeds])  # nobody reads the keys of those without
    latest = [seed if new else old for seed, new, old in zip(seeds, seeded.tolist(), before, strict=True)]
    return _begin_again(functional, state, keys, seeded, mask), latest


def _begin_again(
    functional: FunctionalVectorEnv, state: EnvState, keys: npt.NDArray[Any], seeded: Mask, mask: Mask | None
) -> EnvState:
    if mask is None or mask.all():  # the compiled reset serves; no need to compile the masked one
        old: Any = state.inner
        keys = np.where(seeded[:, None], keys, np.asarray(old.key))
        episode = np.where(seeded, 0, np.asarray(old.episode) + 1).astype(np.int32)
        return functional.begin(keys, episode)
    if seeded.any():
        state = functional.reset_mask(state, jnp.asarray(seeded), jnp.where(seeded[:, None], keys, state.inner.key))
    if (mask & ~seeded).any():
        state = functional.reset_mask(state, jnp.asarray(mask & ~seeded))
    return state
