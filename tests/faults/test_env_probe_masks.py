"""The environment that is tried is given actions that its masks allow."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from vecenv.planning import probe


class Strict(gym.Env[Any, Any]):
    """Allows one action a step, tells which in a mask, and raises on any other."""

    def __init__(self, where: str, start: int) -> None:
        self.where = where
        self.action_space = spaces.Discrete(5, start=start)
        mask = spaces.Box(0, 1, (5,), np.int8)
        parts: Any = {"action_mask": mask} if where == "observation" else {"time": spaces.Discrete(99)}
        self.observation_space = spaces.Dict(parts)

    def _seen(self) -> Any:
        self.mask = np.zeros(5, np.int8)
        self.mask[self.time % 5] = 1
        if self.where == "observation":
            return {"action_mask": self.mask}, {}
        return {"time": self.time}, {self.where: self.mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        return self._seen()

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        if not self.mask[action - self.action_space.start]:
            raise RuntimeError("illegal")
        self.time += 1
        observation, info = self._seen()
        return observation, 0.0, self.time == 7, False, info


@pytest.mark.parametrize("where", ["observation", "action_mask", "action_masks"])
@pytest.mark.parametrize("start", [0, 3])
def test_masks_are_honoured(where: str, start: int) -> None:
    found = probe._time_steps(Strict(where, start), None)
    assert found.steps > 10
    assert not found.failure


def test_where_there_are_no_processes_a_failed_trial_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "why_no_processes", lambda: "for this test")
    assert "illegal" in probe.EnvProbe([lambda: Strict("hidden", 0)]).times().failure
