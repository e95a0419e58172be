"""The engine over a Ray cluster: one actor a host, each holding an ordinary local engine.

To the engine that runs in the caller, a host is what a worker process is to the engine on one machine: it is asked the same
questions, owns a contiguous share of the rows, and may die. So there is one implementation of phases, seeds, masks, infos,
first-ready batches, failures and restarts, and what is here is the way to a host and back:

* :mod:`~vecenv.backends.ray.host` is what runs on a host, and knows nothing of Ray;
* :mod:`~vecenv.backends.ray.pool` asks hosts and takes in their answers, and knows nothing of Ray either;
* :mod:`~vecenv.backends.ray.cluster` is all there is of Ray;
* :mod:`~vecenv.backends.ray.vector_env` is :class:`RayVectorEnv`, over the engine with hosts for workers.
"""

from vecenv.backends.ray.vector_env import RayVectorEnv

__all__ = ["RayVectorEnv"]
