"""Calls into environments with ``agent_num`` reach the environments themselves, and nested observations arrive."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from test_agents_stacked import Stacked
from test_rllib_game import Turns

from vecenv.multi_agent import MultiAgentVecEnv, StackedAgents

LEAF = spaces.Box(-99, 99, (2,), np.float32)
NESTED: dict[str, spaces.Space[Any]] = {
    "tuple": spaces.Tuple([LEAF, spaces.Discrete(5)]),
    "tuple of one": spaces.Tuple([LEAF]),
    "tuple with a dict": spaces.Tuple([LEAF, spaces.Dict({"deep": LEAF})]),
    "dict in a dict": spaces.Dict({"near": LEAF, "far": spaces.Dict({"deep": LEAF, "place": spaces.Discrete(5)})}),
    "tuple in a dict": spaces.Dict({"both": spaces.Tuple([LEAF, LEAF])}),
}


def filled(space: spaces.Space[Any], time: int) -> Any:
    """What the convention has for ``space``: a leaf has an axis of agents, and ``Discrete`` is one-hot."""
    if isinstance(space, spaces.Dict):
        return {key: filled(inner, time) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(filled(inner, time) for inner in space.spaces)
    if isinstance(space, spaces.Discrete):
        return np.eye(5)[[time, time + 1]]
    return np.array([[time, 0], [time, 1]], np.float32)


class Nested:
    """Two agents whose observations say the time, in a structure."""

    agent_num = 2
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, kind: str, with_info: bool) -> None:
        self.observation_space, self.with_info = NESTED[kind], with_info
        self.action_space = spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> Any:
        self.time = 0
        seen = filled(self.observation_space, 0)
        return (seen, {}) if self.with_info else seen

    def step(self, actions: Any) -> Any:
        self.time += 1
        return filled(self.observation_space, self.time), np.zeros((2, 1)), np.zeros(2, bool), {}

    def close(self) -> None:
        pass


def check(space: spaces.Space[Any], batch: Any, time: int) -> None:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            check(inner, batch[key], time)
    elif isinstance(space, spaces.Tuple):
        assert isinstance(batch, tuple)
        for inner, part in zip(space.spaces, batch, strict=True):
            check(inner, part, time)
    elif isinstance(space, spaces.Discrete):
        assert batch.tolist() == [[time, time + 1]] * 3
    else:
        assert batch.tolist() == [[[time, 0], [time, 1]]] * 3


@pytest.mark.parametrize("with_info", [True, False])
@pytest.mark.parametrize("kind", NESTED)
def test_structured_observations_arrive_leaf_by_leaf(kind: str, with_info: bool) -> None:
    with MultiAgentVecEnv([functools.partial(Nested, kind, with_info)] * 3, num_workers=0) as envs:
        space = NESTED[kind]
        obs, _ = envs.reset(seed=1)
        check(space, obs, 0)
        obs, *_ = envs.step(np.zeros((3, 2), np.int64))
        check(space, obs, 1)
        assert envs.observation_space.contains(obs)


def lengthen(env: Any, length: int) -> str:
    env.length = length
    return type(env).__name__


@pytest.mark.parametrize("env_fn", [Stacked, lambda: StackedAgents(Stacked()), Turns])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_a_function_writes_into_an_environment_stays(env_fn: Any, num_workers: int) -> None:
    with MultiAgentVecEnv([env_fn] * 2, num_workers=num_workers) as envs:
        assert envs.exec_func(lengthen, None, 7) == ("Turns" if env_fn is Turns else "Stacked",) * 2
        assert envs.exec_func(lambda env: vars(env)["length"]) == (7, 7)
        assert envs.get_attr("length") == (7, 7)
        envs.set_attr("metadata", {"name": "another"})
        assert envs.exec_func(lambda env: env.metadata) == ({"name": "another"},) * 2
        if env_fn is Turns:
            return
        assert envs.get_attr("observation_space") == (spaces.Box(-99, 99, (1,), np.float32),) * 2
        assert envs.get_attr("possible_agents") == (["agent_0", "agent_1"],) * 2
