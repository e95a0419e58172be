"""A pool that EnvPool itself built, as a task: what its specification says, and how to build its like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vecenv.backends.envpool.task import Task, quietly, said_by

__all__ = ["Existing", "seeds_within"]


@dataclass(frozen=True)
class Existing(Task):
    """The task of a pool. The first that is built with the pool's own seeds is the pool itself.

    Attributes:
        make: Builds another, of a configuration.
        given: The pool, until it was handed over.
    """

    make: Any = None
    given: list[Any] = field(default_factory=list)

    @classmethod
    def of_pool(cls, pool: Any) -> Existing:
        """Read a pool's specification.

        Raises:
            TypeError: It is no pool of EnvPool's.
        """
        spec: Any = getattr(pool, "spec", None)
        if not all(hasattr(pool, name) for name in ("_send", "_recv", "_reset")) or not hasattr(spec, "_config_keys"):
            raise TypeError(f"a pool that envpool.make() built is wanted, got {pool!r}")
        config = dict(zip(spec._config_keys, spec._config_values, strict=True))
        kind, pool_kind = type(spec), type(pool)

        def make(changed: dict[str, Any]) -> Any:
            return pool_kind(kind(tuple({**config, **changed}.values())))

        return cls(
            id=pool_kind.__name__,
            family=pool_kind.__module__,
            pool_config=config,
            config=config,
            **said_by(spec, config),
            env_spec=None,
            make=make,
            given=[pool],
        )

    def build(self, seeds: list[int]) -> Any:
        """The pool itself, if it is still there and has these seeds; else its like."""
        pool = self.given.pop() if self.given else None
        if pool is not None and seeds == seeds_within(self.config):
            return pool
        return quietly(lambda: self.make({"env_seed": seeds}))


def seeds_within(config: dict[str, Any]) -> list[int]:
    """The seeds of a pool's environments."""
    return list(config["env_seed"]) or [config["seed"] + i for i in range(config["num_envs"])]
