"""Environments over a Ray cluster: one actor per host, each with an :class:`~vecenv.AsyncVectorEnv` of its own.

A host steps, resets, restarts and saves its environments by public calls of that class, so here are only the split of calls
over hosts, the merging of their replies, and the replacement of hosts that are lost:

* :mod:`~vecenv.backends.ray.host` runs on a host, without using Ray;
* :mod:`~vecenv.backends.ray.driver` and :mod:`~vecenv.backends.ray.exchange` run in the caller: calls, and their replies;
* :mod:`~vecenv.backends.ray.cluster` contains all uses of Ray;
* :mod:`~vecenv.backends.ray.vector_env` is :class:`RayVectorEnv`.
"""

from vecenv.backends.ray.vector_env import RayVectorEnv

__all__ = ["RayVectorEnv"]
