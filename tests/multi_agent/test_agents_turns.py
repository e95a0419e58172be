"""Turn-based games and real ones: what a plain loop over the same PettingZoo environment gives."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

pytest.importorskip("pettingzoo")

from sampling import each_once
from test_agents_trajectories import assert_same_trajectory

from vecenv.multi_agent import MultiAgentVecEnv, TurnBased, from_aec


def tictactoe() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return from_aec(tictactoe_v3.env())


def connect_four() -> Any:
    from pettingzoo.classic import connect_four_v3

    return from_aec(connect_four_v3.env(render_mode="rgb_array"))


def rock_paper_scissors() -> Any:
    from pettingzoo.classic import rps_v2

    return from_aec(rps_v2.env(max_cycles=5))


def spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=6)


def speaker_listener() -> Any:
    from mpe2 import simple_speaker_listener_v4

    return simple_speaker_listener_v4.parallel_env(max_cycles=6, continuous_actions=True)


def pistonball() -> Any:
    from pettingzoo.butterfly import pistonball_v6

    return pistonball_v6.parallel_env(n_pistons=3, max_cycles=4)


def knights() -> Any:
    from pettingzoo.butterfly import knights_archers_zombies_v11

    return knights_archers_zombies_v11.parallel_env(max_cycles=8)


NEEDS = {spread: "mpe2", speaker_listener: "mpe2", pistonball: "pymunk", knights: "pygame", connect_four: "pygame",
         tictactoe: "pygame", rock_paper_scissors: "pygame"}  # fmt: skip


@pytest.mark.parametrize(
    ("game", "num_workers", "mode"),
    each_once([spread, speaker_listener, tictactoe, rock_paper_scissors], [0, 2], AutoresetMode),
)
def test_a_real_game_is_what_a_plain_loop_gives(game: Any, num_workers: int, mode: AutoresetMode) -> None:
    pytest.importorskip(NEEDS[game])
    with MultiAgentVecEnv([game] * 2, num_workers=num_workers, autoreset_mode=mode) as envs:
        assert_same_trajectory(envs, [game] * 2, 30)


@pytest.mark.long
@pytest.mark.parametrize("game", [pistonball, knights, connect_four])
def test_a_heavier_real_game_is_what_a_plain_loop_gives(game: Any) -> None:
    pytest.importorskip(NEEDS[game])
    with MultiAgentVecEnv([game] * 2, num_workers=2, autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        assert_same_trajectory(envs, [game] * 2, 60 if game is connect_four else 18)
        if game is connect_four:
            frames = envs.render()
            assert frames is not None
            assert frames[0].ndim == 3


def test_in_a_turn_based_game_one_agent_acts_at_a_time() -> None:
    pytest.importorskip("pygame")
    with MultiAgentVecEnv([tictactoe] * 2, num_workers=0) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["agent_mask"].tolist() == [[True, False]] * 2
        assert infos["action_mask"].shape == (2, 2, 9)
        rewards = np.zeros((2, 2))
        moves = [0, 3, 1, 4, 2]  # the first player wins with the upper row
        for t, move in enumerate(moves):
            _, paid, terminations, _, infos = envs.step(np.full((2, 2), move))
            rewards += paid
            mover = t % 2
            assert infos["transition_mask"].tolist() == [[mover == 0, mover == 1]] * 2
            if t < 4:
                assert infos["agent_mask"].tolist() == [[mover == 1, mover == 0]] * 2
                assert not infos["action_mask"][:, 1 - mover, move].any()
                assert infos["action_mask"][:, mover].all()
        assert rewards.tolist() == [[1, -1]] * 2
        assert terminations.all()
        assert infos["env_done"].all()
        assert not infos["agent_mask"].any()


def wrapped_tictactoe() -> Any:
    from pettingzoo.utils.wrappers import BaseParallelWrapper

    return BaseParallelWrapper(tictactoe())


def test_a_wrapper_around_a_turn_based_game_changes_nothing() -> None:
    pytest.importorskip("pygame")
    with MultiAgentVecEnv([wrapped_tictactoe], num_workers=0) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["agent_mask"].tolist() == [[True, False]]


@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3"])
def test_a_game_pays_what_its_own_loop_over_turns_pays(name: str) -> None:
    pytest.importorskip("pygame")
    module = importlib.import_module(f"pettingzoo.classic.{name}")
    rng = np.random.default_rng(0)
    with MultiAgentVecEnv([lambda: from_aec(module.env())], num_workers=1) as envs:
        for seed in range(4):
            game = module.env()
            game.reset(seed=seed)
            obs, infos = envs.reset(seed=seed)
            sums, wanted = np.zeros(2), dict.fromkeys(game.possible_agents, 0.0)
            for agent in game.agent_iter():
                seen, paid, terminated, truncated, _ = game.last()
                wanted[agent] += paid
                if terminated or truncated:
                    game.step(None)
                    continue
                index = envs.agent_index[agent]
                assert infos["agent_mask"][0].tolist() == [index == 0, index == 1]
                assert np.array_equal(obs["observation"][0, index], seen["observation"])
                assert np.array_equal(infos["action_mask"][0, index], seen["action_mask"] != 0)
                move = rng.choice(np.flatnonzero(seen["action_mask"]))
                game.step(move)
                obs, rewards, _, _, infos = envs.step(np.full((1, 2), move))
                sums += rewards[0]
            assert infos["env_done"].all()
            assert sums.tolist() == list(wanted.values())
            game.close()


def test_the_adapter_leaves_a_parallel_game_to_pettingzoo() -> None:
    pytest.importorskip("mpe2")
    from mpe2 import simple_spread_v3

    game = from_aec(simple_spread_v3.env(max_cycles=3))
    assert not isinstance(game, TurnBased)
    game.close()
    fn = functools.partial(_spread_by_aec)
    with MultiAgentVecEnv([fn] * 2, num_workers=0) as envs:
        assert_same_trajectory(envs, [fn] * 2, 12)


def _spread_by_aec() -> Any:
    from mpe2 import simple_spread_v3

    return from_aec(simple_spread_v3.env(max_cycles=3))


def test_a_move_without_the_mover_is_refused() -> None:
    pytest.importorskip("pygame")
    game = tictactoe()
    game.reset(seed=0)
    with pytest.raises(ValueError, match="player_1"):
        game.step({"player_2": 0})
    assert game.state_space if hasattr(game, "state_space") else True
    assert "TurnBased" in repr(game)
    game.close()
