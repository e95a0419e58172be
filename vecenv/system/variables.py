"""Environment variables of a process of ours, set before anything is imported in it.

``CUDA_VISIBLE_DEVICES``, ``MUJOCO_EGL_DEVICE_ID``, ``MUJOCO_GL`` and their like are read once, by an import or by the first
use of a device, so they have to be there before a worker imports the program's main module. A new interpreter does that
before it unpickles what it is to run. The one thing that it reads earlier and that is ours is the name of the process: it
carries the variables (:func:`named`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

__all__ = ["Variables", "WorkerEnv", "check_variables", "named", "set_variables", "too_late", "variables_of"]

WorkerEnv: TypeAlias = Mapping[str, str | int | float | Callable[[int], str | int | float | None] | None]
"""Name -> value, or a function of a worker's index that gives it. ``None`` removes a variable."""

Variables: TypeAlias = dict[str, str | None]
"""Name -> value for one process; ``None``: removed."""

_READ_BY: Final = {
    "JAX_ENABLE_X64": "jax",
    "JAX_PLATFORMS": "jax",
    "MKL_NUM_THREADS": "numpy",
    "MUJOCO_EGL_DEVICE_ID": "mujoco.egl",
    "MUJOCO_GL": "mujoco",
    "OMP_NUM_THREADS": "numpy",
    "OPENBLAS_NUM_THREADS": "numpy",
    "PYOPENGL_PLATFORM": "OpenGL",
    "XLA_FLAGS": "jax",
}
"""Variable -> the module that reads it when it is imported."""


def check_variables(worker_env: Any) -> None:
    """Refuse what is no mapping of names to values.

    Raises:
        TypeError: No mapping, or a name or a value of another type; named.
        ValueError: A name that no variable can have.
    """
    if not isinstance(worker_env, Mapping):
        raise TypeError(f"`worker_env` must be a dict of environment variables, got {type(worker_env).__name__}")
    for name, value in worker_env.items():
        if not isinstance(name, str):
            raise TypeError(f"`worker_env` has a name that is no string: {name!r}")
        if not name or "=" in name or "\0" in name:
            raise ValueError(f"`worker_env` has a name that no environment variable can have: {name!r}")
        if not callable(value):
            _text(name, value, "")


def variables_of(worker_env: WorkerEnv | None, index: int) -> Variables:
    """The variables of worker ``index``.

    Raises:
        TypeError, ValueError: A function gave something that is no value; the variable and the worker are named.
        Exception: Whatever a function raises.
    """
    where = f" for worker {index}"
    return {
        name: _text(name, value(index) if callable(value) else value, where) for name, value in (worker_env or {}).items()
    }


def _text(name: str, value: Any, where: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        wanted = "a string, a number, None (remove it), or a function of the worker's index"
        raise TypeError(f"`worker_env[{name!r}]` must be {wanted}; got {value!r}{where}")
    text = str(value)
    if "\0" in text:
        raise ValueError(f"`worker_env[{name!r}]` must not contain a null character, got {value!r}{where}")
    return text


def set_variables(variables: Variables) -> None:
    """Set them in this process."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def named(name: str, variables: Variables) -> str:
    """A process name that sets the variables where it is unpickled."""
    return _Carrier(name, variables) if variables else name


class _Carrier(str):
    """See :func:`named`. It is unpickled by builtins alone, because nothing can be imported that early."""

    variables: Variables

    def __new__(cls, name: str, variables: Variables) -> _Carrier:
        self = super().__new__(cls, name)
        self.variables = variables
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        given = {name: value for name, value in self.variables.items() if value is not None}
        removed = [name for name, value in self.variables.items() if value is None]
        environ = "__import__('os').environ"
        program = f"({environ}.update({given!r}), [{environ}.pop(n, None) for n in {removed!r}], {str(self)!r})[-1]"
        return eval, (program,)


def too_late(each: Sequence[Variables]) -> dict[str, str]:
    """Variable -> module, for those that a module of this process has read already, with another value.

    A forked worker has that module from its start.
    """
    here = os.environ
    return {
        name: module
        for name, module in _READ_BY.items()
        if module in sys.modules and any(name in own and own[name] != here.get(name) for own in each)
    }
