"""OpenRL's ``AsyncVectorEnv`` by its own arguments, in their order: a vector environment of ours and the view on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vecenv.multi_agent.openrl import OpenRLView
from vecenv.multi_agent.vector_env import MultiAgentVecEnv
from vecenv.planning.options import StartMethod

__all__ = ["make_openrl"]


def make_openrl(
    env_fns: Sequence[Callable[[], Any]],
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    shared_memory: bool = True,
    copy: bool = True,
    context: StartMethod | None = None,
    daemon: bool = True,
    worker: None = None,
    render_mode: str | None = None,
    auto_reset: bool = True,
    **engine: Any,
) -> OpenRLView:
    """What OpenRL's ``AsyncVectorEnv(env_fns, ...)`` made, with its arguments in its order.

    Args:
        env_fns: Functions that build environments: with ``agent_num``, PettingZoo's parallel ones, or Gymnasium's.
        observation_space, action_space: Of one agent; what the environments have must be equal.
        shared_memory, copy, context, daemon: As of :class:`~vecenv.AsyncVectorEnv`.
        worker: Must be ``None``: a worker function of OpenRL's speaks its own protocol.
        render_mode: Of the view.
        auto_reset: ``False``: environments are reset by ``reset(options={"reset_mask": ...})`` only.
        **engine: As of :class:`~vecenv.MultiAgentVecEnv`: ``num_workers``, ``on_failure``, ``step_timeout`` ...

    Raises:
        RuntimeError: The environments have other spaces.
        TypeError: ``worker`` is given.
        Exception: As of :class:`~vecenv.MultiAgentVecEnv`.
    """
    if worker is not None:
        raise TypeError("make_openrl takes no worker function: one of OpenRL's speaks to OpenRL's own pipes")
    mode = AutoresetMode.SAME_STEP if auto_reset else AutoresetMode.DISABLED
    own: dict[str, Any] = {"copy": copy, "context": context, "daemon": daemon}
    if shared_memory is not True:  # the default here, so not asked for
        own["shared_memory"] = shared_memory
    envs = MultiAgentVecEnv(env_fns, layout="stack", autoreset_mode=mode, **{**own, **engine})
    both = (envs.single_observation_space, envs.single_action_space)
    for kind, wanted, has in zip(("observation", "action"), (observation_space, action_space), both, strict=True):
        if wanted is not None and wanted != has:
            envs.close()
            raise RuntimeError(f"Some environments have an {kind} space different from `{wanted}`: they have `{has}`.")
    return OpenRLView(envs, render_mode)
