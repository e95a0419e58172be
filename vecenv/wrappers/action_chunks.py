"""Chunks of actions: one step of the wrapper executes several actions of the wrapped environment."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, repeat
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

__all__ = ["ActionChunks"]


class ActionChunks(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A wrapper that takes one chunk of ``horizon`` actions of the wrapped environment per step.

    A step executes the actions of a chunk until the episode ends. It returns the last observation, the sum of the rewards,
    and the flags and the info of the last executed action. The rest of the chunk is discarded. The info also has
    ``"chunk_steps"``, int, the number of executed actions, and ``"chunk_rewards"``, float64 ``(horizon,)``, zero after the
    last executed action. ``vecenv.evaluate``, ``vecenv.wrappers.RecordEpisodeStatistics`` and ``stats()`` of a vector
    environment count ``chunk_steps``.

    The action space is ``MultiDiscrete`` of shape ``(horizon,)`` for ``Discrete``; ``Box``, ``MultiDiscrete`` and
    ``MultiBinary`` get the shape ``(horizon, *shape)``; for any other space it is a ``Tuple`` of ``horizon`` spaces.

    Args:
        env: The environment. If its ``step`` has a parameter ``render``, all actions but the last of a chunk are executed
            with ``render=False``.
        horizon: The number of actions per chunk, at least 1.
        discount: The reward of a chunk is the sum of ``discount**i * rewards[i]``.
        observations: ``"last"``, or ``"all"``: the observations of the chunk, stacked along a new first axis of length
            ``horizon`` and padded with the last one. After a reset, its observation is repeated.
        variable: Actions are dicts with a chunk ``"actions"`` and an int ``"steps"``, from 1 to ``horizon``: only the first
            ``steps`` actions are executed.

    Raises:
        ValueError: An invalid ``horizon``, ``discount`` or ``observations``. In ``step``: a chunk of another length, or an
            invalid number of steps; nothing was executed.
        TypeError: The environment's action space is not a Gymnasium space; ``horizon`` is not an integer. In ``step``: a
            chunk that has no length or, with ``variable``, an action that is not a dict with exactly these two keys.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], horizon: int, *, discount: float = 1.0, observations: str = "last",
        variable: bool = False,
    ) -> None:  # fmt: skip
        self.horizon = _parse_horizon(horizon)
        if not 0.0 <= discount <= 1.0:
            raise ValueError(f"ActionChunks: discount must be from 0 to 1, got {discount!r}")
        if observations not in ("last", "all"):
            raise ValueError(f"ActionChunks: observations must be 'last' or 'all', got {observations!r}")
        RecordConstructorArgs.__init__(
            self, horizon=horizon, discount=discount, observations=observations, variable=variable
        )
        super().__init__(env)
        self._discount, self._variable = float(discount), bool(variable)
        self._returns_all = observations == "all"
        self._skips_rendering = _accepts_render(env)
        chunks = _make_chunk_space(env.action_space, self.horizon)
        self.action_space = (
            spaces.Dict({"actions": chunks, "steps": spaces.Discrete(self.horizon, start=1)}) if variable else chunks
        )
        if self._returns_all:
            self.observation_space = batch_space(env.observation_space, self.horizon)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment.

        Returns:
            The observation, with ``observations="all"`` repeated ``horizon`` times, and the info.
        """
        observation, info = self.env.reset(seed=seed, options=options)
        return (self._stack([observation]) if self._returns_all else observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute the actions of a chunk, and stop if the episode ends; see the class."""
        actions = self._actions_to_execute(action)
        observations: list[Any] = []
        rewards: list[float] = []
        for single, step in zip(actions, self._step_functions(len(actions)), strict=False):
            observation, reward, terminated, truncated, info = step(single)
            rewards.append(reward if reward.__class__ is float else _as_float(reward))
            if self._returns_all:
                observations.append(copy.deepcopy(observation))  # an environment may return the same array at every step
            if terminated or truncated:
                break
        chunk_rewards = np.zeros(self.horizon)
        chunk_rewards[: len(rewards)] = rewards
        info = {**info, "chunk_steps": len(rewards), "chunk_rewards": chunk_rewards}
        result = self._stack(observations) if self._returns_all else observation
        return result, self._discounted_sum(rewards), terminated, truncated, info

    def _step_functions(self, count: int) -> Iterator[Callable[[Any], Any]]:
        """Return the step functions for ``count`` actions; only the last one may render."""
        step: Callable[..., Any] = self.env.step
        if not self._skips_rendering:
            return repeat(step)
        return chain(repeat(partial(step, render=False), count - 1), [step])

    def _actions_to_execute(self, action: Any) -> Any:
        """Return the actions of a chunk that a step executes. Raise for an invalid chunk or number of steps."""
        count = self.horizon
        if self._variable:
            action, count = self._split_variable_action(action)
        try:
            length = len(action)
        except TypeError:
            raise TypeError(f"ActionChunks: expected a chunk of {self.horizon} actions, got {action!r}") from None
        if length != self.horizon:
            raise ValueError(f"ActionChunks: expected a chunk of {self.horizon} actions, got one of {length}")
        return action if count == length else action[:count]

    def _split_variable_action(self, action: Any) -> tuple[Any, int]:
        """Return the chunk, and the number of its actions to execute."""
        if not isinstance(action, Mapping) or action.keys() != {"actions", "steps"}:
            raise TypeError(f"ActionChunks: expected a dict with 'actions' and 'steps', got {action!r}")
        steps = action["steps"]
        try:
            count = operator.index(np.asarray(steps).item())
        except (TypeError, ValueError):
            count = 0
        if not 1 <= count <= self.horizon:
            raise ValueError(f"ActionChunks: steps must be an integer from 1 to {self.horizon}, got {steps!r}")
        return action["actions"], count

    def _discounted_sum(self, rewards: list[float]) -> float:
        """Return the discounted sum of rewards, with the rounding errors of a loop that adds them one by one."""
        if self._discount == 1.0:
            total = 0.0
            for reward in rewards:  # not sum(): since Python 3.12 it compensates for rounding errors
                total += reward
            return total
        total, weight = 0.0, 1.0
        for reward in rewards:
            total += weight * reward
            weight *= self._discount
        return total

    def _stack(self, observations: list[Any]) -> Any:
        """Stack observations along a new first axis of length ``horizon``, padded with the last one."""
        space = self.env.observation_space
        padded = observations + [observations[-1]] * (self.horizon - len(observations))
        empty: Any = create_empty_array(space, self.horizon)
        return concatenate(space, padded, empty)


def _parse_horizon(horizon: Any) -> int:
    try:
        count = operator.index(horizon)
    except TypeError:
        raise TypeError(f"ActionChunks: horizon must be a positive integer, got {horizon!r}") from None
    if count < 1:
        raise ValueError(f"ActionChunks: horizon must be a positive integer, got {horizon!r}")
    return count


def _accepts_render(env: gymnasium.Env[Any, Any]) -> bool:
    """True if ``env.step`` has a parameter ``render``, as in Isaac Lab."""
    try:
        return "render" in inspect.signature(env.step).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False


def _make_chunk_space(space: Any, horizon: int) -> spaces.Space[Any]:
    """Return the space of chunks of actions. Raise ``TypeError`` if ``space`` is not a Gymnasium space."""
    kind = type(space)
    if kind is spaces.Box:
        low, high = (np.repeat(bound[np.newaxis], horizon, axis=0) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype)
    if kind is spaces.Discrete:
        return spaces.MultiDiscrete([space.n] * horizon, dtype=space.dtype, start=[space.start] * horizon)
    if kind is spaces.MultiDiscrete:
        sizes, starts = (np.repeat(each[np.newaxis], horizon, axis=0) for each in (space.nvec, space.start))
        return spaces.MultiDiscrete(sizes, dtype=space.dtype, start=starts)
    if kind is spaces.MultiBinary:
        return spaces.MultiBinary((horizon, *space.shape))
    if not isinstance(space, spaces.Space):
        raise TypeError(f"ActionChunks: cannot stack the action space {space!r}: expected a gymnasium.spaces.Space")
    return spaces.Tuple([copy.deepcopy(space) for _ in range(horizon)])


def _as_float(reward: Any) -> float:
    return float(np.asarray(reward, np.float64).reshape(()))
