"""Tests of random calls, faults and interruptions. A model computes the expected results: one plain environment per row.

The default run takes seconds. ``PYTHONPATH=tests python tests/faults/test_model.py 1000`` makes 1,000 runs.
``pytest -m soak -s`` continues for ``VECENV_SOAK_SECONDS`` (default: 3,600). Both print the numbers of runs and moves.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from at_random import SignalInterruption, handle_signal, handle_unraisable
from counting import DIE, RAISE, CountingEnv, DrawingEnv, LargeObservationEnv, echo
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from interrupted_calls import (
    RESTART,
    SETTINGS,
    UNINTERRUPTED,
    HangError,
    Setting,
    Watchdog,
    child_pids,
    describe_error,
    drops_calls,
    in_flight,
    interruptible_files,
    kill_children,
    needs_reset,
)
from interruption import Interruption, Stopped
from observe import FAULT_MARKS, WAIT_SECONDS, still_running
from sampling import each_once
from signals import default_sigint_handler

from vecenv.errors import EnvFailed, StepTimeout, WorkerDied
from vecenv.testing import assert_identical

pytestmark = [mark for mark in FAULT_MARKS if mark.name != "timeout"]

NUM_ENVS, BATCH_SIZE, EPISODE_LENGTH = 4, 2, 4
SETTINGS_BY_NAME = {
    **SETTINGS,
    "generators": Setting({"num_workers": 2, "generators": "own"}, env_class=DrawingEnv),
    "generators, in process": Setting(
        {"num_workers": 0, "generators": "own"}, env_class=DrawingEnv, local_envs=(0, 1, 2, 3)
    ),
    "generators, caller's share": Setting(
        {"num_workers": 2, "use_caller": True, "generators": "own"}, env_class=DrawingEnv, local_envs=(0,)
    ),
    "lent observations, caller's share": Setting(
        {"num_workers": 2, "use_caller": True}, env_class=LargeObservationEnv, local_envs=(0,)
    ),
}
MODEL_SETTINGS: dict[str, Setting] = {
    name: replace(
        SETTINGS_BY_NAME[base],
        options={**SETTINGS_BY_NAME[base].options, "batch_size": BATCH_SIZE, **changes},
        length=EPISODE_LENGTH,
    )
    for name, base, changes in [
        ("in process", "in process", {}),
        ("caller's share", "caller's share", {}),
        ("one worker", "one worker", {}),
        ("two workers", "batch_size", {}),
        ("two workers of a fork server", "batch_size", {"context": "forkserver"}),
        ("same step", "same step", {}),
        ("same step, restart", "same step", RESTART),
        ("same step, in process", "in process", {"autoreset_mode": "SameStep"}),
        ("no autoreset", "batch_size", {"autoreset_mode": "Disabled"}),
        ("no autoreset, restart", "batch_size", {"autoreset_mode": "Disabled", **RESTART}),
        ("restart", "restart", {}),
        ("max_concurrency", "max_concurrency", {}),
        ("list actions", "list actions", {}),
        ("Text actions, restart", "Text actions", RESTART),
        ("Text observations", "Text observations", {}),
        ("no shared memory, restart", "no shared memory", RESTART),
        ("env_threads", "batch_size", {"env_threads": 2}),
        ("env_threads, restart", "batch_size", {"env_threads": 2, **RESTART}),
        ("generators", "generators", {}),
        ("generators, in process", "generators, in process", {}),
        ("generators, caller's share", "generators, caller's share", {}),
        ("generators, restart", "generators", RESTART),
        ("lent observations", "lent observations", {}),
        ("lent observations, restart", "lent observations", RESTART),
        ("lent observations, caller's share", "lent observations, caller's share", {}),
    ]
}
TIMEOUTS = [None, 0.0, 30.0]
TOTALS = {"runs": 0, "moves": 0, "interrupted": 0, "tolerated": 0}


class ExpectedRow:
    """A plain environment that computes the expected values of a row, and a separate implementation of autoreset."""

    def __init__(self, setting: Setting, index: int) -> None:
        self.env: CountingEnv = setting.env_class(index, setting.length)
        self.mode = AutoresetMode(setting.options.get("autoreset_mode", "NextStep"))
        self.done = False
        self.last_observation: Any = None
        self.next_seed: int | None = None  # for the next automatic reset

    def reset(self, seed: int | None) -> tuple[Any, ...]:
        if isinstance(self.env, DrawingEnv):
            self.env.begin_episode(seed)
        self.last_observation, info = self.env.reset(seed=seed)
        self.done = False
        return self.last_observation, 0.0, False, False, info

    def _begin_next(self) -> tuple[Any, ...]:
        seed, self.next_seed = self.next_seed, None
        return self.reset(seed)

    def step(self, action: Any) -> tuple[Any, ...]:
        if self.done and self.mode is AutoresetMode.NEXT_STEP:
            return self._begin_next()
        result = self.env.step(action)
        self.last_observation, self.done = result[0], result[2]
        if self.done and self.mode is AutoresetMode.SAME_STEP:
            first, *_, info = self._begin_next()
            return first, *result[1:4], {**info, "final_obs": result[0], "final_info": result[4]}
        return result


def check_row(result: tuple[Any, ...], position: int, expected: tuple[Any, ...], name: str) -> None:
    """Check that the row at this position in the result of a step or a reset has the expected values."""
    observation = result[0][position]
    assert type(observation) is str or observation.dtype == expected[0].dtype
    assert np.array_equal(observation, expected[0]), f"{name} returned {observation}, expected {expected[0]}"
    if len(result) == 5:
        values = tuple(column[position] for column in result[1:4])
        assert values == expected[1:4], f"{name} returned {values}, expected {expected[1:4]}"
    check_info(result[-1], position, expected[4], name)


def check_info(infos: dict[str, Any], position: int, expected: dict[str, Any], name: str) -> None:
    info = extract_info(infos, position)
    info.pop("env_id", None)
    final_obs, expected_final_obs = info.pop("final_obs", None), expected.get("final_obs")
    assert np.array_equal(final_obs, expected_final_obs), f"{name} ended with {final_obs}, expected {expected_final_obs}"
    assert info == {key: value for key, value in expected.items() if key != "final_obs"}, f"info of {name}: {info}"


def extract_info(infos: dict[str, Any], position: int) -> dict[str, Any]:
    """Return the info of one row from merged infos: a dict of arrays with masks."""
    info = {}
    for key, column in infos.items():
        if not key.startswith("_") and infos[f"_{key}"][position]:
            info[key] = extract_info(column, position) if isinstance(column, dict) else column[position]
    return info


class Model:
    """An engine, the expected rows, and the pending call.

    Attributes:
        pending: The kind of the pending call, and a function that checks its result.
        in_flight: The expected values of the rows that were sent and not received.
        saved: The last saved states. Each has a flag (true if it is from ``state_dict``), the state, and the expected rows.
        planned_interruptions: The interruptions of the next calls.
        held: The observations of the latest results, with copies.
    """

    def __init__(self, name: str) -> None:
        self.setting = MODEL_SETTINGS[name]
        self.restart = "on_failure" in self.setting.options
        self.autoresets = self.setting.options.get("autoreset_mode") != "Disabled"
        if self.setting.options.get("context") == "forkserver":
            self.setting.open().close()  # starts the fork server, which stays
        self.known = child_pids()
        self.log: list[object] = [name]
        self.tick = 0
        self.envs: Any = None
        self.saved: list[tuple[bool, Any, list[ExpectedRow]]] = []
        self.was_interrupted = False
        self.open()

    def open(self) -> None:
        self.envs = self.setting.open()
        self.rows = [ExpectedRow(self.setting, index) for index in range(NUM_ENVS)]
        self.pending: tuple[str, Callable[[Any], None]] | None = None
        self.in_flight: dict[int, tuple[Any, ...]] = {}
        self.planned_interruptions: list[Interruption] = []
        self.held: list[tuple[Any, Any]] = []
        self.recover()
        self.snapshots_verified = not self.setting.local_envs

    def close_and_reopen(self, timeout: float | None, really: bool) -> None:
        """Close the engine and open a new one, or do nothing if ``really`` is false."""
        if really:
            self.close(timeout=timeout)
            self.open()

    def verify_snapshots(self) -> None:
        """Make the engine verify snapshots now. It would report an interruption of that as a fault of the environment."""
        self.envs.save()
        self.snapshots_verified = True

    def close(self, **options: Any) -> None:
        envs, self.envs = self.envs, None
        if envs is not None:
            with warnings.catch_warnings(), Watchdog(self.known, 5.0):
                warnings.simplefilter("ignore")
                envs.close(**options)
        left = kill_children(self.known)
        assert not (left and envs is not None), f"processes {left} were left by close()"

    # --- helpers of the moves

    def new_seed(self) -> int:
        self.tick += 1
        return 100 * self.tick

    def recover(self) -> None:
        """Reset the engine and the expected rows with a seed, after which both are equal again."""
        seed = self.new_seed()
        for _ in range(NUM_ENVS + 1):
            try:
                observations, infos = self.envs.reset(seed=seed)
            except WorkerDied:
                continue  # no call had reported this failure
            except AlreadyPendingCallError:  # reset() drops a pending call only if its wait was interrupted
                self.envs.call_wait()
                continue
            self.check_new_episodes(infos, seed, range(NUM_ENVS))
            break
        # load() copies the index, too, from one row to another
        self.envs.set_attr("index", list(range(NUM_ENVS)))
        observations, _ = self.envs.reset(seed=seed)
        for index, row in enumerate(self.rows):
            row.env.index = index
            expected = row.reset(seed + index)[0]
            assert np.array_equal(observations[index], expected), f"after reset() env {index} returned {observations[index]}"
            row.next_seed = None
        if self.autoresets:
            self.envs.set_next_options()  # clears all, because failed environments have lost theirs
        self.pending = None
        self.in_flight = {}

    def check_new_episodes(self, infos: dict[str, Any], seed: int, ids: Any) -> None:
        """Check by the infos of rows that they began episodes. Ignore the index, which ``load`` may have changed."""
        assert {key.removeprefix("_") for key in infos} <= {"resets", "tag", "restarted"}, infos
        for index in ids:
            assert infos["resets"][index] == 1
            assert infos["tag"][index].partition(" ")[2] == f"reset {seed + index}.1", infos["tag"][index]

    def make_move(self, move: Callable[[], None]) -> None:
        """Make a move with a time limit. Tolerate errors of environments in this process that were interrupted."""
        with Watchdog(self.known) as watchdog:
            try:
                move()
            except ResetNeeded:
                if not self.was_interrupted:
                    raise
                TOTALS["resets"] = TOTALS.get("resets", 0) + 1
                self.recover()
                self.read_call_counts()
            except Exception as error:
                if watchdog.fired:
                    raise HangError(f"the move hung; after its workers were killed: {describe_error(error)}") from None
                if isinstance(error, AssertionError) or not self.is_tolerated(error):
                    raise
                TOTALS["tolerated"] += 1
                if self.envs._state.value != "default":
                    raise AssertionError(f"the call failed, but {self.envs._state.value} is still pending") from error
                self.recover()
        assert not watchdog.fired, "the move ended only when its workers were killed"

    def read_call_counts(self) -> None:
        """Copy the call counts of the engine's environments, because an interrupted call may have been executed."""
        for name, attribute in [("calls", "calls"), ("marks", "marks"), ("mark", "_mark")]:  # assigning `mark` would count
            for row, value in zip(self.rows, self.envs.get_attr(name), strict=True):
                setattr(row.env, attribute, value)

    def require_state(self, *, is_call: bool = False) -> None:
        """Raise if only a reset is allowed after an interruption, or if the engine dropped a call, which may have run."""
        if needs_reset(self.envs) or (is_call and drops_calls(self.envs)):
            raise ResetNeeded

    def is_tolerated(self, error: Exception) -> bool:
        """True if an environment in this process was interrupted, and the error names it."""
        return self.was_interrupted and self.setting.names_local_env(describe_error(error, whole=True))

    def next_interruption(self) -> Any:
        if not self.planned_interruptions:
            return UNINTERRUPTED
        TOTALS["interrupted"] += 1
        self.was_interrupted = True
        self.log.append(self.planned_interruptions[0])
        return self.planned_interruptions.pop(0)

    def call_until_done(self, call: Callable[[], Any], wait: Callable[[], Any] | None, kind: str) -> Any:
        """Make a call that may be interrupted: repeat it if it was not submitted, and wait if it is pending.

        Args:
            call: Makes the call, or submits it, or waits for it.
            wait: Waits for the result; ``None`` if ``call`` only submits.
            kind: The state while the call is pending.
        """
        next_call, is_pending, errors_before = call, False, len(self.envs.errors)
        while True:
            returned, result, interruption = False, None, self.next_interruption()
            with interruption:
                result, returned = next_call(), True
            if interruption is not UNINTERRUPTED:
                assert not interruption.swallowed or self.new_local_failures(errors_before), f"swallowed: {interruption}"
            if not returned:
                # an interrupted wait loses a call only if the caller executes a part of it
                submits = next_call is call and call is not wait
                self.require_state(is_call=kind == "call" and (submits or bool(self.setting.local_envs)))
            state = self.envs._state.value
            if not returned and state == "default":
                self.raise_if_env_was_interrupted(interruption)
            if returned:
                assert state == ("default" if wait is not None else kind), state
                return result
            assert state in ("default", kind), state
            assert state == kind or not is_pending, "the call is pending, but the state is default"
            is_pending = is_pending or state == kind
            if is_pending:
                if wait is None:
                    return None
                next_call = wait

    def raise_if_env_was_interrupted(self, interruption: Any) -> None:
        """Raise if the notes of the interruption name an environment in this process, which was interrupted itself."""
        if self.setting.names_local_env(getattr(interruption, "note", "")):
            raise RuntimeError(interruption.note)

    def new_local_failures(self, errors_before: int) -> list[int]:
        """Return the environments in this process that failed after the first ``errors_before`` records."""
        return [record.env for record in list(self.envs.errors)[errors_before:] if record.env in self.setting.local_envs]

    def raise_if_dropped_step_was_interrupted(self, errors_before: int) -> None:
        """Raise if a reset dropped a step that was interrupted in this process. Only a record shows that failure."""
        if (failed := self.new_local_failures(errors_before)) and self.was_interrupted:
            if self.envs._state.value == "reset":
                self.envs.reset_wait()
            raise RuntimeError(f"env {failed[0]} was interrupted in a step that a reset dropped")

    def check_all_rows(self, result: tuple[Any, ...], expected: list[tuple[Any, ...]]) -> None:
        for index in range(NUM_ENVS):
            check_row(result, index, expected[index], f"env {index}")
        self.hold(result[0])

    def hold(self, observations: Any) -> None:
        """Keep the latest observations, write into some of them, and check that they do not change otherwise."""
        if len(self.log) % 3 == 0 and isinstance(observations, np.ndarray):
            observations[len(self.log) % NUM_ENVS] = -5
        self.held = [*self.held[-4:], (observations, copy.deepcopy(observations))]
        for held, copied in self.held:
            assert_identical(held, copied)

    def actions(self, numbers: list[int]) -> Any:
        return self.setting.make_actions(numbers)

    def make_action(self, number: int) -> Any:
        return self.setting.make_actions([number])[0]

    # --- moves

    def expect_step(self, numbers: list[int]) -> list[tuple[Any, ...]]:
        return [row.step(self.make_action(number)) for row, number in zip(self.rows, numbers, strict=True)]

    def step(self, numbers: list[int]) -> None:
        expected = self.expect_step(numbers)
        actions = self.actions(numbers)
        self.check_all_rows(self.call_until_done(lambda: self.envs.step(actions), self.envs.step_wait, "step"), expected)

    def step_async(self, numbers: list[int]) -> None:
        expected = self.expect_step(numbers)
        actions = self.actions(numbers)
        self.call_until_done(lambda: self.envs.step_async(actions), None, "step")
        self.pending = "step", lambda result: self.check_all_rows(result, expected)

    def expect_reset(self, seed: int | None, mask: list[bool] | None) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        expected = []
        for index, row in enumerate(self.rows):
            if mask is None or mask[index]:
                expected.append(row.reset(None if seed is None else seed + index))
            else:
                expected.append((row.last_observation, 0.0, False, False, {}))
        options = {} if mask is None else {"options": {"reset_mask": np.array(mask)}}
        return {"seed": seed, **options}, expected

    def reset(self, seed: int | None, mask: list[bool] | None) -> None:
        arguments, expected = self.expect_reset(seed, mask)
        before = len(self.envs.errors)
        result = self.call_until_done(lambda: self.envs.reset(**arguments), self.envs.reset_wait, "reset")
        self.raise_if_dropped_step_was_interrupted(before)
        self.check_all_rows(result, expected)
        self.in_flight = {}

    def reset_async(self, seed: int | None) -> None:
        arguments, expected = self.expect_reset(seed, None)
        before = len(self.envs.errors)
        self.call_until_done(lambda: self.envs.reset_async(**arguments), None, "reset")
        self.raise_if_dropped_step_was_interrupted(before)
        self.in_flight = {}
        self.expected_by_row = dict(enumerate(expected))
        self.pending = "reset", lambda result: self.check_all_rows(result, expected)

    def wait(self, timeout: float | None) -> None:
        """Wait for the pending call. After a timeout it stays pending."""
        assert self.pending is not None
        kind, check = self.pending
        wait = getattr(self.envs, f"{kind}_wait")
        while True:
            try:
                # without the timeout, a repeated wait would never end: a stopped worker continues only after this move
                wait_with_timeout = functools.partial(wait, timeout=timeout)
                result = self.call_until_done(wait_with_timeout, wait_with_timeout, kind)
                break
            except StepTimeout:
                assert timeout is not None
                assert self.envs._state.value == kind
                return
        self.pending = None
        check(result)

    def call(self, name: str, submit_only: bool) -> None:
        self.tick += 1
        text, envs = f"text {self.tick}", self.envs
        plain_envs = [row.env for row in self.rows]

        def make_check(expected: Any) -> Callable[[Any], None]:
            def check(result: Any) -> None:
                assert result == expected, (result, expected)

            return check

        if name == "get_attr":
            result = self.call_until_done(lambda: envs.get_attr("marks"), envs.call_wait, "call")
            make_check(tuple(env.marks for env in plain_envs))(result)
        elif name == "set_attr":
            marks = [f"{text} of {index}" for index in range(NUM_ENVS)]
            for env, mark in zip(plain_envs, marks, strict=True):
                env.mark = mark
            result = self.call_until_done(lambda: envs.set_attr("mark", marks), envs.call_wait, "call")
            assert result in (None, (None,) * NUM_ENVS)
            assert envs.get_attr("mark") == tuple(marks)
        elif name == "set_next_options" and not self.autoresets:
            with pytest.raises(ValueError, match="begins no episodes"):
                envs.set_next_options()
        elif name == "set_next_options":
            seeds = [None if (self.tick + index) % 3 == 0 else self.new_seed() for index in range(NUM_ENVS)]
            for row, seed in zip(self.rows, seeds, strict=True):
                row.next_seed = seed
            result = self.call_until_done(lambda: envs.set_next_options(seed=seeds), envs.call_wait, "call")
            assert result in (None, (None,) * NUM_ENVS)
        elif name == "exec_func":
            expected = tuple(echo(env, text) if index in (0, 3) else None for index, env in enumerate(plain_envs))
            if submit_only:
                self.call_until_done(lambda: envs.exec_func_send(echo, [3, 0], text), None, "call")
                self.pending = "call", make_check(expected)
            else:
                result = self.call_until_done(lambda: envs.exec_func(echo, [3, 0], text), envs.call_wait, "call")
                make_check(expected)(result)
        else:
            expected = tuple(echo(env, text) for env in plain_envs)
            if submit_only:
                self.call_until_done(lambda: envs.call_async("echo", text), None, "call")
                self.pending = "call", make_check(expected)
            else:
                make_check(expected)(self.call_until_done(lambda: envs.call("echo", text), envs.call_wait, "call"))

    def save(self, as_state_dict: bool) -> None:
        """Save the state of all rows, and keep the last three states."""
        save = self.envs.state_dict if as_state_dict else self.envs.save
        state = self.call_until_done(save, self.envs.call_wait, "call")
        self.saved = [*self.saved[-2:], (as_state_dict, state, copy.deepcopy(self.rows))]

    def load(self, which: int, ids: list[int]) -> None:
        """Load a saved state into all rows, or the snapshot of one row into some rows."""
        as_state_dict, state, rows = self.saved[which % len(self.saved)]
        if as_state_dict:
            ids, load = list(range(NUM_ENVS)), lambda: self.envs.load_state_dict(state)
        elif len(ids) == NUM_ENVS:
            load = lambda: self.envs.load([state[index] for index in ids], ids)  # noqa: E731
        else:
            rows = [rows[ids[0]]] * NUM_ENVS
            load = lambda: self.envs.load(state[ids[0]], ids)  # noqa: E731
        observations = self.call_until_done(load, self.envs.call_wait, "call")
        for position, index in enumerate(ids):
            self.rows[index] = copy.deepcopy(rows[index])
            observation = observations[position]
            assert np.array_equal(observation, rows[index].last_observation), f"loaded env {index} returned {observation}"

    def send(self, ids: list[int], numbers: list[int]) -> None:
        ids = [index for index in ids if index not in self.in_flight]
        if not ids:
            return
        numbers = numbers[: len(ids)]
        actions, before = self.actions(numbers), in_flight(self.envs)
        while True:
            with self.next_interruption():
                self.envs.send(actions, np.array(ids))
            self.require_state()
            sent = in_flight(self.envs) - before
            assert sent in (0, len(ids)), f"{sent} of {len(ids)} rows were sent"
            if sent:
                break
        for index, number in zip(ids, numbers, strict=True):
            self.in_flight[index] = self.rows[index].step(self.make_action(number))

    def recv(self, timeout: float | None) -> None:
        result = None
        while result is None:
            try:
                interruption = self.next_interruption()
                with interruption:
                    result = self.envs.recv(timeout)
                if result is None:
                    self.require_state()
                    self.raise_if_env_was_interrupted(interruption)
            except StepTimeout:
                assert timeout is not None
                timeout = None
        if self.pending is not None:  # a reset, received row by row
            self.in_flight, self.pending = self.expected_by_row, None
        ids = result[-1]["env_id"].tolist()
        assert len(set(ids)) == BATCH_SIZE
        for position, index in enumerate(ids):
            assert index in self.in_flight, f"row {index} was received without being in flight"
            check_row(result, position, self.in_flight.pop(index), f"env {index}")

    def step_with_faults(self, numbers: list[int]) -> None:
        """Step with actions that make environments raise or kill their worker."""
        self.recover()
        if self.setting.local_envs:  # the caller's own share has no worker to kill
            numbers = [RAISE if number == DIE else number for number in numbers]
        raising = {index for index, number in enumerate(numbers) if number == RAISE}
        killing = {index for index, number in enumerate(numbers) if number == DIE}
        lost = {
            row
            for worker in range(len(self.worker_pids()))
            for row in self.worker_rows(worker)
            if killing & {*self.worker_rows(worker)}
        }
        self.copy_last_observations()
        harmless_numbers = [1 if index in raising | lost else number for index, number in enumerate(numbers)]
        expected = self.expect_step(harmless_numbers)
        if self.restart:
            self.check_restarted_rows(self.envs.step(self.actions(numbers)), expected, raising | lost)
        else:
            with pytest.raises((ValueError, WorkerDied)) as raised:
                self.envs.step(self.actions(numbers))
            text = describe_error(raised.value, whole=True)
            assert raising - lost <= parse_rows(text), text
            assert bool(lost) == ("died during step" in text), text
            assert raising - lost or set(raised.value.envs) == lost, text  # type: ignore[attr-defined]
            with pytest.raises(EnvFailed):
                self.envs.step(self.actions([1] * NUM_ENVS))
        self.recover()

    def copy_last_observations(self) -> None:
        """Copy the last observation of each row to ``last_observations``."""
        self.last_observations = [copy.copy(row.last_observation) for row in self.rows]

    def check_restarted_rows(self, result: tuple[Any, ...], expected: list[tuple[Any, ...]], lost: set[int]) -> None:
        for index in range(NUM_ENVS):
            if index in lost:
                assert (result[1][index], result[2][index], result[3][index]) == (0.0, False, True)
                assert result[4]["restarted"][index]
                assert np.array_equal(result[4]["final_obs"][index], self.last_observations[index])
            else:
                check_row(result, index, expected[index], f"env {index}")

    def worker_pids(self) -> list[int]:
        return [process.pid for process in self.envs.processes]

    def kill_idle_worker(self, which: int, noticed_by: str) -> None:
        """Kill an idle worker, and let a step, a call or a reset notice its death."""
        self.recover()
        pids = self.worker_pids()
        worker = which % len(pids)
        os.kill(pids[worker], signal.SIGKILL)
        assert not still_running([pids[worker]], WAIT_SECONDS)
        self.copy_last_observations()
        rows = self.worker_rows(worker)
        if noticed_by == "step":
            expected = [row.step(self.make_action(1)) for row in self.rows]
            if self.restart:
                self.check_restarted_rows(self.envs.step(self.actions([1] * NUM_ENVS)), expected, set(rows))
            else:
                with pytest.raises(WorkerDied):
                    self.envs.step(self.actions([1] * NUM_ENVS))
        elif noticed_by == "call":
            with pytest.raises((WorkerDied, EnvFailed)):
                self.envs.call("echo", "x")
        elif noticed_by == "reset of some":
            self.reset_rows_of_dead_worker(rows, which)
        self.recover()

    def worker_rows(self, worker: int) -> list[int]:
        share = NUM_ENVS // len(self.worker_pids())
        return list(range(worker * share, (worker + 1) * share))

    def reset_rows_of_dead_worker(self, lost: list[int], which: int) -> None:
        """Reset the rows of a dead worker and row ``which`` by a mask."""
        chosen = sorted({*lost, which})
        others = [index for index in range(NUM_ENVS) if index not in chosen]
        for _ in range(2):
            seed = self.new_seed()
            mask = np.isin(np.arange(NUM_ENVS), chosen)
            try:
                observations, infos = self.envs.reset(seed=seed, options={"reset_mask": mask})
                break
            except WorkerDied:
                assert not self.restart
        self.check_new_episodes(infos, seed, chosen)
        assert not infos["_tag"][others].any()
        for index in others:
            assert np.array_equal(observations[index], self.last_observations[index])

    def kill_worker_in_flight(self, which: int) -> None:
        """Kill a worker, then send and receive all rows. With restarts, do so twice."""
        self.recover()
        self.copy_last_observations()
        worker = which % len(self.worker_pids())
        for _ in range(2 if self.restart else 1):
            os.kill(self.worker_pids()[worker], signal.SIGKILL)
            expected = [row.step(self.make_action(1)) for row in self.rows]
            self.envs.send(self.actions([1] * NUM_ENVS), np.arange(NUM_ENVS))
            received: set[int] = set()
            died = False
            while in_flight(self.envs) and not (died and in_flight(self.envs) < BATCH_SIZE):
                try:
                    result = self.envs.recv()
                except WorkerDied:
                    assert not self.restart
                    assert not died
                    died = True
                    continue
                for position, index in enumerate(result[4]["env_id"].tolist()):
                    assert index not in received
                    received.add(index)
                    observation = result[0][position]
                    if result[4].get("_restarted", np.zeros(BATCH_SIZE, bool))[position]:
                        assert index in self.worker_rows(worker)
                        assert np.array_equal(result[4]["final_obs"][position], self.last_observations[index])
                        # in mode SameStep, this is the first observation of the next episode
                        is_last = self.setting.options.get("autoreset_mode") != "SameStep"
                        assert np.array_equal(observation, self.last_observations[index]) == is_last
                        assert result[3][position]
                    else:
                        assert index not in self.worker_rows(worker)
                        check_row(result, position, expected[index], f"env {index}")
                    self.last_observations[index] = copy.copy(observation)
            assert died or received == set(range(NUM_ENVS))
        self.recover()

    def abandon(self, which: int) -> None:
        """Abandon a row, and repeat the call if it was interrupted."""
        while True:
            returned = False
            with self.next_interruption():
                self.envs.abandon([which])
                returned = True
            self.require_state()
            if returned:
                return

    def end_worker_in_step(self, which: int, abandoned: bool) -> None:
        """Kill a worker during a step, or abandon one of its rows, before or after it has replied."""
        self.recover()
        pids = self.worker_pids()
        self.copy_last_observations()
        expected = [row.step(self.make_action(1)) for row in self.rows]
        self.envs.step_async(self.actions([1] * NUM_ENVS))
        worker = which % len(pids)
        if abandoned:
            self.abandon(worker * (NUM_ENVS // len(pids)))
        else:
            os.kill(pids[worker], signal.SIGKILL)
        try:
            result = self.call_until_done(self.envs.step_wait, self.envs.step_wait, "step")
        except WorkerDied:
            assert not self.restart
        else:
            lost = set(np.flatnonzero(result[4].get("_restarted", np.zeros(NUM_ENVS, bool))).tolist())
            assert self.restart or not lost
            self.check_restarted_rows(result, expected, lost)
        assert abandoned or not still_running([pids[worker]], WAIT_SECONDS)
        self.recover()

    def stop_and_continue_worker(self, which: int, numbers: list[int]) -> None:
        """Stop a worker until a wait has timed out, and continue it."""
        pids = self.worker_pids()
        worker = pids[which % len(pids)]
        os.kill(worker, signal.SIGSTOP)
        try:
            self.step_async(numbers)
            self.wait(0.02)
        finally:
            os.kill(worker, signal.SIGCONT)
        if self.pending is not None:
            self.wait(None)

    def make_wrong_calls(self) -> None:
        """Make calls that raise and change nothing, most of them because they are out of order."""
        envs = self.envs
        waits = {kind: getattr(envs, f"{kind}_wait") for kind in ("step", "reset", "call")}
        if self.pending is not None:
            resets = (envs.reset_async, envs.reset)
            others = (
                lambda: envs.step_async(self.actions([1] * NUM_ENVS)), lambda: envs.call_async("echo", "x"),
                lambda: envs.get_attr("marks"), lambda: envs.set_attr("mark", 1), envs.save,
            )  # fmt: skip
            refused = (*resets, *others)
            if envs._driver.is_interrupted:  # after an interrupted wait, resets drop any request, and all calls drop a call
                refused = () if self.pending[0] == "call" else others
            for call in refused:
                with pytest.raises(AlreadyPendingCallError):
                    call()
            del waits[self.pending[0]]
        for wait in waits.values():
            with pytest.raises(NoAsyncCallError):
                wait()
        with pytest.raises((ValueError, AlreadyPendingCallError)):
            envs.step(self.actions([1] * (NUM_ENVS - 1)))
        if self.in_flight:
            with pytest.raises(AlreadyPendingCallError):
                envs.send(self.actions([1]), np.array([next(iter(self.in_flight))]))


ACTIONS = st.lists(st.integers(0, RAISE - 1), min_size=NUM_ENVS, max_size=NUM_ENVS)
FAULTY_ACTIONS = st.lists(st.sampled_from([0, 1, 2, 3, RAISE, RAISE, DIE]), min_size=NUM_ENVS, max_size=NUM_ENVS).filter(
    lambda numbers: max(numbers) >= RAISE
)
CALLS = ["call", "get_attr", "set_attr", "set_next_options", "exec_func"]
NOTICED_BY = ["step", "call", "reset", "reset of some"]
MASKS = st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS).filter(any)
SEEDS = st.one_of(st.none(), st.integers(10, 99))
ROW_LISTS = st.builds(lambda order, length: order[:length], st.permutations(range(NUM_ENVS)), st.integers(1, NUM_ENVS))
"""A strategy for lists of one or more rows, in any order."""


def is_idle(model: Model) -> bool:
    return model.pending is None and not model.in_flight


def has_idle_workers(model: Model) -> bool:
    return is_idle(model) and not model.setting.local_envs


def may_inject_fault(model: Model) -> bool:
    return is_idle(model) and not model.planned_interruptions


def may_kill_worker(model: Model) -> bool:
    return may_inject_fault(model) and not model.setting.local_envs


def move_rule(name: str, condition: Callable[[Model], Any] = lambda model: True, /, **arguments: Any) -> Any:
    """Declare a rule that makes a move of the model if the condition is true, and does nothing otherwise.

    The condition is no precondition in the sense of hypothesis, which could not repeat its draws: it depends on timing.
    """

    def make_move(self: FaultMachine, **drawn: Any) -> None:
        if condition(self.model):
            self.move(f"{name}({', '.join(map(str, drawn.values()))})", lambda: getattr(self.model, name)(**drawn))

    return rule(**arguments)(make_move)


WORKER = st.integers(0, NUM_ENVS - 1)
RARELY_TRUE = st.sampled_from([False, False, False, True])


class FaultMachine(RuleBasedStateMachine):
    """A hypothesis state machine with all faults, but without interruptions."""

    model: Model

    @initialize(name=st.sampled_from(sorted(MODEL_SETTINGS)))
    def start(self, name: str) -> None:
        TOTALS["runs"] += 1
        self.model = Model(name)

    def move(self, text: str, move: Callable[[], None]) -> None:
        model = self.model
        TOTALS["moves"] += 1
        model.log.append(text)
        model.was_interrupted = False
        try:
            model.make_move(move)
        except BaseException as error:
            note("; ".join(map(str, model.log[-25:])))
            error.add_note("the last moves: " + "; ".join(map(str, model.log[-12:])))
            raise
        if model.was_interrupted:
            model.planned_interruptions = []

    step = move_rule("step", is_idle, numbers=ACTIONS)
    step_async = move_rule("step_async", is_idle, numbers=ACTIONS)
    reset = move_rule("reset", lambda model: model.pending is None, seed=SEEDS, mask=st.none())
    reset_some = move_rule("reset", is_idle, seed=SEEDS, mask=MASKS)
    reset_async = move_rule("reset_async", is_idle, seed=SEEDS)
    wait = move_rule("wait", lambda model: model.pending is not None, timeout=st.sampled_from(TIMEOUTS))
    call = move_rule("call", is_idle, name=st.sampled_from(CALLS), submit_only=st.booleans())
    save = move_rule("save", is_idle, as_state_dict=st.booleans())
    load = move_rule("load", lambda model: is_idle(model) and model.saved, which=st.integers(0, 2), ids=ROW_LISTS)
    send = move_rule(
        "send", lambda model: model.pending is None and len(model.in_flight) < NUM_ENVS, ids=ROW_LISTS, numbers=ACTIONS
    )
    recv = move_rule(
        "recv", lambda model: len(model.in_flight) >= BATCH_SIZE or (model.pending or " ")[0] == "reset",
        timeout=st.sampled_from(TIMEOUTS),
    )  # fmt: skip
    step_with_faults = move_rule("step_with_faults", may_inject_fault, numbers=FAULTY_ACTIONS)
    kill_idle_worker = move_rule("kill_idle_worker", may_kill_worker, which=WORKER, noticed_by=st.sampled_from(NOTICED_BY))
    kill_worker_in_step = move_rule("end_worker_in_step", may_kill_worker, which=WORKER, abandoned=st.just(False))
    kill_worker_in_flight = move_rule("kill_worker_in_flight", may_kill_worker, which=WORKER)
    abandon = move_rule("end_worker_in_step", has_idle_workers, which=WORKER, abandoned=st.just(True))
    stop_and_continue_worker = move_rule("stop_and_continue_worker", has_idle_workers, which=WORKER, numbers=ACTIONS)
    wrong_calls = move_rule("make_wrong_calls")
    close_and_reopen = move_rule("close_and_reopen", timeout=st.sampled_from([None, 1.0]), really=RARELY_TRUE)  # slow

    @invariant()
    def state_names_the_pending_call(self) -> None:
        model = getattr(self, "model", None)
        if model is None or model.envs is None:
            return
        kind = model.pending[0] if model.pending is not None else "default"
        assert model.envs._state.value == kind
        assert in_flight(model.envs) == len(model.in_flight) + (NUM_ENVS if kind in ("reset", "step") else 0)

    def teardown(self) -> None:
        model = getattr(self, "model", None)
        if model is not None:
            model.close(terminate=sys.exc_info()[0] is not None)


def parse_rows(text: str) -> set[int]:
    """Return the rows that a text names, as in ``env 3`` or ``envs 1-3, 7``."""
    numbers = " ".join(re.findall(r"\benvs? (\d[-\d, ]*)", text))
    ranges = re.findall(r"(\d+)(?:-(\d+))?", numbers)
    return {row for first, last in ranges for row in range(int(first), int(last or first) + 1)}


class InterruptionMachine(FaultMachine):
    """A hypothesis state machine with all faults and with interruptions."""

    @rule(
        kind=st.sampled_from(["line", "call"]), moment=st.integers(0, 160), second=st.integers(0, 60),
        error=st.sampled_from([KeyboardInterrupt, Stopped]),
    )  # fmt: skip
    def interrupt_next_call(self, kind: str, moment: int, second: int, error: type[BaseException]) -> None:
        """Interrupt the next call, and in one of three cases also the call after it, at moment ``second``."""
        if self.model.planned_interruptions:
            return
        if not self.model.snapshots_verified:
            if not is_idle(self.model):
                return
            self.move("verify_snapshots", self.model.verify_snapshots)
        files = interruptible_files(self.model.setting)
        self.model.planned_interruptions = [Interruption(kind, moment, error, files)]
        if second < 20:
            self.model.planned_interruptions.append(Interruption(kind, second, Stopped, files))

    @rule(delay=st.floats(1e-5, 3e-3), twice=st.booleans())
    def interrupt_next_call_by_timer(self, delay: float, twice: bool) -> None:
        """Interrupt the next call by a real timer, which has a signal handler that raises."""
        delays = [delay, delay / 3] if twice else [delay]
        if not self.model.planned_interruptions:
            self.model.planned_interruptions = [SignalInterruption("ALARM", seconds) for seconds in delays]


@contextlib.contextmanager
def install_signal_handlers() -> Iterator[None]:
    """Install handlers with which a signal raises in the body of a :class:`SignalInterruption`."""
    with default_sigint_handler(), contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, handle_signal))
        stack.callback(setattr, sys, "unraisablehook", sys.unraisablehook)
        sys.unraisablehook = handle_unraisable  # for an exception in a finalizer, or during garbage collection
        yield


