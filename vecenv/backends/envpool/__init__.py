"""EnvPool's C++ threads behind Gymnasium's vector interface.

EnvPool steps environments written in C++ in its own threads, and its pools come close to a Gymnasium vector environment
without being one: spaces are not batched, ``reset(seed=...)`` is ignored, infos have no masks, an episode that ends on its
last allowed step loses its termination, and a short action ends the interpreter. :class:`EnvPoolVectorEnv` puts that
right with checks that cost a few microseconds a step, and adds same-step resets, first-ready batches with a timeout, and
errors in place of crashes.

=========== ==========================================================================================
task        which task: finding EnvPool, task ids, configuration, spaces
existing    a pool that EnvPool itself built, as a task
options     checks of arguments
trial       options of a task, tried in a process that may die of them
seeds       any seed Gymnasium takes, as EnvPool wants it
actions     every action checked and copied before it may reach C++
rows        what the pool returns, as Gymnasium's observations, rewards, flags and infos
wire        talking to a pool so that neither Ctrl-C nor a timeout loses an answer
helpers     threads that wait inside a pool while the interpreter ends
driver      the pools, one after the other, and their episodes; driven in ``lockstep``, or in ``batches``: ``first_ready``
            for one player an environment, ``player_driver`` for several
pools       building them, and forks
over_pools  what classes over pools can tell beside what every vector environment says
vector_env  the class itself: its arguments, and what EnvPool alone can do
players     rows of pools with several players an environment, put in order, for the multi-agent class
rendering   whether this machine can draw a task, asked of a process that may die of it
=========== ==========================================================================================
"""

from __future__ import annotations

from vecenv.backends.envpool.vector_env import EnvPoolVectorEnv

__all__ = ["EnvPoolVectorEnv"]
