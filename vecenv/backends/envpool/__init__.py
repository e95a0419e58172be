"""EnvPool's C++ threads behind Gymnasium's vector interface.

EnvPool steps environments written in C++ in its own threads, and its pools come close to a Gymnasium vector environment
without being one: spaces are not batched, ``reset(seed=...)`` is ignored, infos have no masks, an episode that ends on its
last allowed step loses its termination, and a short action ends the interpreter. :class:`EnvPoolVectorEnv` puts that
right with checks that cost a few microseconds per step, and adds same-step resets, first-ready batches with a timeout, and
errors in place of crashes.

=========== ==========================================================================================
task        finds EnvPool and its tasks, checks options (unknown ones in a process that may die of them), builds pools
rows        converts what a pool takes and returns: checked actions in, Gymnasium's arrays out
drivers     drives the pools of one vector environment, so that neither Ctrl-C nor a timeout loses or breaks anything
vector_env  the class itself: its arguments, and what EnvPool alone can do
=========== ==========================================================================================
"""

from __future__ import annotations

from vecenv.backends.envpool.vector_env import EnvPoolVectorEnv

__all__ = ["EnvPoolVectorEnv"]
