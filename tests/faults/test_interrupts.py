"""Tests of calls that are interrupted by an exception at each possible moment.

Afterwards, either the call was not submitted, or its result is pending and the same ``*_wait`` returns it, or every call
raises ``ResetNeeded`` until ``reset()``. The default run tests a few configurations, and interrupts each call at every
19th moment or less often (``VECENV_OFFSET`` shifts the moments), by Ctrl-C and by another exception.
``pytest -m slow tests/faults/test_interrupts.py`` tests all moments of all configurations.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from counting import DIE, HANG, RAISE, CountingEnv
from envs import SameLengthSpace
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv
from interrupted_calls import (
    CALLS,
    RESTART,
    SETTINGS,
    ComparedEngine,
    HangError,
    Outcomes,
    Setting,
    Watchdog,
    child_pids,
    describe_error,
    interruptible_files,
    list_resources,
    make_call,
    needs_reset,
)
from interrupted_close import CLOSE_SETTINGS, CLOSE_STATES, check_interrupted_close, check_nothing_left, warm_up
from interruption import KINDS, PACKAGE, Interruption, Stopped, moments, run_in_generator
from observe import FAULT_MARKS
from signals import default_sigint_handler
from streams import FIRST_READY, RowStream

import vecenv
from vecenv.testing import assert_identical

pytestmark = [
    *(mark for mark in FAULT_MARKS if mark.name != "timeout"),
    pytest.mark.timeout(600, method="signal"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
slow = [pytest.mark.slow, pytest.mark.timeout(3600, method="signal")]

OFFSET = int(os.environ.get("VECENV_OFFSET", "739942"))
INTERVAL = 19  # between two interrupted moments


@pytest.fixture(autouse=True)
def default_ctrl_c() -> Iterator[None]:
    with default_sigint_handler():
        yield
    gc.unfreeze()  # warm_up() freezes


def choose_offset(*names: object) -> int:
    """Return the offset of the moments of a test: the same in each run, but different for each test."""
    return OFFSET + zlib.crc32(repr(names).encode())


def interrupt_at_moments(
    attempt: Callable[[Interruption], None],
    renew: Callable[[], None],
    names: tuple[object, ...],
    *,
    every: int,
    kinds: tuple[str, ...] = KINDS,
    least: int = 10,
    outcomes: Outcomes | None = None,
    **options: Any,
) -> Outcomes:
    """Call ``attempt`` with an interruption at every ``every``-th moment of each kind, and count the outcomes.

    ``renew`` is called after each attempt that fails. ``names`` identify the test for :func:`choose_offset`.
    """
    outcomes = outcomes or Outcomes()
    for kind in kinds:
        for interruption in moments(kind, every=every, offset=choose_offset(*names, kind), least=least, **options):
            outcomes.attempts += 1
            try:
                next(run_in_generator(attempt, interruption))
            except (Exception, KeyboardInterrupt, Stopped) as error:
                outcomes.add(error, repr(interruption))
                del error
                renew()
            outcomes.fired += interruption.fired
            if outcomes.should_stop:
                return outcomes
    return outcomes


# --- calls --------------------------------------------------------------------------------------

DEFAULT_CASES = [
    ("in process", "step", "whole"), ("in process", "reset", "whole"),
    ("caller's share", "step", "whole"), ("caller's share", "call", "whole"),
    ("one worker", "step", "whole"), ("one worker", "step", "begin"), ("one worker", "step", "wait"),
    ("one worker", "reset", "whole"), ("one worker", "reset_some", "whole"), ("one worker", "call", "whole"),
    ("one worker", "set_attr", "whole"), ("one worker", "exec_func", "whole"), ("one worker", "get_attr", "whole"),
    ("four workers", "step", "whole"), ("four workers", "set_attr", "whole"), ("four workers", "set_next_options", "whole"),
    ("max_concurrency", "step", "whole"), ("restart", "step", "whole"), ("restart", "reset", "whole"),
    ("list actions", "step", "whole"), ("Text actions", "step", "wait"), ("Text observations", "step", "whole"),
    ("Text observations", "reset", "wait"), ("no shared memory", "step", "whole"), ("same step", "step", "whole"),
    ("batch_size", "step", "whole"), ("lent observations", "step", "whole"), ("lent observations", "reset_some", "whole"),
    ("one worker", "save", "whole"), ("one worker", "load", "whole"),
    ("in process", "load", "whole"), ("one worker", "abandon", "whole"),
]  # fmt: skip
LONG_CASES = [
    ("one worker", "state_dict", "whole"), ("one worker", "load_state_dict", "whole"),
]  # fmt: skip
UNDIVIDED_CALLS = ("get_attr", "set_attr", "set_next_options", "save", "load", "state_dict", "load_state_dict", "abandon")
CALL_PARTS = [
    (name, part) for name in CALLS for part in ("whole", "begin", "wait") if part == "whole" or name not in UNDIVIDED_CALLS
]


@pytest.mark.sampled(
    "in process-reset-whole-95",
    "caller's share-step-whole-95",
    "one worker-step-whole-95",
    "one worker-reset-whole-95",
    "one worker-call-whole-95",
    "one worker-set_attr-whole-95",
    "one worker-get_attr-whole-95",
    "four workers-step-whole-95",
    "max_concurrency-step-whole-95",
    "restart-reset-whole-95",
    "Text observations-reset-wait-95",
)
@pytest.mark.parametrize(
    ("setting", "call", "part", "every"),
    [
        *((*case, 5 * INTERVAL) for case in DEFAULT_CASES),
        *(pytest.param(*case, INTERVAL, marks=slow) for case in DEFAULT_CASES),
        *(pytest.param(*case, 2 * INTERVAL, marks=pytest.mark.long) for case in LONG_CASES),
        *(
            pytest.param(setting, call, part, 1, marks=slow, id=f"all-{setting}-{call}-{part}")
            for setting in SETTINGS
            for call, part in CALL_PARTS
        ),
    ],
)
def test_interrupted_call_was_not_submitted_or_is_pending(setting: str, call: str, part: str, every: int) -> None:
    """The results of the interrupted call and of the next one equal those of an uninterrupted reference."""
    chosen = SETTINGS[setting]
    rng = random.Random(OFFSET)

    def attempt(interruption: Interruption) -> None:
        interruptions = [interruption]
        if interruption.moment % 3 == 0:  # also interrupt the call that returns the result
            interruptions.append(Interruption(interruption.kind, rng.randrange(30), Stopped))
        subject.attempt(call, part, interruptions)

    with ComparedEngine(chosen) as subject:
        names = (setting, call, part)
        outcomes = interrupt_at_moments(attempt, subject.renew, names, every=every, within=interruptible_files(chosen))
    outcomes.tolerated = subject.tolerated
    outcomes.check()


@pytest.mark.slow
@pytest.mark.timeout(3600, method="signal")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("setting", ["one worker", "caller's share", "list actions", "batch_size"])
def test_call_interrupted_before_a_bytecode_was_not_submitted_or_is_pending(setting: str, call: str) -> None:
    """The test above, with an exception before every third bytecode."""
    chosen = SETTINGS[setting]
    with ComparedEngine(chosen) as subject:
        outcomes = interrupt_at_moments(
            lambda interruption: subject.attempt(call, "whole", [interruption]), subject.renew, (setting, call),
            every=3, kinds=("opcode",), within=interruptible_files(chosen),
        )  # fmt: skip
    outcomes.tolerated = subject.tolerated
    outcomes.check()


# --- first-ready batches ------------------------------------------------------------------------


def interrupt_cycle(stream: RowStream, call: str, interruption: Interruption, tick: int) -> None:
    """Run a cycle of the stream, and interrupt one call, and its repetition too."""
    stream.cycle(call, [interruption, Interruption(interruption.kind, tick * 11 % 40, Stopped)], tick)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "interrupted", ["send", "recv", "recv of the rest", "recv at least", "reset_async", "recv of a reset"]
)
@pytest.mark.parametrize(
    ("setting", "every"),
    [
        ("two of four", INTERVAL),
        ("in process", INTERVAL),
        *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in FIRST_READY),
    ],
)
def test_interrupted_send_sends_all_rows_or_none_and_recv_returns_each_once(
    setting: str, interrupted: str, every: int
) -> None:
    stream = RowStream(FIRST_READY[setting])
    ticks = itertools.count()
    try:
        interrupt_at_moments(
            lambda interruption: interrupt_cycle(stream, interrupted, interruption, next(ticks)),
            stream.renew, (setting, interrupted), every=every,
        ).check()  # fmt: skip
    finally:
        stream.end()


class LengthEnv(CountingEnv):
    """An environment with steps that return as many elements as its index, so that rows do not fit together."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.observation_space = SameLengthSpace()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        return np.zeros(self.index), 0.0, False, False, {}


