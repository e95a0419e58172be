"""Tests of ``submissions()``: non-blocking requests to single rows, made by event loops."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from test_engine_concurrency import CannotBeUnpickled
from test_interrupted_calls import KILL, CountingEnv

from vecenv.engine.vector_env import AsyncVectorEnv
from vecenv.errors import EnvFailed, RestartsExhausted, SnapshotMismatch, WorkerDied
from vecenv.system.restart_budget import RestartBudget


class RaisingEnv(CountingEnv):
    """An environment that raises for action 8."""

    action_space = gymnasium.spaces.Discrete(8)

    def step(self, action: Any) -> Any:
        if action == 8:
            raise ValueError("no such move")
        return super().step(action)

    def count_bytes(self, array: Any) -> int:
        return int(array.nbytes)


def make_envs(num_workers: int | None = None, **options: Any) -> Any:
    return AsyncVectorEnv([partial(RaisingEnv, row) for row in range(3)], num_workers=num_workers, context="fork", **options)


@pytest.fixture
def envs() -> Iterator[Any]:
    envs = make_envs()
    yield envs
    envs.close(terminate=True)


@pytest.fixture
def submissions(envs: Any) -> Iterator[Any]:
    with closing(envs.submissions()) as submissions:
        yield submissions


def wait_for_results(submissions: Any, count: int, *, starts: bool = False) -> dict[int, Any]:
    """Wait as an event loop does until ``count`` requests (or starts) have finished. Return results or errors by row."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + 40
    while len(results) < count:
        assert time.monotonic() < deadline
        select.select([submissions.fileno()], [], [], 1.0)
        for request, result, error in submissions.collect():
            if (request.command == "start") == starts:
                results[request.rows[0]] = error or result
    return results


def reset_rows(submissions: Any, *rows: int) -> None:
    for row in rows:
        submissions.submit(row, "reset", (row, None))
    wait_for_results(submissions, len(rows))


def test_rows_can_be_reset_and_stepped_one_by_one(envs: Any, submissions: Any) -> None:
    for row in range(3):
        submissions.submit(row, "reset", (row, None))
    assert envs.stats()["in_flight"] == 3
    results = wait_for_results(submissions, 3)
    assert {row: (result[0].tolist(), result[1]) for row, result in results.items()} == {
        row: ([row, 0, row], {"began": row}) for row in range(3)
    }
    submissions.submit(1, "step", 5)
    ((observation, *rest),) = wait_for_results(submissions, 1).values()
    assert (observation.tolist(), rest) == ([1, 1, 6], [6.0, False, False, {"total": 6}])
    submissions.submit(2, "call", ("sleep", (0.01,), {}))
    assert wait_for_results(submissions, 1) == {2: 2}
    assert {key: envs.stats()[key] for key in ("steps", "resets", "in_flight")} == {"steps": 1, "resets": 3, "in_flight": 0}


def test_env_that_raises_needs_a_reset(submissions: Any) -> None:
    reset_rows(submissions, 0)
    submissions.submit(0, "step", 8)
    (error,) = wait_for_results(submissions, 1).values()
    assert isinstance(error, EnvFailed)
    assert isinstance(error.__cause__, ValueError)
    assert set(submissions.failed) == {0}
    with pytest.raises(EnvFailed, match="no such move"):
        submissions.submit(0, "step", 1)
    reset_rows(submissions, 0)
    submissions.submit(0, "call", ("no_such_method", (), {}))
    assert isinstance(wait_for_results(submissions, 1)[0], AttributeError)
    assert not submissions.failed


