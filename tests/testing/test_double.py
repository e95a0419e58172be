"""The double keeps the promises of Gymnasium's interface, and can be told to be late."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError
from gymnasium.vector import AutoresetMode

from vecenv.errors import StepTimeout
from vecenv.testing import DoubleVectorEnv, VectorEnvContract


class TestDouble(VectorEnvContract):
    autoreset_modes: ClassVar = (AutoresetMode.NEXT_STEP,)

    def make(self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any) -> Any:
        return DoubleVectorEnv(num_envs)


def test_an_answer_that_is_late_stays_pending() -> None:
    envs = DoubleVectorEnv(2)
    envs.reset(seed=7)
    envs.ready.clear()
    envs.step_async([1, 2])
    for _ in range(2):
        with pytest.raises(StepTimeout, match="still pending"):
            envs.step_wait(timeout=0.001)
        with pytest.raises(AlreadyPendingCallError):
            envs.step_async([0, 0])
    envs.ready.set()
    assert envs.step_wait()[0].tolist() == [[7, 1, 1], [8, 1, 2]]
    envs.close()
    with pytest.raises(ClosedEnvironmentError):
        envs.step([0, 0])


def test_episodes_end_and_begin_in_the_next_step() -> None:
    envs = DoubleVectorEnv(2)
    envs.reset(seed=[3, 999])
    steps = [envs.step([4, 0]) for _ in range(6)]
    assert [step[2].tolist() for step in steps] == [[False, False]] * 2 + [[True, False]] + [[False, False]] * 3
    assert [step[3].tolist() for step in steps] == [[False, False]] * 4 + [[False, True]] + [[False, False]]
    assert steps[3][0].tolist() == [[4, 0, 0], [999, 4, 0]]
    assert steps[5][0].tolist() == [[4, 2, 8], [0, 0, 0]]
    assert np.array_equal(steps[3][1], [0, 0])
