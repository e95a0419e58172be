"""Engines whose environments step together: an exception loses no answer, wherever it falls in the front or the driver."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from double import DoubleVectorEnv
from interruption import Interruption, Stopped, moments
from witnesses import pythons_own_ctrl_c

import vecenv
from vecenv.testing import assert_identical

pytestmark = pytest.mark.timeout(300)
WITHIN = str(Path(vecenv.__file__).parent / "front"), str(Path(__file__).parents[1] / "double.py")
ROWS = 3

CALLS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    # the whole call, and what gives its answer where it is pending
    "reset": (lambda envs, arg: envs.reset(seed=int(arg.sum())), "reset_wait"),
    "step": (lambda envs, arg: envs.step(arg), "step_wait"),
    "send": (lambda envs, arg: envs.send(arg), "recv"),
    "masked reset": (lambda envs, arg: envs.reset(seed=9, options={"reset_mask": arg > 1}), "reset_wait"),
}


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    with pythons_own_ctrl_c():
        yield


@pytest.mark.long
@pytest.mark.parametrize("kind", ["line", "call", "opcode"])
@pytest.mark.parametrize("name", CALLS)
def test_the_call_was_not_made_or_its_answer_is_pending(name: str, kind: str) -> None:
    whole, wait = CALLS[name]
    chance = random.Random(4)
    envs, same = DoubleVectorEnv(ROWS), DoubleVectorEnv(ROWS)
    for each in (envs, same):
        each.reset(seed=1)
    for interruption in moments(kind, within=WITHIN):
        action = np.array([chance.randrange(5), 4, chance.randrange(5)])
        wanted = whole(same, action)
        if name == "send":
            wanted = same.recv()
        found = None
        with interruption:
            found = whole(envs, action)
        assert not interruption.swallowed, f"{interruption} was swallowed"
        again = Interruption(kind, chance.randrange(60), Stopped, WITHIN)
        while found is None:
            pending = envs.stats()["in_flight"] > 0
            with again:
                if not pending:
                    found = whole(envs, action)
                    if name == "send":
                        found = None
                else:
                    found = getattr(envs, wait)()
            again = Interruption(kind, 10**9, Stopped, WITHIN)
        assert_identical(found, wanted, f"after {interruption}")
        for each in (envs, same):
            assert each.stats()["in_flight"] == 0
        assert_identical(envs.step(action), same.step(action), f"the step after {interruption}")
    assert envs.stats()["steps"] == same.stats()["steps"]
    assert envs.stats()["resets"] == same.stats()["resets"]
