"""``as_tianshou``: a vector environment as Tianshou's collectors want one.

Tianshou resets environments itself, by index and as soon as their episodes have ended, and when it has enough episodes steps
only some of them. That is a reset mask, which also takes the place of a pending autoreset, and ``send`` and ``recv``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, iterate
from tianshou.env import BaseVectorEnv

from vecenv.adapters.single import AnyVectorEnv, SingleEnvs, require, reset_all
from vecenv.front.arguments import OnlyMask
from vecenv.front.infos import info_rows

__all__ = ["TianshouVectorEnv", "as_tianshou"]

Ids = int | Sequence[int] | npt.NDArray[np.integer[Any]] | None
Objects = npt.NDArray[np.object_]
Row = tuple[Any, Any, Any, Any, dict[str, Any]]
Columns = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.bool_], npt.NDArray[np.bool_], Objects]


def as_tianshou(envs: AnyVectorEnv, wait_num: int | None = None) -> TianshouVectorEnv:
    """A Tianshou ``BaseVectorEnv`` for its ``Collector``; closing it closes ``envs``.

    ``as_tianshou(vecenv.make_vec("CartPole-v1", 8))`` goes where ``SubprocVectorEnv(...)`` went.

    Args:
        envs: The vector environment.
        wait_num: For Tianshou's asynchronous mode: ``step`` returns as soon as that many environments are done. Some
            environments are then reset while others step, which worker processes can do. Default, all, and no asynchronous
            mode.

    Raises:
        ImportError: Tianshou is not installed.
        TypeError: Not a Gymnasium vector environment; Tuple observations, which Tianshou does not have.
        ValueError: Same-step autoreset, ``copy=False``, or arrays that are no numpy; says what to change. ``wait_num`` is
            not within 1 and the number of environments, or a vector wrapper is around them, which knows no single rows.
    """
    return TianshouVectorEnv(envs, wait_num)


class TianshouVectorEnv(BaseVectorEnv):  # type: ignore[misc, unused-ignore]  # (Any where Tianshou is not installed)
    """What :func:`as_tianshou` returns.

    Attributes:
        vector_env: The vector environment beneath.
    """

    def __init__(self, envs: AnyVectorEnv, wait_num: int | None = None) -> None:
        # (the base's would build environments, and workers for them)
        require(envs, "Tianshou", [AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP])
        if isinstance(envs.observation_space.sample(), tuple):
            raise TypeError(f"Tianshou does not support Tuple observations, got {envs.single_observation_space}")
        self.vector_env: Any = envs
        self._singles = SingleEnvs(envs)
        self._action_spaces = self._singles.get("action_space", range(envs.num_envs))
        self.env_num = envs.num_envs
        self.is_closed = False
        self.wait_num = envs.num_envs if wait_num is None else wait_num
        if not 1 <= self.wait_num <= envs.num_envs:
            raise ValueError(f"wait_num must be within 1..{envs.num_envs}, got {wait_num!r}")
        self.is_async = self.wait_num < envs.num_envs
        self._inner: Any = envs.unwrapped
        if self.is_async and self._inner is not envs:
            raise ValueError(f"wait_num steps and resets single rows, which vector wrappers do not see: give {self._inner}")
        self._held: list[Row] = []  # steps that were done while something else was waited for
        self._resetting: set[int] = set()  # resets that were asked for, and not handed out
        self.timeout = None

    # Tianshou's two lists are read from the engine's table of pending requests, so a failure leaves no environment in them.

    @property
    def waiting_id(self) -> list[int]:
        """The environments whose step was asked for and not handed out, in asynchronous mode."""
        if not self.is_async:
            return []
        return [*(row[4]["env_id"] for row in self._held), *self.vector_env.in_flight.tolist()]

    @property
    def ready_id(self) -> list[int]:
        """All other environments."""
        waiting = set(self.waiting_id)
        return [row for row in range(self.env_num) if row not in waiting]

    def reset(self, env_id: Ids = None, **kwargs: Any) -> tuple[npt.NDArray[Any], Objects]:
        """Reset the environments ``env_id`` (all), each with the keywords that are given here.

        A reset of all drops what was sent and not handed out: it goes on after a failure, a timeout or a Ctrl-C.

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
        # (without seeds it is None, which environments that can only be seeded all at once want)
        seeds = None if all(one is None for one in each) else [None if one is None else int(one) for one in each]
        every = len(ids) == self.env_num
        if self.is_async and not every:
            return self._reset_in_flight(ids, seeds, options)
        if seeds is not None:
            given = dict(zip(ids.tolist(), seeds, strict=True))
            seeds = [given.get(i) for i in range(self.env_num)]
        if every:
            observations, infos = reset_all(self.vector_env, seeds, options)
            self._held, self._resetting = [], set()
        else:
            mask = np.isin(np.arange(self.env_num), ids)
            options = OnlyMask({**(options or {}), "reset_mask": mask})
            observations, infos = self.vector_env.reset(seed=seeds, options=options)
        nothing = np.zeros(self.env_num)
        rows = self._rows((observations, nothing, nothing, nothing, infos), range(self.env_num))
        return _begun([rows[i] for i in ids])

    def step(self, action: Any, id: Ids = None) -> Columns:
        """Step the environments ``id`` (all).

        Returns:
            ``(observations, rewards, terminations, truncations, infos)`` in the order of ``id``; infos an object array of
            dicts, with ``"env_id"``.
        """
        self._assert_is_not_closed()
        ids = self._ids(id)
        if self.is_async:
            return self._step_in_flight(action, ids)
        if action is None or len(action) != len(ids):
            raise ValueError(f"step wants an action for each of {len(ids)} environments, got {action!r}")
        actions = np.asarray(action)
        if len(ids) < self.env_num:
            self._inner.send(actions, ids)
            received = {row[4]["env_id"]: row for row in self._received(len(ids))}
            return self._columns([received[i] for i in ids.tolist()])
        rows = self._rows(self.vector_env.step(actions[np.argsort(ids)]), range(self.env_num))
        return self._columns([rows[i] for i in ids])

    # -- some step while others are reset ---------------------------------------------------------------------------

    def _step_in_flight(self, action: Any, ids: npt.NDArray[np.intp]) -> Columns:
        """Send ``action``, if there is one, and hand out the next ``wait_num`` rows, or all that are left."""
        self._finish_resets()
        if action is not None:
            self._assert_id(ids)
            if len(action) != len(ids):
                raise ValueError(f"step wants an action for each of {len(ids)} environments, got {action!r}")
            self.vector_env.send(np.asarray(action), ids)
        wanted = min(self.wait_num, len(self.waiting_id)) - len(self._held)
        if wanted > 0:
            self._held += self._received(wanted)
        done, self._held = self._held, []
        if not done:
            raise ValueError("no environment is stepping: step(None) fetches what was sent before")
        return self._columns(done)

    def _columns(self, rows: Sequence[Row]) -> Columns:
        observations, *numbers, infos = zip(*rows, strict=True)
        rewards, terminations, truncations = map(np.stack, numbers)
        return _stacked(observations), rewards, terminations, truncations, _objects(infos)

    def _reset_in_flight(self, ids: npt.NDArray[np.intp], seeds: Any, options: Any) -> tuple[Any, Objects]:
        """Reset environments that are not stepping; rows of others that arrive meanwhile are kept for the next step."""
        self._finish_resets()
        self._assert_id(ids)
        self.vector_env.reset_async(seed=seeds, options=options, env_id=ids)
        self._resetting = set(ids.tolist())
        begun = self._finish_resets()
        return _begun([begun[index] for index in ids.tolist()])

    def _finish_resets(self) -> dict[int, Row]:
        """First rows of the resets that were asked for; after a failure the next call drops them."""
        begun: dict[int, Row] = {}
        while self._resetting and not self._resetting.isdisjoint(self.vector_env.in_flight.tolist()):
            (row,) = self._received(1)
            index = row[4]["env_id"]
            if index in self._resetting:
                begun[index] = row
            else:
                self._held.append(row)
        self._resetting = set()
        return begun

    def _received(self, count: int) -> list[Row]:
        answer = self._inner.recv(count=count)
        return self._rows(answer, answer[4]["env_id"].tolist())

    def _rows(self, answer: Any, ids: Sequence[int]) -> list[Row]:
        """What a batch holds of each of its environments."""
        observations, rewards, terminations, truncations, infos = answer
        listed = info_rows({key: value for key, value in infos.items() if key not in ("env_id", "_env_id")}, len(ids))
        for info, index in zip(listed, ids, strict=True):
            info["env_id"] = index
        if not isinstance(observations, np.ndarray):
            space = self.vector_env.observation_space
            if len(ids) != self.env_num:
                space = batch_space(self.vector_env.single_observation_space, len(ids))
            observations = iterate(space, observations)
        return list(zip(observations, rewards, terminations, truncations, listed, strict=True))

    def _ids(self, env_id: Ids) -> npt.NDArray[np.intp]:
        ids: npt.NDArray[np.intp] = np.arange(self.env_num)[self._wrap_id(env_id)]
        return ids

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
            ``[[seed], ...]``, one per environment.
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


def _begun(rows: Sequence[Row]) -> tuple[npt.NDArray[Any], Objects]:
    """Observations and infos of a reset."""
    for row in rows:
        row[4].pop("env_id", None)
    return _stacked([row[0] for row in rows]), _objects([row[4] for row in rows])


def _stacked(rows: Sequence[Any]) -> npt.NDArray[Any]:
    return np.stack(rows) if isinstance(rows[0], np.ndarray | np.generic) else _objects(rows)


def _objects(rows: Sequence[Any]) -> Objects:
    column = np.empty(len(rows), dtype=object)
    column[:] = rows
    return column
