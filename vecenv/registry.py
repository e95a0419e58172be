"""Looks up environments and the names of their options in Gymnasium's registry; errors name what is right."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import logging
import re
from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, _find_spec, load_env_creator, registry

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import how_to_install
from vecenv.front.arguments import check_names

__all__ = [
    "check_env_options", "engine_options", "find_spec", "newest_version", "only_vector", "parameters_of",
]  # fmt: skip


def find_spec(env_id: str) -> EnvSpec:
    """The spec of an id in Gymnasium's registry.

    Raises:
        gymnasium.error.UnregisteredEnv: There is none (or a subclass of this error); names close ids, and other places that
            have this name.
        ModuleNotFoundError: The module of a ``module:Env`` id cannot be imported.
    """
    try:
        return _find_spec(env_id)  # unlike gymnasium.spec, it knows modules and the newest version
    except gymnasium.error.Error as error:
        kind = type(error) if isinstance(error, gymnasium.error.UnregisteredEnv) else gymnasium.error.UnregisteredEnv
        raise kind(f"{error} {_other_places(env_id)}".rstrip()) from None


def newest_version(env_id: str) -> str | None:
    """The registered id that an id without its version means; ``None`` if there is none."""
    level, gymnasium.logger.min_level = gymnasium.logger.min_level, logging.ERROR  # it warns that there was no version
    try:
        return str(_find_spec(env_id).id)
    except (gymnasium.error.Error, ImportError):
        return None
    finally:
        gymnasium.logger.min_level = level


def _other_places(env_id: str) -> str:
    """Where else an unregistered environment may be found, for messages."""
    name = env_id.rpartition(":")[2]
    hints = []
    close = difflib.get_close_matches(name, registry, n=3, cutoff=0.7)
    if close:
        hints.append(f"Registered ids like it: {', '.join(close)}.")
    namespace = "ALE" if re.search(r"NoFrameskip-v\d|Deterministic-v\d", name) else name.partition("/")[0]
    library, command = _LIBRARIES.get(namespace, ("", ""))
    if library and importlib.util.find_spec(library) is not None:
        hints.append(f"{library} is installed and registers ids of this kind: `import {library}`, or '{library}:{name}'.")
    elif library:
        hints.append(f"Ids of this kind are registered by `import {library}`: {command}.")
    if importlib.util.find_spec("envpool") is not None:
        from vecenv.backends.envpool.task import task_ids

        if name.rpartition("/")[2] in task_ids():
            hints.append(f"EnvPool has {name.rpartition('/')[2]!r}: backend='envpool'.")
    return " ".join(hints)


_LIBRARIES = {
    # namespace of an id -> the module that registers it, and what installs that
    "ALE": ("ale_py", how_to_install("bench")),
    "MiniGrid": ("minigrid", "pip install minigrid"),
    "dm_control": ("shimmy", "pip install 'shimmy[dm-control]'"),
}


@functools.cache
def engine_options() -> tuple[str, ...]:
    parameters = inspect.signature(AsyncVectorEnv.__init__).parameters
    return tuple(name for name in parameters if name not in ("self", "env_fns"))


def check_env_options(spec: EnvSpec, env_kwargs: Mapping[str, Any], *, vector: bool = False) -> None:
    """Raise for options that the constructor of the environment (of the vector environment) does not have."""
    entry_point = spec.vector_entry_point if vector else spec.entry_point
    if entry_point is None and vector:
        raise gymnasium.error.Error(f"{spec.id!r} has no vector entry point, so backend 'native' has nothing to build")
    if entry_point is None:
        hint = ": its library steps them, backend='native'" if spec.vector_entry_point is not None else ""
        raise gymnasium.error.Error(f"{spec.id!r} has no entry point, so there is no single environment to build{hint}")
    parameters = parameters_of(entry_point)
    if parameters is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if vector:
        check_names(env_kwargs, sorted({*parameters, *_NATIVE_OPTIONS} - {"num_envs"}), f"{spec.id!r}, backend 'native',")
        return
    accepted = {*parameters, "render_mode", "max_episode_steps", "disable_env_checker"}
    check_names(env_kwargs, sorted(accepted), repr(spec.id), elsewhere=engine_options())


_NATIVE_OPTIONS = ("autoreset_mode", "copy")


def parameters_of(entry_point: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of the function behind an entry point; ``None`` where it has no signature."""
    creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    try:
        return inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return None


def only_vector(spec: EnvSpec) -> bool:
    """Whether there is no single environment to build."""
    return spec.entry_point is None and spec.vector_entry_point is not None
