"""Vector envs that must not be bridged, found out before they hang."""

from __future__ import annotations

import multiprocessing.context
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import jax
from gymnasium.vector import VectorEnv

from vecenv.front.capabilities import capabilities_of
from vecenv.front.gymnasiums import GymnasiumSync

__all__ = ["refuse_jax_in_process", "warn_of_fork"]


def refuse_jax_in_process(envs: VectorEnv[Any, Any, Any]) -> None:
    """Refuse environments that run JAX in this process.

    They are stepped inside a callback of a JAX program, and what they compute may be queued behind that very program.

    Raises:
        ValueError: ``envs`` runs JAX, or holds an environment that does.
    """
    base = envs.unwrapped
    able = capabilities_of(base)
    if (able is not None and able.runs_jax) or _uses_jax(base):
        raise ValueError(
            f"{type(base).__name__} runs JAX in this process, and would wait for the program that waits for it. Its "
            "environments need no bridge: use vecenv.jax.FunctionalVectorEnv."
        )
    for env in _envs_in_process(base):
        for layer in _layers(env):
            if _uses_jax(layer):
                raise ValueError(
                    f"{type(layer).__name__} runs JAX in this process, and would wait for the program that waits for it. "
                    "Run it in worker processes (vecenv.AsyncVectorEnv with context='forkserver' or 'spawn'), or without a "
                    "bridge: vecenv.jax.FunctionalVectorEnv."
                )


def warn_of_fork(envs: VectorEnv[Any, Any, Any]) -> None:
    """Warn of workers started by fork: a copy of a process in which JAX has threads may stop at any lock they held."""
    processes = getattr(envs.unwrapped, "processes", None) or ()
    fork = getattr(multiprocessing.context, "ForkProcess", None)
    if fork is not None and any(isinstance(process, fork) for process in processes):
        warnings.warn(
            f"The workers of {type(envs.unwrapped).__name__} were started by fork, and so will be those that replace "
            "them: next to JAX's threads that may hang. Build it with context='forkserver' (or 'spawn').",
            RuntimeWarning,
            stacklevel=4,
        )


def _envs_in_process(envs: VectorEnv[Any, Any, Any]) -> list[Any]:
    return list(envs.envs if isinstance(envs, GymnasiumSync) else getattr(envs, "local_envs", ()))


def _layers(env: Any) -> Iterator[Any]:
    """An environment and what it wraps."""
    while env is not None:
        yield env
        env = getattr(env, "env", None) if isinstance(env, gymnasium.Wrapper) else None


def _uses_jax(env: Any) -> bool:
    """Whether an object holds JAX arrays or compiled functions, or its class's code names a module of JAX."""
    held = getattr(env, "__dict__", {}).values()
    if any(isinstance(value, jax.Array) or type(value).__module__.partition(".")[0] in ("jaxlib", "jax") for value in held):
        return True
    for cls in type(env).__mro__:
        module = sys.modules.get(cls.__module__)
        if module is None or cls.__module__.partition(".")[0] in ("builtins", "gymnasium", "typing", "abc"):
            continue
        for function in vars(cls).values():
            if isinstance(function, types.FunctionType) and _names_jax(function.__code__, function.__globals__):
                return True
    return False


def _names_jax(code: types.CodeType, names: dict[str, Any]) -> bool:
    for name in code.co_names:
        found = names.get(name)
        if isinstance(found, types.ModuleType) and found.__name__.partition(".")[0] == "jax":
            return True
    return any(_names_jax(part, names) for part in code.co_consts if isinstance(part, types.CodeType))
