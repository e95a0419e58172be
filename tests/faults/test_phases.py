"""Calls out of order: row 28 of the table in ``docs/faults.md``.

The 35 answers are Gymnasium's, and Gymnasium itself is asked for them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AsyncVectorEnv as Stock
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from observe import FAULTS
from sampling import each_pair
from vandals import Ledger, crew

import vecenv
from vecenv.testing.faulty import WitnessEnv

pytestmark = [*FAULTS, pytest.mark.xdist_group("phases")]  # Gymnasium is asked once

PHASES = ("default", "reset", "step", "call", "closed")
ACTIONS = np.array([1, 2])
CALLS: dict[str, Callable[[Any], Any]] = {
    "reset_async": lambda envs: envs.reset_async(),
    "reset_wait": lambda envs: envs.reset_wait(),
    "step_async": lambda envs: envs.step_async(ACTIONS),
    "step_wait": lambda envs: envs.step_wait(),
    "call_async": lambda envs: envs.call_async("echo", 1),
    "call_wait": lambda envs: envs.call_wait(),
    "set_attr": lambda envs: envs.set_attr("secret", 1),
}
LEGAL = {
    "default": {"reset_async", "step_async", "call_async", "set_attr"},
    "reset": {"reset_wait"},
    "step": {"step_wait"},
    "call": {"call_wait"},
    "closed": set(),
}


def enter(envs: Any, phase: str) -> None:
    """Bring a fresh engine into a phase."""
    envs.reset(seed=1)
    if phase == "closed":
        envs.close()
    elif phase != "default":
        CALLS[f"{phase}_async"](envs)


def answer(envs: Any, call: str) -> tuple[type[Exception], str, str | None] | None:
    """What the person who makes this call gets to see: nothing, or an error."""
    try:
        CALLS[call](envs)
    except Exception as error:
        return type(error), str(error), getattr(error, "name", None)
    return None


@pytest.fixture(scope="module")
def stock_answers() -> dict[tuple[str, str], Any]:
    """Gymnasium's own 35."""
    answers = {}
    for phase in PHASES:
        for call in CALLS:
            envs = Stock(crew(2), context="fork")
            enter(envs, phase)
            answers[phase, call] = answer(envs, call)
            envs.close(terminate=True)
    return answers


@pytest.mark.parametrize(("phase", "call", "workers"), each_pair(PHASES, list(CALLS), [0, 1, None]))
def test_phase_table(phase: str, call: str, workers: int | None, stock_answers: dict[tuple[str, str], Any]) -> None:
    """Every call in every phase answers as Gymnasium does: same class, same text, same name."""
    envs = vecenv.AsyncVectorEnv(crew(2), context="fork", num_workers=workers)
    try:
        enter(envs, phase)
        given = answer(envs, call)
        assert given == stock_answers[phase, call]
        assert (given is None) == (call in LEGAL[phase])
        if given is not None and phase not in ("default", "closed"):
            CALLS[f"{phase}_wait"](envs)  # an illegal call changes nothing
        if phase == "closed":
            return
        if given is None and call.endswith("_async"):
            CALLS[f"{call.removesuffix('_async')}_wait"](envs)
        rows = [WitnessEnv.read(row) for row in envs.step(ACTIONS)[0]]
        assert [(row["witness_id"], row["last_action"]) for row in rows] == [(0, 1), (1, 2)]
    finally:
        envs.close()


@pytest.mark.parametrize("alias", ["reset_send", "reset_fetch", "step_send", "step_fetch", "call_send", "call_fetch"])
def test_other_names_are_the_same_methods(alias: str) -> None:
    """One implementation, two names."""
    verb, kind = alias.split("_")
    same = getattr(vecenv.AsyncVectorEnv, f"{verb}_{'async' if kind == 'send' else 'wait'}")
    assert getattr(vecenv.AsyncVectorEnv, alias) is same


class Phases(RuleBasedStateMachine):
    """Any sequence of calls: legal ones give the right rows, illegal ones the right error and no other effect."""

    def __init__(self) -> None:
        super().__init__()
        self.envs = vecenv.AsyncVectorEnv(crew(2, length=3), num_workers=0)
        self.ledger = Ledger(2, length=3)
        self.ledger.reset(self.envs.reset(seed=1))
        self.phase = "default"

    def refused(self, call: str) -> bool:
        """Make an illegal call; whether it was one."""
        if call in LEGAL[self.phase]:
            return False
        wrong = NoAsyncCallError if call.endswith("_wait") else AlreadyPendingCallError
        with pytest.raises(ClosedEnvironmentError if self.phase == "closed" else wrong):
            CALLS[call](self.envs)
        return True

    @rule()
    def reset_async(self) -> None:
        if not self.refused("reset_async"):
            self.envs.reset_async()
            self.phase = "reset"

    @rule()
    def step_async(self) -> None:
        if not self.refused("step_async"):
            self.envs.step_async(ACTIONS)
            self.phase = "step"

    @rule()
    def call_async(self) -> None:
        if not self.refused("call_async"):
            self.envs.call_async("echo", 17)
            self.phase = "call"

    @rule()
    def reset_wait(self) -> None:
        if not self.refused("reset_wait"):
            self.ledger.reset(self.envs.reset_wait())
            self.phase = "default"

    @rule()
    def step_wait(self) -> None:
        if not self.refused("step_wait"):
            self.ledger.step(ACTIONS, self.envs.step_wait())
            self.phase = "default"

    @rule()
    def call_wait(self) -> None:
        if not self.refused("call_wait"):
            assert self.envs.call_wait() == (17, 17)
            self.phase = "default"

    @rule()
    def set_attr(self) -> None:
        if not self.refused("set_attr"):
            self.envs.set_attr("secret", 3)
            assert self.envs.get_attr("secret") == (3, 3)

    @precondition(lambda self: self.phase == "default")
    @rule()
    def step(self) -> None:
        self.ledger.step(ACTIONS, self.envs.step(ACTIONS))

    @rule()
    def wrong_actions(self) -> None:
        if self.phase == "default":
            with pytest.raises(ValueError, match=r"(?i)action"):
                self.envs.step(ACTIONS[:1])

    @invariant()
    def closed_or_not(self) -> None:
        assert self.envs.closed == (self.phase == "closed")

    def teardown(self) -> None:
        self.envs.close()
        self.envs.close()


def test_phase_table_in_any_order() -> None:
    """The table, walked at random."""
    run_state_machine_as_test(
        Phases,
        settings=settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)),
    )
