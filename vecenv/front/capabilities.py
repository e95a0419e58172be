"""The capabilities that a backend declares, beyond ``reset`` and ``step``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NoReturn

from gymnasium.vector import VectorWrapper


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a backend. Calls that need a missing one raise :class:`NotImplementedError`.

    Attributes:
        backend: ``"process"``, ``"ray"``, ``"envpool"``, ``"jax"`` or ``"native"``.
        attributes: ``call``, ``get_attr``, ``set_attr``, ``exec_func``, ``set_next_options``, which need Python
            environments.
        first_ready: ``send`` to some environments, and ``recv`` from those that finish first.
        timeouts: Timeouts, as in ``step_wait(timeout)``.
        row_seeds: Arbitrary seeds, one per row; without it, a single seed for all.
        reset_mask: ``reset(options={"reset_mask": ...})``.
        masked_seeds: Seeds together with a reset mask.
        reset_options: Options other than the mask, which are passed to the environments.
        row_options: A sequence of options, one for each row.
        restarts: ``on_failure="restart"``.
        snapshots: ``save``, ``load``, ``state_dict``, ``load_state_dict``.
        freezing: ``freeze``, ``thaw``.
        recording: ``record``, and files about failures (``record_failures=``).
        spare_workers: Spare workers, which begin the next episodes of rows ahead of time.
        in_this_process: The calling process steps the environments, or some of them.
        runs_jax: The environments are JAX programs that run in the calling process.
    """

    backend: str
    attributes: bool = True
    first_ready: bool = True
    timeouts: bool = True
    row_seeds: bool = True
    reset_mask: bool = True
    masked_seeds: bool = True
    reset_options: bool = True
    row_options: bool = True
    restarts: bool = False
    snapshots: bool = False
    freezing: bool = False
    recording: bool = False
    spare_workers: bool = False
    in_this_process: bool = False
    runs_jax: bool = False

    def __str__(self) -> str:
        supported = [field.name for field in fields(self) if getattr(self, field.name) is True]
        return f"{self.backend}: {', '.join(supported)}"


def capabilities_of(envs: object) -> Capabilities | None:
    """Return the capabilities that a vector environment declares; ``None`` if it declares none."""
    declared = getattr(envs, "capabilities", None)
    return declared if isinstance(declared, Capabilities) else None


def wrappers_around(envs: Any) -> Iterator[Any]:
    """Yield the wrappers around a vector environment, outermost first."""
    while isinstance(envs, VectorWrapper):
        yield envs
        envs = envs.env


def raise_unsupported(envs: object, action: str, reason: str) -> NoReturn:
    """Raise ``NotImplementedError`` for a missing capability. ``envs`` is the vector environment or its name."""
    name = envs if isinstance(envs, str) else type(envs).__name__
    raise NotImplementedError(f"{name} cannot {action}: {reason}")


def overridden_methods(cls: type[Any], base: type[Any]) -> set[str]:
    """Return the names of the guarded methods of ``base`` that ``cls`` overrides with a new body, not only a new guard."""
    bodies = {name: method.__wrapped__ for name, method in vars(base).items() if hasattr(method, "__wrapped__")}
    return {name for name, body in bodies.items() if getattr(getattr(cls, name), "__wrapped__", None) is not body}


class _UnsupportedAttribute(NotImplementedError, AttributeError):
    """An error that ``hasattr``, and ``getattr`` with a default, treat as a missing attribute."""


class WorkerOnlyAttribute:
    """An attribute that requires a capability. Without the capability, reading it raises ``NotImplementedError``."""

    def __init__(self, capability: str = "workers") -> None:
        self._capability = capability

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        try:
            instance._require_capability(self._capability, self._name)
        except NotImplementedError as error:
            raise _UnsupportedAttribute(*error.args) from None


STATS_KEYS: Final = (
    "steps", "steps_per_second", "seconds", "wait_fraction", "step_time_mean", "step_time_slowest_env", "straggler_share",
    "resets", "restarts", "errors", "bytes_pickled", "in_flight",
)  # fmt: skip
"""The keys of ``stats()`` on every backend; see :meth:`vecenv.AsyncVectorEnv.stats`."""


def complete_stats(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the statistics in ``stats``, and nan for each key of :data:`STATS_KEYS` that it lacks."""
    return {**dict.fromkeys(STATS_KEYS, math.nan), **stats}
