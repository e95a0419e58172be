"""Environments: one that a fault happens in, at a chosen moment, and one whose observations can be checked."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Container
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from vecenv.testing.faulty.faults import Fault, find

__all__ = ["FaultyConstructor", "FaultyEnv", "NestedEnv", "UnloadableConstructor", "UnpicklableConstructor", "WitnessEnv"]


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


class WitnessEnv(gym.Env[np.ndarray[Any, np.dtype[np.int64]], Any]):
    """Says in every observation where it comes from.

    The observation is ``int64``, shape ``(width,)``. Its first entries are :data:`WitnessEnv.FIELDS`; every
    further entry is a checksum of them and of its own position, so that a row put together from two
    observations does not add up. :meth:`read` takes a row apart and checks it. The reward of a step is ``tick
    + actions / 1024``; infos carry ``witness_id``, ``episode`` and ``tick``, and ``last_action`` on every
    third tick only, so that missing keys are exercised too.

    Args:
        witness_id: A number of your choice, the environment's index for one.
        length: Steps in an episode; the last one is terminated if the episode's number is even, truncated if
            it is odd.
        delay: Seconds that every step takes.
        num_actions: Size of the discrete action space.
        width: Entries of an observation, at least ``len(FIELDS) + 1``.
    """

    FIELDS = ("witness_id", "life", "episode", "tick", "steps", "seed", "last_action", "actions")
    """The environment's number; a random number chosen at construction; episodes begun (resets), from 1;
    steps in this episode; steps in this life; the seed of the last seeded reset or -1; the last action or -1;
    the sum of all actions of this episode."""

    def __init__(
        self,
        witness_id: int = 0,
        *,
        length: int = 10,
        delay: float = 0.0,
        num_actions: int = 16,
        width: int = 64,
    ) -> None:
        self.observation_space = gym.spaces.Box(-(2**63), 2**63 - 1, (width,), np.int64)
        self.action_space = gym.spaces.Discrete(num_actions)
        self.witness_id = witness_id
        self.length = length
        self.delay = delay
        self.width = width
        self.life = int.from_bytes(os.urandom(4), "little")
        self.episode = self.tick = self.steps = self.actions = 0
        self.last_action = self.seed = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, np.dtype[np.int64]], dict[str, Any]]:
        """Begin another episode."""
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.episode += 1
        self.tick = self.actions = 0
        self.last_action = -1
        return self.observation(), self.info()

    def step(self, action: Any) -> tuple[np.ndarray[Any, np.dtype[np.int64]], float, bool, bool, dict[str, Any]]:
        """Count one step."""
        if self.delay:
            time.sleep(self.delay)
        self.tick += 1
        self.steps += 1
        self.last_action = int(action)
        self.actions += self.last_action
        done = self.tick >= self.length
        even = self.episode % 2 == 0
        return (
            self.observation(),
            self.tick + self.actions / 1024,
            done and even,
            done and not even,
            self.info(),
        )

    def observation(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The observation of this moment, shape ``(width,)``."""
        fields = np.array([getattr(self, name) for name in self.FIELDS], dtype=np.int64)
        return np.concatenate([fields, _checksums(fields, self.width)])

    def info(self) -> dict[str, Any]:
        """The info of this moment."""
        info = {"witness_id": self.witness_id, "episode": self.episode, "tick": self.tick}
        return info | {"last_action": self.last_action} if self.tick % 3 == 2 else info

    @classmethod
    def read(cls, row: np.ndarray[Any, Any]) -> dict[str, int]:
        """Take one observation apart.

        Raises:
            AssertionError: If the row is not one whole observation.
        """
        fields = np.array(row[: len(cls.FIELDS)], dtype=np.int64)
        wanted = _checksums(fields, len(row))
        if not np.array_equal(row[len(fields) :], wanted):
            wrong = np.flatnonzero(row[len(fields) :] != wanted) + len(fields)
            raise AssertionError(f"torn row: fields {fields.tolist()} do not belong to entries {wrong.tolist()} of {row}")
        return dict(zip(cls.FIELDS, fields.tolist(), strict=True))


def _checksums(fields: np.ndarray[Any, np.dtype[np.int64]], width: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    digest = 0xCBF29CE484222325  # FNV-1a over the words: the same in every process, unlike hash()
    for word in fields.tolist():
        digest = ((digest ^ (word % 2**64)) * 0x100000001B3) % 2**64
    return np.int64(digest % 2**40) + np.arange(len(fields), width, dtype=np.int64)
