"""Rows of pools with several players: put in order, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("envpool")

import envpool

from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool.rows import PlayerSorter

KEYS = ["info:env_id", "info:players.env_id", "done", "reward"]
SPECS = {key: SimpleNamespace(shape=shape) for key, shape in zip(KEYS, ([], [-1], [], [-1]), strict=True)}


def states(env_id: list[int], players_env_id: list[int], reward: list[float]) -> list[Any]:
    ids = np.array(env_id, np.int32)
    return [ids, np.array(players_env_id, np.int32), ids % 2 == 0, np.array(reward, np.float32)]


def test_a_vector_env_of_several_players_names_the_multi_agent_class() -> None:
    with pytest.raises(ValueError, match=r"2 players.*MultiAgentVecEnv"):
        EnvPoolVectorEnv("TicTacToe-v1", 4)


def test_rows_in_order_are_not_copied() -> None:
    given = states([0, 1], [0, 0, 1, 1], [1, 2, 3, 4])
    rows = PlayerSorter(KEYS, SPECS, 2)(given)
    assert rows.players["reward"].tolist() == [[1, 2], [3, 4]]
    assert np.shares_memory(rows.players["reward"], given[3])
    assert rows.envs["done"] is given[2]
    assert rows.mask.all()


def test_rows_are_sorted_by_environment_and_players_keep_their_order() -> None:
    rows = PlayerSorter(KEYS, SPECS, 2)(states([5, 2, 3], [5, 5, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6]))
    assert rows.env_ids.tolist() == [2, 3, 5]
    assert rows.players["reward"].tolist() == [[3, 4], [5, 6], [1, 2]]
    assert rows.envs["done"].tolist() == [True, False, False]


def test_absent_players_are_masked_and_zero() -> None:
    rows = PlayerSorter(KEYS, SPECS, 3)(states([1, 0], [1, 0, 0], [7, 8, 9]))
    assert rows.mask.tolist() == [[True, True, False], [True, False, False]]
    assert rows.players["reward"].tolist() == [[8, 9, 0], [7, 0, 0]]


def test_an_absent_player_leaves_its_own_place_empty_where_players_are_numbered() -> None:
    keys = [*KEYS, "info:players.id"]
    specs = {**SPECS, "info:players.id": SimpleNamespace(shape=[-1])}
    given = [*states([0, 1], [0, 1, 1], [7, 8, 9]), np.array([1, 1, 0], np.int32)]
    rows = PlayerSorter(keys, specs, 2)(given)
    assert rows.mask.tolist() == [[False, True], [True, True]]
    assert rows.players["reward"].tolist() == [[0, 7], [9, 8]]


def test_actions_go_back_without_those_of_absent_players() -> None:
    sorter = PlayerSorter(KEYS, SPECS, 2)
    actions = np.array([[1, 2], [3, 4]], np.int32)
    mask = np.array([[True, False], [True, True]])
    sent = sorter.flatten(actions, np.array([4, 7]), mask)
    assert [array.tolist() for array in sent] == [[4, 7], [4, 7, 7], [1, 3, 4]]


@pytest.mark.parametrize("wrong", [([0], [0, 0, 0]), ([0], [0, 1]), ([1], [0, 1])])
def test_rows_that_make_no_sense_are_refused(wrong: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="player"):
        PlayerSorter(KEYS, SPECS, 2)(states(*wrong, [0.0] * len(wrong[1])))


@pytest.mark.parametrize("task_id", ["TicTacToe-v1", "SparrowMahjong-v1", "IntersectionMultiAgent-v0"])
def test_a_real_pool_comes_in_order(task_id: str) -> None:
    pool = envpool.make_gymnasium(task_id, num_envs=16, num_threads=2, seed=list(range(16)))
    players = pool.config["max_num_players"]
    sorter = PlayerSorter(pool._state_keys, pool.spec.state_array_spec, players)
    pool._reset(np.arange(16, dtype=np.int32))
    for _ in range(20):
        rows = sorter(pool._recv())
        assert rows.env_ids.tolist() == list(range(16))
        assert rows.mask.all()
        assert (rows.players["info:players.env_id"] == np.arange(16)[:, None]).all()
        if "info:players.id" in rows.players:
            assert (rows.players["info:players.id"] == np.arange(players)).all()
        actions = np.zeros((16, players), np.int32)
        if "info:legal_action_mask" in rows.envs:
            actions[:] = rows.envs["info:legal_action_mask"].argmax(axis=1)[:, None]
        pool._send(sorter.flatten(actions, rows.env_ids, rows.mask))
