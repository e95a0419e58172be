"""Functions that build the environments of a worker and check their results.

Recordings pickle :class:`WorkerPlan` and :class:`Expected`, so renaming these classes, their fields or ``_expected`` would
make old files unreadable.
"""

from __future__ import annotations

import contextlib
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.link.messages import dumps_by_value
from vecenv.shm.layout import Layout


@dataclass(frozen=True, slots=True)
class Expected:
    """The spaces to check every environment against; ``mode`` is the ``observation_mode`` of the vector environment."""

    mode: Any
    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the spaces by value, like the functions that build environments, so that both refer to the same classes."""
        return _expected, (dumps_by_value((self.mode, self.observation_space, self.action_space)),)

    def find_mismatch(self, env: gymnasium.Env[Any, Any]) -> tuple[str, str] | None:
        """Return the kind of mismatch and the repr of the wrong space, or ``None``.

        The kind is ``"observation"``, ``"shape"`` (no ``observation_mode`` could batch that space) or ``"action"``.
        """
        if isinstance(self.mode, str) and self.mode == "same":
            matches = env.observation_space == self.observation_space
        else:
            matches = is_space_dtype_shape_equiv(env.observation_space, self.observation_space)
        if not matches:
            return "observation" if self._can_batch(env.observation_space) else "shape", repr(env.observation_space)
        if env.action_space != self.action_space:
            return "action", repr(env.action_space)
        return None

    def _can_batch(self, space: gymnasium.Space[Any]) -> bool:
        """True if some ``observation_mode`` can batch ``space``, or if a custom space cannot be compared."""
        with contextlib.suppress(Exception):  # from the code of a custom space
            return is_space_dtype_shape_equiv(space, self.observation_space)
        return True


def _expected(blob: bytes) -> Expected:
    return Expected(*pickle.loads(blob))


@dataclass(slots=True)
class WorkerPlan:
    """The settings that all workers of a vector environment share.

    Attributes:
        layout: Layout of the shared memory.
        autoreset_mode: The autoreset mode.
        expected: The spaces to check every environment against.
        registered: The observation space and its memory, if it is a custom space with its own shared-memory functions.
        threads: Limit of the BLAS, OpenMP and torch threads in a worker; ``None`` for their defaults.
        env_threads: Maximum number of environments that a worker process runs at the same time.
        refuses_finished: True if stepping a finished environment without autoreset raises; otherwise it warns once.
    """

    layout: Layout
    autoreset_mode: AutoresetMode
    expected: Expected
    registered: tuple[Any, Any] | None = None
    threads: int | None = None
    env_threads: int = 1
    refuses_finished: bool = False


def find_env_id(env: Any) -> str:
    """Return the id of an environment in Gymnasium's registry, or the name of its class if it has none."""
    spec = getattr(env, "spec", None)
    return str(spec.id) if spec is not None else type(getattr(env, "unwrapped", env)).__name__


def different_action_space_error(first: Any, env: int, got: str) -> RuntimeError:
    """Return the exception for an environment with an action space different from the first one's."""
    return RuntimeError(
        f"Some environments have an action space different from `{first}`. In order to batch actions, the action spaces "
        f"from all environments must be equal. Env {env} has {got}."
    )


_REQUIRED_ATTRIBUTES: Final = ("reset", "step", "close", "observation_space", "action_space", "metadata", "render_mode")


def build_env(env_fn: Callable[[], Any], index: int) -> Any:
    """Call ``env_fn`` and check that it returned an environment.

    Args:
        env_fn: The function at ``env_fns[index]``.
        index: Its index, for error messages.

    Raises:
        TypeError: It returned something else.
    """
    env = env_fn()
    if isinstance(env, VectorEnv):
        with contextlib.suppress(Exception):
            env.close()
        raise TypeError(
            f"env_fns[{index}]() returned {type(env).__name__}, a vector environment of {env.num_envs} environments: each "
            "function must build a single one. Pass the functions that build its environments instead; with num_workers=N, "
            "each of N processes steps several"
        )
    if env is None:
        raise TypeError(f"env_fns[{index}]() returned None instead of an environment: is a `return` missing?")
    if isinstance(env, gymnasium.Env):
        return env
    if hasattr(env, "possible_agents"):
        raise TypeError(f"env_fns[{index}]() returned a PettingZoo environment: use vecenv.MultiAgentVecEnv instead")
    if missing := [name for name in _REQUIRED_ATTRIBUTES if not hasattr(env, name)]:
        raise TypeError(
            f"env_fns[{index}]() returned {type(env).__name__}, which has no `{missing[0]}`: expected a gymnasium.Env"
        )
    return env


def same_object_error(indices: Sequence[int], env: Any) -> ValueError:
    """Return the error for two functions that returned the same environment."""
    first, second = sorted(indices)
    name = type(getattr(env, "unwrapped", env)).__name__
    return ValueError(
        f"env_fns[{first}]() and env_fns[{second}]() returned the same object ({name}), so one environment "
        "would be stepped twice. Each function must build a new environment: write `lambda: gymnasium.make(...)`, or the "
        "constructor, in place of `lambda: env`"
    )


def call_env(env: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call an attribute of an environment or of one of its wrappers; return it if it is not callable."""
    attribute = env.get_wrapper_attr(name)
    return attribute(*args, **kwargs) if callable(attribute) else attribute


def unpack_reset(returned: Any, index: int) -> tuple[Any, Any]:
    """Unpack the return value of ``env.reset()`` into observation and info.

    Raises:
        TypeError: It is not a tuple or list of length 2.
    """
    # plain unpacking would accept an array of two numbers, the observation of an environment with the old API
    if not isinstance(returned, (tuple, list)):
        got = f"one {type(returned).__name__}"
    elif len(returned) == 2:
        return returned[0], returned[1]
    else:
        got = f"{len(returned)} value{'s' * (len(returned) != 1)}"
    raise TypeError(f"env {index}: reset returned {got}, expected (observation, info)")


_UNPACKING_ERRORS: Final = {  # Python's message for a failed unpacking into five names -> description of the value
    r"not enough values to unpack \(expected 5, got 1\)": "1 value",
    r"not enough values to unpack \(expected 5, got (\d)\)": r"\1 values",
    r"too many values to unpack": "more than 5 values",
    r"cannot unpack non-iterable (\S+) object": r"one \1",
}


def explain_bad_step(error: BaseException, index: int) -> TypeError | None:
    """Return a clearer error if ``error`` means that ``step()`` did not return five values."""
    traceback = error.__traceback__
    raised_by_caller = traceback is not None and traceback.tb_next is None  # not inside step() itself
    if isinstance(error, (TypeError, ValueError)) and raised_by_caller:
        for pattern, got in _UNPACKING_ERRORS.items():
            if match := re.match(pattern, str(error)):
                expected = "(observation, reward, terminated, truncated, info)"
                return TypeError(f"env {index}: step returned {match.expand(got)}, expected {expected}")
    return None
