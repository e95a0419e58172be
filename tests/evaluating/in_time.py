"""Rows whose time is counted, not spent: each is done when its step, as long as its episode says, is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from walks import Walk

from vecenv.errors import ErrorRecord, WorkerDied
from vecenv.front.capabilities import Capabilities


class InTime(VectorEnv[Any, Any, Any]):
    """Walks, row by row, each as if it had a process of its own. ``now`` is the time.

    Attributes:
        steps: How many were made.
        busy: How much time rows have spent in steps.
        lasting: Seed -> how long its episode takes, of those that came to an end.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as Gymnasium's
    capabilities = Capabilities("process")
    step_timeout = None

    def __init__(self, num_envs: int, **walks: Any) -> None:
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Walk.observation_space, Walk.action_space
        self.observation_space = batch_space(Walk.observation_space, num_envs)
        self.action_space = batch_space(Walk.action_space, num_envs)
        self.worker_rows = [range(row, row + 1) for row in range(num_envs)]
        self.now, self.steps, self.errors = 0.0, 0, list[ErrorRecord]()
        self._envs = [Walk(**walks) for _ in range(num_envs)]
        self._pace = [1.0] * num_envs
        self._flying: dict[int, tuple[float, Any]] = {}  # row -> when it is done, and what it says then

    @property
    def in_flight(self) -> Any:
        return np.array(list(self._flying), int)

    def reset_async(self, seed: Any = None, options: Any = None, *, env_id: Sequence[int]) -> None:
        for row, own in zip(env_id, seed, strict=True):
            assert row not in self._flying
            self._pace[row] = 0.5 + own % 8 / 8
            observation, info = self._envs[row].reset(seed=own)
            self._flying[row] = self.now, (observation, 0.0, False, False, info)

    def send(self, actions: Any, env_id: Sequence[int]) -> None:
        for row, action in zip(env_id, actions, strict=True):
            assert row not in self._flying
            said: Any
            try:
                said = self._envs[row].step(action)
                self.steps += 1
            except ArithmeticError as error:
                died = self._envs[row].seed % 2
                said = WorkerDied(str(error), worker=row, envs=(row,), pid=1, exitcode=-9, command="step") if died else error
            self._flying[row] = self.now + self._pace[row], said

    def recv(self, timeout: Any = None, *, count: int, at_least: int) -> Any:
        assert at_least == 1
        self.now = max(self.now, min(when for when, _ in self._flying.values()))
        done = [row for row, (when, _) in self._flying.items() if when <= self.now]
        failed = next((row for row in done if isinstance(self._flying[row][1], Exception)), None)
        if failed is not None:
            error = self._flying.pop(failed)[1]
            env = None if isinstance(error, WorkerDied) else failed
            self.errors.append(ErrorRecord(env, failed, 1, "step", error, str(error), 0.0))
            raise error
        rows = done[:count]
        seen = [self._flying.pop(row)[1] for row in rows]
        infos: dict[str, Any] = {}
        for place, (*_, info) in enumerate(seen):
            infos = self._add_info(infos, info, place)
        infos["env_id"], infos["_env_id"] = np.array(rows), np.ones(len(rows), bool)
        observations, rewards, terminations, truncations = (np.array(each) for each in list(zip(*seen, strict=True))[:4])
        return observations, rewards, terminations, truncations, infos

    def _add_info(self, vector_infos: Any, env_info: Any, env_num: int) -> Any:
        for key, value in env_info.items():
            column = vector_infos.setdefault(key, np.full(self.num_envs, None, object))
            column[env_num] = value
            vector_infos.setdefault(f"_{key}", np.zeros(self.num_envs, bool))[env_num] = True
        return vector_infos

    def abandon(self, env_id: Any) -> None:
        raise AssertionError("nothing hangs here")


def least_time(results: Sequence[Any], num_envs: int) -> float:
    """How long the best schedule of these episodes takes at least, on so many environments."""
    lasting = [each.length * (0.5 + each.seed % 8 / 8) for each in results]
    return max(*lasting, sum(lasting) / num_envs)
