"""``lazy=True``: nothing starts before it is needed."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from envs import CounterEnv, counters, opened
from gymnasium.error import ClosedEnvironmentError
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import vecenv
from vecenv.testing import assert_identical

ENGINES = pytest.mark.parametrize("engine", [{"num_workers": 2}, {"num_workers": 0}, {}], ids=["two", "here", "one each"])


class Logged:
    """Builds an environment, and writes down in which process."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self) -> Any:
        with self.log.open("a") as out:
            print(os.getpid(), file=out)
        return gymnasium.make("CartPole-v1")

    @property
    def built(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@ENGINES
def test_nothing_starts_before_the_first_reset(engine: dict[str, Any], tmp_path: Path) -> None:
    env_fn, before = Logged(tmp_path / "log"), children()
    with opened([env_fn] * 4, lazy=True, **engine) as envs:
        assert isinstance(envs, gymnasium.vector.AsyncVectorEnv)
        assert (envs.num_envs, envs.closed, envs.stats()["steps"], len(envs.errors)) == (4, False, 0.0, 0)
        assert "not started" in repr(envs)
        assert (env_fn.built, children()) == ([], before)
        oracle = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 4)
        assert_identical(envs.reset(seed=3), oracle.reset(seed=3))
        assert type(envs) is vecenv.AsyncVectorEnv
        for _ in range(60):
            assert_identical(envs.step(np.ones(4, int)), oracle.step(np.ones(4, int)))
        assert "not started" not in repr(envs)


def test_spaces_come_from_one_environment_elsewhere_and_are_remembered(tmp_path: Path) -> None:
    env_fn = Logged(tmp_path / "log")
    stock = gymnasium.make("CartPole-v1")
    spaces = []
    for _ in range(3):
        with opened([env_fn] * 4, lazy=True) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
            assert (envs.render_mode, envs.single_action_space) == (None, stock.action_space)
            assert envs.observation_space.shape == (4, 4)
            assert envs.num_workers == 4
            assert "not started" in repr(envs)
            spaces.append(envs.single_observation_space)
    assert spaces == [stock.observation_space] * 3
    assert len({id(space) for space in spaces}) == 3  # each with a generator of its own
    assert len(env_fn.built) == 1
    assert os.getpid() not in env_fn.built


def test_a_dummy_env_may_be_wanted_here(tmp_path: Path) -> None:
    env_fn = Logged(tmp_path / "log")
    with opened([env_fn] * 2, lazy=True, dummy_env=True) as envs:
        assert env_fn.built == []
        assert envs.single_action_space == gymnasium.spaces.Discrete(2)
        assert env_fn.built == [os.getpid()]


@pytest.mark.parametrize(
    "first",
    [
        lambda envs: envs.reset_async(seed=1),
        lambda envs: envs.call("get_wrapper_attr", "spec"),
        lambda envs: envs.get_attr("spec"),
        lambda envs: envs.set_attr("theirs", 1),
        lambda envs: envs.exec_func(lambda env: env.spec),
        lambda envs: envs.processes,
        lambda envs: envs.capabilities,
        lambda envs: envs.observations,
    ],
    ids=["reset_async", "call", "get_attr", "set_attr", "exec_func", "processes", "capabilities", "observations"],
)
def test_whatever_needs_environments_starts_them(first: Any) -> None:
    with opened([Logged(Path(os.devnull))] * 2, lazy=True) as envs:
        first(envs)
        assert len(envs.processes) == 2


def test_auto_is_planned_when_somebody_asks() -> None:
    with opened([CounterEnv] * 2, lazy=True, num_workers="auto") as envs:
        assert "not started" in repr(envs)
        assert envs.plan is not None
        assert "not started" in repr(envs)
        envs.reset(seed=1)
        assert envs.num_workers == envs.plan.num_workers


def test_wrappers_of_gymnasium_go_around_it() -> None:
    with opened(counters(2, lengths=(3,)), lazy=True) as envs:
        wrapped = RecordEpisodeStatistics(envs)
        assert "not started" in repr(envs)
        wrapped.reset(seed=1)
        for _ in range(3):
            *_, infos = wrapped.step([1, 1])
        assert infos["episode"]["l"].tolist() == [3, 3]


