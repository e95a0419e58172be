"""Gymnasium's own engines, as they were before anybody put something in their place (:mod:`vecenv.instead`)."""

from __future__ import annotations

from gymnasium.vector import AsyncVectorEnv as GymnasiumAsync
from gymnasium.vector import SyncVectorEnv as GymnasiumSync

__all__ = ["GymnasiumAsync", "GymnasiumSync"]
