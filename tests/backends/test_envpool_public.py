"""Pools whose private functions are missing: the same streams through EnvPool's public ones."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode

pytest.importorskip("envpool")

from sampling import each_once

from vecenv.backends import EnvPoolVectorEnv
from vecenv.backends.envpool.public import PublicPool
from vecenv.errors import StepTimeout
from vecenv.testing import assert_identical

from .conftest import Make, zeros
from .pool_doubles import SlowPool
from .test_envpool_contract import EnvPoolContract


@pytest.fixture
def make(hide: None, any_make: Make) -> Make:
    """Without the private functions."""
    return any_make


@pytest.fixture
def private(any_make: Make) -> Make:
    """Made with all that EnvPool has, and reset; ask for it before ``make``."""

    def build(*arguments: Any, **options: Any) -> EnvPoolVectorEnv:
        envs = any_make(*arguments, **options)
        envs.reset(seed=3)
        assert not isinstance(envs._pools.current.pool, PublicPool)
        return envs

    return build


TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"max_episode_steps": 20},
    "Pendulum-v1": {"max_episode_steps": 20},
    "FrozenLake-v1": {},
    "Pong-v5": {"max_episode_steps": 20},
    "Ant-v4": {"max_episode_steps": 20},
    "CheetahRun-v1": {"max_episode_steps": 20},
    "MiniGrid-Empty-5x5-v0": {"max_episode_steps": 20},
    "Maze-v0": {},
    "Play2048-v1": {},
    "LunarLander-v3": {"max_episode_steps": 20, "exact_time_limit": True},
}


@pytest.mark.parametrize(("task_id", "mode"), each_once(list(TASKS), [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP]))
def test_streams_are_the_same(private: Make, request: pytest.FixtureRequest, task_id: str, mode: AutoresetMode) -> None:
    options = TASKS[task_id]
    wanted = private(3, task_id, autoreset_mode=mode, **options)
    envs = request.getfixturevalue("make")(3, task_id, autoreset_mode=mode, **options)
    observations, _ = envs.reset(seed=3)
    assert isinstance(envs._pools.current.pool, PublicPool)
    assert observations in envs.observation_space
    envs.action_space.seed(1)
    for _ in range(60):
        actions = envs.action_space.sample()
        assert_identical(envs.step(actions), wanted.step(actions))
    mask = np.array([True, False, True])
    if mode is AutoresetMode.NEXT_STEP:
        assert_identical(envs.reset(options={"reset_mask": mask}), wanted.reset(options={"reset_mask": mask}))
        assert_identical(envs.step(actions), wanted.step(actions))
    assert_identical(envs.reset(), wanted.reset())


@pytest.mark.usefixtures("hide")
class TestContract(EnvPoolContract):
    task_id = "CartPole-v1"


@pytest.mark.parametrize("threads", [1, 3])
def test_first_ready_batches(make: Make, threads: int) -> None:
    lockstep = make(8)
    stream = [lockstep.reset()[0], *(lockstep.step(zeros(8))[0] for _ in range(40))]
    envs = make(8, batch_size=2, num_threads=threads)
    envs.reset_async()
    seen = [0] * 8
    while min(seen) < 40:
        observations, *_, infos = envs.recv(timeout=20.0)
        for row, i in enumerate(infos["env_id"].tolist()):
            if seen[i] <= 40:
                np.testing.assert_array_equal(observations[row], stream[seen[i]][i])
            seen[i] += 1
        envs.send(zeros(2))
    with pytest.raises(AlreadyPendingCallError):
        envs.send(zeros(8), np.arange(8))
    assert envs.reset()[1]["elapsed_step"].tolist() == [0] * 8  # waits for what is in flight
    assert envs.stats()["in_flight"] == 0


def test_what_public_functions_cannot_do_is_refused_and_nothing_is_lost(make: Make) -> None:
    envs = make(4, batch_size=2)
    envs.reset()
    envs.reset_async(env_id=[1, 2])
    with pytest.raises(RuntimeError, match="cannot reset some environments while others are in flight"):
        envs.recv()
    limited = make(4, batch_size=2, exact_time_limit=True)
    with pytest.raises(RuntimeError, match="exact_time_limit=False"):
        limited.reset()


def test_timeouts(make: Make) -> None:
    envs, same = make(), make()
    envs.reset()
    same.reset()
    SlowPool(envs, 0.2)
    envs.step_async(zeros(4))
    with pytest.raises(StepTimeout):
        envs.step_wait(timeout=0.02)
    assert_identical(envs.step_wait(timeout=20.0), same.step(zeros(4)))


def test_errors_of_the_pool_reach_the_caller(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = make()
    envs.reset()

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    envs._pools.current.pool._pool.send = broken
    envs.step_async(zeros(4))
    with pytest.raises(RuntimeError, match="out of order"):
        envs.step_wait()


@pytest.mark.parametrize("batch_size", [4, 2])
def test_close_ends_the_thread(make: Make, batch_size: int) -> None:
    envs = make(batch_size=batch_size)
    for _ in range(3):
        envs.reset(seed=1)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("vecenv-envpool-public") == 1
    envs.send(zeros(4), np.arange(4))
    envs.close()
    assert "vecenv-envpool-public" not in [thread.name for thread in threading.enumerate()]


def test_forgotten_without_close_the_thread_ends_too(make: Make) -> None:
    pool = make().task.build([0] * 4)
    public = PublicPool(pool, make().task, 4)
    thread = public._thread
    del public
    deadline = time.monotonic() + 10
    while thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not thread.is_alive()


def test_frames_and_compiled_code(make: Make) -> None:
    envs = make(2, render_mode="rgb_array")
    envs.reset()
    frames = envs.render()
    assert frames is not None
    assert len(frames) == 2
    assert len(envs.xla()) == 4
    assert envs.reset()[0].shape == (2, 4)
