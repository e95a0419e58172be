"""Backends that step all environments together: an interrupted call is pending, not submitted, or needs a reset."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from double import DoubleVectorEnv
from gymnasium.error import ResetNeeded
from interruption import Interruption, Stopped, moments
from signals import default_sigint_handler

import vecenv
from vecenv.testing import assert_identical

pytestmark = pytest.mark.timeout(300)
WITHIN = str(Path(vecenv.__file__).parent / "front"), str(Path(__file__).parents[1] / "double.py")
ROWS = 3

CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    # the call, and the call that returns its result if it is pending
    "reset": (lambda envs, arg: envs.reset(seed=int(arg.sum())), "reset_wait"),
    "step": (lambda envs, arg: envs.step(arg), "step_wait"),
    "send": (lambda envs, arg: envs.send(arg), "recv"),
    "masked reset": (lambda envs, arg: envs.reset(seed=9, options={"reset_mask": arg > 1}), "reset_wait"),
}


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    with default_sigint_handler():
        yield


@pytest.mark.long
@pytest.mark.parametrize("kind", ["line", "call", "opcode"])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_call_is_pending_or_not_submitted_or_needs_a_reset(name: str, kind: str) -> None:
    call, wait = CALLS[name]
    rng = random.Random(4)
    envs, reference = DoubleVectorEnv(ROWS), DoubleVectorEnv(ROWS)
    for instance in (envs, reference):
        instance.reset(seed=1)
    resets_needed = interruptions = 0
    for interruption in moments(kind, within=WITHIN):
        action = np.array([rng.randrange(5), 4, rng.randrange(5)])
        expected = call(reference, action)
        if name == "send":
            expected = reference.recv()
        result = None
        with interruption:
            result = call(envs, action)
        assert not interruption.swallowed, f"{interruption} was swallowed"
        first_retry = retry = Interruption(kind, rng.randrange(60), Stopped, WITHIN)
        try:
            while result is None:
                pending = envs.stats()["in_flight"] > 0
                with retry:
                    if not pending:
                        result = call(envs, action)
                        if name == "send":
                            result = None
                    else:
                        result = getattr(envs, wait)()
                retry = Interruption(kind, 10**9, Stopped, WITHIN)
            assert_identical(result, expected, f"after {interruption}")
        except ResetNeeded:
            assert interruption.fired or first_retry.fired
            resets_needed += 1
            assert_identical(envs.reset(seed=5), reference.reset(seed=5), f"the reset after {interruption}")
        for instance in (envs, reference):
            assert instance.stats()["in_flight"] == 0
        assert_identical(envs.step(action), reference.step(action), f"the step after {interruption}")
        interruptions += 1
    assert resets_needed < interruptions / 2
    steps, resets = ([instance.stats()[key] for instance in (envs, reference)] for key in ("steps", "resets"))
    if not resets_needed:
        assert steps[0] == steps[1]
        # a reset that drops the result of an interrupted one counts too
        assert resets[0] == resets[1] or (name == "reset" and resets[0] > resets[1])


def test_reset_after_an_interrupted_change_leaves_nothing_pending() -> None:
    envs = DoubleVectorEnv(ROWS)
    envs.reset(seed=1)
    envs._driver.state.changing = True  # the state after an exception in the middle of `finish`
    with pytest.raises(ResetNeeded):
        envs.step(np.ones(ROWS, np.int64))
    envs.reset(seed=1)
    assert envs.step(np.ones(ROWS, np.int64))[1].tolist() == [1.0] * ROWS
