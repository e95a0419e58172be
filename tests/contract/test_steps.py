"""``step``, ``step_async`` and ``step_wait``, ``send`` and ``recv``; timeouts, actions, and infos."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError

from vecenv.errors import StepTimeout
from vecenv.testing import assert_identical

from .backends import ROWS, Backend
from .calls import assert_masks, call, copy_rows, count_in_flight, to_numpy

ALL_ROWS = range(ROWS)


def receive_all(envs: Any) -> list[Any]:
    """Receive every row once, and return the results without infos in the order of rows."""
    results: dict[int, Any] = {}
    while len(results) < ROWS:
        *batch, infos = envs.recv()
        for position, row in enumerate(infos["env_id"].tolist()):
            assert row not in results
            results[row] = [copy_rows(part, [position]) for part in batch]
    return [results[row] for row in sorted(results)]


def step_after_seeded_reset(envs: Any, actions: Any) -> Any:
    """Return the results of a step after a seeded reset, and then reset with the same seed again."""
    envs.reset(seed=7)
    expected = to_numpy(envs.step(actions)[:4])
    envs.reset(seed=7)
    return expected


@call("`step`")
def test_step_returns_observations_rewards_and_flags_of_all_rows(backend: Backend, envs: Any) -> None:
    observations, rewards, terminations, truncations, infos = envs.step(backend.actions(ROWS))
    assert to_numpy(observations) in envs.observation_space
    assert len(rewards) == len(terminations) == len(truncations) == ROWS
    assert np.asarray(terminations).dtype == np.asarray(truncations).dtype == np.bool_
    assert np.asarray(rewards).dtype.kind == "f"
    assert isinstance(infos, dict)
    assert count_in_flight(envs) == 0


@call("`step_async`, `step_wait`")
def test_step_async_and_step_wait_equal_step(backend: Backend, envs: Any) -> None:
    actions = backend.actions(ROWS)
    for wait in (envs.step_wait, envs.recv):
        with pytest.raises(NoAsyncCallError):
            wait()
    expected = step_after_seeded_reset(envs, actions)
    envs.step_async(actions)
    assert_identical(to_numpy(envs.step_wait()[:4]), expected)
    with pytest.raises(NoAsyncCallError, match="`step_wait` without any prior call to `step_async`"):
        envs.step_wait()


@call("calls while a step is pending")
def test_other_calls_are_refused_while_a_step_is_pending(backend: Backend, envs: Any) -> None:
    actions = backend.actions(ROWS)
    expected = step_after_seeded_reset(envs, actions)
    envs.step_async(actions)
    for make_call in (
        lambda: envs.step_async(actions), lambda: envs.step(actions), envs.reset, envs.reset_async,
        lambda: envs.send(actions), lambda: envs.send(actions, ALL_ROWS), envs.recv,
    ):  # fmt: skip
        with pytest.raises(AlreadyPendingCallError):
            make_call()
    with pytest.raises(NoAsyncCallError):
        envs.reset_wait()
    assert_identical(to_numpy(envs.step_wait()[:4]), expected)


@call("`step_wait(timeout)`: the timeout passes")
def test_step_wait_after_a_timeout_returns_the_pending_result(
    backend: Backend, build: Callable[..., Any], unless_refused: Any
) -> None:
    envs = build(backend.make_slow)
    actions = (backend.slow_actions or backend.actions)(envs.num_envs)
    envs.reset()
    timeouts = 0
    with unless_refused(envs, "timeouts"):
        for timeout in (0, -1, 0.001, np.float32(0), 0):  # several, because on a busy machine the result may be ready
            envs.step_async(actions)
            try:
                envs.step_wait(timeout=timeout)
            except StepTimeout as error:
                assert isinstance(error, TimeoutError)
                assert error.timeout is not None
                assert set(error.envs) <= set(range(envs.num_envs))
                timeouts += 1
                with pytest.raises(AlreadyPendingCallError):
                    envs.step_async(actions)
                assert len(envs.step_wait(timeout=60)[1]) == envs.num_envs
            if timeouts == 2:
                break
        assert timeouts or envs.capabilities.in_this_process
    if count_in_flight(envs):
        envs.step_wait()
    envs.step(actions)


@call("`recv(timeout)`: the timeout passes")
def test_recv_after_a_timeout_returns_the_late_rows(
    backend: Backend, build: Callable[..., Any], unless_refused: Any
) -> None:
    envs = build(backend.make_slow)
    actions = (backend.slow_actions or backend.actions)(envs.num_envs)
    envs.reset()
    timeouts = 0
    with unless_refused(envs, "timeouts"):
        for _ in range(5):
            envs.send(actions, range(envs.num_envs))
            try:
                rows = envs.recv(0, count=envs.num_envs)[4]["env_id"]
            except StepTimeout:
                timeouts += 1
                rows = envs.recv(count=envs.num_envs)[4]["env_id"]
            assert sorted(rows.tolist()) == list(range(envs.num_envs))
            if timeouts == 2:
                break
        assert timeouts or envs.capabilities.in_this_process


@call("`timeout`: invalid values")
def test_invalid_timeout_is_refused_and_the_result_stays_pending(backend: Backend, envs: Any) -> None:
    def check_invalid_timeouts_then_wait(wait: Callable[..., Any]) -> None:
        for wrong, error in ((math.nan, ValueError), ("1", TypeError), (True, TypeError), ([1], TypeError)):
            with pytest.raises(error, match="timeout"):
                wait(timeout=wrong)
        wait()

    envs.reset_async()
    check_invalid_timeouts_then_wait(envs.reset_wait)
    envs.step_async(backend.actions(ROWS))
    check_invalid_timeouts_then_wait(envs.step_wait)
    envs.send(backend.actions(ROWS), ALL_ROWS)
    check_invalid_timeouts_then_wait(envs.recv)
    while count_in_flight(envs):
        envs.recv()


@call("`send`, `recv`: all rows")
def test_send_to_all_rows_equals_step(backend: Backend, envs: Any) -> None:
    actions = backend.actions(ROWS)
    expected = step_after_seeded_reset(envs, actions)
    envs.send(actions, ALL_ROWS)  # without `env_id`, only the rows of the latest `recv` would be stepped
    assert count_in_flight(envs) == ROWS
    for row, (observation, *_) in enumerate(receive_all(envs)):
        assert_identical(observation, copy_rows(expected[0], [row]))
    with pytest.raises(NoAsyncCallError):
        envs.recv()


@call("`batch_size`: rows that `recv` returns")
def test_batch_size_is_the_number_of_received_rows(backend: Backend, envs: Any) -> None:
    envs.send(backend.actions(ROWS), ALL_ROWS)
    received_rows = len(envs.recv()[1])
    while count_in_flight(envs):
        envs.recv()
    assert received_rows == envs.batch_size


@call("`send(env_id=)`: some rows")
def test_send_to_some_rows_steps_only_those(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "first_ready"):
        envs.send(backend.actions(2), [3, 1])
        assert count_in_flight(envs) == 2
        with pytest.raises(NoAsyncCallError):
            envs.recv(count=3)
        assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [1, 3]
        for begin in (envs.reset, lambda: envs.step(backend.actions(ROWS))):
            envs.send(backend.actions(2), [3, 1])
            envs.recv(count=2)
            envs.send(backend.actions(2))  # to the rows of the latest `recv`
            assert sorted(envs.recv(count=2)[4]["env_id"].tolist()) == [1, 3]
            begin()
            envs.send(backend.actions(ROWS))
            assert len(receive_all(envs)) == ROWS
    assert count_in_flight(envs) == 0


@call("`send`: a row in flight")
def test_send_to_a_row_in_flight_is_refused(backend: Backend, envs: Any) -> None:
    actions = backend.actions(ROWS)
    envs.send(actions, ALL_ROWS)
    refused_calls = [lambda: envs.send(actions, ALL_ROWS), lambda: envs.step(actions), lambda: envs.step_async(actions)]
    if envs.capabilities.attributes:
        refused_calls += [lambda: envs.call("spec"), lambda: envs.set_attr("mine", 1), lambda: envs.exec_func(id)]
    for make_call in refused_calls:
        with pytest.raises(AlreadyPendingCallError):
            make_call()
    for wait in (envs.step_wait, envs.reset_wait):
        with pytest.raises(NoAsyncCallError):
            wait()
    assert len(receive_all(envs)) == ROWS


@call("`reset_async(env_id=)`: a row in flight")
def test_reset_of_a_row_in_flight_is_refused(backend: Backend, envs: Any, unless_refused: Any) -> None:
    envs.send(backend.actions(ROWS), ALL_ROWS)
    with unless_refused(envs, "first_ready"), pytest.raises(AlreadyPendingCallError):
        envs.reset_async(env_id=ALL_ROWS)
    assert len(receive_all(envs)) == ROWS


@call("`send(env_id=)`: invalid rows")
def test_send_with_an_invalid_env_id_sends_nothing(backend: Backend, envs: Any) -> None:
    for wrong in ([ROWS], [-1], [1, 1], [], [0.0], ["a"], 1, [[0, 1]]):
        with pytest.raises(ValueError, match="env_id"):
            envs.send(backend.actions(np.size(wrong)), wrong)
    assert count_in_flight(envs) == 0


@call("`recv(count=)`")
def test_recv_returns_the_requested_count(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "first_ready"):
        for counts in ((1, 3), (2, 2), (4,), (3, 1)):
            envs.send(backend.actions(ROWS), ALL_ROWS)
            rows = []
            for count in counts:
                rows += envs.recv(count=count)[4]["env_id"].tolist()
                assert count_in_flight(envs) == ROWS - len(rows)
            assert sorted(rows) == list(ALL_ROWS)
    if count_in_flight(envs):
        envs.recv(count=ROWS)


@call("`recv(count=)`: invalid counts")
def test_invalid_count_is_refused(backend: Backend, envs: Any) -> None:
    envs.send(backend.actions(ROWS), ALL_ROWS)
    for wrong, error in ((0, ValueError), (-1, ValueError), (ROWS + 1, ValueError), (1.0, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="count must be"):
            envs.recv(count=wrong)
    assert count_in_flight(envs) == ROWS
    assert len(receive_all(envs)) == ROWS


@call("`recv(at_least=, within=)`")
def test_recv_with_at_least_returns_each_row_once_and_all_rows_if_within_is_long(
    backend: Backend, build: Callable[..., Any], unless_refused: Any
) -> None:
    envs = build(backend.make_slow)
    num_envs, actions = envs.num_envs, (backend.slow_actions or backend.actions)(envs.num_envs)
    envs.reset()
    envs.send(actions, range(num_envs))
    received: list[int] = []
    with unless_refused(envs, "first_ready"):
        while len(received) < num_envs:
            at_least = min(envs.batch_size, num_envs - len(received))
            rows = envs.recv(60, count=num_envs, at_least=at_least, within=0.001)[4]["env_id"]
            assert len(rows) >= at_least
            received += rows.tolist()
            assert count_in_flight(envs) == num_envs - len(received)
        assert sorted(received) == list(range(num_envs))
        envs.send(actions, range(num_envs))
        assert len(envs.recv(60, count=num_envs, at_least=1, within=60)[1]) == num_envs
    while count_in_flight(envs):
        envs.recv()
    with pytest.raises((NoAsyncCallError, NotImplementedError)):
        envs.recv(at_least=1)


@call("`recv(at_least=, within=)`: invalid values")
def test_invalid_at_least_is_refused(backend: Backend, envs: Any, unless_refused: Any) -> None:
    envs.send(backend.actions(ROWS), ALL_ROWS)
    with unless_refused(envs, "first_ready"):
        for wrong, error in ((0, ValueError), (ROWS + 1, ValueError), (1.0, TypeError), ("2", TypeError)):
            with pytest.raises(error, match="at_least must be"):
                envs.recv(at_least=wrong, count=ROWS)
        for wrong, error in ((math.nan, ValueError), ("1", TypeError), (True, TypeError)):
            with pytest.raises(error, match="within"):
                envs.recv(within=wrong)
    assert count_in_flight(envs) == ROWS
    assert len(receive_all(envs)) == ROWS


@call("`recv`: one row in flight")
def test_single_row_in_flight_can_be_received(backend: Backend, envs: Any, unless_refused: Any) -> None:
    with unless_refused(envs, "first_ready"):
        envs.send(backend.actions(1), [2])
        assert envs.recv(count=1)[4]["env_id"].tolist() == [2]


@call("actions: too few, too many")
def test_wrong_number_of_actions_is_refused_before_anything_is_sent(backend: Backend, envs: Any) -> None:
    steps = envs.stats()["steps"]
    for wrong in (backend.actions(ROWS - 1), backend.actions(ROWS + 1), backend.actions(1)[0], None, 3):
        for begin in (envs.step, envs.step_async, lambda actions: envs.send(actions, ALL_ROWS)):
            with pytest.raises((ValueError, TypeError)):
                begin(wrong)
    assert count_in_flight(envs) == 0
    assert envs.stats()["steps"] == pytest.approx(steps, nan_ok=True)
    with pytest.raises(NoAsyncCallError):
        envs.step_wait()
    envs.step(backend.actions(ROWS))


@call("actions: a wrong shape")
def test_actions_of_a_wrong_shape_are_refused_before_anything_is_sent(backend: Backend, envs: Any) -> None:
    steps = envs.stats()["steps"]
    for begin in (envs.step, envs.step_async, lambda actions: envs.send(actions, ALL_ROWS)):
        with pytest.raises((ValueError, TypeError)):
            begin(backend.misshapen_actions(ROWS))
    assert count_in_flight(envs) == 0
    assert envs.stats()["steps"] == pytest.approx(steps, nan_ok=True)
    envs.step(backend.actions(ROWS))


@call("infos: masks")
def test_every_info_has_its_mask(backend: Backend, envs: Any) -> None:
    assert_masks(envs.reset()[1])
    for _ in range(12):  # some episodes end within this many steps
        assert_masks(envs.step(backend.actions(ROWS))[4])
    envs.send(backend.actions(ROWS), ALL_ROWS)
    received = 0
    while received < ROWS:
        infos = envs.recv()[4]
        assert_masks(infos)
        received += len(infos["env_id"])


@call("infos: `env_id`")
def test_received_infos_have_env_ids(backend: Backend, envs: Any) -> None:
    for begin in (lambda: envs.send(backend.actions(ROWS), ALL_ROWS), envs.reset_async):
        begin()
        received: list[int] = []
        while len(received) < ROWS:
            *_, infos = envs.recv()
            assert infos["env_id"].dtype == np.intp
            assert infos["_env_id"].dtype == np.bool_
            assert infos["_env_id"].all()
            received += infos["env_id"].tolist()
        assert sorted(received) == list(ALL_ROWS)
