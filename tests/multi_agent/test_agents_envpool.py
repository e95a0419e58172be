"""EnvPool's games of several players in ``MultiAgentVecEnv``: masks, turns, seeds, and players as rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("envpool")

from vecenv.multi_agent import MultiAgentVecEnv


def choose_allowed_actions(infos: dict[str, np.ndarray]) -> np.ndarray:
    return infos["action_mask"].argmax(axis=-1)


def test_tic_tac_toe_has_turns_and_rewards_of_both_players() -> None:
    with MultiAgentVecEnv.from_envpool("TicTacToe-v1", 4, num_threads=1) as envs:
        assert envs.possible_agents == ["player_0", "player_1"]
        obs, infos = envs.reset(seed=0)
        assert obs.shape == (4, 2, 3, 3, 2)
        assert obs in envs.observation_space
        assert infos["board"].shape == (4, 3, 3)
        episodes = 0
        finished = np.zeros(4, np.bool_)
        for _ in range(40):
            acting = infos["agent_mask"]
            assert (acting.sum(axis=1) == ~finished).all()
            mask = infos["action_mask"]
            assert mask.shape == (4, 2, 9)
            assert mask[~acting].all()
            obs, rewards, terminations, truncations, infos = envs.step(choose_allowed_actions(infos))
            assert np.array_equal(infos["transition_mask"], acting)
            assert not truncations.any()
            assert np.array_equal(infos["env_done"], terminations.all(axis=1))
            assert (rewards.sum(axis=1) == 0).all()
            assert not rewards[finished].any()
            assert not terminations[finished].any()
            finished = infos["env_done"]
            episodes += int(finished.sum())
        assert episodes > 8


def test_step_of_go_moves_only_the_player_to_move() -> None:
    """If the pool received more than one action per environment, it would end the process."""
    with MultiAgentVecEnv.from_envpool("Go9x9-v1", 2, num_threads=1) as envs:
        _, infos = envs.reset(seed=0)
        for move in range(3):
            acting = infos["agent_mask"]
            _, _, _, _, infos = envs.step(np.where(acting, move, 80))
            assert np.array_equal(infos["agent_mask"], ~acting)
        assert np.count_nonzero(infos["board"].reshape(2, -1)[:, :3], axis=1).tolist() == [3, 3]


def test_step_sends_the_action_of_the_player_to_move() -> None:
    with MultiAgentVecEnv.from_envpool("TicTacToe-v1", 4, num_threads=1) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["agent_mask"][:, 0].any()
        assert infos["agent_mask"][:, 1].any()
        for move in (4, 0, 8, 7):
            actions = np.where(infos["agent_mask"], move, 5)  # 5 for the player that does not move
            *_, infos = envs.step(actions)
        assert infos["board"].reshape(4, 9).tolist() == [[1, -1, -1, -1, 0, -1, -1, 1, 0]] * 4
        assert not infos["env_done"].any()


@pytest.mark.parametrize("batch_size", [None, 2])
def test_action_out_of_range_raises_and_sends_nothing(batch_size: int | None) -> None:
    with MultiAgentVecEnv.from_envpool("TicTacToe-v1", 4, batch_size=batch_size, num_threads=1) as envs:
        *_, infos = envs.reset(seed=0)
        for wrong in (9, -1, 2**32):
            with pytest.raises(ValueError, match="actions must be from 0 to 8"):
                envs.step(np.full((4, 2), wrong))
        *_, infos = envs.step(np.where(infos["agent_mask"], 4, -1))  # -1 for the player that does not move
        assert not infos["env_done"].any()
        envs.send(choose_allowed_actions(infos))
        *_, infos = envs.recv()
        with pytest.raises(ValueError, match="actions must be from 0 to 8"):
            envs.send(np.full((batch_size or 4, 2), 9))
        envs.send(choose_allowed_actions(infos))
        assert not envs.recv()[-1]["env_done"].any()


def test_highway_players_act_simultaneously_and_seeds_repeat_games() -> None:
    games = []
    for _ in range(2):
        with MultiAgentVecEnv.from_envpool("IntersectionMultiAgent-v0", 3, num_threads=1) as envs:
            envs.reset(seed=5)
            results = [envs.step(np.full((3, 2), 1)) for _ in range(10)]
            games.append([result[0] for result in results] + [result[1] for result in results])
            assert results[0][4]["agent_mask"].all()
            assert results[0][4]["speed"].shape == (3, 2)
            assert results[0][4]["crashed"].dtype == np.bool_
    for one, other in zip(*games, strict=True):
        assert np.array_equal(one, other)


def test_reset_mask_error_names_how_to_reset_some_games() -> None:
    advice = r"reset_async\(env_id=...\) and recv\(\) with a batch_size that divides the number of these environments"
    for batch_size, some in ((None, range(4)), (2, [1, 3]), (1, [2])):
        with MultiAgentVecEnv.from_envpool("TicTacToe-v1", 4, batch_size=batch_size, num_threads=1) as envs:
            *_, infos = envs.reset(seed=0)
            *_, infos = envs.step(choose_allowed_actions(infos))
            with pytest.raises(NotImplementedError, match=advice):
                envs.reset(options={"reset_mask": np.isin(range(4), some)})
            envs.reset_async(env_id=some)
            *_, infos = envs.recv()
            assert infos["env_id"].tolist() == list(some)
            assert (infos["board"] == -1).all()


def test_flatten_agents_has_a_row_per_player_and_unsupported_calls_raise() -> None:
    envs = MultiAgentVecEnv.from_envpool("TicTacToe-v1", 2, num_threads=1)
    with pytest.raises(NotImplementedError, match="render"):
        envs.render()
    with pytest.raises(NotImplementedError, match="cannot `exec_func`"):
        envs.exec_func(len)
    assert "TicTacToe-v1" in repr(envs)
    rows = envs.flatten_agents()
    obs, _ = rows.reset(seed=0)
    assert obs.shape == (4, 3, 3, 2)
    rows.step(np.zeros(4, np.int64))
    assert envs.stats()["steps"] == 2
    rows.close()
    assert envs.closed


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"reward_dtype": int}, "`reward_dtype` must be a float type, got int64"),
        ({"seed_stride": 1.5}, "`seed_stride` must be an int, got 1.5"),
        ({"max_episode_steps": 0}, "max_episode_steps must be from 1"),
    ],
)
def test_from_envpool_with_wrong_options_raises(option: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MultiAgentVecEnv.from_envpool("TicTacToe-v1", 2, num_threads=1, **option)
