"""The capabilities of a backend beyond ``reset`` and ``step``, which each backend declares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, NoReturn


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a backend. Calls that need a ``False`` one raise :class:`NotImplementedError`.

    Attributes:
        backend: ``"process"``, ``"ray"``, ``"envpool"``, ``"jax"``, ``"native"``.
        attributes: ``call``, ``get_attr``, ``set_attr``, ``exec_func``, ``set_next_options``: there are Python environments.
        first_ready: ``send`` to some environments, ``recv`` of those that finish first.
        timeouts: ``step_wait(timeout)`` and the like.
        row_seeds: A seed for each row, in any order; otherwise one for all.
        reset_mask: ``reset(options={"reset_mask": ...})``.
        masked_seeds: Seeds together with a reset mask.
        reset_options: Options other than the mask reach the environments.
        row_options: A sequence of options, one for each row.
        restarts: ``on_failure="restart"``.
        snapshots: ``save``, ``load``, ``state_dict``, ``load_state_dict``.
        freezing: ``freeze``, ``thaw``.
        recording: ``record``; failures leave files (``record_failures=``).
        spare_workers: The next episodes of rows begin ahead of time.
        in_this_process: Environments are stepped by the calling process.
        runs_jax: They run as JAX programs of the calling process.
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
        can = [field.name for field in fields(self) if getattr(self, field.name) is True]
        return f"{self.backend}: {', '.join(can)}"


def capabilities_of(envs: object) -> Capabilities | None:
    """Return the capabilities that a vector environment declares; ``None`` if it is not vecenv's and declares none."""
    declared = getattr(envs, "capabilities", None)
    return declared if isinstance(declared, Capabilities) else None


def unable(envs: object, what: str, reason: str) -> NoReturn:
    """Raise for a missing capability, with the same text everywhere. ``envs`` is the vector environment or its name."""
    name = envs if isinstance(envs, str) else type(envs).__name__
    raise NotImplementedError(f"{name} cannot {what}: {reason}")


def overridden(cls: type[Any], base: type[Any]) -> set[str]:
    """Return the names of the guarded methods of ``base`` that a subclass has overridden, not just guarded otherwise."""
    bodies = {name: method.__wrapped__ for name, method in vars(base).items() if hasattr(method, "__wrapped__")}
    return {name for name, body in bodies.items() if getattr(getattr(cls, name), "__wrapped__", None) is not body}


class _Unable(NotImplementedError, AttributeError):
    """An error that ``hasattr``, and ``getattr`` with a default, treat as a missing attribute."""


class OfWorkers:
    """An attribute of backends with workers. Reading it on another backend raises ``NotImplementedError``."""

    def __init__(self, capability: str = "workers") -> None:
        self._capability = capability

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        try:
            instance._need(self._capability, self._name)
        except NotImplementedError as error:
            raise _Unable(*error.args) from None


FIGURES: Final = (
    "steps", "steps_per_second", "seconds", "wait_fraction", "step_time_mean", "step_time_slowest_env", "straggler_share",
    "resets", "restarts", "errors", "bytes_pickled", "in_flight",
)  # fmt: skip
"""The keys of ``stats()`` on every backend; see :meth:`vecenv.AsyncVectorEnv.stats`."""


def figures(known: Mapping[str, float]) -> dict[str, float]:
    """Return all statistics: nan for those that a backend does not know, and those that only this backend has."""
    return {**dict.fromkeys(FIGURES, math.nan), **known}
