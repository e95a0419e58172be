"""Tests of ``EnvChoice``: in every engine, each reset can choose the environment."""

from __future__ import annotations

import functools
import pickle
import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from envs import CounterEnv, open_engine
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import vecenv
from vecenv.errors import SnapshotMismatch
from vecenv.testing import assert_identical
from vecenv.wrappers import ActionChunks


class LifetimeLoggingEnv(CounterEnv):
    """An environment that writes ``+`` and its number to a file when it is built, and ``-`` when it is closed."""

    def __init__(self, number: int, log: str = "", render_mode: str | None = None) -> None:
        super().__init__(env_id=number, lengths=(number + 2,), render_mode=render_mode)
        self.log = log
        self._append_to_log("+")

    def _append_to_log(self, sign: str) -> None:
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{sign}{self.env_id} ")

    def close(self) -> None:
        self._append_to_log("-")


def make_choice(log: str = "", keep: int = 1, count: int = 4) -> vecenv.EnvChoice:
    factories = {f"task-{number}": functools.partial(LifetimeLoggingEnv, number, log) for number in range(count)}
    return vecenv.EnvChoice(factories, keep)


@pytest.mark.parametrize(
    ("keep", "expected_log"),
    [
        (1, "+0 -0 +2 -2 +1 -1 +2 -2 "),
        (2, "+0 +2 -0 +1 -2 -1 "),
    ],
)
def test_keep_limits_the_number_of_open_environments(keep: int, expected_log: str, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    env = make_choice(log, keep)()
    env.reset()
    for name, number in (("task-2", 2), (None, 2), ("task-1", 1), ("task-2", 2)):
        observation, _ = env.reset(seed=3, options=None if name is None else {"env": name})
        assert observation.tolist()[::3] == [number, 3]
        assert env.step(0)[0].tolist()[:2] == [number, 1]
    env.close()
    assert Path(log).read_text() == expected_log


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_each_row_chooses_its_environment(mode: AutoresetMode) -> None:
    options = [{"env": "task-3"}, None, {"env": "task-1", "level": 7}]
    for engine in ({"num_workers": 0}, {"num_workers": 2}):
        with open_engine([make_choice()] * 3, autoreset_mode=mode, **engine) as envs:
            observations, infos = envs.reset(seed=5, options=options)
            assert observations[:, 0].tolist() == [3, 0, 1]
            assert "level" in infos["reset_kwargs"][2]
            assert "env" not in infos["reset_kwargs"][2]
            for _ in range(7):  # automatic resets keep the environment
                observations, _, terminations, truncations, _ = envs.step([0, 0, 0])
                assert observations[:, 0].tolist() == [3, 0, 1]
                ended = terminations | truncations
                if mode is AutoresetMode.DISABLED and ended.any():
                    envs.reset(options={"reset_mask": ended})
            assert envs.call("add", 10) == (13, 10, 11)
            assert envs.get_attr("env_name") == ("task-3", "task-0", "task-1")
            envs.set_attr("note", ["a", "b", "c"])
            assert envs.get_attr("note") == ("a", "b", "c")


def test_trajectories_equal_those_of_single_environments() -> None:
    tasks = {
        name: functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=limit)
        for name, limit in (("short", 5), ("long", 6))
    }
    references = [SyncVectorEnv([tasks["long"]]), SyncVectorEnv([tasks["short"]])]
    with open_engine([vecenv.EnvChoice(tasks)] * 2, num_workers=2) as envs:
        observations, _ = envs.reset(seed=5, options=[{"env": "long"}, {"env": "short"}])
        for row, reference in enumerate(references):
            assert_identical(observations[row], reference.reset(seed=5 + row)[0][0])
        for step in range(20):
            actions = np.array([step % 2, 1])
            results = envs.step(actions)
            for row, reference in enumerate(references):
                expected = reference.step(actions[[row]])
                for part, expected_part in zip(results[:4], expected[:4], strict=True):
                    assert_identical(part[row], expected_part[0])
    for reference in references:
        reference.close()


