"""What environments have to be: what every worker is told of them, and what is said of one that is something else."""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode

from vecenv.link.messages import dumps_by_value
from vecenv.shm.layout import Layout
from vecenv.system.generators import GeneratorsOption


@dataclass(frozen=True, slots=True)
class Expected:
    """The spaces every environment must have; ``mode`` is the ``observation_mode`` of the vector environment."""

    mode: Any
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned worker's environments have come by value, and so have to be the classes of their spaces."""
        return _expected, (dumps_by_value((self.mode, self.observation_space, self.action_space)),)

    def mismatch(self, env: gymnasium.Env[Any, Any]) -> tuple[str, str] | None:
        """``(which, got)`` if a space of ``env`` does not go with the others."""
        if isinstance(self.mode, str) and self.mode == "same":
            fits = env.observation_space == self.observation_space
        else:
            fits = is_space_dtype_shape_equiv(env.observation_space, self.observation_space)
        if not fits:
            return "observation" if self._batches(env.observation_space) else "shape", repr(env.observation_space)
        if env.action_space != self.action_space:
            return "action", repr(env.action_space)
        return None

    def _batches(self, space: gymnasium.Space[Any]) -> bool:
        """Whether some mode can batch a space with the others, or it is not known."""
        with contextlib.suppress(Exception):  # of a space's own class
            return is_space_dtype_shape_equiv(space, self.observation_space)
        return True


def _expected(blob: bytes) -> Expected:
    return Expected(*pickle.loads(blob))


@dataclass(slots=True)
class WorkerPlan:
    """What every worker of one vector environment is sent alike.

    Attributes:
        layout: What lies where in the shared block.
        autoreset_mode: What to do when an episode ends.
        expected: The spaces to check every environment against.
        registered: (space, memory) of a custom space with shared-memory functions of its own.
        threads: At most that many threads for BLAS, OpenMP and torch in a worker; ``None``: as they come.
        strict: An observation that loses finite numbers in the cast to its space is an error and not a warning.
        ragged: Info values of one key that do not go together become an object array.
        env_threads: That many environments of a worker are run at the same time.
        overlaps: With ``env_threads``: each message is about one row, and is answered when that is done.
        generators: What environments draw from by ``random``, ``numpy.random`` and torch: ``"shared"`` or ``"own"``.
        ahead: Each worker has one environment, which may begin episodes ahead of time, of any row.
    """

    layout: Layout
    autoreset_mode: AutoresetMode
    expected: Expected
    registered: tuple[Any, Any] | None = None
    threads: int | None = None
    strict: bool = False
    ragged: bool = False
    env_threads: int = 1
    overlaps: bool = False
    ahead: bool = False
    generators: GeneratorsOption = "shared"


_NEEDED: Final = ("reset", "step", "close", "observation_space", "action_space")


def made_by(env_fn: Callable[[], Any], env: int) -> Any:
    """What ``env_fns[env]`` builds.

    Raises:
        TypeError: Nothing came back, or something that is no environment.
    """
    made = env_fn()
    if made is None:
        raise TypeError(f"env_fns[{env}]() gave None, wanted an environment: is a `return` missing?")
    if isinstance(made, gymnasium.Env):
        return made
    if hasattr(made, "possible_agents"):
        raise TypeError(f"env_fns[{env}]() gave an environment of PettingZoo: vecenv.MultiAgentVecEnv takes these")
    if missing := [name for name in _NEEDED if not hasattr(made, name)]:
        raise TypeError(f"env_fns[{env}]() gave a {type(made).__name__} without {missing[0]}, wanted a gymnasium.Env")
    return made


def called(env: Any, name: str, args: Any, kwargs: Any) -> Any:
    """``env.get_wrapper_attr(name)``, called if it can be."""
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def observation_and_info(returned: Any, env: int) -> tuple[Any, Any]:
    """What a reset has returned, if that is what it has to be: an array of two numbers could be taken apart, too.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(returned, (tuple, list)):
        got = f"one {type(returned).__name__}"
    elif len(returned) == 2:
        return returned[0], returned[1]
    else:
        got = f"{len(returned)} value{'s' * (len(returned) != 1)}"
    raise TypeError(f"env {env}: reset returned {got}, wanted (observation, info)")


_UNPACKED: Final = {  # what Python says where five values are wanted -> what there was
    r"not enough values to unpack \(expected 5, got (\d)\)": r"\1 values",
    r"too many values to unpack": "more than 5 values",
    r"cannot unpack non-iterable (\S+) object": r"one \1",
}


def misreturned(error: BaseException, env: int) -> TypeError | None:
    """What is said of a step whose five values could not be taken apart, if ``error`` was raised by that."""
    where = error.__traceback__
    if isinstance(error, (TypeError, ValueError)) and where is not None and where.tb_next is None:
        for text, got in _UNPACKED.items():
            if found := re.match(text, str(error)):
                wanted = "(observation, reward, terminated, truncated, info)"
                return TypeError(f"env {env}: step returned {found.expand(got)}, wanted {wanted}")
    return None