def test_worker_death_ends_its_request_and_start_does_not_block(envs: Any, submissions: Any) -> None:
    reset_rows(submissions, 0, 1, 2)
    submissions.submit(0, "step", KILL)
    submissions.submit(2, "step", 2)
    results = wait_for_results(submissions, 2)
    assert results[2][0].tolist() == [2, 1, 4]
    assert isinstance(results[0], WorkerDied)
    assert [death.envs for death in submissions.deaths] == [(0,)]
    with pytest.raises(EnvFailed):
        submissions.submit(0, "reset", (7, None))
    with pytest.raises(ValueError, match="is alive"):
        submissions.start(1)
    budget = RestartBudget(1, 60.0, lambda: 0.0)
    submissions.start(0, budget=budget)
    submissions.submit(0, "reset", (7, None))
    assert wait_for_results(submissions, 1)[0][0].tolist() == [0, 0, 7]
    submissions.submit(0, "step", KILL)
    wait_for_results(submissions, 1)
    with pytest.raises(RestartsExhausted, match="more than 1 restarts") as exhausted:
        submissions.start(0, budget=budget)
    assert exhausted.value.envs == (0,)
    submissions.start(0)
    assert wait_for_results(submissions, 1, starts=True) == {0: None}
    assert envs.stats()["restarts"] == 2


def test_death_of_an_idle_worker_is_collected_once(envs: Any, submissions: Any) -> None:
    reset_rows(submissions, 1)
    envs.processes[1].kill()
    select.select([submissions.fileno()], [], [], 20.0)
    assert submissions.collect() == []
    (death,) = submissions.deaths
    assert "died while idle" in death.text
    # nothing else is readable, although forked processes hold copies of the descriptor that reported the death
    assert select.select([submissions.fileno()], [], [], 0.1)[0] == []
    submissions.start(1)
    assert wait_for_results(submissions, 1, starts=True) == {1: None}
    assert select.select([submissions.fileno()], [], [], 0.1)[0] == []


def test_kill_ends_a_hanging_request_with_the_given_reason(submissions: Any) -> None:
    reset_rows(submissions, 1)
    submissions.submit(1, "call", ("sleep", (60.0,), {}))
    assert submissions.collect() == []
    submissions.kill(1, "the request was cancelled")
    (error,) = wait_for_results(submissions, 1).values()
    assert "died during call: the request was cancelled" in str(error)


def test_message_larger_than_the_pipe_is_sent_completely(submissions: Any) -> None:
    reset_rows(submissions, 0)
    submissions.submit(0, "call", ("count_bytes", (np.zeros(1 << 20),), {}))
    assert wait_for_results(submissions, 1) == {0: 8 << 20}


def test_states_are_saved_and_loaded_by_row(submissions: Any) -> None:
    reset_rows(submissions, 0, 1)
    submissions.submit(0, "step", 3)
    wait_for_results(submissions, 1)
    submissions.submit(0, "save")
    (snapshot,) = wait_for_results(submissions, 1).values()
    submissions.submit(0, "verify")
    assert wait_for_results(submissions, 1) == {0: None}
    assert submissions.verified == {0}
    submissions.submit(1, "check", snapshot)
    assert wait_for_results(submissions, 1) == {1: None}
    submissions.submit(1, "load", snapshot)
    assert wait_for_results(submissions, 1)[1].tolist() == [0, 1, 3]
    with pytest.raises(SnapshotMismatch):
        submissions.submit(1, "check", snapshot.having(observation="another observation"))


def test_row_stays_failed_if_its_worker_dies_right_after_a_load(envs: Any, submissions: Any) -> None:
    reset_rows(submissions, 0)
    submissions.submit(0, "save")
    (snapshot,) = wait_for_results(submissions, 1).values()
    submissions.submit(0, "check", snapshot)
    wait_for_results(submissions, 1)
    submissions.submit(0, "load", snapshot)
    select.select([submissions.fileno()], [], [], 20.0)
    (worker, *_) = envs._pool.processes
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.watch.has_ended(20.0)
    assert isinstance(wait_for_results(submissions, 1)[0], WorkerDied)
    with pytest.raises(EnvFailed, match="died while idle"):
        submissions.submit(0, "step", 1)
    submissions.start(0, budget=RestartBudget(1, 60.0, lambda: 0.0))
    reset_rows(submissions, 0)


