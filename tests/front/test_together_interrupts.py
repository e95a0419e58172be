"""Tests of backends that step all environments together, with interrupted calls.

An interrupted call is pending, was not submitted, or makes a reset necessary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vector_env import FakeVectorEnv
from gymnasium.error import ResetNeeded
from interruption import Interruption, Stopped, moments
from signals import default_sigint_handler

import vecenv
from vecenv.testing import assert_identical

pytestmark = pytest.mark.timeout(300)
TRACED_PATHS = str(Path(vecenv.__file__).parent / "front"), str(Path(__file__).parents[1] / "fake_vector_env.py")
ROWS = 3

# name -> the call, and the method that returns its result if it is pending
CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "reset": (lambda envs, actions: envs.reset(seed=int(actions.sum())), "reset_wait"),
    "step": (lambda envs, actions: envs.step(actions), "step_wait"),
    "send": (lambda envs, actions: envs.send(actions), "recv"),
    "masked reset": (lambda envs, actions: envs.reset(seed=9, options={"reset_mask": actions > 1}), "reset_wait"),
}


@pytest.fixture(autouse=True)
def raise_keyboard_interrupt_on_ctrl_c() -> Iterator[None]:
    with default_sigint_handler():
        yield


@pytest.mark.long
@pytest.mark.parametrize("kind", ["line", "call", "opcode"])
@pytest.mark.parametrize("name", CALLS)
def test_interrupted_call_is_pending_or_not_submitted_or_needs_a_reset(name: str, kind: str) -> None:
    call, wait_method = CALLS[name]
    rng = random.Random(4)
    envs, reference = FakeVectorEnv(ROWS), FakeVectorEnv(ROWS)
    for instance in (envs, reference):
        instance.reset(seed=1)
    resets_needed = interruptions = 0
    for interruption in moments(kind, within=TRACED_PATHS):
        actions = np.array([rng.randrange(5), 4, rng.randrange(5)])
        expected = call(reference, actions)
        if name == "send":
            expected = reference.recv()
        result = None
        with interruption:
            result = call(envs, actions)
        assert not interruption.swallowed, f"{interruption} was swallowed"
        # the first retry may be interrupted as well; later ones are not
        first_retry = retry = Interruption(kind, rng.randrange(60), Stopped, TRACED_PATHS)
        try:
            while result is None:
                pending = envs.stats()["in_flight"] > 0
                with retry:
                    if not pending:
                        result = call(envs, actions)
                        if name == "send":
                            result = None
                    else:
                        result = getattr(envs, wait_method)()
                retry = Interruption(kind, 10**9, Stopped, TRACED_PATHS)
            assert_identical(result, expected, f"after {interruption}")
        except ResetNeeded:
            assert interruption.fired or first_retry.fired
            resets_needed += 1
            assert_identical(envs.reset(seed=5), reference.reset(seed=5), f"the reset after {interruption}")
        for instance in (envs, reference):
            assert instance.stats()["in_flight"] == 0
        assert_identical(envs.step(actions), reference.step(actions), f"the step after {interruption}")
        interruptions += 1
    assert resets_needed < interruptions / 2
    if not resets_needed:
        stats, expected_stats = envs.stats(), reference.stats()
        assert stats["steps"] == expected_stats["steps"]
        if name == "reset":  # an interrupted reset is counted, although the next reset drops its result
            assert stats["resets"] >= expected_stats["resets"]
        else:
            assert stats["resets"] == expected_stats["resets"]


def test_reset_after_an_interrupted_change_leaves_nothing_pending() -> None:
    envs = FakeVectorEnv(ROWS)
    envs.reset(seed=1)
    envs._driver.state.changing = True  # as after an exception inside of `finish`
    with pytest.raises(ResetNeeded):
        envs.step(np.ones(ROWS, np.int64))
    envs.reset(seed=1)
    assert envs.step(np.ones(ROWS, np.int64))[1].tolist() == [1.0] * ROWS
