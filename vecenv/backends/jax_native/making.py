"""What ``vecenv.make_vec`` calls for Brax and MuJoCo Playground."""

from __future__ import annotations

from typing import Any

from vecenv.backends.jax_native.vector_env import JaxVectorEnv

__all__ = ["make_jax_vec"]


def make_jax_vec(
    env_id: str,
    num_envs: int = 1,
    *,
    library: str | None = None,
    vector_kwargs: dict[str, Any] | None = None,
    **env_kwargs: Any,
) -> JaxVectorEnv:
    """What ``vecenv.make_vec(env_id, num_envs, backend="brax")`` and ``backend="playground"`` call.

    Args:
        env_id: Name of the environment, as in :func:`available_envs`.
        num_envs: How many.
        library: ``"brax"`` or ``"playground"``.
        vector_kwargs: Options of :class:`JaxVectorEnv`.
        **env_kwargs: For the environment, such as ``backend="spring"``; options of ``JaxVectorEnv`` are also taken here.

    Raises:
        As :class:`JaxVectorEnv`.
    """
    return JaxVectorEnv(env_id, num_envs, library=library, **{**(vector_kwargs or {}), **env_kwargs})
