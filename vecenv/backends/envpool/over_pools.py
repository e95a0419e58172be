"""What vector environments over pools have in common, whether their environments have one player or several."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NoReturn, TypeVar

from vecenv.backends.envpool.driver import PoolDriver
from vecenv.front.vector_env import DrivenVectorEnv

__all__ = ["OverPools"]

D = TypeVar("D", bound=PoolDriver)


class OverPools(DrivenVectorEnv[D]):
    """What can be told of pools, beside what every vector environment says."""

    _why_no_attributes: ClassVar[str] = "EnvPool's environments are C++ objects without Python attributes"

    def stats(self) -> dict[str, float]:
        """As :meth:`vecenv.AsyncVectorEnv.stats`; and EnvPool's own: ``pools`` built, ``num_threads`` of the pool."""
        driver = self._driver
        threads = int(driver.task.config["num_threads"]) or min(driver.batch_size, os.cpu_count() or 1)
        return {**super().stats(), "pools": float(driver.seeding.pools), "num_threads": float(threads)}

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seeds of the pool, one for each environment: ``reset(seed=...)`` with them repeats what it did."""
        return tuple(self._driver.seeding.seeds)

    def __repr__(self) -> str:
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}(closed)"
        name = self.spec.id if self.spec is not None else self._driver.task.id
        batch = f", batch_size={self.batch_size}" if self.batch_size < self.num_envs else ""
        return f"{type(self).__name__}({name}, num_envs={self.num_envs}{batch}, phase={self._phase.name})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} owns threads and cannot be copied or pickled: build one where it is to be used"
        )
