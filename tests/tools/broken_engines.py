"""Engines for ``vecenv conform``: most of them break one promise each."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class ReusesArrays(SyncVectorEnv):
    """An engine that returns the same arrays at every step."""

    def __init__(self, env_fns: Any, autoreset_mode: Any) -> None:
        super().__init__(env_fns, copy=False, autoreset_mode=autoreset_mode)


class WrongFinalObservation(SyncVectorEnv):
    """An engine that returns the next episode's first observation as the final one of the ended episode."""

    def step(self, actions: Any) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        for row in np.flatnonzero(infos.get("_final_obs", np.zeros(self.num_envs, bool))):
            infos["final_obs"][row] = observations[row]
        return observations, rewards, terminations, truncations, infos


class UsesGlobalGenerator(SyncVectorEnv):
    """An engine that breaks no promise, but draws from the global generator of numpy.random."""

    def reset(self, **arguments: Any) -> Any:
        np.random.rand()
        return super().reset(**arguments)


class ReportsOnlyTerminations(SyncVectorEnv):
    """An engine that reports every end as a termination."""

    def step(self, actions: Any) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        return observations, rewards, terminations | truncations, np.zeros_like(truncations), infos


class SwapsActions(SyncVectorEnv):
    """An engine that sends the actions to the environments in reverse order."""

    def step(self, actions: Any) -> Any:
        return super().step(np.asarray(actions)[::-1])


class SameSeedForAll(SyncVectorEnv):
    """An engine that gives all environments the same seed."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return super().reset(seed=[seed] * self.num_envs if isinstance(seed, int) else seed, options=options)


class ResetsTwice(SyncVectorEnv):
    """An engine that resets each environment twice after an episode."""

    def step(self, actions: Any) -> Any:
        results = super().step(actions)
        for env in np.array(self.envs)[results[2] | results[3]]:
            env.reset()
        return results


class InfosWithoutMasks(SyncVectorEnv):
    """An engine that returns infos without their masks."""

    def step(self, actions: Any) -> Any:
        *results, infos = super().step(actions)
        return (*results, {key: value for key, value in infos.items() if not key.startswith("_")})


class IgnoresMasks(SyncVectorEnv):
    """An engine that ignores reset masks and resets all environments."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        options = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
        return super().reset(seed=seed, options=options)


class CountsResetsAsSteps(SyncVectorEnv):
    """An engine that returns a reward of 1 for the reset of next-step mode, as for a step."""

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        return (observations, np.where(rewards == 0, 1.0, rewards), *rest)


class ExitsInStep(SyncVectorEnv):
    """An engine that ends the program in its second step."""

    steps = 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.steps == 2:
            os._exit(3)
        return super().step(actions)


class Hangs(SyncVectorEnv):
    """An engine that hangs in ``close`` and in steps."""

    def step(self, actions: Any) -> Any:
        time.sleep(1000)

    def close(self, **kwargs: Any) -> None:
        time.sleep(1000)


class HangsInConstructor(SyncVectorEnv):
    """An engine that hangs while it is built."""

    def __init__(self, env_fns: Any, autoreset_mode: Any) -> None:
        time.sleep(1000)


class WithoutStep:
    """An engine without ``step``."""

    def __init__(self, env_fns: Any) -> None:
        self.envs = SyncVectorEnv(env_fns)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}

    def reset(self, **kwargs: Any) -> Any:
        return self.envs.reset(**kwargs)


def make_own_environments(num_envs: int) -> Any:
    """Build an engine that has its own environments and accepts no others."""
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")


def make_resets_in_same_step(num_envs: int) -> Any:
    """Build an engine that resets in the same step, although its metadata contains next-step mode (Gymnasium#914)."""
    envs = SyncVectorEnv([_cartpole] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    envs.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    return envs


def make_without_final_observations(num_envs: int) -> Any:
    """Build an engine that resets in the same step without returning final observations (mujoco_playground#305)."""
    return _WithoutFinalObservations([_cartpole] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


class _WithoutFinalObservations(SyncVectorEnv):
    def step(self, actions: Any) -> Any:
        return (*super().step(actions)[:4], {})


def _cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def needs_an_argument(env_fns: Any, something: int) -> None:
    """Raise a ``TypeError`` when it is called, because ``vecenv conform`` does not pass the second argument."""


def raises_in_constructor(env_fns: Any) -> None:
    """Raise an error that depends neither on the arguments nor on the autoreset mode."""
    raise RuntimeError("no licence")


def make_short_episodes(num_envs: int, autoreset_mode: Any = "NextStep") -> Any:
    """Build an engine with short episodes, most of one or two steps."""
    return SyncVectorEnv([lambda: gymnasium.make("Blackjack-v1")] * num_envs, autoreset_mode=autoreset_mode)


@functools.cache
def sleep_once() -> None:
    """Sleep when it is called for the first time in a process, to simulate a slow import."""
    time.sleep(2.0)


def make_after_slow_import(env_fns: Any, autoreset_mode: Any = "NextStep") -> Any:
    """Build a SyncVectorEnv, the first time in a process after a delay like that of a slow import."""
    sleep_once()
    return SyncVectorEnv(env_fns, autoreset_mode=autoreset_mode)
