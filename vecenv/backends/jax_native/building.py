"""What a ``JaxVectorEnv`` is built from, and what is shown while XLA compiles it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from vecenv.jax.native.adapters import adapt
from vecenv.jax.native.catalog import make_env
from vecenv.jax.native.functional import FunctionalVectorEnv

__all__ = ["functional_of", "spinner"]

_OPTIONS: Final = frozenset(inspect.signature(FunctionalVectorEnv).parameters) - {"env", "num_envs"}


def functional_of(env: Any, num_envs: int, library: str | None, options: dict[str, Any]) -> FunctionalVectorEnv:
    """The functional environment for these arguments of ``JaxVectorEnv``.

    Raises:
        ValueError: Options for an environment that has its own already; a number of environments that is no number.
        TypeError: Options that nothing knows.
    """
    if isinstance(env, FunctionalVectorEnv):
        if options or num_envs not in (1, env.num_envs) or len(env.batch_shape) != 1:
            raise ValueError(f"{env!r} has its options already (and must have one batch axis); got {num_envs=}, {options}.")
        return env
    if not isinstance(num_envs, int | np.integer) or num_envs < 1:
        raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}.")
    given = {name: options[name] for name in options if name in _OPTIONS}
    for_env = {name: options[name] for name in options if name not in _OPTIONS}
    if isinstance(env, str):
        env = adapt(make_env(env, library, **for_env))
    elif for_env or library is not None:
        raise TypeError(
            f"Unknown options {sorted(for_env) or 'library'} for an environment that exists already; JaxVectorEnv knows "
            f"{sorted(_OPTIONS)}."
        )
    return FunctionalVectorEnv(env, int(num_envs), **given)


@contextlib.contextmanager
def spinner(progress: bool | None) -> Iterator[Any]:
    """A line on stderr that moves while XLA compiles; yields the function that changes its text."""
    try:
        from rich.console import Console
    except ImportError:
        yield lambda text: None
        return
    console = Console(stderr=True)
    if not (console.is_terminal if progress is None else progress):
        yield lambda text: None
        return
    with console.status("compiling") as status:
        yield status.update