@pytest.mark.filterwarnings("ignore:.*SameLengthSpace")
def test_interrupted_recv_of_observations_that_do_not_fit_together_ends_or_can_be_repeated() -> None:
    def attempt(interruption: Interruption) -> None:
        envs.send([0, 0], [0, 1])
        with suppress(ValueError), interruption:
            envs.recv(count=2)
        if needs_reset(envs):
            envs.reset()
        if envs.in_flight.size > 0:
            with pytest.raises(ValueError, match="same shape"):
                envs.recv(5.0, count=2)
        assert envs.in_flight.size == 0

    with closing(vecenv.AsyncVectorEnv([functools.partial(LengthEnv, row) for row in (0, 1)])) as envs:
        envs.reset()
        interrupt_at_moments(attempt, envs.reset, ("wrong observations",), every=1, within=(f"{PACKAGE}/engine/",)).check()


# --- environments that fail in the interrupted step ---------------------------------------------


def step_and_recover(envs: Any, actions: Any, interruption: Interruption) -> Any:
    """Step with an interruption, and return the result. If the step is still pending, wait for it; otherwise step again."""
    with interruption:
        return envs.step(actions)
    if needs_reset(envs):
        raise ResetNeeded
    if envs._state.value == "default":
        return envs.step(actions)
    assert envs._state.value == "step"
    return envs.step_wait()


