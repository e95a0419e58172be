"""Pools with several players: rows are sorted by environment, and interrupted calls lose none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.error import NoAsyncCallError
from interruption import KINDS, Interruption, moments

pytest.importorskip("envpool")

import envpool

from vecenv.backends import EnvPoolVectorEnv
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.multi_agent.player_pool import PlayerRows

KEYS = {"info:env_id": [], "info:players.env_id": [-1], "done": [], "reward": [-1], "obs": [-1]}


def make_player_rows(players: int, keys: dict[str, list[int]] = KEYS) -> PlayerRows:
    specs = {key: SimpleNamespace(shape=shape) for key, shape in keys.items()}
    task: Any = SimpleNamespace(
        state_keys=[*keys], state_specs=specs, max_num_players=players, action_dtypes=[np.int32], id="a task",
        observation_space=spaces.Discrete(2), action_space=spaces.Discrete(2), action_keys=["action"],
    )  # fmt: skip
    return PlayerRows(task, 8)


def make_states(env_id: list[int], players_env_id: list[int], reward: list[float]) -> list[Any]:
    ids, owners = np.array(env_id, np.int32), np.array(players_env_id, np.int32)
    return [ids, owners, ids % 2 == 0, np.array(reward, np.float32), owners]


def test_error_for_a_multi_player_task_names_the_multi_agent_class() -> None:
    with pytest.raises(ValueError, match=r"2 players.*MultiAgentVecEnv"):
        EnvPoolVectorEnv("TicTacToe-v1", 4)


def test_rows_in_order_are_not_copied() -> None:
    arrays = make_states([0, 1], [0, 0, 1, 1], [1, 2, 3, 4])
    rows = make_player_rows(2).sort_by_env(arrays)
    assert rows.players["reward"].tolist() == [[1, 2], [3, 4]]
    assert np.shares_memory(rows.players["reward"], arrays[3])
    assert rows.envs["done"] is arrays[2]
    assert rows.mask.all()


def test_rows_are_sorted_by_environment_and_players_keep_their_order() -> None:
    rows = make_player_rows(2).sort_by_env(make_states([5, 2, 3], [5, 5, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6]))
    assert rows.env_ids.tolist() == [2, 3, 5]
    assert rows.players["reward"].tolist() == [[3, 4], [5, 6], [1, 2]]
    assert rows.envs["done"].tolist() == [True, False, False]


def test_absent_players_are_masked_and_zero() -> None:
    rows = make_player_rows(3).sort_by_env(make_states([1, 0], [1, 0, 0], [7, 8, 9]))
    assert rows.mask.tolist() == [[True, True, False], [True, False, False]]
    assert rows.players["reward"].tolist() == [[8, 9, 0], [7, 0, 0]]


def test_row_of_an_absent_player_is_masked_if_players_have_ids() -> None:
    arrays = [*make_states([0, 1], [0, 1, 1], [7, 8, 9]), np.array([1, 1, 0], np.int32)]
    rows = make_player_rows(2, {**KEYS, "info:players.id": [-1]}).sort_by_env(arrays)
    assert rows.mask.tolist() == [[False, True], [True, True]]
    assert rows.players["reward"].tolist() == [[0, 7], [9, 8]]


def test_payload_has_no_actions_of_absent_players() -> None:
    actions = np.array([[1, 2], [3, 4]], np.int32)
    mask = np.array([[True, False], [True, True]])
    payload = make_player_rows(2).build_payload(actions, np.array([4, 7]), mask)
    assert [array.tolist() for array in payload] == [[4, 7], [4, 7, 7], [1, 3, 4]]


@pytest.mark.parametrize("wrong", [([0], [0, 0, 0]), ([0], [0, 1]), ([1], [0, 1])])
def test_invalid_rows_raise(wrong: tuple[list[int], list[int]]) -> None:
    with pytest.raises(ValueError, match="player"):
        make_player_rows(2).sort_by_env(make_states(*wrong, [0.0] * len(wrong[1])))


@pytest.mark.parametrize("task_id", ["TicTacToe-v1", "SparrowMahjong-v1", "IntersectionMultiAgent-v0"])
def test_rows_of_a_real_pool_are_in_order(task_id: str) -> None:
    pool = envpool.make_gymnasium(task_id, num_envs=16, num_threads=2, seed=list(range(16)))
    players = pool.config["max_num_players"]
    player_rows = make_player_rows(players, {key: spec.shape for key, spec in pool.spec.state_array_spec.items()})
    pool._reset(np.arange(16, dtype=np.int32))
    for _ in range(20):
        rows = player_rows.sort_by_env(pool._recv())
        assert rows.env_ids.tolist() == list(range(16))
        assert rows.mask.all()
        assert (rows.players["info:players.env_id"] == np.arange(16)[:, None]).all()
        if "info:players.id" in rows.players:
            assert (rows.players["info:players.id"] == np.arange(players)).all()
        actions = np.zeros((16, players), np.int32)
        if "info:legal_action_mask" in rows.envs:
            actions[:] = rows.envs["info:legal_action_mask"].argmax(axis=1)[:, None]
        pool._send(player_rows.build_payload(actions, rows.env_ids, rows.mask))


# -- calls of MultiAgentVecEnv ------------------------------------------------------------------------------------------


@pytest.fixture
def tic_tac_toe() -> Iterator[Callable[..., MultiAgentVecEnv]]:
    """Yield a function that builds games. They are closed after the test."""
    built: list[MultiAgentVecEnv] = []

    def build(num_envs: int = 4, **options: Any) -> MultiAgentVecEnv:
        built.append(MultiAgentVecEnv.from_envpool("TicTacToe-v1", num_envs, num_threads=1, **options))
        return built[-1]

    yield build
    for envs in built:
        envs.close()


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_recv_of_any_count_returns_reset_and_stepped_games(tic_tac_toe: Any, batch_size: int) -> None:
    envs = tic_tac_toe(batch_size=batch_size)
    _, infos = envs.reset(seed=0)
    envs.step(infos["action_mask"].argmax(axis=-1))
    envs.reset_async(env_id=[1])
    envs.send(np.ones((3, 2), np.int64), [3, 0, 2])
    boards = {}
    for count in (1, 3):
        _, _, _, _, infos = envs.recv(count=count)
        assert infos["env_id"].dtype == np.intp
        assert infos["_env_id"].all()
        assert len(infos["env_id"]) == count
        assert envs.last_received.tolist() == infos["env_id"].tolist()
        boards |= dict(zip(infos["env_id"].tolist(), (infos["board"] >= 0).sum(axis=(1, 2)).tolist(), strict=True))
    assert boards == {0: 2, 1: 0, 2: 2, 3: 2}
    assert envs.stats()["in_flight"] == 0
    with pytest.raises(NoAsyncCallError):
        envs.recv(count=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [4, 2])
def test_interruptions_neither_lose_nor_repeat_rows(tic_tac_toe: Any, batch_size: int, kind: str) -> None:
    """Call the pool directly, because ``MultiAgentVecEnv`` keeps no state about rows that it has not received."""
    pool, reference = tic_tac_toe(batch_size=batch_size)._rows, tic_tac_toe()._rows
    for player_pool in (pool, reference):
        player_pool.reset_async(seed=3)
        player_pool.reset_wait()
    for move, interruption in enumerate(moments(kind, least=10)):
        actions = np.full((4, 2), move % 9)
        reference.step_async(actions)
        expected = reference.step_wait()
        with interruption:
            pool.send(actions, np.arange(4))
        if not pool.stats()["in_flight"]:
            pool.send(actions, np.arange(4))
        # if send was interrupted, also interrupt recv, at a different moment in each round
        second_interruption = Interruption(kind, interruption._left % 60 if interruption.fired else 10**6)
        parts = []
        while sum(len(part[1]) for part in parts) < 4:
            with second_interruption:
                parts.append(pool.recv(30.0))
        ids = np.concatenate([part[4]["env_id"] for part in parts])
        assert sorted(ids.tolist()) == [0, 1, 2, 3]
        for field in ("obs", "signals"):
            rows = np.concatenate([part[0][field] for part in parts])
            np.testing.assert_array_equal(rows[np.argsort(ids)], expected[0][field])
