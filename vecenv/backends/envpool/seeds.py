"""Any seed that Gymnasium takes, as one int32 for each environment, which is what EnvPool takes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from vecenv.front.arguments import seeds_of

__all__ = ["Seed", "spread"]

Seed: TypeAlias = int | Sequence[int | None] | None

_END = 2**31


def spread(seed: Any, num_envs: int, rng: np.random.Generator) -> list[int]:
    """One seed for each environment.

    Args:
        seed: An integer gives environment i the seed ``seed + i``; a sequence of ``num_envs`` gives each its own, where
            ``None`` means a random one; ``None`` is random for all. Seeds of 2**31 and more, which EnvPool cannot take,
            are hashed into its range by :class:`numpy.random.SeedSequence`.
        num_envs: Number of environments.
        rng: Where random seeds come from.

    Returns:
        ``num_envs`` integers from 0 to 2**31 - 1.

    Raises:
        TypeError: Not an integer where one is needed.
        ValueError: A negative seed, or a sequence of the wrong length.
    """
    return [_int32(entry, i, rng) for i, entry in enumerate(seeds_of(seed, num_envs))]


def _int32(seed: Any, env: int, rng: np.random.Generator) -> int:
    if seed is None:
        return int(rng.integers(_END))
    try:
        value = operator.index(seed)
    except TypeError:
        raise TypeError(f"the seed of env {env} must be an integer or None, got {type(seed).__name__}") from None
    if value < 0:
        raise ValueError(f"the seed of env {env} is {value}; seeds must not be negative")
    return value if value < _END else int(np.random.SeedSequence(value).generate_state(1)[0] >> 1)
