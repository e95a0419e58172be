"""Infos of agents and of environments, as arrays with masks and as lists."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from agent_games import RandomGame, Scripted

from vecenv.multi_agent import MultiAgentVecEnv, list_of_dicts


@pytest.mark.parametrize("num_workers", [0, 2])
def test_keys_of_agents_have_an_axis_and_keys_of_environments_have_none(num_workers: int) -> None:
    game = functools.partial(RandomGame, infos=True, together=True, length=20)
    with MultiAgentVecEnv([game] * 2, num_workers=num_workers) as envs:
        envs.reset(seed=1)
        infos = envs.step(envs.action_space.sample())[-1]
    assert infos["time"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert infos["time"].dtype == np.int64
    assert infos["vector"].shape == (2, 3, 2)
    assert infos["word"].dtype == object
    assert infos["word"].tolist() == [[None, "t1", None]] * 2
    assert infos["_word"].tolist() == [[False, True, False]] * 2
    assert infos["common"]["score"].tolist() == [0.5, 0.5]
    assert infos["common"]["weather"].tolist() == [1, 1]
    assert infos["common"]["_score"].tolist() == [True, True]
    assert "agents" not in infos


def test_same_step_gives_the_infos_of_the_last_step_too() -> None:
    game = functools.partial(RandomGame, infos=True, length=3)
    with MultiAgentVecEnv([game] * 2, autoreset_mode="SameStep", num_workers=0) as envs:
        envs.reset(seed=1)
        for t in range(1, 10):
            infos = envs.step(envs.action_space.sample())[-1]
            if infos["env_done"].any():
                row = int(np.flatnonzero(infos["env_done"])[0])
                assert infos["_final_info"][row]
                assert infos["final_info"]["common"]["score"][row] == t * 0.5
                assert infos["final_info"]["time"][row][infos["final_info"]["_time"][row]].tolist().count(t) > 0
                assert infos["time"][row].tolist() == [0, 0, 0]
                return
    pytest.fail("no episode ended")


class Notes(Scripted):
    """Two agents with infos as given."""

    def __init__(self, a: dict[Any, Any], b: dict[Any, Any]) -> None:
        super().__init__({"a": (0, 5), "b": (0, 5)})
        self.notes = {"a": a, "b": b}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed, options)[0], self.notes


def notes(a: dict[Any, Any], b: dict[Any, Any], n: int = 2) -> dict[str, Any]:
    with MultiAgentVecEnv([functools.partial(Notes, a, b)] * n, num_workers=0) as envs:
        return envs.reset(seed=0)[1]


def test_numbers_of_two_agents_get_the_dtype_that_holds_both() -> None:
    infos = notes({"x": 1}, {"x": 2.5})
    assert infos["x"].dtype == np.float64
    assert infos["x"].tolist() == [[1.0, 2.5]] * 2


def test_arrays_of_different_shapes_stand_in_an_object_array() -> None:
    infos = notes({"x": np.zeros(2)}, {"x": np.zeros(3)})
    assert infos["x"].dtype == object
    assert [value.shape for value in infos["x"][0]] == [(2,), (3,)]


def test_nested_infos_have_masks_at_every_level() -> None:
    infos = notes({"d": {"x": 1}}, {})
    assert infos["d"]["x"].tolist() == [[1, 0]] * 2
    assert infos["d"]["_x"].tolist() == [[True, False]] * 2
    assert infos["_d"].tolist() == [[True, False]] * 2


def test_an_environments_key_that_vecenv_needs_gets_an_underscore() -> None:
    infos = notes({"env_done": 5}, {"agent_mask": 6})
    assert infos["agent_mask"].all()
    assert infos["agent_mask_"].tolist() == [[0, 6]] * 2
    assert infos["env_done_"].tolist() == [[5, 0]] * 2
    assert infos["_env_done_"].tolist() == [[True, False]] * 2


def test_a_list_of_dicts_says_the_same() -> None:
    game = functools.partial(RandomGame, infos=True, length=3)
    with MultiAgentVecEnv([game] * 2, autoreset_mode="SameStep", num_workers=0) as envs:
        envs.reset(seed=1)
        for _ in range(10):
            infos = envs.step(envs.action_space.sample())[-1]
            listed = list_of_dicts(infos)
            assert len(listed) == 2
            for row, info in enumerate(listed):
                assert info["env_done"] == infos["env_done"][row]
                assert np.array_equal(info["agent_mask"], infos["agent_mask"][row])
                assert ("final_obs" in info) == bool(infos["env_done"][row])
                assert ("final_info" in info) == bool(infos["env_done"][row])
                assert info["common"]["score"] == infos["common"]["score"][row]
                assert np.array_equal(info["time"], infos["time"][row])
                assert np.array_equal(info["_time"], infos["_time"][row])
