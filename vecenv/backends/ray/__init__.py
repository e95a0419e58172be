"""Environments over a Ray cluster: one actor per host, each with an :class:`~vecenv.AsyncVectorEnv`.

A host steps, resets, restarts and saves its environments through the public methods of that class. This package only splits
calls over hosts, merges their replies, and replaces lost hosts:

* :mod:`~vecenv.backends.ray.host` runs on a host, without using Ray;
* :mod:`~vecenv.backends.ray.driver` and :mod:`~vecenv.backends.ray.exchange` run in the caller: calls, and their replies;
* :mod:`~vecenv.backends.ray.hosts` and :mod:`~vecenv.backends.ray.failures` too: handles to hosts, and the log of failures;
* :mod:`~vecenv.backends.ray.cluster` contains all uses of Ray;
* :mod:`~vecenv.backends.ray.vector_env` is :class:`RayVectorEnv`.
"""

from vecenv.backends.ray.vector_env import RayVectorEnv

__all__ = ["RayVectorEnv"]
