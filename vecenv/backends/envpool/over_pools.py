"""What any vector environment over pools has in common, whether its environments have one player or several."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import numpy as np
from gymnasium.error import ResetNeeded

from vecenv.backends.envpool.calls import refuse
from vecenv.backends.envpool.driver import Driver
from vecenv.backends.envpool.pools import Pools
from vecenv.backends.envpool.rows import Array
from vecenv.backends.envpool.seeds import spread
from vecenv.backends.envpool.task import Task
from vecenv.front.arguments import env_ids_of, refuse_options, reset_mask_of
from vecenv.front.attributes import NoAttributes
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.front.deadlines import seconds_of
from vecenv.front.phases import Phase, advance

__all__ = ["OverPools"]


class OverPools(NoAttributes):
    """Resets, refusals, figures and the end; :meth:`_open` makes it ready."""

    num_envs: int
    batch_size: int
    closed: bool
    task: Task
    _why_no_attributes: ClassVar[str] = "EnvPool's environments are C++ objects without Python attributes"

    def _open(self, pools: Pools) -> None:
        self._pools = pools
        self._caller, self._owner = 0, os.getpid()
        self._began = time.monotonic()
        self._steps = self._resets = 0
        self._figures: dict[str, float] | None = None  # the last, after close()
        self.closed = False

    @property
    def capabilities(self) -> Capabilities:
        """What EnvPool can do."""
        raise NotImplementedError

    def _random(self) -> np.random.Generator:
        """Where seeds come from that nobody gave."""
        raise NotImplementedError

    def _begin_reset(self, seed: Any, options: Any, env_id: Any) -> Driver[Any]:
        self._require_open("reset")
        ids = None if env_id is None else env_ids_of(env_id, self.num_envs).astype(np.int32)
        seeds = None if seed is None else spread(seed, self.num_envs if ids is None else len(ids), self._random())
        driver = self._pools.driver
        if driver is not None:
            advance(driver.phase, "reset_async", self)
        mask, others = reset_mask_of(options, self.num_envs)
        if others:
            refuse_options(self, others, "its environments take none")
        masked = None if mask is None else np.flatnonzero(mask).astype(np.int32)
        if ids is not None and masked is not None:
            raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
        some = masked if ids is None else ids
        if some is not None:
            return self._begin_partial_reset(driver, seeds, some, by_row=masked is None)
        self._resets += self.num_envs
        pools = self._pools
        if seeds is not None:
            return pools.renew(seeds)
        if driver is None:
            return pools.renew(pools.seeds if pools.lent is None else spread(None, self.num_envs, self._random()))
        driver.begin_reset(driver.all_ids, force=True)
        return driver

    def _begin_partial_reset(
        self, driver: Driver[Any] | None, seeds: list[int] | None, ids: Array, by_row: bool
    ) -> Driver[Any]:
        if seeds is not None:
            unable(self, "seed some environments only", "EnvPool seeds its environments when it builds them, all at once")
        if not by_row and not self.capabilities.reset_mask:
            why = "EnvPool answers in whole batches; use reset_async(env_id=...) and recv()"
            unable(self, "take options['reset_mask'] in this pool", why)
        if driver is None or not driver.begun:
            raise ResetNeeded("the first reset must be of all environments")
        driver.begin_reset(ids, force=False, by_row=by_row)
        self._resets += len(ids)
        return driver

    def stats(self) -> dict[str, float]:
        """Figures since construction, as of :meth:`vecenv.AsyncVectorEnv.stats`; nan where EnvPool does not tell.

        ``steps`` of environments; ``steps_per_second``; ``wait_fraction`` (of the time, spent waiting for the pool);
        ``resets`` asked for; ``in_flight`` now; and EnvPool's own: ``pools`` built, ``num_threads`` of the pool. After
        :meth:`close` they stay as they were.
        """
        if self._figures is not None:
            return dict(self._figures)
        elapsed = max(time.monotonic() - self._began, 1e-9)
        driver = self._pools.driver
        threads = int(self.task.config["num_threads"]) or min(self.batch_size, os.cpu_count() or 1)
        return figures({
            "steps": float(self._steps),
            "steps_per_second": self._steps / elapsed,
            "wait_fraction": self._pools.waited / elapsed,
            "resets": float(self._resets),
            "restarts": 0.0,
            "errors": 0.0,
            "bytes_pickled": 0.0,
            "in_flight": float(driver.flying() if driver is not None else 0),
            "pools": float(self._pools.built),
            "num_threads": float(threads),
        })  # fmt: skip

    def _let_go(self, timeout: float | None = None, **_: Any) -> None:
        """Let go of the pool, and keep the last figures."""
        seconds_of(timeout)
        self._figures = self.stats()
        self._pools.drop()

    def _pool_driver(self, method: str) -> Driver[Any]:
        """The driver of the pool; raises for whatever keeps ``method`` from being used now."""
        self._require_open(method)
        driver = self._pools.driver
        if driver is None:
            if self._pools.lent is not None:
                raise RuntimeError(
                    f"the pool was handed over to compiled code by xla(), so `{method}` cannot be used: reset() builds a "
                    "new one"
                )
            raise ResetNeeded(f"Cannot call `{method}` before calling `reset`")
        if method == "step_async" and driver.phase is not Phase.DEFAULT:
            advance(driver.phase, method, self)
        return driver

    def _require_open(self, method: str) -> None:
        if self.closed or os.getpid() != self._owner:
            refuse(self, method)