@pytest.mark.parametrize("again", [lambda envs: envs.reset(), lambda envs: envs.metadata, lambda envs: envs.step([0, 0])])
def test_one_that_is_closed_before_it_started_never_starts(again: Any, tmp_path: Path) -> None:
    env_fn = Logged(tmp_path / "log")
    envs: Any = vecenv.AsyncVectorEnv([env_fn] * 2, lazy=True)
    envs.close()
    envs.close()
    assert envs.closed
    assert "closed" in repr(envs)
    with pytest.raises(ClosedEnvironmentError):
        again(envs)
    assert env_fn.built == []


def test_one_that_nobody_used_leaves_nothing_and_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    envs: Any = vecenv.AsyncVectorEnv(counters(2), lazy=True)
    gone = weakref.ref(envs)
    gc.disable()
    try:
        del envs
        assert gone() is None
    finally:
        gc.enable()
    assert not recwarn.list


class Moody:
    """Cannot be built while its file is there."""

    def __init__(self, mood: Path) -> None:
        self.mood = mood

    def __call__(self) -> Any:
        if self.mood.exists():
            raise ArithmeticError("not today")
        return CounterEnv()


def test_a_start_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    mood = tmp_path / "mood"
    mood.touch()
    before = children()
    with opened([Moody(mood)] * 2, lazy=True) as envs:
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="not today"):
                envs.reset()
        assert children() == before
        mood.unlink()
        envs.reset(seed=1)


class Changing:
    """An observation space that a file gives the size of."""

    def __init__(self, size: Path) -> None:
        self.size = size

    def __call__(self) -> Any:
        env = CounterEnv()
        env.observation_space = gymnasium.spaces.Box(0, 1, (int(self.size.read_text()),), np.float32)
        return env


def test_what_is_not_true_any_more_is_refused_and_forgotten(tmp_path: Path) -> None:
    size = tmp_path / "size"
    size.write_text("3")
    with opened([Changing(size)] * 2, lazy=True) as envs:
        assert envs.single_observation_space.shape == (3,)
    size.write_text("4")
    for _ in range(2):
        with opened([Changing(size)] * 2, lazy=True) as envs:
            try:
                assert envs.single_observation_space.shape == (3,)
                with pytest.raises(RuntimeError, match="observation spaces are not equivalent"):
                    envs.reset()
            except AssertionError:
                assert envs.single_observation_space.shape == (4,)
                break
    else:
        pytest.fail("it was not forgotten")


def test_two_threads_start_it_once(tmp_path: Path) -> None:
    env_fn = Logged(tmp_path / "log")
    with opened([env_fn] * 2, lazy=True) as envs:
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(envs.processes)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({process.pid for processes in found for process in processes}) == 2
    assert len(env_fn.built) == 3


def test_a_subclass_stays_itself() -> None:
    class Mine(vecenv.AsyncVectorEnv):
        def reset(self, **kwargs: Any) -> Any:
            return "mine", super().reset(**kwargs)

    envs: Any = Mine(counters(2), lazy=True)
    assert type(envs).__name__ == "Mine"
    assert isinstance(envs, Mine)
    word, (observations, _) = envs.reset(seed=1)
    assert (word, len(observations), type(envs)) == ("mine", 2, Mine)
    envs.close()


def test_make_vec_takes_it() -> None:
    envs: Any = vecenv.make_vec("CartPole-v1", 2, vector_kwargs={"lazy": True, "num_workers": 2})
    assert envs.spec.id == "CartPole-v1"
    assert "not started" in repr(envs)
    envs.reset(seed=1)
    envs.close()


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_wrong_values_are_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ValueError, match="`lazy` must be True or False"):
        vecenv.AsyncVectorEnv(counters(2), lazy=wrong)
    with pytest.raises(ValueError, match="`num_workers` must be"):
        vecenv.AsyncVectorEnv(counters(2), lazy=True, num_workers=-1)
