"""``adapt``: whatever a user has in hand becomes a :class:`vecenv.jax.JaxEnv`, or an error that says why not."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from vecenv.jax.native import catalog, libraries
from vecenv.jax.native.env import JaxEnv
from vecenv.jax.native.wrap import Override, Rescaled

__all__ = ["adapt", "differentiability", "require_gradient"]


def adapt(
    env: Any,
    *,
    params: Any = None,
    action_space: gym.Space[Any] | None = None,
    rescale: str | tuple[Any, Any] | None = None,
    max_episode_steps: int | None = None,
    **env_kwargs: Any,
) -> JaxEnv:
    """Make a :class:`JaxEnv` of an environment of Brax, MuJoCo Playground, gymnax, jumanji or Gymnasium's ``FuncEnv``.

    Args:
        env: The environment; or a name known to Brax or Playground; or gymnax's pair ``(env, params)``; or a ``JaxEnv``,
            which is returned as it is. Brax's and Playground's training wrappers around an environment are recognised: an
            ``AutoResetWrapper`` is taken off (autoreset is done better outside), the limit of an ``EpisodeWrapper`` is
            adopted, wrappers that batch are refused.
        params: gymnax's or FuncEnv's parameters; default, the environment's own.
        action_space: Replaces the space that is advertised. Brax's and Playground's environments take ``Box(-1, 1)``,
            whatever the control range of their actuators; say otherwise here for one that does not.
        rescale: ``(low, high)`` advertises ``Box(low, high)`` and maps actions linearly onto the native bounds;
            ``"actuator"`` takes the control range of the physics model's actuators for ``low`` and ``high``.
        max_episode_steps: Replaces the time limit in steps; -1 for none.
        **env_kwargs: Passed to the library together with a name, such as ``backend="spring"``.

    Raises:
        gymnasium.error.NameNotFound: No installed library knows the name; close matches are listed.
        TypeError: The object is of no known kind, or keyword arguments came with an environment that exists already.
        ValueError: A wrapped environment that cannot be unwrapped, or a rescaling of unbounded actions.
    """
    if isinstance(env, str):
        env = catalog.make_env(env, **env_kwargs)
    elif env_kwargs:
        raise TypeError(f"{sorted(env_kwargs)} can only be given together with a name, not with {env!r}.")
    result: JaxEnv = env if isinstance(env, JaxEnv) else libraries.recognise(env, params)
    if action_space is not None or max_episode_steps is not None:
        result = Override(result, action_space, max_episode_steps)
    if rescale is not None:
        low, high = libraries.actuator_range(result) if isinstance(rescale, str) else rescale
        result = Rescaled(result, low, high)
    return result


def differentiability(env: Any) -> str:
    """How a step of ``env`` can be differentiated with respect to its action.

    Args:
        env: A ``JaxEnv``, anything :func:`vecenv.jax.adapt` accepts, or a vector env over one.

    Returns:
        ``"reverse"``: ``jax.grad`` and everything else; ``"forward"``: ``jax.jvp`` only; ``"none"``: no derivative, or
        one that is zero whatever the action.
    """
    return adapt(getattr(env, "single_env", env)).differentiable


def require_gradient(env: Any, mode: str = "reverse") -> None:
    """Raise unless ``env`` can be differentiated in ``mode`` (``"reverse"`` or ``"forward"``).

    Raises:
        ValueError: It cannot; the message names the cure where there is one.
    """
    single = getattr(env, "single_env", env)
    found = getattr(single, "differentiable", "reverse")
    if found == "reverse" or (found == "forward" and mode == "forward"):
        return
    advice = getattr(single, "gradient_advice", lambda: "")()
    what = "no derivative" if found == "none" else "no reverse-mode derivative (jax.grad)"
    raise ValueError(f"A step of {getattr(single, 'name', single)} has {what} with respect to its action. {advice}")
