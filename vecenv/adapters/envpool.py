"""``as_envpool``: EnvPool's asynchronous interface for a vector environment.

Programs written for EnvPool start all episodes with ``async_reset``, and then alternate ``recv`` and ``send`` for the
environments that finish first. With this adapter, they can run environments written in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vecenv.adapters.single import AnyVectorEnv, require_row_steps, require_settings
from vecenv.errors import envs_text
from vecenv.front.arguments import parse_env_ids
from vecenv.front.driver import drop_pending_and_retry

__all__ = ["EnvPoolLike", "as_envpool"]

Ids = Sequence[int] | npt.NDArray[np.integer[Any]] | None
Step = tuple[Any, npt.NDArray[np.float32], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]


def as_envpool(envs: AnyVectorEnv, seed: int | None = None) -> EnvPoolLike:
    """Wrap a vector environment in the interface of ``envpool.make_gymnasium``; closing the wrapper closes ``envs``.

    ``as_envpool(vecenv.make_vec("CartPole-v1", 8, batch_size=4))`` replaces
    ``envpool.make_gymnasium("CartPole-v1", num_envs=8, batch_size=4)``.

    Args:
        envs: A vector environment with next-step autoreset, the mode of EnvPool, and with ``send`` and ``recv``. If its
            backend steps all environments together, calls for some of them raise ``NotImplementedError``.
        seed: Environment i gets ``seed + i`` at its first reset; with ``None`` it gets no seed.

    Raises:
        TypeError: ``envs`` is not a Gymnasium vector environment.
        ValueError: ``envs`` has another autoreset mode, has ``copy=False``, returns arrays that are not NumPy's, or has no
            ``recv``, such as a vector wrapper.
    """
    return EnvPoolLike(envs, seed)


class EnvPoolLike:
    """A vector environment with EnvPool's interface, built by :func:`as_envpool`.

    Attributes:
        vector_env: The wrapped vector environment.
        observation_space, action_space: The spaces of one environment, as in EnvPool.
        config: ``num_envs``, ``batch_size`` and ``seed``.
        all_env_ids: The indices of all environments, int32 ``(num_envs,)``.
        is_async: True if a batch has fewer rows than there are environments.
    """

    def __init__(self, envs: AnyVectorEnv, seed: int | None) -> None:
        require_settings(envs, "EnvPool's interface", [AutoresetMode.NEXT_STEP])
        require_row_steps(envs, "EnvPool's interface steps single rows")
        inner: Any = envs
        self.vector_env: Any = inner
        self.observation_space: Space[Any] = envs.single_observation_space
        self.action_space: Space[Any] = envs.single_action_space
        self.spec = envs.spec
        self.num_envs: int = envs.num_envs
        batch_size = int(getattr(inner, "batch_size", envs.num_envs))
        self.config: dict[str, Any] = {"num_envs": self.num_envs, "batch_size": batch_size, "seed": seed}
        self.all_env_ids = np.arange(self.num_envs, dtype=np.int32)
        self.is_async = batch_size < self.num_envs
        self._seeded = np.full(self.num_envs, seed is None)
        self._elapsed = np.zeros(self.num_envs, np.int32)
        self._starts_episode = np.ones(self.num_envs, np.bool_)  # True if the next result is the first of an episode

    def async_reset(self) -> None:
        """Begin an episode in every environment; :meth:`recv` returns the first observations as they become ready.

        Pending requests are dropped, so this also works after a failure.
        """
        self._reset(None)

    def recv(self) -> Step:
        """Return the results of the ``batch_size`` environments that finish first, or of all if fewer are in flight.

        A failed environment is no longer in flight; :meth:`reset` rebuilds it.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``. Rewards are float32, and 0 at the first
            observation of an episode. The int32 arrays ``infos["env_id"]`` and ``infos["players"]["env_id"]`` hold the
            environment of each row, and ``infos["elapsed_step"]`` the number of steps in its episode so far. All other
            infos are Gymnasium's arrays with masks.
        """
        return self._receive(self.config["batch_size"])

    def send(self, action: Any, env_id: Ids = None) -> None:
        """Step the environments ``env_id``; by default those of the latest :meth:`recv` or :meth:`reset`, in its order."""
        self.vector_env.send(action, self._parse_ids(env_id))

    def step(self, action: Any, env_id: Ids = None) -> Step:
        """Call :meth:`send`, then :meth:`recv`."""
        self.send(action, env_id)
        return self.recv()

    def reset(self, env_id: Ids = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode in the environments ``env_id`` (default: all), and wait for the first observations.

        A reset of all environments drops pending requests.

        Returns:
            ``(observations, infos)`` in the order in which the environments finished, as listed in ``infos["env_id"]``.

        Raises:
            gymnasium.error.AlreadyPendingCallError: ``env_id`` is given while environments are in flight: the results of
                their steps would be returned as those of the reset. Call :meth:`recv` first.
        """
        ids = self._parse_ids(env_id)
        if ids is not None and (in_flight := self._in_flight()):
            raise AlreadyPendingCallError(
                f"Calling `reset` for {envs_text(ids.tolist())} with requests in flight ({in_flight}): "
                "`recv` first, or reset all.",
                "send",
            )
        self._reset(ids)
        observations, *_, infos = self._receive(self.num_envs if ids is None else len(ids))
        return observations, infos

    def _reset(self, ids: npt.NDArray[np.intp] | None) -> None:
        rows = self.all_env_ids if ids is None else ids
        seed = self.config["seed"]
        seeds = [None if self._seeded[row] else seed + row for row in rows.tolist()]
        row_seeds = None if all(row_seed is None for row_seed in seeds) else seeds
        if ids is None:
            drop_pending_and_retry(self.vector_env, lambda: self.vector_env.reset_async(seed=row_seeds))
        else:
            self.vector_env.reset_async(seed=row_seeds, env_id=ids)
        self._starts_episode[rows] = True

    def _in_flight(self) -> int:
        return len(self.vector_env.in_flight)  # not from stats(), which also counts spare workers during their resets

    def _receive(self, count: int) -> Step:
        try:
            results = self.vector_env.recv(count=count)
        except NoAsyncCallError:  # fewer than `count` are in flight, for example after a failure
            in_flight = self._in_flight()
            if not in_flight:
                raise
            results = self.vector_env.recv(count=in_flight)
        observations, rewards, terminations, truncations, infos = results
        ids = infos["env_id"].astype(np.int32)
        self._seeded[ids] = True  # set only now, so that a failed reset is repeated with its seed
        self._elapsed[ids] = np.where(self._starts_episode[ids], 0, self._elapsed[ids] + 1)
        self._starts_episode[ids] = terminations | truncations
        envpool_infos = {"env_id": ids, "players": {"env_id": ids}, "elapsed_step": self._elapsed[ids]}
        return observations, rewards.astype(np.float32), terminations, truncations, {**infos, **envpool_infos}

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()

    def __len__(self) -> int:
        return self.num_envs

    def __repr__(self) -> str:
        return f"EnvPoolLike({self.vector_env!r})"

    def _parse_ids(self, env_id: Ids) -> npt.NDArray[np.intp] | None:
        return None if env_id is None else parse_env_ids(env_id, self.num_envs)
