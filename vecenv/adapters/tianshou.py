"""``as_tianshou``: a vector environment as Tianshou's collectors want one.

Tianshou resets environments itself, by index and as soon as their episodes are over, and when it has enough episodes steps
only some of them. That is a reset mask, which also takes the place of a pending autoreset, and ``send`` and ``recv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate
from tianshou.env import BaseVectorEnv

from vecenv.adapters.single import AnyVectorEnv, SingleEnvs, info_rows, require
from vecenv.front.arguments import OnlyMask

__all__ = ["TianshouVectorEnv", "as_tianshou"]

Ids = int | Sequence[int] | npt.NDArray[np.integer[Any]] | None
Objects = npt.NDArray[np.object_]


def as_tianshou(envs: AnyVectorEnv) -> TianshouVectorEnv:
    """A Tianshou ``BaseVectorEnv`` for its ``Collector``; closing it closes ``envs``.

    ``as_tianshou(vecenv.make_vec("CartPole-v1", 8))`` goes where ``SubprocVectorEnv(...)`` went. Tianshou's asynchronous
    mode (``wait_num``, ``AsyncCollector``) is not offered: it resets some environments while others step, which Gymnasium's
    interface has no words for.

    Raises:
        ImportError: Tianshou is not installed.
        TypeError: Not a Gymnasium vector environment; Tuple observations, which Tianshou does not have.
        ValueError: Same-step autoreset, ``copy=False``, or arrays that are no numpy; says what to change.
    """
    return TianshouVectorEnv(envs)


class TianshouVectorEnv(BaseVectorEnv):  # type: ignore[misc, unused-ignore]  # (Any where Tianshou is not installed)
    """What :func:`as_tianshou` returns.

    Attributes:
        vector_env: The vector environment beneath.
    """

    def __init__(self, envs: AnyVectorEnv) -> None:  # (the base's would build environments, and workers for them)
        require(envs, "Tianshou", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
        if isinstance(envs.observation_space.sample(), tuple):
            raise TypeError(f"Tianshou does not support Tuple observations, got {envs.single_observation_space}")
        self.vector_env: Any = envs
        self._singles = SingleEnvs(envs)
        self._action_spaces = self._singles.get("action_space", range(envs.num_envs))
        self.env_num = envs.num_envs
        self.is_async = False
        self.is_closed = False
        self.wait_num = envs.num_envs
        self.timeout = None
        self.waiting_id: list[int] = []
        self.ready_id = list(range(envs.num_envs))

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[npt.NDArray[Any], Objects]:
        """Reset the environments ``env_id`` (all), each with the keywords that are given here.

        Args:
            env_id: Which.
            seed: As everywhere in Tianshou, an int is the seed of *each* environment; a sequence has one for each.
            options: For each environment.

        Returns:
            Their observations and infos, in the order of ``env_id``.
        """
        self._assert_is_not_closed()
        ids = self._ids(env_id)
        seed = kwargs.pop("seed", None)
        options = kwargs.pop("options", None)
        if kwargs:
            raise TypeError(f"reset() of an environment has no {sorted(kwargs)}: 'seed' and 'options'")
        each = [seed] * len(ids) if seed is None or isinstance(seed, (int, np.integer)) else list(seed)
        if len(each) != len(ids):
            raise ValueError(f"got {len(each)} seeds for {len(ids)} environments")
        seeds: list[int | None] = [None] * self.env_num
        for i, given in zip(ids.tolist(), each, strict=True):
            seeds[i] = None if given is None else int(given)
        if len(ids) < self.env_num:
            mask = np.zeros(self.env_num, np.bool_)
            mask[ids] = True
            options = OnlyMask({**(options or {}), "reset_mask": mask})
        # (without seeds it is None, which environments that can only be seeded all at once want)
        given_seeds = None if all(one is None for one in seeds) else seeds
        observations, infos = self.vector_env.reset(seed=given_seeds, options=options)
        rows = info_rows(infos, self.env_num)
        return self._observations(observations, ids), _objects([rows[i] for i in ids])

    def step(
        self, action: Any, id: Ids = None
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Objects]:
        """Step the environments ``id`` (all).

        Returns:
            ``(observations, rewards, terminations, truncations, infos)`` in the order of ``id``; infos an object array of
            dicts, with ``"env_id"``.
        """
        self._assert_is_not_closed()
        ids = self._ids(id)
        if action is None or len(action) != len(ids):
            raise ValueError(f"step wants an action for each of {len(ids)} environments, got {action!r}")
        actions = np.asarray(action)
        if len(ids) == self.env_num:
            back = np.empty_like(ids)
            back[ids] = np.arange(len(ids))
            results, order = self.vector_env.step(actions[back]), ids
        else:
            results = self._step_some(actions, ids)
            back = np.empty(self.env_num, np.intp)
            back[results[4]["env_id"]] = np.arange(len(ids))
            order = back[ids]
        observations, rewards, terminations, truncations, infos = results
        rows = info_rows(infos, len(rewards))
        for position, i in zip(order.tolist(), ids.tolist(), strict=True):
            rows[position]["env_id"] = i
        listed = _objects([rows[position] for position in order])
        return self._observations(observations, order), rewards[order], terminations[order], truncations[order], listed

    def _step_some(self, actions: npt.NDArray[Any], ids: npt.NDArray[np.intp]) -> Any:
        envs: Any = self.vector_env.unwrapped
        envs.send(actions, ids)
        return envs.recv(count=len(ids))

    def _ids(self, env_id: Ids) -> npt.NDArray[np.intp]:
        ids: npt.NDArray[np.intp] = np.arange(self.env_num)[self._wrap_id(env_id)]
        return ids

    def _observations(self, observations: Any, order: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        if isinstance(observations, np.ndarray):
            return observations[order]
        rows = list(iterate(self.vector_env.observation_space, observations))
        return _objects([rows[position] for position in order])

    # -- single environments ----------------------------------------------------------------------------------------

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """An attribute of the environments ``id`` (all), of whichever wrapper has it."""
        self._assert_is_not_closed()
        if key == "action_space":  # always the same ones, which :meth:`seed` has seeded
            return [self._action_spaces[i] for i in self._ids(id).tolist()]
        return self._singles.get(key, self._ids(id).tolist())

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of the environments ``id`` (all)."""
        self._assert_is_not_closed()
        self._singles.set(key, value, self._ids(id).tolist())

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int] | None]:
        """Seed the action spaces, and the environments by a reset, as Tianshou's workers do.

        Args:
            seed: An int gives environment i ``seed + i``; a sequence has one for each.

        Returns:
            ``[[seed], ...]``, one an environment.
        """
        self._assert_is_not_closed()
        seeds: Any = [None] * self.env_num if seed is None else seed
        if isinstance(seeds, (int, np.integer)):
            seeds = [int(seeds) + i for i in range(self.env_num)]
        for space, one in zip(self._action_spaces, seeds, strict=True):
            space.seed(one)
        self.reset(seed=list(seeds))
        return [[one] for one in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """One frame an environment."""
        self._assert_is_not_closed()
        return list(self.vector_env.render() or [None] * self.env_num)

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()
        self.is_closed = True


def _objects(rows: Sequence[Any]) -> Objects:
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column
