"""Gymnasium's seeds as JAX keys: environment i of seed s has the key ``jax.random.key(s + i)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import jax
import numpy as np

__all__ = ["entropy_seeds", "seed_keys"]


def seed_keys(seeds: Sequence[int]) -> np.ndarray[Any, Any]:
    """Raw keys ``uint32[len(seeds), k]`` of the default generator, equal to ``jax.random.key(seed)`` for seeds below 2**32.

    Larger seeds keep their bits 32 to 63, which ``jax.random.key`` does only in 64-bit mode.

    Raises:
        gymnasium.error.Error: A seed is negative or no integer, as Gymnasium's own environments say.
    """
    words = []
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
            raise gym.error.Error(f"Seed must be an integer from 0 to 2**64 - 1, got {seed!r}.")
        words.append((int(seed) >> 32, int(seed) & 0xFFFFFFFF))
    raw = np.asarray(words, np.uint32)
    if jax.random.key_data(jax.random.key(0)).shape == (2,):  # threefry: a key is its seed
        return raw
    make: Any = jax.vmap(lambda high, low: jax.random.key_data(jax.random.fold_in(jax.random.key(low), high)))
    return np.asarray(make(raw[:, 0], raw[:, 1]))


def entropy_seeds(count: int) -> list[int]:
    """Unpredictable seeds, for a reset that names none."""
    return [int(word) for word in np.random.SeedSequence().generate_state(count, np.uint64)]
