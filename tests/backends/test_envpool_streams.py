"""Results equal those of raw EnvPool in all three autoreset modes, with correct time limits and seeds."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

pytest.importorskip("envpool")

import envpool

from vecenv.backends import EnvPoolVectorEnv
from vecenv.testing import assert_identical

# family -> (one of its tasks, options that make episodes short)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "classic_control": ("CartPole-v1", {}),
    "toy_text": ("FrozenLake-v1", {}),
    "atari": ("Breakout-v5", {"max_episode_steps": 25}),
    "mujoco.gym": ("Ant-v4", {"max_episode_steps": 20}),
    "mujoco.dmc": ("CheetahRun-v1", {"max_episode_steps": 20}),
    "mujoco.robotics": ("FetchReach-v4", {"max_episode_steps": 20}),
    "minigrid": ("MiniGrid-Empty-5x5-v0", {"max_episode_steps": 20}),
    "box2d": ("LunarLander-v3", {"max_episode_steps": 30}),
    "pgx": ("Play2048-v1", {}),
    "jumanji": ("Maze-v0", {}),
    "highway": ("HighwayFast-v0", {}),
}
SLOW_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mujoco.playground": ("AeroCubeRotateZAxis-v1", {"max_episode_steps": 20}),
    "mujoco.metaworld": ("MetaWorld/Assembly-v3", {"max_episode_steps": 20}),
    "mujoco.myosuite": ("MyoHandAirplaneFixed-v0", {}),
    "gfootball": ("gfootball/11_vs_11_competition-v1", {"max_episode_steps": 20}),
    "vizdoom": ("Basic-v1", {"max_episode_steps": 40}),
}
FAMILY_CASES = [
    *(pytest.param(family, *case, id=family) for family, case in FAMILIES.items()),
    *(pytest.param(family, *case, id=family, marks=pytest.mark.slow) for family, case in SLOW_FAMILIES.items()),
]
SEEDS = [11, 5, 8]
STEPS = 110
IN_SEPARATE_PROCESS = "VECENV_TEST_ALONE"


def run_in_separate_process(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test so that its case for vizdoom runs in another process, which can be killed.

    ViZDoom starts a process for every environment. If that process dies, ViZDoom waits forever in C++ and holds the GIL, so
    that pytest's timeout has no effect.
    """

    @functools.wraps(test)
    def run(family: str, task_id: str, options: dict[str, Any]) -> None:
        if family != "vizdoom" or IN_SEPARATE_PROCESS in os.environ:
            test(family, task_id, options)
            return
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "slow or not slow"]
        done = subprocess.run(
            [*command, f"{Path(__file__)}::{test.__name__}[{family}]"],
            cwd=Path(__file__).parents[2], env={**os.environ, IN_SEPARATE_PROCESS: "1"},
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]

    return run