def check_restarted_rows(subject: ComparedEngine, lost: list[int], fault: int, interruption: Interruption) -> None:
    """Check that the lost rows restart, and that the results of the others and the next step are correct."""
    envs, reference, count = subject.envs, subject.reference, subject.setting.count
    subject.reset_both()
    actions = [(subject.tick + row) % RAISE for row in range(count)]
    assert_identical(envs.step(np.array(actions)), reference.step(np.array(actions)), "the step before")
    last_observations = envs.observations.copy()
    expected = reference.step(np.array(actions))
    actions[lost[0]] = fault
    restarts = envs.stats()["restarts"]
    result = step_and_recover(envs, np.array(actions), interruption)
    assert envs._state.value == "default"
    for row in range(count):
        if row in lost:
            assert (result[1][row], result[2][row], result[3][row]) == (0.0, False, True), f"row {row} is not truncated"
            assert result[4]["restarted"][row]
            assert_identical(result[4]["final_obs"][row], last_observations[row], f"final_obs of env {row}")
        else:
            for field in range(4):
                assert_identical(result[field][row], expected[field][row], f"field {field} of env {row}")
            assert result[4]["tag"][row] == expected[4]["tag"][row]
            assert not result[4]["_restarted"][row]
    assert envs.stats()["restarts"] == restarts + 1
    observations, *_ = envs.step(np.zeros(count, np.int64))
    for row in lost:
        assert observations[row].tolist()[3:] == [0, 0, 0], f"row {row} did not begin an episode: {observations[row]}"