def run_machine(machine: type[FaultMachine], examples: int, moves: int) -> None:
    with install_signal_handlers():
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=moves,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
                phases=[Phase.generate],  # shrinking takes minutes, and the notes of the error list the last moves
            ),
        )


def send_and_receive(model: Model) -> None:
    """Send all rows and receive them in two batches. Interrupt only the second ``recv()``."""
    interruptions, model.planned_interruptions = model.planned_interruptions, []
    model.send([3, 0, 2, 1], [1, 2, 3, 4])
    model.recv(None)
    model.planned_interruptions = interruptions
    model.recv(None)


CALLS_THAT_WAIT: dict[str, Callable[[Model], None]] = {
    "step": lambda model: model.step([1, 2, 3, 4]),
    "reset": lambda model: model.reset(50, None),
    "reset of some": lambda model: model.reset(50, [True, False, True, False]),
    **{name: lambda model, name=name: model.call(name, False) for name in CALLS},
    "save": lambda model: model.save(False),
    "send, recv": send_and_receive,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("setting", "call"),
    each_once(
        ["one worker", "two workers", "max_concurrency", "list actions", "restart", "same step"], list(CALLS_THAT_WAIT)
    ),
)
def test_call_interrupted_twice_during_its_wait_returns_its_result(setting: str, call: str) -> None:
    """A worker is stopped for half a second, while a timer twice interrupts the call that waits for it."""
    with install_signal_handlers():
        model = Model(setting)
        pid = model.worker_pids()[-1]
        continue_worker = threading.Timer(0.5, os.kill, (pid, signal.SIGCONT))
        try:
            model.step([1, 2, 3, 4])
            os.kill(pid, signal.SIGSTOP)
            continue_worker.start()
            model.planned_interruptions = [SignalInterruption("ALARM", 0.1), SignalInterruption("ALARM", 0.1)]
            model.make_move(lambda: CALLS_THAT_WAIT[call](model))
            model.planned_interruptions = []
            model.step([4, 3, 2, 1])
        finally:
            continue_worker.join()
            model.close(terminate=True)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("setting", ["two workers", "same step, restart"])
