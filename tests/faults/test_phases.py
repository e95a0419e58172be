"""Calls out of order: row 28 of the table in ``FAULTS.md``.

The 35 answers are Gymnasium's, and Gymnasium itself is asked for them here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from envs import opened
from gymnasium.vector import AsyncVectorEnv as Stock
from observe import FAULTS
from sampling import each_pair
from vandals import Ledger, crew

import vecenv

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


def is_echoed(envs: Any, ledger: Ledger) -> None:
    assert envs.call_wait() == (1, 1)


FINISH: dict[str, Callable[[Any, Ledger], None]] = {
    "reset": lambda envs, ledger: ledger.reset(envs.reset_wait()),
    "step": lambda envs, ledger: ledger.step(ACTIONS, envs.step_wait()),
    "call": is_echoed,
}
"""Fetch the answer that is pending, which must be right."""


def enter(envs: Any, phase: str) -> Any:
    """Bring a fresh engine into a phase; the answer to its first reset."""
    began = envs.reset(seed=1)
    if phase == "closed":
        envs.close()
    elif phase != "default":
        CALLS[f"{phase}_async"](envs)
    return began


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
    """Every call in every phase answers as Gymnasium does: same class, text and name; an illegal one changes nothing."""
    with opened(crew(2), context="fork", num_workers=workers) as envs:
        ledger = Ledger(2, length=10)
        ledger.reset(enter(envs, phase))
        given = answer(envs, call)
        assert given == stock_answers[phase, call]
        assert (given is None) == (call in LEGAL[phase])
        assert envs.closed == (phase == "closed")
        if phase == "closed":
            return
        if given is not None and phase != "default":
            FINISH[phase](envs, ledger)
        elif given is None and call.endswith("_async"):
            FINISH[call.removesuffix("_async")](envs, ledger)
        elif given is None and call.endswith("_wait"):  # its answer was taken above
            for env, row in enumerate(envs.observations):
                ledger.resume(env, row)
        ledger.step(ACTIONS, envs.step(ACTIONS))


@pytest.mark.parametrize("alias", ["reset_send", "reset_fetch", "step_send", "step_fetch", "call_send", "call_fetch"])
def test_other_names_are_the_same_methods(alias: str) -> None:
    """One implementation, two names."""
    verb, kind = alias.split("_")
    same = getattr(vecenv.AsyncVectorEnv, f"{verb}_{'async' if kind == 'send' else 'wait'}")
    assert getattr(vecenv.AsyncVectorEnv, alias) is same
