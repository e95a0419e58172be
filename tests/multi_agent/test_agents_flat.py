"""Agents as rows of a Gymnasium vector environment: its contract, zero copies, and right episode statistics."""

from __future__ import annotations

import functools
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from agent_games import RandomGame, Scripted
from failing import patiently
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import StepTimeout
from vecenv.front.arguments import HAS_MAX_CONCURRENCY
from vecenv.multi_agent import FlattenAgents, MultiAgentVecEnv
from vecenv.testing import VectorEnvContract, assert_identical


def flat(env_fns: list[Any], padding_done: bool = True, **options: Any) -> FlattenAgents:
    return MultiAgentVecEnv(env_fns, **options).flatten_agents(padding_done=padding_done)


class TestRowsOfOneAgentEach(VectorEnvContract):
    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        return flat([functools.partial(RandomGame, 1, infos=True)] * num_envs, autoreset_mode=autoreset_mode, num_workers=0)


class TestRowsOfAgentsWhoDieApart(VectorEnvContract):
    """Each dies two steps after the other, so that padding has a step of its own to end in."""

    supports_reset_mask: ClassVar[bool] = False

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> VectorEnv:
        lives = {"a": (0, 2), "b": (0, 4), "c": (0, 6)} if num_envs == 3 else {"a": (0, 3)}
        return flat([functools.partial(Scripted, lives)], autoreset_mode=autoreset_mode, num_workers=0)


def test_rows_are_the_same_memory_in_another_shape() -> None:
    envs = MultiAgentVecEnv([Scripted] * 2, num_workers=0, copy=False)
    rows = envs.flatten_agents()
    obs, _ = rows.reset(seed=0)
    batch, _ = envs.reset(seed=0)
    assert np.shares_memory(obs, batch)
    assert obs.shape == (6, 2)
    assert obs in rows.observation_space
    rows.close()
    assert envs.closed


def test_rows_hold_what_the_axis_of_agents_holds() -> None:
    game = functools.partial(RandomGame, infos=True, births=True)
    with MultiAgentVecEnv([game] * 2, num_workers=0) as envs:
        rows = flat([game] * 2, padding_done=False, num_workers=0)
        one, _ = envs.reset(seed=1)
        other, _ = rows.reset(seed=1)
        rng = np.random.default_rng(0)
        for _ in range(20):
            assert_identical(other, one.reshape(6, 3))
            actions = rng.integers(0, 4, 6)
            one, *rest, infos = envs.step(actions.reshape(2, 3))
            other, *flat_rest, flat_infos = rows.step(actions)
            for array, flat_array in zip(rest, flat_rest, strict=True):
                assert_identical(flat_array, array.reshape(6))
            for key in {"agent_mask", "transition_mask", "time", "_time", "word"} & set(infos):
                assert_identical(flat_infos[key], infos[key].reshape(6))
            assert_identical(flat_infos["env_done"], np.repeat(infos["env_done"], 3))
            assert_identical(flat_infos["common"]["score"], np.repeat(infos["common"]["score"], 3))
        rows.close()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_episode_statistics_are_those_of_the_agents(mode: AutoresetMode) -> None:
    rows = gymnasium.wrappers.vector.RecordEpisodeStatistics(flat([Scripted] * 2, autoreset_mode=mode, num_workers=0))
    rows.reset(seed=0)
    episodes: list[tuple[int, float, int]] = []
    for _ in range(21 if mode is AutoresetMode.NEXT_STEP else 18):
        infos = rows.step(np.zeros(6, np.int64))[-1]
        if "episode" in infos:
            found = infos["episode"]
            ended = np.flatnonzero(infos["_episode"]).tolist()
            episodes.extend((row % 3, float(found["r"][row]), int(found["l"][row])) for row in ended)
    rows.close()
    real = [episode for episode in episodes if episode[1] > 0]
    wanted = {(0, 2.0, 2), (1, 4.0, 4), (2, 6.0, 6)}
    if mode is AutoresetMode.SAME_STEP and not HAS_MAX_CONCURRENCY:  # before 1.4 the wrapper loses first steps
        wanted |= {(agent, paid - 1, length - 1) for agent, paid, length in wanted}
    assert set(real) == wanted
    assert len(real) == 18
    assert {agent for agent, paid, _ in episodes if paid == 0} == {0, 1}


def test_padding_ends_with_the_episode_unless_told_otherwise() -> None:
    for padding_done in (True, False):
        rows = flat([Scripted], padding_done=padding_done, num_workers=0)
        rows.reset(seed=0)
        ends = [rows.step(np.zeros(3, np.int64))[2].tolist() for _ in range(6)]
        assert ends[1] == [True, False, False]
        assert ends[3] == [False, True, False]
        assert ends[5] == [padding_done, padding_done, True]
        rows.close()


def test_same_step_gives_each_row_its_last_observation_on_its_last_step() -> None:
    rows = flat([Scripted], autoreset_mode="SameStep", num_workers=0)
    rows.reset(seed=0)
    for t in range(1, 7):
        *_, terminations, _, infos = rows.step(np.zeros(3, np.int64))
        if terminations.any():
            assert np.array_equal(infos["_final_obs"], terminations)
        if t == 2:
            assert infos["final_obs"][0].tolist() == [102, 102]
        if t == 6:
            assert [value.tolist() for value in infos["final_obs"]] == [[0, 0], [0, 0], [106, 106]]
    rows.close()


def test_a_reset_mask_chooses_whole_environments() -> None:
    rows = flat([Scripted] * 2, num_workers=0)
    rows.reset(seed=0)
    rows.step(np.zeros(6, np.int64))
    with pytest.raises(ValueError, match=r"reset_mask.*envs \[1\]"):
        rows.reset(options={"reset_mask": np.array([False] * 5 + [True])})
    mask = np.array([False] * 3 + [True] * 3)
    obs, infos = rows.reset(seed=[1, 2, 3, 4, 5, 6], options={"reset_mask": mask})
    assert obs[:, 0].tolist() == [101] * 3 + [100] * 3
    assert np.array_equal(infos["_agent_mask"], mask)
    assert rows.get_attr("seeds")[3] == [1, 4]
    with pytest.raises(ValueError, match="6"):
        rows.reset(seed=[1, 2])
    rows.close()


def test_attributes_are_those_of_the_environments() -> None:
    rows = flat([Scripted] * 2, num_workers=0)
    rows.set_attr("speed", 2.0)
    assert rows.get_attr("speed") == (2.0,) * 6
    rows.set_attr("speed", [1, 2, 3, 4, 5, 6])
    assert rows.get_attr("speed") == (1, 1, 1, 4, 4, 4)
    assert rows.stats()["steps"] == 0
    assert "num_envs=6" in repr(rows)
    rows.close()


def test_only_the_stacked_layout_can_be_flat() -> None:
    with MultiAgentVecEnv([Scripted], layout="agents", num_workers=0) as envs, pytest.raises(ValueError, match="'agents'"):
        envs.flatten_agents()


class Slow(RandomGame):
    """A game whose steps take a second."""

    def step(self, actions: Any) -> Any:
        time.sleep(1.0)
        return super().step(actions)


def test_a_step_that_timed_out_is_dropped_by_the_next_reset() -> None:
    envs = flat([functools.partial(Slow, 1)], num_workers=1, step_timeout=0.5)
    envs.reset(seed=3)
    first = envs.reset(seed=3)[0]
    with pytest.raises(StepTimeout):
        envs.step(np.zeros(1, np.int64))
    assert_identical(patiently(lambda: envs.reset(seed=3)[0]), first)
    envs.close()