def test_messages_held_by_max_concurrency_are_sent_after_replies() -> None:
    envs = make_envs(max_concurrency=1)
    try:
        with closing(envs.submissions()) as submissions:
            reset_rows(submissions, 0, 1, 2)
            submissions.submit(0, "step", KILL)
            for row in (1, 2):
                submissions.submit(row, "step", 4)
            results = wait_for_results(submissions, 3)
            assert isinstance(results[0], WorkerDied)
            assert [results[row][0].tolist() for row in (1, 2)] == [[1, 1, 5], [2, 1, 6]]
    finally:
        envs.close(terminate=True)


def test_failure_that_cannot_be_recorded_is_the_result_of_its_request(
    envs: Any, submissions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_error(*_: Any, **__: Any) -> Any:
        raise TypeError("cannot be recorded")

    reset_rows(submissions, 0, 1, 2)
    monkeypatch.setattr(submissions._changes.failure_log, "record", raise_error)
    for row, action in enumerate((8, 3, 4)):
        submissions.submit(row, "step", action)
    for worker in envs._pool.processes:
        select.select([worker.channel.fd], [], [], 20.0)
    results = {request.rows[0]: error or result[0].tolist() for request, result, error in submissions.collect()}
    assert repr(results.pop(0)) == "TypeError('cannot be recorded')"
    assert results == {1: [1, 1, 4], 2: [2, 1, 6]}
    assert envs.stats()["in_flight"] == 0


def test_requests_to_env_threads_finish_in_any_order() -> None:
    envs = make_envs(1, env_threads=3)
    try:
        with closing(envs.submissions()) as submissions:
            reset_rows(submissions, 0, 1, 2)
            started = time.monotonic()
            for row, seconds in enumerate((60.0, 0.5, 0.01)):
                submissions.submit(row, "call", ("sleep", (seconds,), {}))
            assert list(wait_for_results(submissions, 1)) == [2]
            submissions.submit(2, "step", 4)
            assert wait_for_results(submissions, 1)[2][0].tolist() == [2, 1, 6]
            assert list(wait_for_results(submissions, 1)) == [1]
            assert time.monotonic() - started < 30
            os.kill(envs.processes[0].pid, signal.SIGKILL)
            assert isinstance(wait_for_results(submissions, 1)[0], WorkerDied)
    finally:
        envs.close(terminate=True)


@pytest.mark.parametrize("env_threads", [1, 3])
def test_argument_that_cannot_be_unpickled_fails_only_its_request(env_threads: int) -> None:
    envs = make_envs(1, env_threads=env_threads)
    try:
        with closing(envs.submissions()) as submissions:
            reset_rows(submissions, 0, 1, 2)
            submissions.submit(1, "call", ("count_bytes", (CannotBeUnpickled(),), {}))
            submissions.submit(2, "step", CannotBeUnpickled())
            results = wait_for_results(submissions, 2)
            assert str(results[1]).startswith("env 1: the request cannot be unpickled in the worker: ValueError")
            assert isinstance(results[2], EnvFailed)
            assert [record.env for record in envs.errors] == [1, 2]
            submissions.submit(0, "step", 4)
            assert wait_for_results(submissions, 1)[0][0].tolist() == [0, 1, 4]
            reset_rows(submissions, 2)
            assert not submissions.deaths
    finally:
        envs.close(terminate=True)


def test_event_of_a_closed_pipe_with_the_number_of_an_exit_descriptor_ends_no_worker(envs: Any, submissions: Any) -> None:
    """A pipe of a dead worker stays registered while a process that was just forked has a copy of its descriptor."""
    (worker, *_) = envs._pool.processes
    _, exit_descriptor = submissions._watched[worker]
    saved = os.dup(exit_descriptor.number)
    ended_pipe, other_end = os.pipe()
    os.close(other_end)
    try:
        os.dup2(ended_pipe, exit_descriptor.number)
        submissions._selector._selector.register(exit_descriptor.number, select.EPOLLIN)
        os.dup2(saved, exit_descriptor.number)
        assert submissions.collect() == []
        submissions.submit(0, "reset")
        assert wait_for_results(submissions, 1).keys() == {0}
        assert worker.death is None
    finally:
        os.close(saved)
        os.close(ended_pipe)
