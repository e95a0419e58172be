"""JAX-native environments (Brax, MuJoCo Playground and their like) as a ``gymnasium.vector.VectorEnv``."""

from __future__ import annotations

from vecenv.backends.jax_native.making import make_jax_vec
from vecenv.backends.jax_native.vector_env import JaxVectorEnv
from vecenv.jax.native.catalog import available_envs

__all__ = ["JaxVectorEnv", "available_envs", "make_jax_vec"]
