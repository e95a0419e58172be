"""Exceptions at every moment lose nothing.

After one, either the call was never submitted, or its result is pending and the same ``*_wait`` returns it; or every call
raises ``ResetNeeded``, and ``reset()`` restores everything. Every moment of every
call is tried, with Ctrl-C and with another exception; by default every nineteenth or so (``VECENV_OFFSET`` chooses),
in few configurations. All of them: ``pytest -m slow tests/faults/test_interrupts.py``.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from counting import DIE, HANG, RAISE, Counting
from endings import ENDS, STATES, check_nothing_left, interrupted_close, warm_up
from gymnasium.error import ResetNeeded
from gymnasium.vector import SyncVectorEnv
from interrupted_calls import (
    CALLS,
    RESTART,
    SETTINGS,
    Hung,
    Setting,
    Subject,
    Verdicts,
    Watchdog,
    brief,
    children,
    list_resources,
    make_call,
    needs_reset,
    within,
)
from interruption import KINDS, Interruption, Stopped, apart, moments
from observe import FAULTS
from signals import pythons_own_ctrl_c
from streams import FIRST_READY, Stream

import vecenv
from vecenv.testing import assert_identical

pytestmark = [
    *(mark for mark in FAULTS if mark.name != "timeout"),
    pytest.mark.timeout(600, method="signal"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
slow = [pytest.mark.slow, pytest.mark.timeout(3600, method="signal")]

OFFSET = int(os.environ.get("VECENV_OFFSET", "739942"))
EVERY = 19


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    with pythons_own_ctrl_c():
        yield
    gc.unfreeze()


def offset_of(*names: object) -> int:
    """Return the first moment of a test: tests begin at different moments, the same in each run; ``slow`` covers all."""
    return OFFSET + zlib.crc32(repr(names).encode())


def interrupt_every_moment(
    attempt: Callable[[Interruption], None],
    renew: Callable[[], None],
    names: tuple[object, ...],
    *,
    every: int,
    kinds: tuple[str, ...] = KINDS,
    least: int = 10,
    verdicts: Verdicts | None = None,
    **options: Any,
) -> Verdicts:
    """Attempt something with an interruption at every ``every``-th moment of each kind, and collect the verdicts."""
    verdicts = verdicts or Verdicts()
    for kind in kinds:
        for interruption in moments(kind, every=every, offset=offset_of(*names, kind), least=least, **options):
            verdicts.attempts += 1
            try:
                next(apart(attempt, interruption))
            except (Exception, KeyboardInterrupt, Stopped) as error:
                verdicts.add(error, repr(interruption))
                del error
                renew()
            verdicts.fired += interruption.fired
            if verdicts.enough:
                return verdicts
    return verdicts


# --- calls --------------------------------------------------------------------------------------

QUICK = [
    ("in process", "step", "whole"), ("in process", "reset", "whole"),
    ("caller's share", "step", "whole"), ("caller's share", "call", "whole"),
    ("one worker", "step", "whole"), ("one worker", "step", "begin"), ("one worker", "step", "wait"),
    ("one worker", "reset", "whole"), ("one worker", "reset_some", "whole"), ("one worker", "call", "whole"),
    ("one worker", "set_attr", "whole"), ("one worker", "exec_func", "whole"), ("one worker", "get_attr", "whole"),
    ("four workers", "step", "whole"), ("four workers", "set_attr", "whole"), ("four workers", "set_next_options", "whole"),
    ("max_concurrency", "step", "whole"), ("restart", "step", "whole"), ("restart", "reset", "whole"),
    ("list actions", "step", "whole"), ("Text actions", "step", "wait"), ("Text observations", "step", "whole"),
    ("Text observations", "reset", "wait"), ("no shared memory", "step", "whole"), ("same step", "step", "whole"),
    ("batch_size", "step", "whole"), ("one worker", "save", "whole"), ("one worker", "load", "whole"),
    ("in process", "load", "whole"), ("one worker", "abandon", "whole"),
]  # fmt: skip
QUICK_ENOUGH = [
    ("one worker", "state_dict", "whole"), ("one worker", "load_state_dict", "whole"),
]  # fmt: skip
WHOLE = ("get_attr", "set_attr", "set_next_options", "save", "load", "state_dict", "load_state_dict", "abandon")
PARTS = [(name, part) for name in CALLS for part in ("whole", "begin", "wait") if part == "whole" or name not in WHOLE]


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
        *((*case, 5 * EVERY) for case in QUICK),
        *(pytest.param(*case, EVERY, marks=slow) for case in QUICK),
        *(pytest.param(*case, 2 * EVERY, marks=pytest.mark.long) for case in QUICK_ENOUGH),
        *(
            pytest.param(setting, call, part, 1, marks=slow, id=f"all-{setting}-{call}-{part}")
            for setting in SETTINGS
            for call, part in PARTS
        ),
    ],
)
def test_interrupted_call_was_not_submitted_or_is_pending(setting: str, call: str, part: str, every: int) -> None:
    """The result equals that of an undisturbed reference, and so does that of the next call."""
    chosen = SETTINGS[setting]
    chance = random.Random(OFFSET)

    def attempt(interruption: Interruption) -> None:
        again = []
        if interruption.moment % 3 == 0:  # and once more, in the calls that get the result
            again = [Interruption(interruption.kind, chance.randrange(30), Stopped)]
        subject.attempt(call, part, [interruption, *again])

    with Subject(chosen) as subject:
        names = (setting, call, part)
        verdicts = interrupt_every_moment(attempt, subject.renew, names, every=every, within=within(chosen))
    verdicts.excused = subject.excused
    verdicts.check()


@pytest.mark.slow
@pytest.mark.timeout(3600, method="signal")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("setting", ["one worker", "caller's share", "list actions", "batch_size"])
def test_interruption_before_any_bytecode(setting: str, call: str) -> None:
    """The same test with an exception before each bytecode, of which there are thousands."""
    chosen = SETTINGS[setting]
    with Subject(chosen) as subject:
        verdicts = interrupt_every_moment(
            lambda interruption: subject.attempt(call, "whole", [interruption]), subject.renew, (setting, call),
            every=3, kinds=("opcode",), within=within(chosen),
        )  # fmt: skip
    verdicts.excused = subject.excused
    verdicts.check()


# --- first-ready batches ------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("which", ["send", "recv", "recv of the rest", "recv at least", "reset_async", "recv of a reset"])
@pytest.mark.parametrize(
    ("setting", "every"),
    [
        ("two of four", EVERY),
        ("in process", EVERY),
        *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in FIRST_READY),
    ],
)
def test_rows_are_all_sent_or_none_and_received_once(setting: str, which: str, every: int) -> None:
    stream = Stream(FIRST_READY[setting])
    ticks = iter(range(10**9))
    try:
        interrupt_every_moment(
            lambda interruption: stream.cycle(which, interruption, next(ticks)), stream.renew, (setting, which), every=every
        ).check()
    finally:
        stream.end()


# --- environments that fail in the interrupted step ---------------------------------------------


def step_with_a_fault(envs: Any, actions: Any, interruption: Interruption) -> Any:
    """Return the result of an interrupted step, by the calls that the state allows."""
    with interruption:
        return envs.step(actions)
    if needs_reset(envs):
        raise ResetNeeded
    if envs._state.value == "default":
        return envs.step(actions)
    assert envs._state.value == "step"
    return envs.step_wait()


def check_restarted_rows(subject: Subject, lost: list[int], fault: int, interruption: Interruption) -> None:
    """Check that the lost rows are marked as restarted, and that all others, and the next step, are unaffected."""
    envs, same, count = subject.envs, subject.same, subject.setting.count
    subject.in_step()
    numbers = [(subject.tick + row) % RAISE for row in range(count)]
    assert_identical(envs.step(np.array(numbers)), same.step(np.array(numbers)), "the step before")
    last = envs.observations.copy()
    wanted = same.step(np.array(numbers))
    numbers[lost[0]] = fault
    restarts = envs.stats()["restarts"]
    found = step_with_a_fault(envs, np.array(numbers), interruption)
    assert envs._state.value == "default"
    for row in range(count):
        if row in lost:
            assert (found[1][row], found[2][row], found[3][row]) == (0.0, False, True), f"row {row} says not that it ended"
            assert found[4]["restarted"][row]
            assert_identical(found[4]["final_obs"][row], last[row], f"final_obs of {row}")
        else:
            for field in range(4):
                assert_identical(found[field][row], wanted[field][row], f"field {field} of env {row}")
            assert found[4]["tag"][row] == wanted[4]["tag"][row]
            assert not found[4]["_restarted"][row]
    assert envs.stats()["restarts"] == restarts + 1
    beginnings, *_ = envs.step(np.zeros(count, np.int64))
    for row in lost:
        assert beginnings[row].tolist()[3:] == [0, 0, 0], f"row {row} did not begin anew: {beginnings[row]}"


def check_failure_is_raised(subject: Subject, lost: list[int], fault: int, interruption: Interruption) -> None:
    """Check that the error is raised once and names the environment, and that the next reset recovers it."""
    envs, count = subject.envs, subject.setting.count
    subject.in_step()
    actions = np.array([fault if row == lost[0] else row % RAISE for row in range(count)])
    error_class: type[Exception] = ValueError if fault == RAISE else vecenv.errors.WorkerDied
    with pytest.raises(error_class) as raised:
        step_with_a_fault(envs, actions, interruption)
    if fault == RAISE:
        assert re.search(rf"env {lost[0]}\b", brief(raised.value, whole=True)), brief(raised.value)
    else:
        assert set(lost) == set(raised.value.envs)  # type: ignore[attr-defined]
    assert envs._state.value == "default"
    with pytest.raises(vecenv.errors.EnvFailed):
        envs.step(np.zeros(count, np.int64))
    subject.in_step()


FAULTY = {
    "restart, one raises": (Setting({"num_workers": 2, **RESTART}), [1], RAISE, check_restarted_rows),
    "restart, a worker dies": (Setting({"num_workers": 2, **RESTART}), [1, 0], DIE, check_restarted_rows),
    "one raises": (Setting({"num_workers": 2}), [1], RAISE, check_failure_is_raised),
    "a worker dies": (Setting({"num_workers": 2}), [1, 0], DIE, check_failure_is_raised),
}


def step_that_fails(subject: Subject, case: str, interruption: Interruption) -> None:
    _, lost, fault, demand = FAULTY[case]
    before = count_resources(subject)
    with Watchdog(subject.known) as watchdog:
        try:
            demand(subject, lost, fault, interruption)
        except (ResetNeeded, vecenv.errors.EnvFailed):  # the interruption replaced the exception
            if not interruption.fired:
                raise
            subject.envs.reset()  # which may find the worker dead, and report that it was restarted
            subject.in_step()
        except BaseException as error:
            if watchdog.bit:
                raise Hung(f"it hung; ended by force it raised: {brief(error)}") from None
            raise
    assert not watchdog.bit
    assert not interruption.swallowed, "the exception was swallowed"
    assert (held := count_resources(subject)) == before, f"{held} descriptors and processes, {before} before"


def count_resources(subject: Subject) -> tuple[int, int]:
    """Return the numbers of descriptors and processes of an engine, which an interrupted restart must not change."""
    pool = subject.envs._pool
    return len(getattr(pool, "descriptors", None) or pool.holdings), len(pool.started)


def check_abandoned_rows(subject: Subject, interruption: Interruption) -> None:
    """Check that a hanging step loses only the rows of its worker."""
    envs, same, count = subject.envs, subject.same, subject.setting.count
    subject.in_step()
    actions = np.arange(count) % RAISE
    wanted = same.step(actions)
    restarts = envs.stats()["restarts"]
    actions[0] = HANG
    envs.step_async(actions)
    done = False
    with interruption:
        envs.abandon([0])
        done = True
    if needs_reset(envs):
        subject.in_step()
        return
    assert envs._state.value == "step"
    if not done:
        envs.abandon([0])
    lost = list(envs.worker_rows[0])
    if "on_failure" in subject.setting.options:
        found = envs.step_wait()
        assert found[4]["restarted"].tolist() == [row in lost for row in range(count)]
        assert_identical(found[0][len(lost) :], wanted[0][len(lost) :], "rows that were not abandoned")
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
    """The hanging step is pending until it is received, and its death is reported once."""
    chosen = ENDS[setting] if setting == "two workers" else SETTINGS[setting]

    def attempt(interruption: Interruption) -> None:
        with Watchdog(subject.known) as watchdog:
            check_abandoned_rows(subject, interruption)
        assert not watchdog.bit, "it hung"
        assert not interruption.swallowed, "the exception was swallowed"

    with Subject(chosen) as subject:
        interrupt_every_moment(attempt, subject.renew, (setting,), every=every, verdicts=Verdicts(most_wrong=4)).check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "every"),
    [
        *((name, 211 if "dies" in name else 97) for name in FAULTY),
        *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in FAULTY),
    ],
)
def test_failure_in_the_interrupted_step_is_not_lost(case: str, every: int) -> None:
    with Subject(FAULTY[case][0]) as subject:
        attempt = functools.partial(step_that_fails, subject, case)
        interrupt_every_moment(attempt, subject.renew, (case,), every=every, verdicts=Verdicts(most_wrong=4)).check()


# --- beginning and end --------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("setting", "state", "every"),
    [
        ("two workers", "idle", 211), ("two workers", "a step pending", 211), ("in process", "idle", 29),
        *(pytest.param(name, state, 1, marks=slow, id=f"all-{name}-{state}") for name in ENDS for state in STATES),
    ],
)  # fmt: skip
def test_interrupted_close_can_be_repeated(setting: str, state: str, every: int) -> None:
    """The repeated close ends within seconds, and nothing is left."""
    chance = random.Random(OFFSET)

    def attempt(interruption: Interruption) -> None:
        again = [Interruption(interruption.kind, chance.randrange(60), Stopped)] if interruption.moment % 2 else []
        interrupted_close(ENDS[setting], state, [interruption, *again])

    warm_up(ENDS[setting])
    interrupt_every_moment(attempt, gc.collect, (setting, state), every=every, verdicts=Verdicts(most_wrong=6)).check()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("setting", "every"),
    [("two workers", 97), ("in process", 41), *(pytest.param(name, 1, marks=slow, id=f"all-{name}") for name in ENDS)],
)
def test_interrupted_constructor_leaves_nothing(setting: str, every: int) -> None:
    chosen = ENDS[setting]
    warm_up(chosen)

    def attempt(interruption: Interruption) -> None:
        known, before = children(), list_resources()
        envs = None
        with Watchdog(known, 30.0) as watchdog, interruption:
            envs = chosen.open()
        assert not watchdog.bit, "it hung"
        if envs is not None:
            envs.close()
        del envs
        check_nothing_left(before, known)

    interrupt_every_moment(attempt, gc.collect, (setting,), every=every, verdicts=Verdicts(most_wrong=6)).check()


# --- without interruptions ----------------------------------------------------------------------

NEVER = 10**9


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_uninterrupted_calls_pass_the_checks(setting: str) -> None:
    """An undisturbed call passes the checks of the tests above."""
    with Subject(SETTINGS[setting]) as subject:
        for _ in range(3):
            for call, part in PARTS:
                subject.attempt(call, part, [Interruption("line", NEVER)])
    assert not subject.excused


@pytest.mark.sampled(3)
@pytest.mark.parametrize("setting", FIRST_READY)
def test_uninterrupted_rows_are_all_received(setting: str) -> None:
    stream = Stream(FIRST_READY[setting])
    try:
        for tick in range(6):
            stream.cycle(["send", "recv", "reset_async"][tick % 3], Interruption("line", NEVER), tick)
    finally:
        stream.end()


@pytest.mark.parametrize("case", FAULTY)
def test_uninterrupted_failure_is_raised(case: str) -> None:
    with Subject(FAULTY[case][0]) as subject:
        for _ in range(3):
            step_that_fails(subject, case, Interruption("line", NEVER))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("setting", "state"), [*((name, "idle") for name in ENDS), *(("two workers", state) for state in STATES[1:])]
)
def test_uninterrupted_close_leaves_nothing(setting: str, state: str) -> None:
    warm_up(ENDS[setting])
    interrupted_close(ENDS[setting], state, [])


# --- tests of the checks ------------------------------------------------------------------------


class FaultyWhenInterrupted(SyncVectorEnv):
    """A vector environment that is wrong in one way when it is interrupted; the checks must fail."""

    def __init__(self, how: str) -> None:
        super().__init__([functools.partial(Counting, index) for index in range(4)])
        self.how, self.armed = how, False
        self.state, self.pending = "default", None

    @property
    def _state(self) -> Any:
        return type("State", (), {"value": self.state})

    def step(self, actions: Any) -> Any:
        if not self.armed:
            return super().step(actions)
        self.armed = False
        self.pending = super().step(actions)
        if self.how != "twice":
            self.state = "step"
        if self.how == "garbled":
            self.pending[1][2] += 1
        raise KeyboardInterrupt

    def step_wait(self) -> Any:
        self.state = "default"
        return self.pending


@pytest.mark.parametrize("how", ["right", "twice", "garbled"])
def test_checks_detect_errors(how: str) -> None:
    """A check that cannot fail is worthless."""

    class Always(Interruption):
        def __exit__(self, kind: Any, error: Any, where: Any) -> bool:
            super().__exit__(kind, error, where)
            return kind is KeyboardInterrupt

    subject = Subject(Setting({}))
    subject.envs, subject.same = FaultyWhenInterrupted(how), subject.setting.reference()
    subject.in_step()
    subject.envs.armed = True
    call = make_call("step", subject.setting, 3)
    if how == "right":
        subject._attempt(call, "whole", [Always("line", 10**6)])
    else:
        with pytest.raises(AssertionError):
            subject._attempt(call, "whole", [Always("line", 10**6)])
