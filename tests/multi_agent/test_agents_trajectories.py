"""Trajectories of multi-agent environments equal a plain loop, and loaded snapshots continue them."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import numpy as np
import pytest
from agent_games import RandomGame
from gymnasium.vector import AutoresetMode
from plain_loop import PlainLoop, assert_row_equals, select_agent
from sampling import each_once, each_pair

import vecenv
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.testing import assert_identical

# --- Results equal those of a plain loop over the same environments, bit for bit -----------------

NUM_ENVS = 3
GAMES: dict[str, dict[str, Any]] = {
    "deaths": {"infos": True},
    "births": {"births": True, "count": 4},
    "different spaces": {"different_spaces": True, "count": 4},
    "masks in observations": {"masks": "obs"},
    "masks in infos": {"masks": "info", "births": True},
}
WORKERS = [0, 1, 2, NUM_ENVS]


def make_fns(game: str, n: int = NUM_ENVS) -> list[Any]:
    return [functools.partial(RandomGame, **GAMES[game])] * n


def sample_actions(envs: MultiAgentVecEnv, rng: np.random.Generator, infos: Any) -> tuple[Any, list[dict[Any, Any]]]:
    """Return a batch of allowed random actions, and the same actions in a dict by agent for each environment."""
    sampled = envs.action_space.sample()
    masks = infos.get("action_mask")
    if masks is not None and envs.layout == "stack":
        for row, column in np.ndindex(sampled.shape):
            sampled[row, column] = rng.choice(np.flatnonzero(masks[row, column]))
    by_agent = [
        {agent: select_agent(envs, sampled, row, agent) for agent in envs.possible_agents} for row in range(envs.num_envs)
    ]
    return sampled, by_agent


def assert_same_trajectory(envs: MultiAgentVecEnv, env_fns: list[Any], steps: int, seed: int = 7, pad: float = 0) -> None:
    """Assert that a trajectory of ``envs`` equals that of a plain loop over ``env_fns``."""
    mode = envs.autoreset_mode
    loop = PlainLoop(env_fns, mode)
    rng = np.random.default_rng(0)
    envs.action_space.seed(0)
    seeds = [seed + index * envs.seed_stride for index in range(envs.num_envs)]
    result: Any = envs.reset(seed=seed)
    for row, expected_row in enumerate(loop.reset(seeds)):
        assert_row_equals(envs, row, expected_row, result, pad)
    sums, expected_sums = np.zeros(envs.num_agents), np.zeros(envs.num_agents)
    episodes = 0
    for t in range(steps):
        actions, by_agent = sample_actions(envs, rng, result[-1])
        result = envs.step(actions)
        expected = loop.step(by_agent)
        for row, expected_row in enumerate(expected):
            assert_row_equals(envs, row, expected_row, result, pad)
            expected_sums += [expected_row.rewards.get(agent, 0.0) for agent in envs.possible_agents]
        for rewards in result[1]:  # in the order of the expected sums, because float sums depend on it
            sums += rewards
        dones = result[-1]["env_done"]
        episodes += dones.sum()
        if mode is AutoresetMode.DISABLED and dones.any():
            result = envs.reset(seed=t, options={"reset_mask": dones})
            seeds = [t + index * envs.seed_stride for index in range(envs.num_envs)]
            for row, expected_row in enumerate(loop.reset(seeds, dones)):
                if expected_row is not None:
                    assert_row_equals(envs, row, expected_row, result, pad)
    assert episodes > 2
    assert np.array_equal(sums, expected_sums)
    loop.close()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("game", "mode", "num_workers"), each_pair(list(GAMES), AutoresetMode, WORKERS))
def test_trajectories_equal_a_plain_loop(game: str, mode: AutoresetMode, num_workers: int) -> None:
    with MultiAgentVecEnv(make_fns(game), autoreset_mode=mode, num_workers=num_workers) as envs:
        assert envs.layout == ("agents" if game == "different spaces" else "stack")
        assert_same_trajectory(envs, make_fns(game), 30)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_trajectories_of_groups_equal_a_plain_loop(mode: AutoresetMode) -> None:
    layout = {"odd": ["agent_3", "agent_1"], "even": ["agent_0", "agent_2"]}
    with MultiAgentVecEnv(make_fns("different spaces"), layout=layout, autoreset_mode=mode, num_workers=1) as envs:
        assert_same_trajectory(envs, make_fns("different spaces"), 30)


OPTIONS = [
    {"shared_memory": False, "num_workers": 1},
    {"copy": False, "num_workers": 1},
    {"context": "spawn", "num_workers": 1},
    {"use_caller": True, "num_workers": 1},
    {"pad_value": 7, "num_workers": 0},
    {"seed_stride": 10086, "num_workers": 0},
]


@pytest.mark.long
@pytest.mark.parametrize(("game", "options"), each_once(["deaths", "different spaces"], OPTIONS), ids=str)
def test_engine_options_do_not_change_trajectories(game: str, options: dict[str, Any]) -> None:
    with MultiAgentVecEnv(make_fns(game), autoreset_mode=AutoresetMode.SAME_STEP, **options) as envs:
        assert_same_trajectory(envs, make_fns(game), 20, pad=options.get("pad_value", 0))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_seed_gives_each_environment_another_seed_for_any_num_workers(num_workers: int) -> None:
    with MultiAgentVecEnv(make_fns("deaths", 4), num_workers=num_workers) as envs:
        obs, _ = envs.reset(seed=0)
        assert len(np.unique(obs[:, 0, 0])) == 4
        expected, _ = envs.reset(seed=[0, 1, 2, 3])
        assert np.array_equal(obs, expected)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_trajectories_of_first_ready_batches_equal_a_plain_loop(mode: AutoresetMode, num_workers: int, closes: Any) -> None:
    n = 4
    fns = make_fns("deaths", n)
    loop = closes(PlainLoop(fns, mode))
    with MultiAgentVecEnv(fns, autoreset_mode=mode, num_workers=num_workers, batch_size=2) as envs:
        envs.reset_async(seed=3)
        expected: list[Any] = list(loop.reset([3, 4, 5, 6]))
        for _ in range(40):
            result = envs.recv(timeout=20)
            rows = result[-1]["env_id"]
            for position, row in enumerate(rows):
                if expected[row].rewards or expected[row].acted:
                    assert_row_equals(envs, position, expected[row], result)
                else:
                    assert not result[-1]["transition_mask"][position].any()
            actions = np.zeros((2, envs.num_agents), np.int64) + rows[:, None] % 4
            for position, row in enumerate(rows):
                row_actions = dict(zip(envs.possible_agents, actions[position], strict=True))
                expected[row] = loop.step_row(row, row_actions)
            envs.send(actions)
        for _ in range(2):
            envs.recv(timeout=20)


# --- Saved and loaded games ----------------------------------------------------------------------

SAVED_GAMES = {
    "births and masks": functools.partial(RandomGame, births=True, masks="obs", strict=False),
    "masks in infos": functools.partial(RandomGame, masks="info", infos=True, strict=False),
    "all agents end together": functools.partial(RandomGame, end_together=True, strict=False),
}


def choose_allowed_actions(infos: Any) -> Any:
    """Return an allowed action for each agent."""
    if "action_mask" in infos:
        return np.argmax(infos["action_mask"], axis=-1)
    return np.ones(infos["agent_mask"].shape, np.int64)


@pytest.mark.sampled("masks in infos-SameStep-{'num_workers': 0}")
@pytest.mark.parametrize(
    ("game", "mode", "options"),
    each_once(list(SAVED_GAMES), ["NextStep", "SameStep"], [{"num_workers": 2}, {"num_workers": 0}]),
)
def test_loaded_games_continue_like_the_saved_ones(game: str, mode: str, options: dict[str, Any], closes: Any) -> None:
    make = functools.partial(vecenv.MultiAgentVecEnv, [SAVED_GAMES[game]] * 3, autoreset_mode=mode)
    envs, other = closes(make(**options)), closes(make(num_workers=1))
    _, infos = envs.reset(seed=4)
    other.reset(seed=77)
    for _ in range(9):
        *_, infos = envs.step(choose_allowed_actions(infos))
    snapshots = pickle.loads(pickle.dumps(envs.save()))
    other.load(snapshots)
    assert_identical(other.agent_mask, envs.agent_mask)
    for number in range(30):
        expected = envs.step(choose_allowed_actions(infos))
        assert_identical(other.step(choose_allowed_actions(infos)), expected, f"step {number}")
        infos = expected[4]


class UnloadableGame(RandomGame):
    """A game with a state that cannot be loaded if ``length`` was 0 when it was saved."""

    def take_snapshot(self) -> Any:
        return pickle.dumps(self.__dict__)

    def restore_snapshot(self, state: bytes) -> None:
        values = pickle.loads(state)
        if values["length"] == 0:
            raise ArithmeticError("length 0")
        self.__dict__.update(values)


def test_game_that_was_loaded_while_another_failed_has_the_saved_agents(closes: Any) -> None:
    """After the save, all agents of the first game end."""
    envs = closes(vecenv.MultiAgentVecEnv([UnloadableGame] * 2, num_workers=2))
    _, infos = envs.reset(seed=4)
    envs.exec_func(lambda game: setattr(game, "length", 0), [1])
    snapshots, saved_mask = envs.save(verify=False), envs.agent_mask.copy()
    while infos["agent_mask"][0].tolist() == saved_mask[0].tolist():
        *_, infos = envs.step(np.ones(infos["agent_mask"].shape, np.int64))
    with pytest.raises(ArithmeticError, match="length 0"):
        envs.load(snapshots)
    assert_identical(envs.agent_mask[0], saved_mask[0])