@pytest.mark.parametrize("keep", [1, 2])
def test_one_seed_determines_the_episodes_of_all_environments(keep: int) -> None:
    """An environment that is built for a reset without a seed would have a random one."""
    factories = {name: functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=3) for name in ("a", "b")}
    trajectories = []
    for _ in range(2):
        env = vecenv.EnvChoice(factories, keep)()
        trajectories.append([env.reset(seed=5)[0].tolist()])
        for name in ("b", "a", "a", "b"):
            trajectories[-1].append(env.reset(options={"env": name})[0].tolist())
        env.close()
    assert trajectories[0] == trajectories[1]
    assert len({str(observation) for observation in trajectories[0]}) == 5


def test_reset_of_another_environment_does_not_build_the_first_one(tmp_path: Path) -> None:
    choice = make_choice(str(tmp_path / "log"))
    choice().close()
    env = choice()
    env.reset(options={"env": "task-2"})
    assert (tmp_path / "log").read_text() == "+0 -0 +2 "
    env.close()


def test_make_vec_passes_arguments_to_factories_and_applies_wrappers() -> None:
    envs = vecenv.make_vec(
        make_choice(), 2, wrappers=[functools.partial(ActionChunks, horizon=2)], vector_kwargs={"num_workers": 1},
        render_mode="rgb_array",
    )  # fmt: skip
    try:
        envs.reset(options={"env": "task-2"})
        *_, infos = envs.step(np.zeros((2, 2), np.int64))
        assert infos["chunk_steps"].tolist() == [2, 2]
        assert [frame[0, 0, 0] for frame in envs.render()] == [22, 22]
    finally:
        envs.close()


def test_snapshot_continues_in_another_row() -> None:
    tasks = {
        "cart": functools.partial(gymnasium.make, "CartPole-v1"),
        "short": functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=30),
    }
    with open_engine([vecenv.EnvChoice(tasks)] * 2, num_workers=2) as envs:
        envs.reset(seed=1, options=[{"env": "short"}, {"env": "cart"}])
        for _ in range(3):
            envs.step(np.array([0, 1]))
        snapshots = pickle.loads(pickle.dumps(envs.save()))
        expected = [envs.step(np.array([step % 2, 1])) for step in range(20)]
        envs.load(snapshots[::-1])
        assert envs.get_attr("env_name") == ("cart", "short")
        for step, results in enumerate(expected):
            for part, expected_part in zip(envs.step(np.array([1, step % 2]))[:4], results[:4], strict=True):
                assert_identical(part[::-1].copy(), expected_part)
    with open_engine([vecenv.EnvChoice({"cart": tasks["cart"]})] * 2, num_workers=0) as other_envs:
        other_envs.reset(seed=5)
        first = other_envs.step(np.array([0, 0]))[0]
        other_envs.reset(seed=5)
        with pytest.raises(SnapshotMismatch, match="it was saved in 'short', which this EnvChoice does not offer"):
            other_envs.load(snapshots[::-1])
        assert "failed" not in repr(other_envs)
        assert_identical(other_envs.step(np.array([0, 0]))[0], first)


@pytest.mark.parametrize(
    ("factories", "error", "text"),
    [
        ([make_choice], TypeError, "expected a dict of functions by name"),
        ({}, ValueError, "the dict of factories is empty"),
        ({"a": 1}, TypeError, "expected a dict of functions by name, got 'a': 1"),
        ({1: LifetimeLoggingEnv}, TypeError, "expected a dict of functions by name, got 1"),
    ],
)
def test_invalid_factories_are_refused(factories: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"EnvChoice: {text}"):
        vecenv.EnvChoice(factories)