def check_failure_is_raised(subject: ComparedEngine, lost: list[int], fault: int, interruption: Interruption) -> None:
    """Check that the error is raised once and names the failed environments, and that a reset recovers them."""
    envs, count = subject.envs, subject.setting.count
    subject.reset_both()
    actions = np.array([fault if row == lost[0] else row % RAISE for row in range(count)])
    error_class: type[Exception] = ValueError if fault == RAISE else vecenv.errors.WorkerDied
    with pytest.raises(error_class) as raised:
        step_and_recover(envs, actions, interruption)
    if fault == RAISE:
        assert re.search(rf"env {lost[0]}\b", describe_error(raised.value, whole=True)), describe_error(raised.value)
    else:
        assert set(lost) == set(raised.value.envs)  # type: ignore[attr-defined]
    assert envs._state.value == "default"
    with pytest.raises(vecenv.errors.EnvFailed):
        envs.step(np.zeros(count, np.int64))
    subject.reset_both()


FAULT_CASES = {
    "restart, an environment raises": (Setting({"num_workers": 2, **RESTART}), [1], RAISE, check_restarted_rows),
    "restart, a worker dies": (Setting({"num_workers": 2, **RESTART}), [1, 0], DIE, check_restarted_rows),
    "an environment raises": (Setting({"num_workers": 2}), [1], RAISE, check_failure_is_raised),
    "a worker dies": (Setting({"num_workers": 2}), [1, 0], DIE, check_failure_is_raised),
}


def check_failing_step(subject: ComparedEngine, case: str, interruption: Interruption) -> None:
    _, lost, fault, check = FAULT_CASES[case]
    before = count_resources(subject)
    with Watchdog(subject.known) as watchdog:
        try:
            check(subject, lost, fault, interruption)
        except (ResetNeeded, vecenv.errors.EnvFailed):  # the interruption replaced the error of the failure
            if not interruption.fired:
                raise
            try:
                subject.envs.reset()  # this may be the call that notices the death of the worker and restarts it
            except vecenv.errors.WorkerDied:  # the worker was still executing the step that kills it
                if fault != DIE or "on_failure" in subject.setting.options:
                    raise
            subject.reset_both()
        except BaseException as error:
            if watchdog.fired:
                raise HangError(f"the step hung; after its workers were killed: {describe_error(error)}") from None
            raise
    assert not watchdog.fired
    assert not interruption.swallowed, "the exception was swallowed"
    assert (after := count_resources(subject)) == before, f"{after} descriptors and processes, {before} before"


def count_resources(subject: ComparedEngine) -> tuple[int, int]:
    """Return the number of descriptors and the number of processes of the engine."""
    pool = subject.envs._pool
    return len(pool.descriptors), len(pool.started)


def check_abandoned_rows(subject: ComparedEngine, interruption: Interruption) -> None:
    """Interrupt ``abandon()`` during a hanging step, and check that only the rows of the hanging worker are lost."""
    envs, reference, count = subject.envs, subject.reference, subject.setting.count
    subject.reset_both()
    actions = np.arange(count) % RAISE
    expected = reference.step(actions)
    restarts = envs.stats()["restarts"]
    actions[0] = HANG
    envs.step_async(actions)
    returned = False
    with interruption:
        envs.abandon([0])
        returned = True
    if needs_reset(envs):
        subject.reset_both()
        return
    assert envs._state.value == "step"
    if not returned:
        envs.abandon([0])
    lost = list(envs.worker_rows[0])
    if "on_failure" in subject.setting.options:
        result = envs.step_wait()
        assert result[4]["restarted"].tolist() == [row in lost for row in range(count)]
        assert_identical(result[0][len(lost) :], expected[0][len(lost) :], "rows that were not abandoned")
        assert envs.stats()["restarts"] == restarts + 1
        return
    with pytest.raises(vecenv.errors.WorkerDied, match=r"it was abandoned|SIGKILL") as raised:
        envs.step_wait()
    assert list(raised.value.envs) == lost
    assert envs._state.value == "default"
    with pytest.raises(vecenv.errors.EnvFailed):
        envs.step(np.zeros(count, np.int64))


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "every"),
    [
        ("two workers", 97), ("restart", 211),
        *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in ("two workers", "restart")),
    ],
)  # fmt: skip
def test_interrupted_abandon_can_be_repeated(setting: str, every: int) -> None:
    """The hanging step stays pending, and the death of its worker is reported once."""
    chosen = CLOSE_SETTINGS[setting] if setting == "two workers" else SETTINGS[setting]

    def attempt(interruption: Interruption) -> None:
        with Watchdog(subject.known) as watchdog:
            check_abandoned_rows(subject, interruption)
        assert not watchdog.fired, "the call hung"
        assert not interruption.swallowed, "the exception was swallowed"

    with ComparedEngine(chosen) as subject:
        interrupt_at_moments(attempt, subject.renew, (setting,), every=every, outcomes=Outcomes(max_wrong=4)).check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "every"),
    [
        *((name, 211 if "dies" in name else 97) for name in FAULT_CASES),
        *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in FAULT_CASES),
    ],
)
def test_failure_in_an_interrupted_step_is_reported_once(case: str, every: int) -> None:
    with ComparedEngine(FAULT_CASES[case][0]) as subject:
        attempt = functools.partial(check_failing_step, subject, case)
        interrupt_at_moments(attempt, subject.renew, (case,), every=every, outcomes=Outcomes(max_wrong=4)).check()


