"""Each call of a pool of several players means what it means everywhere: timeouts, phases, guards, seeds, interruptions."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from forks import in_a_fork
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded

pytest.importorskip("envpool")

from vecenv.errors import BusyError, ForkedError, StepTimeout
from vecenv.front.capabilities import FIGURES
from vecenv.multi_agent import MultiAgentVecEnv
from vecenv.testing import assert_identical

from .test_envpool_interrupts import KINDS, Interruption, moments


def legal(infos: dict[str, Any]) -> np.ndarray:
    return infos["action_mask"].argmax(axis=-1)


@pytest.fixture
def tic_tac_toe() -> Iterator[Callable[..., MultiAgentVecEnv]]:
    """Games that are closed at the end of the test."""
    made: list[MultiAgentVecEnv] = []

    def build(num_envs: int = 4, **options: Any) -> MultiAgentVecEnv:
        made.append(MultiAgentVecEnv.from_envpool("TicTacToe-v1", num_envs, num_threads=1, **options))
        return made[-1]

    yield build
    for envs in made:
        envs.close()


def slow(envs: MultiAgentVecEnv, delay: float) -> None:
    """Every answer takes ``delay`` seconds longer."""
    receiver = envs._rows._driver.receiver
    recv = receiver._recv
    receiver._recv = lambda: (time.sleep(delay), recv())[1]


def moves(n: int) -> np.ndarray:
    return np.zeros((n, 2), np.int64)


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [None, 2])
def test_an_answer_that_came_too_late_is_still_owed(tic_tac_toe: Any, batch_size: int | None) -> None:
    envs, same = tic_tac_toe(batch_size=batch_size), tic_tac_toe()
    envs.reset(seed=1)
    _, infos = same.reset(seed=1)
    slow(envs, 0.3)
    envs.step_async(legal(infos))
    with pytest.raises(StepTimeout, match="still owed"):
        envs.step_wait(timeout=0.02)
    with pytest.raises(AlreadyPendingCallError):
        envs.step_async(moves(4))
    assert_identical(envs.step_wait(timeout=20.0), same.step(legal(infos)))
    envs.reset_async()
    with pytest.raises(StepTimeout):
        envs.reset_wait(timeout=0.02)
    assert_identical(envs.reset_wait(), same.reset())
    envs.send(moves(4), np.arange(4))
    with pytest.raises(StepTimeout):
        envs.recv(timeout=0.02)
    assert len(envs.recv(timeout=20.0)[1]) == (batch_size or 4)


def test_calls_out_of_order_are_refused_as_everywhere(tic_tac_toe: Any) -> None:
    envs = tic_tac_toe(batch_size=2)
    for call in (lambda: envs.reset_async(env_id=[0]), lambda: envs.step(moves(4))):
        with pytest.raises(ResetNeeded):
            call()
    for call in (envs.reset_wait, envs.step_wait):
        with pytest.raises(NoAsyncCallError):
            call()
    envs.reset()
    for call in (envs.reset_wait, envs.step_wait, envs.recv):
        with pytest.raises(NoAsyncCallError):
            call()
    envs.step_async(moves(4))
    for call in (envs.reset_async, lambda: envs.step_async(moves(4)), lambda: envs.send(moves(4)), envs.recv, envs.reset):
        with pytest.raises(AlreadyPendingCallError):
            call()
    envs.step_wait()
    envs.send(moves(2), [2, 0])
    with pytest.raises(AlreadyPendingCallError, match=r"envs \[2\], which are still in flight"):
        envs.send(moves(2), [1, 2])
    with pytest.raises(AlreadyPendingCallError, match=r"envs \[0\]"):
        envs.reset_async(env_id=[0, 3])
    assert sorted(envs.recv()[4]["env_id"].tolist()) == [0, 2]


@pytest.mark.parametrize("batch_size", [4, 2, 1])
def test_some_games_are_begun_anew_and_received_in_any_number(tic_tac_toe: Any, batch_size: int) -> None:
    envs = tic_tac_toe(batch_size=batch_size)
    _, infos = envs.reset(seed=0)
    envs.step(legal(infos))
    envs.reset_async(env_id=[1])
    envs.send(np.ones((3, 2), np.int64), [3, 0, 2])
    boards = {}
    for count in (1, 3):
        _, _, _, _, infos = envs.recv(count=count)
        assert infos["env_id"].dtype == np.intp
        assert infos["_env_id"].all()
        assert len(infos["env_id"]) == count
        boards |= dict(zip(infos["env_id"].tolist(), (infos["board"] >= 0).sum(axis=(1, 2)).tolist(), strict=True))
    assert boards == {0: 2, 1: 0, 2: 2, 3: 2}
    assert envs.stats()["in_flight"] == 0
    with pytest.raises(NoAsyncCallError):
        envs.recv(count=1)
    with pytest.raises(ValueError, match="count must be"):
        envs.recv(count=5)
    with pytest.raises(NotImplementedError, match="cannot seed some"):
        envs.reset_async(seed=1, env_id=[0])


def test_seeds_of_every_kind_are_taken(tic_tac_toe: Any) -> None:
    with MultiAgentVecEnv.from_envpool("SparrowMahjong-v1", 2, num_threads=1) as envs:
        same = [envs.reset(seed=seed)[0] for seed in (5, np.int64(5), [5, 6], (5, 6), np.array([5, 6]))]
        assert all(np.array_equal(one, same[0]) for one in same)
        assert np.array_equal(envs.reset(seed=[2**40, None])[0][0], envs.reset(seed=[2**40, 3])[0][0])
        for wrong in ([1], "12", 1.5, [1, "x"], -1):
            with pytest.raises((TypeError, ValueError), match="seed"):
                envs.reset(seed=wrong)


def test_a_second_thread_a_forked_child_and_a_caller_after_close_are_refused(tic_tac_toe: Any) -> None:
    envs = tic_tac_toe()
    _, infos = envs.reset()
    slow(envs, 0.5)
    actions = legal(infos)
    thread = threading.Thread(target=envs.step, args=(actions,))
    thread.start()
    time.sleep(0.15)
    calls = [envs.reset, envs.recv, lambda: envs.step(moves(4)), lambda: envs.send(moves(4), [0, 1, 2, 3]), envs.step_wait]
    for call in calls:
        with pytest.raises(BusyError, match="in a call on this MultiAgentVecEnv"):
            call()
    thread.join()

    def check() -> None:
        for call in calls:
            with pytest.raises(ForkedError, match="this MultiAgentVecEnv belongs to another process"):
                call()
        envs.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert in_a_fork(check) == 0
    before = envs.stats()
    envs.close()
    envs.close()
    for call in calls:
        with pytest.raises(ClosedEnvironmentError, match="`MultiAgentVecEnv`, after a call to `close"):
            call()
    assert envs.stats()["steps"] == before["steps"] == 4


def test_figures_and_capabilities_are_those_of_every_backend(tic_tac_toe: Any) -> None:
    envs = tic_tac_toe(batch_size=2)
    assert envs.stats().keys() >= set(FIGURES)
    envs.reset()
    envs.send(moves(3), [0, 1, 2])
    assert envs.stats()["in_flight"] == 3
    assert envs.stats()["resets"] == 4
    assert not envs.capabilities.attributes
    for call in (
        lambda: envs.exec_func(id),
        lambda: envs.call("x"),
        lambda: envs.set_attr("x", 1),
        envs.call_wait,
        envs.render,
    ):
        with pytest.raises(NotImplementedError, match="MultiAgentVecEnv cannot `"):
            call()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [4, 2])
def test_rows_are_neither_lost_nor_repeated_whatever_interrupts(tic_tac_toe: Any, batch_size: int, kind: str) -> None:
    """Of the pool: what ``MultiAgentVecEnv`` knows of rows it knows once they were returned to it."""
    pool, same = tic_tac_toe(batch_size=batch_size)._rows, tic_tac_toe()._rows
    for one in (pool, same):
        one.reset_async(seed=3)
        one.reset_wait()
    for move, interruption in enumerate(moments(kind, least=10)):
        actions = np.full((4, 2), move % 9)
        same.step_async(actions)
        wanted = same.step_wait()
        with interruption:
            pool.send(actions, np.arange(4))
        if not pool.stats()["in_flight"]:
            pool.send(actions, np.arange(4))
        again = Interruption(kind, interruption._left % 60 if interruption.fired else 10**6)
        parts = []
        while sum(len(part[1]) for part in parts) < 4:
            with again:
                parts.append(pool.recv(30.0))
        ids = np.concatenate([part[4]["env_id"] for part in parts])
        assert sorted(ids.tolist()) == [0, 1, 2, 3]
        for field in ("obs", "signals"):
            rows = np.concatenate([part[0][field] for part in parts])
            np.testing.assert_array_equal(rows[np.argsort(ids)], wanted[0][field])