@pytest.mark.parametrize("numbers", [[1, RAISE, 2, DIE], [DIE, 1, DIE, 1], [RAISE, 1, RAISE, 1]], ids=str)
def test_several_failures_in_one_step_are_all_reported(setting: str, numbers: list[int]) -> None:
    model = Model(setting)
    try:
        model.step_with_faults(numbers)
        model.step([1, 2, 3, 4])
    finally:
        model.close(terminate=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.long)])
def test_calls_in_any_order_match_the_model(runs: int) -> None:
    run_machine(InterruptionMachine, runs, 50)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("runs", [2, pytest.param(6, marks=pytest.mark.long)])
def test_uninterrupted_calls_in_any_order_match_the_model(runs: int) -> None:
    run_machine(FaultMachine, runs, 50)


@pytest.mark.soak
@pytest.mark.timeout(10**6)
def test_calls_in_any_order_match_the_model_soak() -> None:
    deadline = time.monotonic() + float(os.environ.get("VECENV_SOAK_SECONDS", "3600"))
    TOTALS.update(dict.fromkeys(TOTALS, 0))
    try:
        while time.monotonic() < deadline:
            run_machine(InterruptionMachine, 20, 100)
    finally:
        print(", ".join(f"{count} {name}" for name, count in TOTALS.items()))


def main(runs: int) -> None:
    """Make this many runs, and stop at the first failure."""
    started = time.monotonic()
    try:
        while TOTALS["runs"] < runs:
            run_machine(InterruptionMachine, min(20, runs - TOTALS["runs"]), 50)
            print(f"{time.monotonic() - started:.0f} s:", TOTALS, flush=True)
    finally:
        print("total:", TOTALS, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]))
