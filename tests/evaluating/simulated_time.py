"""A vector environment with simulated time. The duration of a step depends on the seed of its episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from walks import Walk

from vecenv.errors import ErrorRecord, WorkerDied
from vecenv.front.capabilities import Capabilities


class SimulatedVectorEnv(VectorEnv[Any, Any, Any]):
    """A vector environment of walks that takes as long as if each environment had its own process.

    Attributes:
        now: The simulated time.
        steps: The number of executed steps.
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
        self._step_durations = [1.0] * num_envs
        self._in_flight: dict[int, tuple[float, Any]] = {}  # row -> (time when it is ready, its result)

    @property
    def in_flight(self) -> Any:
        return np.array(list(self._in_flight), int)

    def reset_async(self, seed: Any = None, options: Any = None, *, env_id: Sequence[int]) -> None:
        for row, row_seed in zip(env_id, seed, strict=True):
            assert row not in self._in_flight
            self._step_durations[row] = 0.5 + row_seed % 8 / 8
            observation, info = self._envs[row].reset(seed=row_seed)
            self._in_flight[row] = self.now, (observation, 0.0, False, False, info)

    def send(self, actions: Any, env_id: Sequence[int]) -> None:
        for row, action in zip(env_id, actions, strict=True):
            assert row not in self._in_flight
            result: Any
            try:
                result = self._envs[row].step(action)
                self.steps += 1
            except ArithmeticError as error:
                worker_dies = self._envs[row].seed % 2
                death = WorkerDied(str(error), worker=row, envs=(row,), pid=1, exitcode=-9, command="step")
                result = death if worker_dies else error
            self._in_flight[row] = self.now + self._step_durations[row], result

    def recv(self, timeout: Any = None, *, count: int, at_least: int) -> Any:
        assert at_least == 1
        self.now = max(self.now, min(ready_at for ready_at, _ in self._in_flight.values()))
        ready = [row for row, (ready_at, _) in self._in_flight.items() if ready_at <= self.now]
        failed = next((row for row in ready if isinstance(self._in_flight[row][1], Exception)), None)
        if failed is not None:
            error = self._in_flight.pop(failed)[1]
            env = None if isinstance(error, WorkerDied) else failed
            self.errors.append(ErrorRecord(env, failed, 1, "step", error, str(error), 0.0))
            raise error
        rows = ready[:count]
        results = [self._in_flight.pop(row)[1] for row in rows]
        infos: dict[str, Any] = {}
        for position, (*_, info) in enumerate(results):
            infos = self._add_info(infos, info, position)
        infos["env_id"], infos["_env_id"] = np.array(rows), np.ones(len(rows), bool)
        *columns, _ = zip(*results, strict=True)
        observations, rewards, terminations, truncations = map(np.array, columns)
        return observations, rewards, terminations, truncations, infos

    def _add_info(self, vector_infos: Any, env_info: Any, env_num: int) -> Any:
        for key, value in env_info.items():
            column = vector_infos.setdefault(key, np.full(self.num_envs, None, object))
            column[env_num] = value
            vector_infos.setdefault(f"_{key}", np.zeros(self.num_envs, bool))[env_num] = True
        return vector_infos

    def abandon(self, env_id: Any) -> None:
        raise AssertionError("nothing hangs in simulated time")


def find_minimum_time(results: Sequence[Any], num_envs: int) -> float:
    """Return a lower bound on the time that ``num_envs`` environments need for these episodes."""
    durations = [result.length * (0.5 + result.seed % 8 / 8) for result in results]
    return max(*durations, sum(durations) / num_envs)