@pytest.fixture(autouse=True)
def change_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the working directory, because vizdoom writes a file into it."""
    monkeypatch.chdir(tmp_path)


def make_raw_pool(task_id: str, seeds: list[int], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return envpool.make_gymnasium(task_id, num_envs=len(seeds), num_threads=1, seed=seeds, **options)


def sample_actions(envs: EnvPoolVectorEnv, steps: int = STEPS) -> Iterator[Any]:
    envs.action_space.seed(1)
    for _ in range(steps):
        action = envs.action_space.sample()
        # vizdoom's actions are button presses, although their Box is unbounded
        yield np.clip(action, -1, 1) if isinstance(envs.single_action_space, gymnasium.spaces.Box) else action


def assert_same_observations(actual: Any, raw: Any) -> None:
    """Assert that values are equal. Dtypes may differ, because vecenv uses those of Discrete and MultiBinary spaces."""
    if isinstance(raw, dict):
        assert list(actual) == sorted(raw)
        for key, value in raw.items():
            assert_same_observations(actual[key], value)
    else:
        np.testing.assert_array_equal(actual, raw)


def assert_same_infos(actual: dict[str, Any], raw: dict[str, Any]) -> None:
    assert {key for key in actual if not key.startswith("_")} == {key for key in raw if key != "players"}
    for key, value in raw.items():
        if key != "players":
            assert_identical(actual[key], value.astype(np.intp) if key == "env_id" else value, key)
            assert actual[f"_{key}"].all()


@pytest.mark.long
@pytest.mark.parametrize(("family", "task_id", "options"), FAMILY_CASES)
@run_in_separate_process
def test_trajectory_equals_raw_envpool(family: str, task_id: str, options: dict[str, Any]) -> None:
    assert task_id in EnvPoolVectorEnv.task_ids(family)
    raw = make_raw_pool(task_id, SEEDS, **options)
    envs = EnvPoolVectorEnv(task_id, len(SEEDS), num_threads=2, seed=SEEDS, **options)
    dtype = raw.spec._action_spec[-1][0]
    ended = 0
    try:
        observations, infos = envs.reset()
        raw_observations, raw_infos = raw.reset()
        assert_same_observations(observations, raw_observations)
        assert_same_infos(infos, raw_infos)
        assert observations in envs.observation_space
        for action in sample_actions(envs):
            actual, expected = envs.step(action), raw.step(action.astype(dtype))
            assert_same_observations(actual[0], expected[0])
            assert actual[0] in envs.observation_space
            assert_identical(actual[1], expected[1].astype(np.float64), "rewards")
            np.testing.assert_array_equal(actual[2] | actual[3], expected[2] | expected[3])
            assert (actual[2] >= expected[2]).all(), "a termination of the pool was lost"
            assert_identical(actual[3], expected[3], "truncations")
            assert_same_infos(actual[4], expected[4])
            ended += (actual[2] | actual[3]).sum()
    finally:
        envs.close()
    assert ended, f"no episode of {task_id} ended, so autoreset was not tested"


@pytest.mark.slow
def test_every_installed_family_is_compared() -> None:
    known = {module.removeprefix("envpool.") for module, _, _ in envpool.registration.registry.specs.values()}
    assert known - {"procgen"} == set(FAMILIES) | set(SLOW_FAMILIES)  # procgen needs a system library, Qt 5


@pytest.mark.long
@pytest.mark.parametrize(("family", "task_id", "options"), FAMILY_CASES)
@run_in_separate_process
def test_same_step_equals_next_step_without_reset_rows(family: str, task_id: str, options: dict[str, Any]) -> None:
    """At the end of an episode, same-step combines two steps of next-step: the final one and the reset."""
    mode = AutoresetMode.SAME_STEP
    same_step = EnvPoolVectorEnv(task_id, 1, num_threads=1, seed=3, autoreset_mode=mode, **options)
    next_step = EnvPoolVectorEnv(task_id, 1, num_threads=1, seed=3, **options)
    ended = 0
    try:
        assert_identical(same_step.reset(), next_step.reset(), "reset")
        for action in sample_actions(same_step, 3 * STEPS):
            actual, expected = same_step.step(action), next_step.step(action)
            assert_identical(actual[1:4], expected[1:4], "rewards and flags")
            if not (expected[2] | expected[3]).any():
                assert_identical(actual[0], expected[0], "observations")
                assert_identical(actual[4], expected[4], "infos")
                continue
            ended += 1
            infos = actual[4]
            final_obs = next_step._driver._rows.row(next_step._driver._latest_leaves, 0)  # type: ignore[union-attr]
            assert_identical(infos.pop("final_obs")[0], final_obs, "final_obs")
            assert_identical(infos.pop("final_info"), expected[4], "final_info")
            assert infos.pop("_final_obs").tolist() == infos.pop("_final_info").tolist() == [True]
            following = next_step.step(action)
            assert_identical(actual[0], following[0], "the first observation of the new episode")
            assert_identical(infos, following[4], "the infos of the new episode")
    finally:
        same_step.close()
        next_step.close()
    assert ended


@pytest.mark.long
def test_final_observations_do_not_keep_whole_batches_in_memory(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("Pong-v5", 2, max_episode_steps=2, autoreset_mode="SameStep", num_threads=1))
    envs.reset(seed=0)
    envs.step([0, 0])
    final_obs = envs.step([0, 0])[4]["final_obs"]
    assert all(row.base is None for row in final_obs)


# --- episodic life ------------------------------------------------------------------------------


def collect_lives_at_resets(mode: AutoresetMode, steps: int = 400) -> list[int]:
    """Return the number of lives at the start of each episode of Breakout, except for the first."""
    envs = EnvPoolVectorEnv(
        "Breakout-v5", 1, episodic_life=True, use_fire_reset=True, autoreset_mode=mode, seed=0, num_threads=1
    )
    lives = []
    try:
        envs.reset()
        for _ in range(steps):
            _, _, terminations, truncations, infos = envs.step([1])
            if not (terminations | truncations).any():
                continue
            if mode is AutoresetMode.NEXT_STEP:
                infos = envs.step([1])[4]
            elif mode is AutoresetMode.DISABLED:
                infos = envs.reset(options={"reset_mask": np.array([True])})[1]
            lives.append(int(infos["lives"][0]))
        return lives
    finally:
        envs.close()


@pytest.mark.long
def test_lost_life_continues_the_same_game_in_every_mode() -> None:
    lives = collect_lives_at_resets(AutoresetMode.NEXT_STEP)
    assert lives[:5] == [4, 3, 2, 1, 5], "a new game must start only after five lives"
    assert collect_lives_at_resets(AutoresetMode.SAME_STEP) == lives
    assert collect_lives_at_resets(AutoresetMode.DISABLED) == lives


@pytest.mark.long
def test_masked_reset_within_an_episode_starts_a_new_game(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("Breakout-v5", 2, episodic_life=True, use_fire_reset=True, seed=0, num_threads=1))
    envs.reset()
    done = np.zeros(2, dtype=np.bool_)
    while not done[0]:
        _, _, terminations, truncations, infos = envs.step([1, 1])
        done = terminations | truncations
    while infos["lives"].tolist() != [4, 4] or (terminations | truncations).any():
        _, _, terminations, truncations, infos = envs.step([1, 1])
    while not (terminations | truncations)[0]:
        _, _, terminations, truncations, infos = envs.step([1, 0])
    # env 0 has just lost a life, so its reset continues the game; env 1 may be within an episode
    running = not (terminations | truncations)[1]
    lives = infos["lives"].tolist()
    after = envs.reset(options={"reset_mask": np.ones(2, dtype=np.bool_)})[1]["lives"].tolist()
    assert after == [lives[0], 5 if running else lives[1]]
    assert envs.reset()[1]["lives"].tolist() == [5, 5], "a reset of all environments begins new games"


def test_time_limit_is_in_config_and_spec() -> None:
    envs = EnvPoolVectorEnv("CartPole-v1", max_episode_steps=30)
    assert envs.config["max_episode_steps"] == 30
    assert envs.spec is not None
    assert envs.spec.max_episode_steps == 30


# --- seeds and masks ----------------------------------------------------------------------------


def test_integer_seed_gives_the_same_observations_as_in_envpool(closes: Any) -> None:
    raw = make_raw_pool("CartPole-v1", [7, 8, 9])
    envs = closes(EnvPoolVectorEnv("CartPole-v1", 3, num_threads=1))
    np.testing.assert_array_equal(envs.reset(seed=7)[0], raw.reset()[0])
    assert envs.np_random_seed == (7, 8, 9)


def test_large_integer_seeds_become_repeatable_31_bit_seeds(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("CartPole-v1", 3, num_threads=1))
    first = envs.reset(seed=np.int64(2**40))[0]
    assert all(0 <= seed < 2**31 for seed in envs.np_random_seed)
    envs.reset(seed=2**31 - 1)
    assert envs.np_random_seed[0] == 2**31 - 1
    assert all(0 <= seed < 2**31 for seed in envs.np_random_seed)
    envs.reset(seed=np.int64(2**40))
    repeated = envs.reset(seed=list(envs.np_random_seed))[0]
    np.testing.assert_array_equal(first, repeated)


def test_none_in_a_list_of_seeds_does_not_change_the_others(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("CartPole-v1", 3, num_threads=1))
    envs.reset(seed=[1, None, 3])
    assert envs.np_random_seed[0] == 1
    assert envs.np_random_seed[2] == 3


def test_vector_envs_without_a_seed_have_different_seeds() -> None:
    """EnvPool's own default seed is always 42."""
    one, other = EnvPoolVectorEnv("CartPole-v1", 2), EnvPoolVectorEnv("CartPole-v1", 2)
    assert one.np_random_seed != other.np_random_seed
    assert one.np_random_seed != (42, 43)


