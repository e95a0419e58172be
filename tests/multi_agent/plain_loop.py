"""The reference for ``MultiAgentVecEnv``: a Python loop over the same environments, which returns dicts by agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode


@dataclass
class ExpectedRow:
    """The expected values of one environment after a reset or step, in dicts by agent."""

    observations: dict[Any, Any]
    rewards: dict[Any, float] = field(default_factory=dict)
    terminations: dict[Any, bool] = field(default_factory=dict)
    truncations: dict[Any, bool] = field(default_factory=dict)
    acted: list[Any] = field(default_factory=list)  # agents with an action in this step
    to_act: list[Any] = field(default_factory=list)  # agents that need an action in the next step
    infos: dict[Any, Any] = field(default_factory=dict)
    done: bool = False
    terminated: bool = False
    final_observations: dict[Any, Any] | None = None
    final_infos: dict[Any, Any] | None = None


class PlainLoop:
    """A loop that steps environments one after the other, and resets them as ``mode`` requires."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.envs = [env_fn() for env_fn in env_fns]
        self.mode = mode
        self.needs_reset = [False] * len(self.envs)
        self.truncated = [False] * len(self.envs)  # true if any agent was truncated in this episode

    def _get_agents_to_act(self, env: Any) -> list[Any]:
        return list(env.agents_to_act if hasattr(env, "agents_to_act") else env.agents)

    def reset(self, seeds: Sequence[Any], mask: Sequence[bool] | None = None) -> list[ExpectedRow | None]:
        rows: list[ExpectedRow | None] = []
        for index, env in enumerate(self.envs):
            if mask is not None and not mask[index]:
                rows.append(None)
                continue
            observations, infos = env.reset(seed=seeds[index])
            self.needs_reset[index] = False
            rows.append(ExpectedRow(dict(observations), to_act=self._get_agents_to_act(env), infos=infos))
        return rows

    def step(self, actions: Sequence[dict[Any, Any]]) -> list[ExpectedRow]:
        return [self.step_row(index, actions[index]) for index in range(len(self.envs))]

    def step_row(self, index: int, actions: dict[Any, Any]) -> ExpectedRow:
        env = self.envs[index]
        if self.needs_reset[index]:
            self.needs_reset[index] = False
            observations, infos = env.reset()
            return ExpectedRow(dict(observations), to_act=self._get_agents_to_act(env), infos=infos)
        acted = self._get_agents_to_act(env)
        observations, rewards, terminations, truncations, infos = env.step({agent: actions[agent] for agent in acted})
        expected = ExpectedRow(dict(observations), dict(rewards), dict(terminations), dict(truncations), acted, infos=infos)
        expected.done = not env.agents
        self.truncated[index] |= any(truncations.values())
        expected.terminated = expected.done and not self.truncated[index]
        expected.to_act = self._get_agents_to_act(env)
        if expected.done:
            self.truncated[index] = False
            if self.mode is AutoresetMode.SAME_STEP:
                expected.final_observations, expected.final_infos = expected.observations, infos
                expected.observations, expected.infos = env.reset()
                expected.to_act = self._get_agents_to_act(env)
            else:
                self.needs_reset[index] = self.mode is AutoresetMode.NEXT_STEP
        return expected

    def close(self) -> None:
        for env in self.envs:
            env.close()


def is_identical(one: Any, other: Any) -> bool:
    """True if two values are equal bit for bit, with the same dtype."""
    if isinstance(other, dict):
        return set(one) == set(other) and all(is_identical(one[key], other[key]) for key in other)
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def is_padding(value: Any, pad: float = 0) -> bool:
    if isinstance(value, dict):
        return all(is_padding(inner, pad) for inner in value.values())
    return bool((np.asarray(value) == pad).all())


def select_agent(envs: Any, batch: Any, row: int, agent: Any) -> Any:
    """Return the value of one agent of one environment from a batch in the layout of ``envs``."""
    if envs.layout == "stack":
        return _index_leaves(batch, row, envs.agent_index[agent])
    if envs.layout == "agents":
        return _index_leaves(batch[agent], row)
    for group, members in envs.groups.items():
        if agent in members:
            return _index_leaves(batch[group], row, members.index(agent))
    raise AssertionError(agent)


def _index_leaves(value: Any, *index: int) -> Any:
    if isinstance(value, dict):
        return {key: _index_leaves(inner, *index) for key, inner in value.items()}
    return value[index]


def assert_row_equals(envs: Any, row: int, expected: ExpectedRow, result: tuple[Any, ...], pad: float = 0) -> None:
    """Assert that a row of a result of ``MultiAgentVecEnv`` equals the values of the loop."""
    obs, infos = result[0], result[-1]
    for column, agent in enumerate(envs.possible_agents):
        where = f"env {row}, {agent}"
        found = select_agent(envs, obs, row, agent)
        if agent in expected.observations:
            assert is_identical(found, expected.observations[agent]), f"{where}: {found} != {expected.observations[agent]}"
        else:
            assert is_padding(found, pad), f"{where}: {found} is not padding"
        assert infos["agent_mask"][row, column] == (agent in expected.to_act), where
        assert infos["transition_mask"][row, column] == (agent in expected.acted), where
        if len(result) == 5:
            assert is_identical(result[1][row, column], np.float64(expected.rewards.get(agent, 0.0))), where
            assert result[2][row, column] == expected.terminations.get(agent, False), where
            assert result[3][row, column] == expected.truncations.get(agent, False), where
        if expected.final_observations is not None:
            last = select_agent(envs, infos["final_obs"], row, agent)
            if agent in expected.final_observations:
                assert is_identical(last, expected.final_observations[agent]), where
            else:
                assert is_padding(last, pad), where
    if len(result) == 5:
        assert (infos["env_done"][row], infos["env_terminated"][row]) == (expected.done, expected.terminated)
        assert bool(infos.get("_final_obs", np.zeros(row + 1))[row]) == (expected.final_observations is not None)
    assert_infos_equal(infos, row, expected.infos, envs.possible_agents)
    if expected.final_infos is not None:
        assert_infos_equal(infos["final_info"], row, expected.final_infos, envs.possible_agents)


def assert_infos_equal(infos: Any, row: int, expected: dict[Any, Any], agents: Sequence[Any]) -> None:
    """Assert that the infos of one environment and their masks equal the loop's dicts by agent. Ignores action masks."""
    common = {key: value for key, value in expected.items() if key not in (*agents, "common")}
    common.update(expected.get("common", {}))
    for key, value in common.items():
        assert infos["common"][f"_{key}"][row], key
        assert infos["common"][key][row] == value, key
    keys = {key for agent in agents for key in expected.get(agent, {})} - {"action_mask", "action_masks"}
    for key in keys:
        for column, agent in enumerate(agents):
            info = expected.get(agent, {})
            assert infos[f"_{key}"][row, column] == (key in info), f"env {row}, {agent}: {key}"
            if key in info:
                assert np.array_equal(infos[key][row, column], info[key]), f"env {row}, {agent}: {key}"