# --- constructor and close() --------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("setting", "state", "every"),
    [
        ("two workers", "idle", 211), ("two workers", "a step pending", 211), ("in process", "idle", 29),
        *(
            pytest.param(name, state, 1, marks=slow, id=f"all-{name}-{state}")
            for name in CLOSE_SETTINGS
            for state in CLOSE_STATES
        ),
    ],
)  # fmt: skip
def test_interrupted_close_can_be_repeated(setting: str, state: str, every: int) -> None:
    """The repeated close returns within 30 seconds, and no resource is left."""
    rng = random.Random(OFFSET)

    def attempt(interruption: Interruption) -> None:
        interruptions = [interruption]
        if interruption.moment % 2:  # also interrupt the repeated close()
            interruptions.append(Interruption(interruption.kind, rng.randrange(60), Stopped))
        check_interrupted_close(CLOSE_SETTINGS[setting], state, interruptions)

    warm_up(CLOSE_SETTINGS[setting])
    interrupt_at_moments(attempt, gc.collect, (setting, state), every=every, outcomes=Outcomes(max_wrong=6)).check()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("setting", "every"),
    [
        ("two workers", 97),
        ("in process", 41),
        *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in CLOSE_SETTINGS),
    ],
)
def test_interrupted_constructor_leaves_nothing(setting: str, every: int) -> None:
    chosen = CLOSE_SETTINGS[setting]
    warm_up(chosen)

    def attempt(interruption: Interruption) -> None:
        known, before = child_pids(), list_resources()
        envs = None
        with Watchdog(known, 30.0) as watchdog, interruption:
            envs = chosen.open()
        assert not watchdog.fired, "the constructor hung"
        if envs is not None:
            envs.close()
        del envs
        check_nothing_left(before, known)

    interrupt_at_moments(attempt, gc.collect, (setting,), every=every, outcomes=Outcomes(max_wrong=6)).check()


# --- every third bytecode -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600, method="signal")
@pytest.mark.parametrize("interrupted", ["send", "recv", "reset_async", "recv of a reset"])
def test_send_or_recv_interrupted_before_a_bytecode_loses_no_row(interrupted: str) -> None:
    stream = RowStream(FIRST_READY["two of four"])
    ticks = itertools.count()
    try:
        interrupt_at_moments(
            lambda interruption: interrupt_cycle(stream, interrupted, interruption, next(ticks)),
            stream.renew, (interrupted,), every=3, kinds=("opcode",),
        ).check()  # fmt: skip
    finally:
        stream.end()


@pytest.mark.slow
@pytest.mark.timeout(3600, method="signal")
@pytest.mark.parametrize("case", FAULT_CASES)
def test_failing_step_interrupted_before_a_bytecode_is_reported_once(case: str) -> None:
    with ComparedEngine(FAULT_CASES[case][0]) as subject:
        attempt = functools.partial(check_failing_step, subject, case)
        outcomes = Outcomes(max_wrong=4)
        interrupt_at_moments(attempt, subject.renew, (case,), every=3, kinds=("opcode",), outcomes=outcomes).check()