def test_reset_without_a_seed_continues_the_random_stream(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("CartPole-v1", 2, seed=1, num_threads=1))
    first = envs.reset()[0]
    assert envs.stats()["pools"] == 1
    assert (envs.reset()[0] != first).any()
    assert envs.stats()["pools"] == 1
    np.testing.assert_array_equal(envs.reset(seed=1)[0], first)
    assert envs.stats()["pools"] == 2


@pytest.mark.parametrize("seed", [None, 3])
def test_reset_over_a_stepped_pool_begins_anew_only_with_seeds(seed: int | None, closes: Any) -> None:
    pools = [make_raw_pool("CartPole-v1", [3, 4]) for _ in range(2)]
    first, _ = (pool.reset()[0] for pool in pools)
    envs = closes(EnvPoolVectorEnv.over(pools[0]))
    observations = envs.reset(seed=seed)[0]
    np.testing.assert_array_equal(observations, first if seed is not None else pools[1].reset()[0])
    assert envs.np_random_seed == (3, 4)


def test_threads_and_batch_sizes_do_not_change_trajectories() -> None:
    results = []
    for threads, batch in ((1, 6), (2, 6), (2, 3), (2, 1)):
        envs = EnvPoolVectorEnv("Acrobot-v1", 6, num_threads=threads, batch_size=batch, seed=0)
        envs.reset()
        results.append([envs.step(action)[:4] for action in sample_actions(envs, 30)])
        envs.close()
    for result in results[1:]:
        assert_identical(result, results[0])


