"""An environment that tells the truth, in a way that can be checked."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["WitnessEnv"]


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
