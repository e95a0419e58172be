"""``as_tianshou``: a vector environment for Tianshou's collectors.

Tianshou resets environments itself, by index, as soon as their episodes have ended; when it has enough episodes, it steps
only some environments. The adapter resets with a mask (in asynchronous mode, with ``reset_async`` and ``recv``), which also
replaces a pending autoreset, and steps some environments with ``send`` and ``recv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from tianshou.env import BaseVectorEnv

from vecenv.adapters.single import (
    AnyVectorEnv,
    SingleEnvs,
    require_none_in_flight,
    require_row_steps,
    require_settings,
    reset_all,
    send_alone,
)
from vecenv.errors import envs_text
from vecenv.front.arguments import MaskOnlyOptions, parse_env_ids
from vecenv.front.by_row import infos_by_row

__all__ = ["TianshouVectorEnv", "as_tianshou"]

Ids = int | Sequence[int] | npt.NDArray[np.integer[Any]] | None
Objects = npt.NDArray[np.object_]
Row = tuple[Any, Any, Any, Any, Any, int]  # the results of a step, and the index of the environment
Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Objects]


def as_tianshou(envs: AnyVectorEnv, wait_num: int | None = None) -> TianshouVectorEnv:
    """Wrap a vector environment in a Tianshou ``BaseVectorEnv`` for its ``Collector``; closing it closes ``envs``.

    ``as_tianshou(vecenv.make_vec("CartPole-v1", 8))`` replaces ``SubprocVectorEnv(...)``.

    Args:
        envs: The vector environment.
        wait_num: For Tianshou's asynchronous mode: ``step`` returns as soon as that many environments are ready. Some
            environments are then reset while others step, so the backend must support this, as worker processes do. By
            default ``step`` waits for all environments, and there is no asynchronous mode.

    Raises:
        TypeError: ``envs`` is not a Gymnasium vector environment, or has Tuple observations, which Tianshou cannot process.
        ValueError: ``envs`` has same-step autoreset, ``copy=False``, arrays that are not NumPy's or, with several
            environments, a vector wrapper ``NormalizeObservation`` or no resets with a ``reset_mask``. Or ``wait_num`` is
            not between 1 and the number of environments, or is below that number although ``envs`` has no ``recv``, such as
            a vector wrapper.
    """
    return TianshouVectorEnv(envs, wait_num)


class TianshouVectorEnv(BaseVectorEnv):  # type: ignore[misc, unused-ignore]  # (Any where Tianshou is not installed)
    """A Tianshou vector environment, built by :func:`as_tianshou`.

    Attributes:
        vector_env: The wrapped vector environment.
    """

    def __init__(self, envs: AnyVectorEnv, wait_num: int | None = None) -> None:
        # no super().__init__(): it would build environments and workers
        require_settings(envs, "Tianshou", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
        if isinstance(envs.single_observation_space.sample(), tuple):
            raise TypeError(f"Tianshou does not support Tuple observations, got {envs.single_observation_space}")
        self.vector_env: Any = envs
        self._single_envs = SingleEnvs(envs)
        self._action_spaces = self._single_envs.get("action_space", range(envs.num_envs))
        self.env_num = envs.num_envs
        self.is_closed = False
        self.wait_num = envs.num_envs if wait_num is None else wait_num
        if not 1 <= self.wait_num <= envs.num_envs:
            raise ValueError(f"wait_num must be within 1..{envs.num_envs}, got {wait_num!r}")
        self.is_async = self.wait_num < envs.num_envs
        self._by_row = infos_by_row(envs)
        if self.is_async:
            require_row_steps(envs, "wait_num steps and resets single rows")
        self._early_rows: list[Row] = []  # results of steps that arrived while waiting for other rows
        self._resetting: set[int] = set()  # rows with a submitted reset that has not finished
        self.timeout = None

    # `waiting_id` and `ready_id` are computed from the engine's rows in flight, which exclude failed environments

    @property
    def waiting_id(self) -> list[int]:
        """The environments with a step that has been sent but not returned; without asynchronous mode, none."""
        if not self.is_async:
            return []
        return [*(row[5] for row in self._early_rows), *self.vector_env.in_flight.tolist()]

    @property
    def ready_id(self) -> list[int]:
        """The environments that are not in ``waiting_id``."""
        waiting = set(self.waiting_id)
        return [row for row in range(self.env_num) if row not in waiting]

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[npt.NDArray[Any], Objects]:
        """Reset the environments ``env_id`` (default: all).

        A reset of all environments drops pending requests, so it works after a failure, a timeout or a Ctrl-C.

        Args:
            env_id: The indices of the environments.
            seed: An int is the seed of *each* environment, as always in Tianshou; a sequence has one seed per environment.
            options: A dict that each of these environments receives.

        Returns:
            Their observations and infos, in the order of ``env_id``.
        """
        self._assert_is_not_closed()
        ids = parse_env_ids(self._parse_ids(env_id), self.env_num)
        seed = kwargs.pop("seed", None)
        options = kwargs.pop("options", None)
        if kwargs:
            raise TypeError(f"reset() of an environment accepts only 'seed' and 'options', got {sorted(kwargs)}")
        row_seeds = [seed] * len(ids) if seed is None or isinstance(seed, (int, np.integer)) else list(seed)
        if len(row_seeds) != len(ids):
            raise ValueError(f"got {len(row_seeds)} seeds for {len(ids)} environments")
        # one `None` instead of a list of `None`s: some vector environments accept a single seed, but no list
        seeds = None if all(one is None for one in row_seeds) else [None if one is None else int(one) for one in row_seeds]
        all_rows = len(ids) == self.env_num
        if self.is_async and not all_rows:
            return self._reset_async(ids, seeds, options)
        if seeds is not None:
            seeds_by_env = dict(zip(ids.tolist(), seeds, strict=True))
            seeds = [seeds_by_env.get(i) for i in range(self.env_num)]
        if all_rows:
            observations, infos = reset_all(self._by_row, seeds, options)
            self._early_rows, self._resetting = [], set()
        else:
            require_none_in_flight(self.vector_env, "reset", ids)
            mask = np.isin(np.arange(self.env_num), ids)
            options = MaskOnlyOptions({**(options or {}), "reset_mask": mask})
            observations, infos = self._by_row.reset(seed=seeds, options=options)
        zeros = np.zeros(self.env_num)
        rows = self._split_rows(observations, zeros, zeros, zeros, infos, range(self.env_num))
        return _reset_result([rows[i] for i in ids])

    def step(self, action: Any, id: Ids = None) -> Columns:
        """Step the environments ``id`` (default: all).

        Returns:
            ``(observations, rewards, terminations, truncations, infos)`` in the order of ``id``; in asynchronous mode, those
            of at least ``wait_num`` environments that are ready. Infos are an object array of dicts with ``"env_id"``.
        """
        self._assert_is_not_closed()
        ids = parse_env_ids(self._parse_ids(id), self.env_num)
        if self.is_async:
            return self._step_async(action, ids)
        if action is None or len(action) != len(ids):
            raise ValueError(f"step needs one action for each of {len(ids)} environments, got {action!r}")
        if len(ids) < self.env_num:
            require_row_steps(self.vector_env, f"Tianshou steps only {envs_text(ids.tolist())}")
            send_alone(self.vector_env, self._batch_actions(action, range(len(ids))), ids)
            received = {row[5]: row for row in self._receive(len(ids))}
            return self._join_rows([received[i] for i in ids.tolist()], self._wrap_id(id))
        rows = self._split_rows(*self._by_row.step(self._batch_actions(action, np.argsort(ids))), range(self.env_num))
        return self._join_rows([rows[i] for i in ids], self._wrap_id(id))

    def _batch_actions(self, action: Any, order: Sequence[int] | npt.NDArray[np.intp]) -> Any:
        """Return the single actions of ``action`` as a batch of the action space, in the given order."""
        space = self.vector_env.single_action_space
        if isinstance(space, spaces.Dict | spaces.Tuple):
            out: Any = create_empty_array(space, len(order))
            return concatenate(space, [action[i] for i in order], out)
        return np.asarray(action)[order]

    # -- asynchronous mode ------------------------------------------------------------------------------------------

    def _step_async(self, action: Any, ids: npt.NDArray[np.intp]) -> Columns:
        """Send ``action`` unless it is ``None``; then return at least ``wait_num`` rows, or all if fewer are stepping."""
        self._finish_resets()
        if action is not None:
            self._assert_id(ids)
            if len(action) != len(ids):
                raise ValueError(f"step needs one action for each of {len(ids)} environments, got {action!r}")
            self.vector_env.send(self._batch_actions(action, range(len(ids))), ids)
        missing = min(self.wait_num, len(self.waiting_id)) - len(self._early_rows)
        if missing > 0:
            self._early_rows += self._receive(missing)
        rows, self._early_rows = self._early_rows, []
        if not rows:
            raise ValueError("no environment is stepping: step(None) returns the results of earlier steps")
        return self._join_rows(rows)

    def _join_rows(self, rows: Sequence[Row], env_ids: Any = None) -> Columns:
        """Join rows into columns; ``env_ids`` are the indices as the caller passed them, which Tianshou puts into infos."""
        observations, *numbers, infos, ids = zip(*rows, strict=True)
        rewards, terminations, truncations = map(np.stack, numbers)
        for info, index in zip(infos, ids if env_ids is None else env_ids, strict=True):
            info["env_id"] = index
        return _stack(observations), rewards, terminations, truncations, _object_array(infos)

    def _reset_async(self, ids: npt.NDArray[np.intp], seeds: Any, options: Any) -> tuple[Any, Objects]:
        """Reset environments that are not stepping; rows of others that arrive meanwhile are kept for the next step."""
        self._finish_resets()
        self._assert_id(ids)
        self.vector_env.reset_async(seed=seeds, options=options, env_id=ids)
        self._resetting = set(ids.tolist())
        first_rows = self._finish_resets()
        return _reset_result([first_rows[index] for index in ids.tolist()])

    def _finish_resets(self) -> dict[int, Row]:
        """Wait for the submitted resets and return their rows. If one fails, the next call discards the others' rows."""
        first_rows: dict[int, Row] = {}
        while self._resetting and not self._resetting.isdisjoint(self.vector_env.in_flight.tolist()):
            (row,) = self._receive(1)
            index = row[5]
            if index in self._resetting:
                first_rows[index] = row
            else:
                self._early_rows.append(row)
        self._resetting = set()
        return first_rows

    def _receive(self, count: int) -> list[Row]:
        observations, rewards, terminations, truncations, infos, ids = self._by_row.recv(count=count)
        return self._split_rows(observations, rewards, terminations, truncations, infos, ids.tolist())

    def _split_rows(
        self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: list[Any], ids: Sequence[int]
    ) -> list[Row]:
        """Split a batch into the results of its environments."""
        if not isinstance(observations, np.ndarray):
            space = self.vector_env.observation_space
            if len(ids) != self.env_num:
                space = batch_space(self.vector_env.single_observation_space, len(ids))
            observations = iterate(space, observations)
        return list(zip(observations, rewards, terminations, truncations, infos, ids, strict=True))

    def _parse_ids(self, env_id: Ids) -> npt.NDArray[np.intp]:
        ids: npt.NDArray[np.intp] = np.arange(self.env_num)[list(self._wrap_id(env_id))]
        return ids

    # -- single environments ----------------------------------------------------------------------------------------

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """Return an attribute of the environments ``id`` (default: all), from the outermost wrapper that has it."""
        self._assert_is_not_closed()
        if key == "action_space":  # always the same objects, which `seed` seeds
            return [self._action_spaces[i] for i in self._parse_ids(id).tolist()]
        return self._single_envs.get(key, self._parse_ids(id).tolist())

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set an attribute of the environments ``id`` (default: all)."""
        self._assert_is_not_closed()
        self._single_envs.set(key, value, self._parse_ids(id).tolist())

    def seed(self, seed: int | Sequence[int] | None = None) -> list[list[int] | None]:
        """Seed the action spaces, and reset the environments with the seeds, as Tianshou's workers do.

        Args:
            seed: An int gives environment i ``seed + i``; a sequence has one seed per environment.

        Returns:
            ``[[seed], ...]``, one per environment.
        """
        self._assert_is_not_closed()
        seeds: Any = [None] * self.env_num if seed is None else seed
        if isinstance(seeds, (int, np.integer)):
            seeds = [int(seeds) + i for i in range(self.env_num)]
        for space, env_seed in zip(self._action_spaces, seeds, strict=True):
            space.seed(env_seed)
        self.reset(seed=list(seeds))
        return [[env_seed] for env_seed in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """Return one frame per environment."""
        self._assert_is_not_closed()
        frames = self.vector_env.render()
        return [None] * self.env_num if frames is None else list(frames)

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()
        self.is_closed = True


def _reset_result(rows: Sequence[Row]) -> tuple[npt.NDArray[Any], Objects]:
    """Return the observations and infos of a reset."""
    return _stack([row[0] for row in rows]), _object_array([row[4] for row in rows])


def _stack(rows: Sequence[Any]) -> npt.NDArray[Any]:
    return np.stack(rows) if isinstance(rows[0], np.ndarray | np.generic | str) else _object_array(rows)


def _object_array(rows: Sequence[Any]) -> Objects:
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column
