"""Environments by name: which there are, and how a name becomes an environment.

Only Brax and MuJoCo Playground have registries that answer to a bare name; for the other libraries pass the object. The
names of the two do not overlap, so a name alone says which library is meant.
"""

from __future__ import annotations

import difflib
import dis
import importlib
import importlib.util
import inspect
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym

from vecenv.errors import how_to_install

__all__ = ["available_envs", "make_env"]

_MODULES = {"brax": "brax.envs", "playground": "mujoco_playground"}


def available_envs(library: str | None = None) -> dict[str, tuple[str, ...]]:
    """The names that :func:`make_env` and ``JaxVectorEnv`` know, by library; only libraries that are installed.

    Args:
        library: ``"brax"`` or ``"playground"`` for one of them; default, all.

    Raises:
        ValueError: An unknown library.
        ImportError: The library asked for is not installed.
    """
    if library is None:
        installed = [name for name, module in _MODULES.items() if importlib.util.find_spec(module.split(".")[0])]
        return {name: _names(name) for name in installed}
    return {library: _names(library)}


def make_env(name: str, library: str | None = None, **kwargs: Any) -> Any:
    """Build a named environment of Brax or Playground.

    Args:
        name: Such as ``"ant"`` (Brax) or ``"CartpoleBalance"`` (Playground).
        library: ``"brax"`` or ``"playground"``; default, whichever knows the name.
        **kwargs: For Brax, of the environment's class (``backend="spring"``); for Playground, ``config`` and
            ``config_overrides``. Playground runs on MJX's JAX implementation unless ``config_overrides`` says otherwise:
            its own default, warp, compiles for half a minute on a CPU and has no gradient.

    Raises:
        gymnasium.error.NameNotFound: No library knows the name; close matches are listed.
        TypeError: The environment refuses a keyword argument.
        ValueError: It refuses the value of one, such as a backend that does not exist.
        FileNotFoundError: A Playground environment needs model files that could not be fetched.
    """
    found = [lib for lib, names in available_envs(library).items() if name in names]
    if not found:
        raise gym.error.NameNotFound(_unknown(name, library))
    return _BUILDERS[found[0]](name, **kwargs)


def _names(library: str) -> tuple[str, ...]:
    if library not in _MODULES:
        raise ValueError(f"Unknown library {library!r}; vecenv knows the names of {sorted(_MODULES)}.")
    try:
        module = importlib.import_module(_MODULES[library])
    except ImportError as error:
        raise ImportError(f"{library} is not installed: {how_to_install('brax')}. ({error})") from error
    return tuple(module._envs) if library == "brax" else tuple(module.registry.ALL_ENVS)


def _unknown(name: str, library: str | None) -> str:
    known = available_envs(library)
    lower = {each.lower(): each for names in known.values() for each in names}
    close = [lower[match] for match in difflib.get_close_matches(name.lower(), lower, 3, 0.5)]
    where = " or ".join(known) if known else f"any installed library; {how_to_install('brax')}"
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    return f"No environment {name!r} in {where}.{hint} vecenv.jax.available_envs() lists them all."


def _build_brax(name: str, **kwargs: Any) -> Any:
    envs = importlib.import_module("brax.envs")
    if swallowed := _swallowed(envs._envs[name], kwargs):
        raise TypeError(f"Brax's {name} has no arguments {swallowed}, and would silently ignore them.")
    try:
        return envs.get_environment(name, **kwargs)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise TypeError(f"Brax's {name} refuses {_shown(kwargs)}: {error}.") from error
    except ValueError as error:
        raise ValueError(f"Brax's {name} refuses {_shown(kwargs)}: {error}") from error


def _swallowed(make: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments that ``make`` would accept and never look at: it takes ``**kwargs``, and no line of it reads them."""
    function: Any = inspect.getattr_static(make, "__init__") if isinstance(make, type) else make
    if not inspect.isfunction(function):
        return []
    parameters = inspect.signature(function).parameters.values()
    named = {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    for rest in (each.name for each in parameters if each.kind is each.VAR_KEYWORD):
        used = (line.argval for line in dis.get_instructions(function) if line.opname.startswith("LOAD"))
        if not any(rest == found or (isinstance(found, tuple) and rest in found) for found in used):
            return sorted(kwargs.keys() - named)
    return []


def _build_playground(name: str, *, config: Any = None, config_overrides: Any = None, **unknown: Any) -> Any:
    if unknown:
        raise TypeError(
            f"Playground's {name} takes config= and config_overrides= only, not {sorted(unknown)}; settings go into "
            "config_overrides, as in {'impl': 'jax'}."
        )
    playground = importlib.import_module("mujoco_playground")
    overrides = dict(config_overrides or {})
    if config is None and "impl" in playground.registry.get_default_config(name):
        overrides.setdefault("impl", "jax")
    try:
        return playground.registry.load(name, config=config, config_overrides=overrides)
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        raise FileNotFoundError(_missing_files(name, playground, error)) from error
    except (KeyError, AttributeError) as error:
        raise ValueError(f"Playground's {name} refuses {_shown(overrides)}: {error}.") from error


def _missing_files(name: str, playground: Any, error: Exception) -> str:
    source = importlib.import_module("mujoco_playground._src.mjx_env")
    return (
        f"Playground's {name} needs robot models that are not part of its package and could not be fetched ({error}). "
        f"Clone github.com/google-deepmind/mujoco_menagerie, commit {getattr(source, 'MENAGERIE_COMMIT_SHA', '?')}, into "
        f"{getattr(source, 'MENAGERIE_PATH', '?')}. The environments of its dm_control suite need no such files."
    )


def _shown(kwargs: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "its arguments"


_BUILDERS: dict[str, Callable[..., Any]] = {"brax": _build_brax, "playground": _build_playground}
