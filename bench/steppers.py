"""Adapters with ``send`` and ``recv``, for one loop over all engines of :mod:`bench.train` except the JAX bridge."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np

from bench.waits import make_torchrl_pool
from vecenv.tools.runners import SEED, EnvFn

__all__ = ["AsyncEnvPool", "FirstReadyHalves", "StableBaselines3", "Stepper"]


class Stepper:
    """An adapter for vector environments with Gymnasium's interface, which steps all environments together.

    Attributes:
        batch: The maximum number of rows that :meth:`recv` returns.
        next_step_autoreset: True if the step after an episode only resets the environment, and so is not a transition.
    """

    next_step_autoreset = True

    def __init__(self, envs: Any, batch: int | None = None) -> None:
        self.envs, self.num_envs = envs, envs.num_envs
        self.batch = batch or self.num_envs
        self._set_spaces(envs.single_observation_space, envs.single_action_space)

    def _set_spaces(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._box = None if isinstance(action_space, gymnasium.spaces.Discrete) else action_space

    def _clip(self, actions: np.ndarray) -> np.ndarray:
        return actions if self._box is None else np.clip(actions, self._box.low, self._box.high)

    def reset(self) -> np.ndarray:
        observations: np.ndarray = self.envs.reset(seed=SEED)[0]
        return observations

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        self._actions, self._ids = self._clip(actions), ids

    def recv(self, count: int) -> tuple[np.ndarray, ...]:
        observations, rewards, terminated, truncated, _ = self.envs.step(self._actions)
        return self._ids, observations, rewards, terminated, terminated | truncated

    def close(self) -> None:
        self.envs.close()

    def __str__(self) -> str:
        return str(self.envs)


class FirstReadyHalves(Stepper):
    """An adapter for vecenv's first-ready batches: the policy acts for one half while the other half steps."""

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        self.envs.send(self._clip(actions), ids)

    def recv(self, count: int) -> tuple[np.ndarray, ...]:
        observations, rewards, terminated, truncated, infos = self.envs.recv(count=count)
        return infos["env_id"], observations, rewards, terminated, terminated | truncated


class StableBaselines3(Stepper):
    """An adapter for ``SubprocVecEnv``, which resets within the step."""

    next_step_autoreset = False

    def __init__(self, envs: Any) -> None:
        envs.single_observation_space, envs.single_action_space = envs.observation_space, envs.action_space
        super().__init__(envs)

    def reset(self) -> np.ndarray:
        self.envs.seed(SEED)
        observations: np.ndarray = self.envs.reset()
        return observations

    def recv(self, count: int) -> tuple[np.ndarray, ...]:
        observations, rewards, done, infos = self.envs.step(self._actions)
        truncated = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        return self._ids, observations, rewards, done & ~truncated, done


class AsyncEnvPool(Stepper):
    """An adapter for TorchRL's ``AsyncEnvPool``: processes, shared memory, first-ready batches; resets within the step."""

    next_step_autoreset = False

    def __init__(self, env_fn: EnvFn, num_envs: int, envs_per_worker: int) -> None:
        self.pool = make_torchrl_pool(env_fn, num_envs, envs_per_worker)
        self.num_envs, self.batch = num_envs, max(num_envs // 2, 1)
        env = env_fn()
        self._set_spaces(env.observation_space, env.action_space)
        env.close()
        self._torch = importlib.import_module("torch")
        self._roots: dict[int, Any] = {}  # the TensorDict that the next step of each environment starts from

    def reset(self) -> np.ndarray:
        self.pool.async_reset_send(env_index=list(range(self.num_envs)))
        roots = self.pool.async_reset_recv(min_get=self.num_envs)
        ids = self._read_ids(roots)
        rows = self._read_observations(roots)
        observations = np.empty_like(rows)
        observations[ids] = rows
        self._roots = {env_id: roots[row] for row, env_id in enumerate(ids.tolist())}
        return observations

    def _read_observations(self, rows: Any) -> np.ndarray:
        key = "pixels" if "pixels" in rows.keys() else "observation"  # noqa: SIM118 - not a dict; images have this key
        observations: np.ndarray = rows.get(key).numpy()
        return observations

    def _read_ids(self, rows: Any) -> np.ndarray:
        return np.array(rows.get(self.pool._env_idx_key).tolist())

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        roots = self._torch.stack([self._roots.pop(env_id) for env_id in ids.tolist()])
        roots.set("action", self._torch.from_numpy(self._clip(actions)))
        self.pool.async_step_and_maybe_reset_send(roots)

    def recv(self, count: int) -> tuple[np.ndarray, ...]:
        stepped, roots = self.pool.async_step_and_maybe_reset_recv(min_get=count)
        ids = self._read_ids(roots)
        self._roots |= {env_id: roots[row] for row, env_id in enumerate(ids.tolist())}
        rewards, terminated, done = (stepped.get(("next", name)).numpy()[:, 0] for name in ("reward", "terminated", "done"))
        return ids, self._read_observations(roots), rewards, terminated, done

    def close(self) -> None:
        self.pool.close()

    def __str__(self) -> str:
        return f"AsyncEnvPool of {self.num_envs}"
