"""Observations and actions in dicts and tuples, in every layout, and what is wrong with them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from agent_games import Scripted, playing
from gymnasium import spaces
from gymnasium.vector.utils import iterate
from plain_loop import agents_view, same

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv

LAYOUTS = pytest.mark.parametrize("layout", ["stack", "agents", {"one": ["c", "a"], "two": ["b"]}], ids=str)


class Nested(Scripted):
    """Sees, and does, structured things; what it saw and was told to do is kept."""

    def __init__(self) -> None:
        super().__init__({"a": (0, 2), "b": (0, 4), "c": (1, 4)})
        self.rng = np.random.default_rng()

    def observation_space(self, agent: Any) -> Any:
        inner = spaces.Tuple([spaces.Box(-9, 9, (2, 2), np.float32), spaces.MultiBinary(3)])
        return spaces.Dict({"kind": spaces.Discrete(5, start=2), "parts": inner, "counts": spaces.MultiDiscrete([3, 4])})

    def action_space(self, agent: Any) -> Any:
        return spaces.Dict({"x": spaces.Discrete(4), "y": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32)])})

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return super().reset(seed, options)

    def _look(self, agents: list[Any]) -> dict[Any, Any]:
        seen = {}
        for agent in agents:
            space = self.observation_space(agent)
            space.seed(int(self.rng.integers(1000)))
            seen[agent] = space.sample()
        self.last = copy.deepcopy(seen)
        return seen


def flattened(value: Any) -> Any:
    """Tuples as dicts, so that one comparison is enough."""
    if isinstance(value, (dict, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: flattened(inner) for key, inner in pairs}
    return value


@LAYOUTS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_structured_observations_and_actions_arrive_as_they_were(layout: Any, num_workers: int) -> None:
    with MultiAgentVecEnv([Nested] * 2, layout=layout, num_workers=num_workers) as envs:
        envs.action_space.seed(0)
        result: Any = envs.reset(seed=3)
        for _ in range(12):
            for row, last in enumerate(envs.get_attr("last")):
                for agent, seen in last.items():
                    assert same(agents_view(envs, flattened(result[0]), row, agent), flattened(seen))
            before = envs.agent_mask
            actions = envs.action_space.sample()
            result = envs.step(actions)
            told = envs.get_attr("actions")
            for row, column in zip(*np.nonzero(before), strict=True):
                agent = envs.possible_agents[column]
                given = agents_view(envs, flattened(actions), int(row), agent)
                assert same(flattened(told[row][-1][agent]), given)


def test_structured_rows_are_flat_too() -> None:
    rows = MultiAgentVecEnv([Nested] * 2, autoreset_mode="SameStep", num_workers=0).flatten_agents()
    obs, infos = rows.reset(seed=0)
    for _ in range(6):  # padding need not lie in the space
        for row in np.flatnonzero(infos["agent_mask"]):
            one = list(iterate(rows.observation_space, obs))[row]
            assert one in rows.single_observation_space
        obs, *_, infos = rows.step(rows.action_space.sample())
    with pytest.raises(ValueError, match=r"actions: got ndarray, wanted a dict with \['x', 'y'\]"):
        rows.step(np.zeros(6))
    with pytest.raises(ValueError, match=r"actions\['x'\]: got shape \(5,\), wanted 6 rows"):
        rows.step({"x": np.zeros(5, np.int64), "y": (np.zeros((6, 2), np.float32),)})
    rows.close()


def test_a_structure_that_is_not_the_spaces_is_refused() -> None:
    with playing([Nested] * 2, num_workers=0) as envs:
        good = envs.action_space.sample()
        with pytest.raises(ValueError, match=r"actions: got ndarray, wanted a dict with \['x', 'y'\]"):
            envs.step(np.zeros((2, 3)))
        with pytest.raises(ValueError, match=r"got a dict with \['x'\]"):
            envs.step({"x": good["x"]})
        with pytest.raises(ValueError, match=r"actions\['y'\]: got list, wanted a tuple of 1"):
            envs.step({"x": good["x"], "y": [good["y"][0]]})
        with pytest.raises(ValueError, match=r"actions\['y'\]\[0\]: got shape \(2, 3\)"):
            envs.step({"x": good["x"], "y": (good["y"][0][..., 0],)})


class Odd(Scripted):
    """Says something odd at a reset or a step."""

    def __init__(self, what: str) -> None:
        super().__init__({"a": (0, 9), "b": (0, 9)})
        self.what = what

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed, options)
        if self.what == "no infos":
            return observations
        if self.what == "list":
            return observations, [{}, {}]
        if self.what == "mask":
            infos["a"] = {"action_mask": [[1, 0]]}
        if self.what == "blind":
            del observations["b"]
        return observations, infos

    def step(self, actions: Any) -> Any:
        observations, rewards, terminations, truncations, infos = super().step(actions)
        if self.what == "large":
            observations["a"] = np.full(2, 1e300)
        if self.what == "swapped":
            rewards["who"] = rewards.pop("b")
        return observations, rewards, terminations, truncations, infos


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        ("no infos", ValueError, r"env 0: reset must return \(observations, infos\), got dict"),
        ("list", ValueError, "env 0: infos must be a dict of agents"),
        ("mask", ValueError, "env 0, agent 'a': action_mask must be one row of 0 and 1"),
        ("blind", vecenv.errors.ObservationError, "env 0, agent 'b': is alive and has no observation"),
    ],
)
def test_what_a_reset_returns_is_checked(what: str, error: Any, match: str) -> None:
    with MultiAgentVecEnv([lambda: Odd(what)], num_workers=0) as envs, pytest.raises(error, match=match):
        envs.reset(seed=0)


def test_an_agents_reward_under_another_name_is_refused_on_ordinary_steps_too() -> None:
    wanted = r"unknown agents \['who'\]"
    with playing([lambda: Odd("swapped")], num_workers=0) as envs, pytest.raises(ValueError, match=wanted):
        envs.step(np.zeros((1, 2), np.int64))


def test_a_float_that_becomes_infinite_in_the_spaces_dtype_is_said() -> None:
    with playing([lambda: Odd("large")], num_workers=0) as envs:
        with pytest.warns(RuntimeWarning, match="env 0, agent 'a': observation.*became infinite"):
            obs, *_ = envs.step(np.zeros((1, 2), np.int64))
        assert np.isinf(obs[0, 0]).all()