def test_masked_reset_before_the_first_reset_raises(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("CartPole-v1", 2))
    with pytest.raises(gymnasium.error.ResetNeeded, match="all environments"):
        envs.reset(options={"reset_mask": np.array([True, False])})


# --- spaces, dtypes, infos ----------------------------------------------------------------------


def test_extreme_bounds_of_a_space_become_infinite() -> None:
    """EnvPool's lower bound for dm_control is the smallest positive number."""
    envs = EnvPoolVectorEnv("CheetahRun-v1", 2)
    space = envs.single_observation_space["position"]  # type: ignore[index]
    assert np.isneginf(space.low).all()
    assert np.isposinf(space.high).all()
    cartpole = EnvPoolVectorEnv("CartPole-v1").single_observation_space
    assert isinstance(cartpole, gymnasium.spaces.Box)
    assert cartpole.high[0] == np.float32(4.8)


def test_discrete_observations_have_the_dtype_of_their_space(closes: Any) -> None:
    envs = EnvPoolVectorEnv("FrozenLake-v1", 2, num_threads=1)
    observations, _ = envs.reset(seed=0)
    assert observations.dtype == envs.observation_space.dtype == np.int64
    envs.close()
    maze = closes(EnvPoolVectorEnv("Maze-v0", 2, num_threads=1))
    mask = maze.reset(seed=0)[0]["action_mask"]
    assert mask.dtype == maze.observation_space["action_mask"].dtype == np.int8  # type: ignore[index]


def test_masks_are_separate_arrays(closes: Any) -> None:
    envs = closes(EnvPoolVectorEnv("CartPole-v1", 2, num_threads=1))
    infos = envs.reset(seed=0)[1]
    infos["_env_id"][:] = False
    assert infos["_elapsed_step"].all()
    assert envs.step([0, 0])[4]["_env_id"].all()
