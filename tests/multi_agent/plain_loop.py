"""The reference for ``MultiAgentVecEnv``: a plain Python loop over the same environments, with dicts of agents, no batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode


@dataclass
class Snapshot:
    """One environment at one time; each dict has only the agents that it is about."""

    observations: dict[Any, Any]
    rewards: dict[Any, float] = field(default_factory=dict)
    terminations: dict[Any, bool] = field(default_factory=dict)
    truncations: dict[Any, bool] = field(default_factory=dict)
    acted: list[Any] = field(default_factory=list)
    acting: list[Any] = field(default_factory=list)
    infos: dict[Any, Any] = field(default_factory=dict)
    done: bool = False
    terminated: bool = False
    final: dict[Any, Any] | None = None
    final_infos: dict[Any, Any] | None = None


class PlainLoop:
    """A loop that steps environments one after the other. ``turns``: only the agents to move act."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.envs = [env_fn() for env_fn in env_fns]
        self.mode = mode
        self.over = [False] * len(self.envs)
        self.truncated = [False] * len(self.envs)  # agents that have been present in this episode

    def _acting(self, env: Any) -> list[Any]:
        return list(env.agents_to_act if hasattr(env, "agents_to_act") else env.agents)

    def reset(self, seeds: Sequence[Any], mask: Sequence[bool] | None = None) -> list[Snapshot | None]:
        seen: list[Snapshot | None] = []
        for index, env in enumerate(self.envs):
            if mask is not None and not mask[index]:
                seen.append(None)
                continue
            observations, infos = env.reset(seed=seeds[index])
            self.over[index] = False
            seen.append(Snapshot(dict(observations), acting=self._acting(env), infos=infos))
        return seen

    def step(self, actions: Sequence[dict[Any, Any]]) -> list[Snapshot]:
        return [self._step(index, env, actions[index]) for index, env in enumerate(self.envs)]

    def _step(self, index: int, env: Any, actions: dict[Any, Any]) -> Snapshot:
        if self.over[index]:
            self.over[index] = False
            observations, infos = env.reset()
            return Snapshot(dict(observations), acting=self._acting(env), infos=infos)
        acted = self._acting(env)
        observations, rewards, terminations, truncations, infos = env.step({agent: actions[agent] for agent in acted})
        seen = Snapshot(dict(observations), dict(rewards), dict(terminations), dict(truncations), acted, infos=infos)
        seen.done = not env.agents
        self.truncated[index] |= any(truncations.values())
        seen.terminated = seen.done and not self.truncated[index]
        seen.acting = self._acting(env)
        if seen.done:
            self.truncated[index] = False
            if self.mode is AutoresetMode.SAME_STEP:
                seen.final, seen.final_infos = seen.observations, infos
                seen.observations, seen.infos = env.reset()
                seen.acting = self._acting(env)
            else:
                self.over[index] = self.mode is AutoresetMode.NEXT_STEP
        return seen

    def close(self) -> None:
        for env in self.envs:
            env.close()


def identical(one: Any, other: Any) -> bool:
    """True if two values are equal bit for bit, with the same dtype."""
    if isinstance(other, dict):
        return set(one) == set(other) and all(identical(one[key], other[key]) for key in other)
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def is_padding(value: Any, pad: float = 0) -> bool:
    if isinstance(value, dict):
        return all(is_padding(inner, pad) for inner in value.values())
    return bool((np.asarray(value) == pad).all())


def agents_view(envs: Any, batch: Any, row: int, agent: Any) -> Any:
    """Return one agent's part of a batch in the layout of ``envs``."""
    if envs.layout == "stack":
        return _take(batch, row, envs.agent_index[agent])
    if envs.layout == "agents":
        return _take(batch[agent], row)
    for group, members in envs.groups.items():
        if agent in members:
            return _take(batch[group], row, members.index(agent))
    raise AssertionError(agent)


def _take(value: Any, *index: int) -> Any:
    if isinstance(value, dict):
        return {key: _take(inner, *index) for key, inner in value.items()}
    return value[index]


def assert_row_equals(envs: Any, row: int, seen: Snapshot, result: tuple[Any, ...], pad: float = 0) -> None:
    """Assert that row ``row`` of a result of ``MultiAgentVecEnv`` equals the values of the loop."""
    obs, infos = result[0], result[-1]
    for column, agent in enumerate(envs.possible_agents):
        where = f"env {row}, {agent}"
        view = agents_view(envs, obs, row, agent)
        if agent in seen.observations:
            assert identical(view, seen.observations[agent]), f"{where}: {view} != {seen.observations[agent]}"
        else:
            assert is_padding(view, pad), f"{where}: {view} is no padding"
        assert infos["agent_mask"][row, column] == (agent in seen.acting), where
        assert infos["transition_mask"][row, column] == (agent in seen.acted), where
        if len(result) == 5:
            assert identical(result[1][row, column], np.float64(seen.rewards.get(agent, 0.0))), where
            assert result[2][row, column] == seen.terminations.get(agent, False), where
            assert result[3][row, column] == seen.truncations.get(agent, False), where
        if seen.final is not None:
            last = agents_view(envs, infos["final_obs"], row, agent)
            assert identical(last, seen.final[agent]) if agent in seen.final else is_padding(last, pad), where
    if len(result) == 5:
        assert (infos["env_done"][row], infos["env_terminated"][row]) == (seen.done, seen.terminated)
        assert bool(infos.get("_final_obs", np.zeros(row + 1))[row]) == (seen.final is not None)