@pytest.mark.slow
@pytest.mark.timeout(3600, method="signal")
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("setting", "state"), [("two workers", "idle"), ("two workers", "a step pending")])
def test_close_interrupted_before_a_bytecode_can_be_repeated(setting: str, state: str) -> None:
    def attempt(interruption: Interruption) -> None:
        check_interrupted_close(CLOSE_SETTINGS[setting], state, [interruption])

    warm_up(CLOSE_SETTINGS[setting])
    outcomes = Outcomes(max_wrong=6)
    interrupt_at_moments(attempt, gc.collect, (setting, state), every=3, kinds=("opcode",), outcomes=outcomes).check()


# --- without interruptions ----------------------------------------------------------------------

NEVER = 10**9  # the index of a moment that no call reaches


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_uninterrupted_calls_pass_the_checks(setting: str) -> None:
    with ComparedEngine(SETTINGS[setting]) as subject:
        for _ in range(3):
            for call, part in CALL_PARTS:
                subject.attempt(call, part, [Interruption("line", NEVER)])
    assert not subject.tolerated


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", FIRST_READY)
def test_uninterrupted_send_and_recv_pass_the_checks(setting: str) -> None:
    stream = RowStream(FIRST_READY[setting])
    try:
        for tick in range(6):
            stream.cycle(["send", "recv", "reset_async"][tick % 3], [Interruption("line", NEVER)], tick)
    finally:
        stream.end()


@pytest.mark.parametrize("case", FAULT_CASES)
def test_uninterrupted_failure_passes_the_checks(case: str) -> None:
    with ComparedEngine(FAULT_CASES[case][0]) as subject:
        for _ in range(3):
            check_failing_step(subject, case, Interruption("line", NEVER))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("setting", "state"),
    [*((name, "idle") for name in CLOSE_SETTINGS), *(("two workers", state) for state in CLOSE_STATES[1:])],
)
def test_uninterrupted_close_leaves_nothing(setting: str, state: str) -> None:
    warm_up(CLOSE_SETTINGS[setting])
    check_interrupted_close(CLOSE_SETTINGS[setting], state, [])


# --- tests of the checks ------------------------------------------------------------------------


class SelfInterruptingEnvs(SyncVectorEnv):
    """A vector environment that raises ``KeyboardInterrupt`` after a step.

    The step stays pending with a correct or a wrong reward, or its result is lost, so that the environments step twice.
    """

    def __init__(self, fault: str) -> None:
        super().__init__([functools.partial(CountingEnv, index) for index in range(4)])
        self.fault, self.interrupts_next = fault, False
        self.state, self.pending = "default", None

    @property
    def _state(self) -> Any:
        return type("State", (), {"value": self.state})

    def step(self, actions: Any) -> Any:
        if not self.interrupts_next:
            return super().step(actions)
        self.interrupts_next = False
        self.pending = super().step(actions)
        if self.fault != "steps twice":
            self.state = "step"
        if self.fault == "wrong reward":
            self.pending[1][2] += 1
        raise KeyboardInterrupt

    def step_wait(self) -> Any:
        self.state = "default"
        return self.pending


@pytest.mark.parametrize("fault", ["none", "steps twice", "wrong reward"])
def test_checks_detect_a_repeated_step_and_a_wrong_result(fault: str) -> None:
    class CatchKeyboardInterrupt(Interruption):
        def __exit__(self, kind: Any, error: Any, where: Any) -> bool:
            super().__exit__(kind, error, where)
            return kind is KeyboardInterrupt

    subject = ComparedEngine(Setting({}))
    subject.envs, subject.reference = SelfInterruptingEnvs(fault), subject.setting.make_reference()
    subject.reset_both()
    subject.envs.interrupts_next = True
    call = make_call("step", subject.setting, 3)
    if fault == "none":
        subject.interrupt_call(call, "whole", [CatchKeyboardInterrupt("line", 10**6)])
    else:
        with pytest.raises(AssertionError):
            subject.interrupt_call(call, "whole", [CatchKeyboardInterrupt("line", 10**6)])
