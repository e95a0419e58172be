"""Where and when a fault happens: in an environment, at its construction, or one vector environment deeper."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable, Container
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from vecenv.testing.faulty.registry import Fault, find

__all__ = ["FaultyConstructor", "FaultyEnv", "NestedEnv", "UnloadableConstructor", "UnpicklableConstructor"]


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Sets a fault off inside another environment, at a moment of your choice.

    The inner environment is called first; the fault then gets what it returned. Several conditions are joined
    by *and*; for several faults, wrap several times.

    Args:
        env: The environment to spoil.
        fault: A name from :data:`FAULTS`, or any function of one argument.
        step: Which steps, counted from 1 over the life of this object: a number, or anything with ``in``
            (``range(5, 9)``).
        reset: Which resets, counted the same way; automatic resets count as well.
        seed: Only in episodes that were begun with this seed (or one of these). Alone, it means the reset
            itself.
        action: Only in steps with this action (compared with ``numpy.array_equal``). Alone, it means every
            such step.
        close: Set it off in ``close()`` instead, with ``None`` as its argument.
        once: Path of a file that must not exist yet. The fault then fires once for all processes and restarts
            together: in the process that can create the file.

    Raises:
        ValueError: For an unknown fault, or when no moment is given.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        fault: str | Fault,
        *,
        step: int | Container[int] | None = None,
        reset: int | Container[int] | None = None,
        seed: int | Container[int] | None = None,
        action: Any = None,
        close: bool = False,
        once: str | os.PathLike[str] | None = None,
    ) -> None:
        RecordConstructorArgs.__init__(
            self, fault=fault, step=step, reset=reset, seed=seed, action=action, close=close, once=once
        )
        gym.Wrapper.__init__(self, env)
        if step is None and reset is None and seed is None and action is None and not close:
            raise ValueError("say when the fault should happen: step=, reset=, seed=, action= or close=True")
        self._fault = find(fault)
        self._at_step = step
        self._at_reset = reset
        self._at_seed = seed
        self._at_action = action
        self._at_close = close
        self._once = once
        self._steps = 0
        self._resets = 0
        self._episode_seed: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the inner environment; then, if it is the moment, go wrong."""
        result = self.env.reset(seed=seed, options=options)
        self._resets += 1
        self._episode_seed = seed
        only_seed = self._at_seed is not None and self._at_step is None and self._at_action is None
        if (self._at_reset is not None or only_seed) and _among(self._resets, self._at_reset) and self._seed_matches():
            result = self._go_wrong(result)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the inner environment; then, if it is the moment, go wrong."""
        result = self.env.step(action)
        self._steps += 1
        if (
            (self._at_step is not None or self._at_action is not None)
            and _among(self._steps, self._at_step)
            and (self._at_action is None or np.array_equal(action, self._at_action))
            and self._seed_matches()
        ):
            result = self._go_wrong(result)
        return result

    def close(self) -> None:
        """Close the inner environment, or go wrong instead."""
        if self._at_close:
            self._at_close = False  # a second close, from a finalizer for one, is the inner environment's
            self._go_wrong(None)
        self.env.close()

    def _seed_matches(self) -> bool:
        return self._at_seed is None or (self._episode_seed is not None and _among(self._episode_seed, self._at_seed))

    def _go_wrong(self, result: Any) -> Any:
        if self._once is not None:
            try:
                os.close(os.open(self._once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            except FileExistsError:
                return result
        return self._fault(result)


def _among(number: int, chosen: int | Container[int] | None) -> bool:
    if chosen is None:
        return True
    return number == chosen if isinstance(chosen, int) else number in chosen


class FaultyConstructor:
    """An ``env_fn`` whose call goes wrong: ``FaultyConstructor(env_fn, "sleep")`` never returns an
    environment.

    By default only in child processes, because a vector environment may build one of its environments in the
    parent to learn the spaces; with ``everywhere=True`` in the parent too.
    """

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]], fault: str | Fault, *, everywhere: bool = False) -> None:
        self.env_fn = env_fn
        self.fault = find(fault)
        self.everywhere = everywhere

    def __call__(self) -> gym.Env[Any, Any]:
        env = self.env_fn()
        if self.everywhere or multiprocessing.parent_process() is not None:
            self.fault(None)
        return env


class UnpicklableConstructor:
    """An ``env_fn`` that cannot be sent to a worker: it refuses to be pickled."""

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        self.env_fn = env_fn

    def __call__(self) -> gym.Env[Any, Any]:
        return self.env_fn()

    def __reduce__(self) -> NoReturn:
        raise pickle.PicklingError("this constructor stays where it is")


def _refuse_to_load() -> NoReturn:
    raise ImportError("this constructor cannot be loaded here")


class UnloadableConstructor(UnpicklableConstructor):
    """An ``env_fn`` that pickles well and raises ``ImportError`` where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return _refuse_to_load, ()


class NestedEnv(gym.Env[Any, Any]):
    """An environment that is itself a vector environment, with worker processes of its own.

    Args:
        vector_fn: Makes the inner vector environment.

    Its observation is the inner batch of observations; its reward their sum; it never ends.
    """

    def __init__(self, vector_fn: Callable[[], gym.vector.VectorEnv[Any, Any, Any]]) -> None:
        self.inner = vector_fn()
        self.observation_space = self.inner.observation_space
        self.action_space = self.inner.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all inner environments."""
        super().reset(seed=seed)
        return self.inner.reset(seed=seed)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step all inner environments."""
        observation, rewards, *_ = self.inner.step(action)
        return observation, float(np.sum(rewards)), False, False, {}

    def close(self) -> None:
        """Close the inner vector environment."""
        self.inner.close()
