"""EnvPool's C++ threads behind Gymnasium's vector interface.

EnvPool's pools step C++ environments in their own threads. They are almost Gymnasium vector environments, but spaces are not
batched, ``reset(seed=...)`` is ignored, infos have no masks, an episode that ends on its last allowed step loses its
termination, and too few actions crash the interpreter. :class:`EnvPoolVectorEnv` corrects this (terminations only where
EnvPool reports them separately) at a cost of a few microseconds per step, and adds same-step resets, first-ready batches
with a timeout, and errors in place of crashes.

``task`` finds tasks, checks options (risky ones in a separate process) and builds pools; ``rows`` checks actions and
converts results; ``drivers`` runs the pools and survives Ctrl-C and timeouts; ``vector_env`` defines the class.
"""

from __future__ import annotations

from vecenv.backends.envpool.vector_env import EnvPoolVectorEnv

__all__ = ["EnvPoolVectorEnv"]