@pytest.mark.parametrize(("keep", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_invalid_keep_is_refused(keep: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"EnvChoice: keep must be a positive integer, got {keep}"):
        vecenv.EnvChoice({"a": CounterEnv}, keep)


def test_error_about_an_unknown_name_suggests_similar_names() -> None:
    with open_engine([make_choice()] * 2, num_workers=1) as envs:
        with pytest.raises(ValueError, match=r"there is no environment 'tusk-1'; did you mean 'task-1'"):
            envs.reset(options={"env": "tusk-1"})
        with pytest.raises(ValueError, match=r"there is no environment 'x'; there are 4: 'task-0', 'task-1'"):
            envs.reset(options={"env": "x"})
        assert envs.reset(options={"env": "task-1"})[0][:, 0].tolist() == [1, 1]


def test_error_about_an_unknown_name_states_the_only_name() -> None:
    with (
        open_engine([vecenv.EnvChoice({"task": CounterEnv})], num_workers=1) as envs,
        pytest.raises(ValueError, match=r"there is no environment 'x'; the only one is 'task'"),
    ):
        envs.reset(options={"env": "x"})


class WideEnv(CounterEnv):
    """An environment with observations of five numbers. It records calls to ``close`` in a class attribute."""

    closed: list[bool] = []  # noqa: RUF012 - the test has no access to the instance

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1, 1, (5,))

    def close(self) -> None:
        self.closed.append(True)


class FailingCloseEnv(LifetimeLoggingEnv):
    def close(self) -> None:
        super().close()
        raise RuntimeError("close failed")


def test_all_environments_are_closed_even_if_one_raises(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    factories = {"a": lambda: LifetimeLoggingEnv(0, log), "b": lambda: FailingCloseEnv(1, log)}
    env = vecenv.EnvChoice(factories, keep=2)()
    env.reset(options={"env": "b"})
    with pytest.raises(RuntimeError, match="close failed"):
        env.close()
    assert Path(log).read_text() == "+0 +1 -1 -0 "


def test_environment_with_other_spaces_is_refused_and_closed() -> None:
    env = vecenv.EnvChoice({"narrow": CounterEnv, "wide": WideEnv})()
    with pytest.raises(ValueError, match=r"space of 'wide' is Box\(.*\(5,\).*, that of 'narrow' is Box\(.*\(4,\)"):
        env.reset(options={"env": "wide"})
    assert WideEnv.closed == [True]
    assert env.reset(seed=1)[0].tolist() == [0, 0, 1, 1]


def test_spec_and_metadata_are_those_of_the_current_environment() -> None:
    versions = {"a": "CartPole-v1", "b": "CartPole-v0"}
    factories = {name: functools.partial(gymnasium.make, env_id) for name, env_id in versions.items()}
    with open_engine([vecenv.EnvChoice(factories)] * 2, num_workers=1) as envs:
        envs.reset(options=[{"env": "a"}, {"env": "b"}])
        assert [spec.id for spec in envs.get_attr("spec")] == ["CartPole-v1", "CartPole-v0"]
        envs.exec_func(lambda env: setattr(env.current.unwrapped, "metadata", {"render_fps": 3}), 1)
        assert [metadata["render_fps"] for metadata in envs.get_attr("metadata")] == [50, 3]


def test_np_random_seed_is_that_of_the_current_environment() -> None:
    env = vecenv.EnvChoice({"a": CounterEnv, "b": CounterEnv})()
    for seed, name in enumerate("aba"):
        env.reset(seed=seed, options={"env": name})
        assert env.np_random_seed == env.current.np_random_seed == seed


class OwnGeneratorEnv(gymnasium.Env[Any, Any]):
    """An environment with a generator of the standard library, which only a seeded reset seeds."""

    observation_space = gymnasium.spaces.Box(0, 1, (), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    np_random = random.Random(0)  # type: ignore[assignment]

    def __init__(self) -> None:
        self.generator = random.Random(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.generator.seed(seed)
        return np.float64(self.generator.random()), {}


def test_environments_with_generators_of_their_own_continue_them() -> None:
    env, expected = vecenv.EnvChoice({"a": OwnGeneratorEnv, "b": OwnGeneratorEnv}, keep=2)(), random.Random(1)
    assert env.reset(seed=1, options={"env": "a"})[0] == expected.random()
    env.reset(seed=2, options={"env": "b"})
    assert env.reset(options={"env": "a"})[0] == expected.random()
