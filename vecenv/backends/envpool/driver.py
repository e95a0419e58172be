"""The pools of one vector environment, one after the other, its outstanding calls and what is known of its episodes.

:class:`~vecenv.backends.envpool.lockstep.Lockstep` drives a pool whose batch is all its environments,
:class:`~vecenv.backends.envpool.batches.Batches` one with smaller batches, or with several players an environment. What a
call has got so far is in ``wire``, and asking for the answer again goes on from there.

A pool cannot be seeded again, so a reset with seeds builds a new one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gymnasium.error import NoAsyncCallError, ResetNeeded
from gymnasium.vector import AutoresetMode

from vecenv.backends.envpool.actions import ActionChecker
from vecenv.backends.envpool.pools import build
from vecenv.backends.envpool.rows import Array, RowReader
from vecenv.backends.envpool.seeds import spread
from vecenv.backends.envpool.task import Task
from vecenv.backends.envpool.wire import Receiver
from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities, unable
from vecenv.front.driver import After, Driver

__all__ = ["Episodes", "PoolDriver", "Seeding", "Settings", "too_few"]


class Seeding(NamedTuple):
    """Seeds of a pool, one for each environment; where those come from that nobody gives; how many pools there have been."""

    seeds: list[int]
    random: np.random.Generator
    pools: int = 0


class PoolDriver(Driver):
    """What all ways of driving share.

    Attributes:
        pool: ``None`` before the first reset, after :meth:`lend` and after :meth:`close`.
        lent: A pool that compiled code steps, or ``None``.
        seeding: Of the latest pool; of the first one before there is one.
        wire: What the pool answered.
        all_ids, everyone: The indices of all environments, as int32 and as intp. What is of all is told by identity.
    """

    yields = True  # what a call in another thread still needs of the pool, it holds
    failure: BaseException | None = None  # EnvPool's environments raise nothing
    name = ""
    capabilities: Capabilities
    _check: Callable[[Any, Array], list[Array]]  # actions as the pool wants them

    def __init__(self, task: Task, batch_size: int, seeding: Seeding) -> None:
        self.after: After | None = None  # (a default of the class would make every look at it slow)
        self.pool: Any = None
        self.task = task
        self.batch_size = batch_size
        self.seeding = seeding
        self.lent: Any = None
        self._num_envs = int(task.config["num_envs"])
        self.all_ids = np.arange(self._num_envs, dtype=np.int32)
        self.everyone = np.arange(self._num_envs)  # the same as intp, which is what numpy indexes with fastest
        self.receiver = Receiver(_no_pool, 0.0)
        self._adopt(None)

    @abstractmethod
    def _begin_reset(self, ids: Array, *, force: bool, by_row: bool) -> None:
        """Reset these; with ``force`` even those that would go on with the same game."""

    def _adopt(self, pool: Any) -> None:
        """Be as if this pool was new; ``None``: as before the first one."""
        calls: tuple[Any, Any, Any] = (_no_pool,) * 3 if pool is None else (pool._recv, pool._send, pool._reset)
        recv, self._pool_send, self._pool_reset = calls
        self.receiver = Receiver(recv, self.receiver.waited)
        self.wire: list[Any] = []

    @property
    def waited(self) -> float:
        return self.receiver.waited

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool) -> None:
        given = bool([seed for seed in seeds if seed is not None])
        seeds = spread(seeds, len(seeds), self.seeding.random) if given or self.lent is not None else self.seeding.seeds
        if ids is not None:
            if given:
                why = "EnvPool seeds its environments when it builds them, all at once"
                unable(self.name, "seed some environments only", why)
            if not by_row and not self.capabilities.reset_mask:
                why = "EnvPool answers in whole batches; use reset_async(env_id=...) and recv()"
                unable(self.name, "take options['reset_mask'] in this pool", why)
            if self.pool is None:
                raise ResetNeeded("the first reset must be of all environments")
            self._begin_reset(ids.astype(np.int32), force=False, by_row=by_row)
        elif given or self.pool is None:
            self._renew(seeds)
        else:
            self._begin_reset(self.all_ids, force=True, by_row=False)

    def _renew(self, seeds: list[int]) -> None:
        """Replace the pool by a new one, with all environments being reset.

        It is not :attr:`pool` before its reset is under way, so that one which was interrupted here is never stepped.
        """
        self.close()
        pool = build(self.task, seeds)
        self.seeding = Seeding(seeds, self.seeding.random, self.seeding.pools + 1)
        self._adopt(pool)
        self._begin_reset(self.all_ids, force=True, by_row=False)
        self.pool = pool

    def lend(self) -> tuple[Any, Any, Any, Any]:
        """EnvPool's functions for compiled code, which has the pool to itself from now on. There must be one."""
        pool = self.pool
        functions: tuple[Any, Any, Any, Any] = pool.xla()
        self.close()
        self.lent = pool
        return functions

    def close(self, *, terminate: bool = False) -> None:
        """Let go of the pool: its environments and threads are gone when this returns."""
        self.pool = self.lent = None
        self.receiver.close()
        self._adopt(None)

    def require_pool(self, method: str) -> None:
        """Refuse a method where there is nothing to be stepped."""
        if self.pool is None:
            self._refuse(method)

    def _refuse(self, method: str) -> NoReturn:
        if self.lent is not None:
            raise RuntimeError(
                f"the pool was handed over to compiled code by xla(), so `{method}` cannot be used: reset() builds a new one"
            )
        raise ResetNeeded(f"Cannot call `{method}` before calling `reset`")


class Settings(NamedTuple):
    """How rows of environments with one player are made."""

    reader: RowReader
    checker: ActionChecker
    mode: AutoresetMode


class Episodes(PoolDriver):
    """Which episodes are over and which may be reset how, for drivers of environments with one player.

    An episode is over until its environment is reset.
    """

    def __init__(self, task: Task, batch_size: int, seeding: Seeding, settings: Settings) -> None:
        self.settings = settings
        self._reader, self._check = settings.reader, settings.checker
        self._checks_ends = settings.mode is AutoresetMode.DISABLED
        super().__init__(task, batch_size, seeding)

    def _adopt(self, pool: Any) -> None:
        super()._adopt(pool)
        self.over = np.zeros(self._num_envs, dtype=np.bool_)

    def naturally(self, ids: Array) -> Array:
        """Which of these environments the pool resets by itself at the next action, whatever that is.

        Atari with ``episodic_life`` and ViZDoom go on with the same game in such a reset, and start a new one when told to
        reset; so episodes that are over are to be reset in this way, and only what runs by a command.
        """
        return self.over[ids]

    def _refuse_if_over(self, ids: Array) -> None:
        if (over := self.over[ids]).any():
            raise ResetNeeded(
                f"envs {ids[over].tolist()} have ended their episodes, and autoreset is disabled: reset them with "
                "reset(options={'reset_mask': ...})"
            )


def _no_pool(*_: Any) -> Any:
    raise RuntimeError("the pool is closed")


def too_few(count: int, flying: int, why: str = "") -> NoAsyncCallError:
    """What is raised instead of waiting for rows that nobody sent for."""
    return NoAsyncCallError(
        f"Calling `recv` for {count} environments with {flying} environments in flight: `send` or `reset_async` more.{why}",
        "recv",
    )
