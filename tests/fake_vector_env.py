"""A test double for a vector environment with workers. It computes everything in this process, and can delay its results.

It is one of the backends of the contract tests (``tests/contract``), and tests of ``vecenv.front`` use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import LockstepDriver, Phase, RequestSummary, Stepped
from vecenv.front.vector_env import VectorEnvBase

_STEPS_PER_EPISODE: Final = 5
_Result: TypeAlias = tuple[npt.NDArray[np.float32], Any, Any, Any]


class FakeVectorEnv(VectorEnvBase[Any, Any, Any]):
    """A vector environment of counters. Observations: (seed modulo 1,000, steps, sum of actions), float32 ``(3,)``.

    Actions are ints from 0 to 4, and the reward equals the action. An episode is truncated after five steps and terminated
    when the sum of its actions reaches ten. The step after its end begins the next episode.

    Args:
        num_envs: The number of environments.
        delay: Seconds until a result is ready.

    Attributes:
        ready: A ``threading.Event``; while it is cleared, no result becomes ready.
    """

    _driver: _FakeDriver

    def __init__(self, num_envs: int = 1, *, delay: float = 0.0) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 1e6, (3,), np.float32)
        self.single_action_space = spaces.Discrete(5)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.autoreset_mode = AutoresetMode.NEXT_STEP
        self.metadata = {"autoreset_mode": self.autoreset_mode}
        self._open(_FakeDriver(num_envs, delay))
        self.ready = self._driver.ready


class _FakeDriver(LockstepDriver):
    """A driver that computes each result at once, and returns it after the delay."""

    missing_reasons: ClassVar[Mapping[str, str]] = {
        **LockstepDriver.missing_reasons, "attributes": "its environments are rows of arrays"
    }  # fmt: skip
    capabilities = Capabilities(
        "fake", attributes=False, first_ready=False, reset_options=False, row_options=False, in_this_process=True
    )

    def __init__(self, num_envs: int, delay: float) -> None:
        super().__init__(num_envs)
        self._delay = delay
        self._ready_at = 0.0
        # the request, its result, and a mask of the rows with ended episodes
        self._latest: tuple[RequestSummary, _Result, npt.NDArray[np.bool_]] | None = None
        self.ready = threading.Event()
        self.ready.set()

    @property
    def latest_request(self) -> RequestSummary | None:
        return self._latest[0] if self._latest is not None else None

    def begin_reset(
        self, request: RequestSummary, seeds: list[Any], mask: npt.NDArray[np.bool_] | None, options: ResetOptions
    ) -> None:
        count = len(seeds)
        rows = np.ones(count, np.bool_) if mask is None else mask
        if self._latest is None and not rows.all():
            raise ResetNeeded("The first reset must be of all environments, without reset_mask.")
        previous, ended = np.zeros((count, 3), np.float32), np.zeros(count, np.bool_)
        if self._latest is not None:
            _, (previous, *_), ended = self._latest
        observations = previous.copy()
        for row in np.flatnonzero(rows):
            seed = previous[row, 0] + 1 if seeds[row] is None else int(seeds[row])
            observations[row] = seed % 1000, 0, 0
        result = observations, np.zeros(count), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self._ready_at = time.monotonic() + self._delay
        self._latest = request, result, ended & ~rows

    def begin_step(self, request: RequestSummary, actions: Any) -> None:
        if self._latest is None:
            raise ResetNeeded("Call reset first.")
        values = np.asarray(actions)
        _, (previous, *_), must_reset = self._latest
        if values.shape != (len(previous),):
            raise ValueError(f"actions must be {len(previous)} of Discrete(5), got shape {values.shape}; nothing was sent")
        if values.dtype.kind not in "iu":
            raise TypeError(f"actions must be integers, got {values.dtype}; nothing was sent")
        if ((values < 0) | (values > 4)).any():
            raise ValueError(f"actions must lie within 0..4, got {values.tolist()}; nothing was sent")
        rewards = np.where(must_reset, 0.0, values)
        observations = previous + np.stack([must_reset, ~must_reset, rewards], axis=1).astype(np.float32)
        zeros = np.zeros(must_reset.sum())
        observations[must_reset] = np.stack([observations[must_reset, 0] % 1000, zeros, zeros], axis=1)
        terminated, truncated = observations[:, 2] >= 10, observations[:, 1] >= _STEPS_PER_EPISODE
        self._ready_at = time.monotonic() + self._delay
        self._latest = request, (observations, rewards, terminated, truncated), terminated | truncated

    def wait(self, deadline: float) -> bool:
        return self._wait_until_ready(max(deadline - time.monotonic(), 0.0))

    def read(self, kind: Phase) -> Stepped:
        self._wait_until_ready(None)
        assert self._latest is not None
        observations, rewards, terminations, truncations = (part.copy() for part in self._latest[1])
        steps = {"steps": observations[:, 1].copy(), "_steps": np.ones(len(rewards), np.bool_)}
        return observations, rewards, terminations, truncations, steps if kind is Phase.WAITING_STEP else {}

    def _wait_until_ready(self, seconds: float | None) -> bool:
        started = time.monotonic()
        try:
            remaining = max(self._ready_at - started, 0.0)
            time.sleep(remaining if seconds is None else min(remaining, seconds))
            return self.ready.wait(seconds) and time.monotonic() >= self._ready_at
        finally:
            self.seconds_waited += time.monotonic() - started

    def close(self, *, terminate: bool = False) -> None:
        self.ready.set()
