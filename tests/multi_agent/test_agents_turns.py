"""Trajectories of PettingZoo's games, turn-based or parallel, equal a plain loop over the same game."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

pytest.importorskip("pettingzoo")

from sampling import each_once
from test_agents_trajectories import assert_same_trajectory

from vecenv.multi_agent import MultiAgentVecEnv, TurnBased, from_aec

GAMES: dict[str, tuple[str, dict[str, Any], str]] = {  # name -> module, options, required package
    "tictactoe": ("pettingzoo.classic.tictactoe_v3", {}, "pygame"),
    "connect_four": ("pettingzoo.classic.connect_four_v3", {"render_mode": "rgb_array"}, "pygame"),
    "rock_paper_scissors": ("pettingzoo.classic.rps_v2", {"max_cycles": 5}, "pygame"),
    "spread": ("mpe2.simple_spread_v3", {"max_cycles": 6}, "mpe2"),
    "speaker_listener": ("mpe2.simple_speaker_listener_v4", {"max_cycles": 6, "continuous_actions": True}, "mpe2"),
    "pistonball": ("pettingzoo.butterfly.pistonball_v6", {"n_pistons": 3, "max_cycles": 4}, "pymunk"),
    "knights": ("pettingzoo.butterfly.knights_archers_zombies_v11", {"max_cycles": 8}, "pygame"),
}


def build_game(name: str) -> Any:
    """Build a game. The classic games are turn-based."""
    module, options, _ = GAMES[name]
    library = importlib.import_module(module)
    return from_aec(library.env(**options)) if "classic" in module else library.parallel_env(**options)


def make_game_fn(name: str) -> Any:
    """Return a function that builds a game, or skip the test if its package is missing."""
    pytest.importorskip(GAMES[name][2])
    return functools.partial(build_game, name)


@pytest.mark.parametrize(
    ("game", "num_workers", "mode"),
    each_once(["spread", "speaker_listener", "tictactoe", "rock_paper_scissors"], [0, 2], AutoresetMode),
)
def test_pettingzoo_game_equals_a_plain_loop(game: str, num_workers: int, mode: AutoresetMode) -> None:
    games = [make_game_fn(game)] * 2
    with MultiAgentVecEnv(games, num_workers=num_workers, autoreset_mode=mode) as envs:
        assert_same_trajectory(envs, games, 30)


@pytest.mark.long
@pytest.mark.parametrize("game", ["pistonball", "knights", "connect_four"])
def test_slow_pettingzoo_game_equals_a_plain_loop(game: str) -> None:
    games = [make_game_fn(game)] * 2
    with MultiAgentVecEnv(games, num_workers=2, autoreset_mode=AutoresetMode.SAME_STEP) as envs:
        assert_same_trajectory(envs, games, 60 if game == "connect_four" else 18)
        if game == "connect_four":
            frames = envs.render()
            assert frames is not None
            assert frames[0].ndim == 3


def test_agents_of_a_turn_based_game_act_in_turn() -> None:
    with MultiAgentVecEnv([make_game_fn("tictactoe")] * 2, num_workers=0) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["agent_mask"].tolist() == [[True, False]] * 2
        assert infos["action_mask"].shape == (2, 2, 9)
        rewards = np.zeros((2, 2))
        moves = [0, 3, 1, 4, 2]  # the first player wins with the upper row
        for t, move in enumerate(moves):
            _, step_rewards, terminations, _, infos = envs.step(np.full((2, 2), move))
            rewards += step_rewards
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


def build_wrapped_tictactoe() -> Any:
    from pettingzoo.utils.wrappers import BaseParallelWrapper

    return BaseParallelWrapper(build_game("tictactoe"))


def test_agents_of_a_wrapped_turn_based_game_act_in_turn() -> None:
    pytest.importorskip("pygame")
    with MultiAgentVecEnv([build_wrapped_tictactoe], num_workers=0) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["agent_mask"].tolist() == [[True, False]]


@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3"])
def test_rewards_of_a_turn_based_game_equal_agent_iter(name: str) -> None:
    pytest.importorskip("pygame")
    module = importlib.import_module(f"pettingzoo.classic.{name}")
    rng = np.random.default_rng(0)
    with MultiAgentVecEnv([lambda: from_aec(module.env())], num_workers=1) as envs:
        for seed in range(4):
            game = module.env()
            game.reset(seed=seed)
            obs, infos = envs.reset(seed=seed)
            sums, expected = np.zeros(2), dict.fromkeys(game.possible_agents, 0.0)
            for agent in game.agent_iter():
                observation, reward, terminated, truncated, _ = game.last()
                expected[agent] += reward
                if terminated or truncated:
                    game.step(None)
                    continue
                index = envs.agent_index[agent]
                assert infos["agent_mask"][0].tolist() == [index == 0, index == 1]
                assert np.array_equal(obs["observation"][0, index], observation["observation"])
                assert np.array_equal(infos["action_mask"][0, index], observation["action_mask"] != 0)
                move = rng.choice(np.flatnonzero(observation["action_mask"]))
                game.step(move)
                obs, rewards, _, _, infos = envs.step(np.full((1, 2), move))
                sums += rewards[0]
            assert infos["env_done"].all()
            assert sums.tolist() == list(expected.values())
            game.close()


def test_from_aec_of_a_parallel_game_uses_the_conversion_of_pettingzoo() -> None:
    spread = pytest.importorskip("mpe2.simple_spread_v3")

    def env_fn() -> Any:
        return from_aec(spread.env(max_cycles=3))

    game = env_fn()
    assert not isinstance(game, TurnBased)
    game.close()
    with MultiAgentVecEnv([env_fn] * 2, num_workers=0) as envs:
        assert_same_trajectory(envs, [env_fn] * 2, 12)


def test_step_without_the_action_of_the_agent_to_move_raises(closes: Any) -> None:
    game = closes(make_game_fn("tictactoe")())
    game.reset(seed=0)
    with pytest.raises(ValueError, match="player_1"):
        game.step({"player_2": 0})
    assert "TurnBased" in repr(game)


class GameWithoutMetadata:
    """A turn-based game of four moves; ``AECEnv`` declares no ``metadata``."""

    possible_agents = ("x", "y")

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(9)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def observe(self, agent: str) -> int:
        return self.time

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.time, self.agents, self.agent_selection = 0, list(self.possible_agents), "x"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def step(self, action: Any) -> None:
        if action is None:
            self.agents = []
            return
        self.time += 1
        self.agent_selection = self.possible_agents[self.time % 2]
        self.terminations = dict.fromkeys(self.agents, self.time == 4)


def test_turn_based_game_without_metadata_steps() -> None:
    with MultiAgentVecEnv([lambda: from_aec(GameWithoutMetadata())], num_workers=0) as envs:
        envs.reset(seed=0)
        assert [bool(envs.step(np.zeros((1, 2), np.int64))[4]["env_done"][0]) for _ in range(4)] == [False] * 3 + [True]
