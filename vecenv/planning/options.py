"""Checks the options of vector environments by one table: option -> what it may be, and that in words."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, TypedDict

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.recording.recorder import FlightRecorder
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerEnv, check_variables, require_processes

NumWorkers: TypeAlias = int | Literal["auto"] | None
BatchSize: TypeAlias = int | Literal["auto"] | None
OnFailure: TypeAlias = Literal["raise", "restart"]
StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]


class EngineOptions(TypedDict, total=False):
    """Options that classes over :class:`vecenv.AsyncVectorEnv` pass on to it; see there."""

    shared_memory: bool
    copy: bool
    context: StartMethod | None
    daemon: bool
    max_concurrency: int | None
    num_workers: NumWorkers
    use_caller: bool
    batch_size: BatchSize
    on_failure: OnFailure
    restart_limit: int | None
    restart_period: float
    step_timeout: float | None
    start_timeout: float
    threads_per_worker: int | None
    strict: bool
    dummy_env: bool | None
    isolate: bool | None
    worker_env: WorkerEnv | None
    worker_affinity: Sequence[int | Sequence[int]] | None
    preload: Sequence[str] | None
    ragged_infos: bool
    env_threads: int
    generators: GeneratorsOption
    record_failures: str | os.PathLike[str] | FlightRecorder | None


def require_processes_for(
    name: str, num_workers: int | str | None, use_caller: bool, isolate: bool | None, dummy_env: bool | None
) -> None:
    """Refuse what needs processes where there can be none. ``"auto"`` does not: there it is this process.

    Raises:
        NotImplementedError: With the way out; nothing was built.
    """
    if dummy_env is False:
        require_processes(f"{name} with dummy_env=False")
    elif use_caller:
        require_processes(f"{name} with use_caller=True")
    elif num_workers != 0 and num_workers != "auto":
        require_processes(f"{name} with num_workers={num_workers}")
    elif isolate and num_workers == "auto":
        require_processes(f"{name} with on_failure='restart', step_timeout, worker_env or isolate=True")


def parse_spares(spare_workers: Any, num_envs: int, mode: AutoresetMode, **beside: Any) -> int:
    """The number of spare workers; ``beside``: other options.

    Raises:
        ValueError: It is no number, or cannot be combined with another option; says why.
    """
    check_option("spare_workers", spare_workers)
    own = beside["num_workers"]
    reasons = {
        "num_workers": own is None or own == num_envs or "each row has a process of its own: num_workers=None",
        "use_caller": not beside["use_caller"] or "an environment of the calling process can go nowhere else",
        "batch_size": beside["batch_size"] is None or mode is AutoresetMode.NEXT_STEP or "use AutoresetMode.NEXT_STEP",
        "max_concurrency": beside["max_concurrency"] is None or "they reset while all the others step",
        "env_threads": beside["env_threads"] == 1 or "each has one environment",
        "autoreset_mode": mode is not AutoresetMode.DISABLED or "an episode that begins by itself is what they are for",
    }
    for option, reason in reasons.items():
        if spare_workers and reason is not True:
            raise ValueError(f"`spare_workers` cannot be combined with this `{option}`: {reason}.")
    return int(spare_workers)


_Check: TypeAlias = Callable[[Any], bool]


def whole(low: int, high: float = math.inf) -> _Check:
    """Whether a value is an int from ``low`` to ``high``, and no bool."""
    return lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and bool(value > 0)


def one_of(*accepted: Any, or_: _Check = lambda value: False) -> _Check:
    """Whether a value is one of a few constants, or passes another check. (0 and 1 are neither ``False`` nor ``True``.)"""
    return lambda value: any(value is one or (isinstance(one, str) and value == one) for one in accepted) or or_(value)


_SWITCH: Final = one_of(True, False), "True or False"
_SWITCH_OR_NONE: Final = one_of(None, True, False), "None, True or False"
_DURATION: Final = _seconds, "a number of seconds above 0"
_CHECKS: Final[dict[str, tuple[_Check, str]]] = {
    "num_envs": (whole(1), "an int from 1 on"),
    "num_workers": (one_of(None, "auto", or_=whole(0)), "None (one process per environment), 'auto', or an int from 0 on"),
    "spare_workers": (whole(0), "an int from 0 on"),
    "on_failure": (one_of("raise", "restart"), "'raise' or 'restart'"),
    "restart_limit": (one_of(None, or_=whole(0)), "None or an int from 0 on"),
    "restart_period": _DURATION,
    "step_timeout": (one_of(None, or_=_seconds), "None or a number of seconds above 0"),
    "start_timeout": _DURATION,
    "threads_per_worker": (one_of(None, or_=whole(1)), "None or an int from 1 on"),
    "env_threads": (whole(1), "an int from 1 on"),
    "generators": (one_of("shared", "own"), "'shared' or 'own'"),
    "isolate": _SWITCH_OR_NONE,
    "dummy_env": _SWITCH_OR_NONE,
    "strict": _SWITCH,
    "ragged_infos": _SWITCH,
}
"""Option -> what it may be, and that in words. What depends on another option stands in :func:`check_options`."""

_NEED_PROCESSES: Final[dict[str, tuple[_Check, str]]] = {
    "step_timeout": (lambda value: value is not None, "can be killed"),
    "worker_env": (bool, "have environment variables of their own"),
    "isolate": (lambda value: value is True, "keep a crash of an environment from the program"),
    "env_threads": (lambda value: value != 1, "are the ones that have these threads"),
}
"""Option -> whether a value needs worker processes, and what these do for it."""


def check_option(name: str, value: Any, check: tuple[_Check, str] | None = None) -> None:
    """Refuse a value that an option of this name cannot have, on any backend.

    Args:
        name: The option.
        value: Its value.
        check: What it may be, and that in words; ``None``: as in the table of all options.

    Raises:
        ValueError: Names the accepted values.
    """
    accepts, accepted = check or _CHECKS[name]
    if not accepts(value):
        raise ValueError(f"`{name}` must be {accepted}, got {value!r}.")


def check_options(num_envs: int, batch_size: Any, **options: Any) -> None:
    """Refuse options that mean nothing, by name and with what is accepted.

    Args:
        num_envs: How many environments there are.
        batch_size: How many of them :meth:`recv` returns.
        options: Any of the options in :class:`EngineOptions`.

    Raises:
        TypeError, ValueError: Before anything was built.
    """
    if options.get("worker_env") is not None:
        check_variables(options["worker_env"])
    if options.get("use_caller") or options.get("num_workers") == 0:
        for name, (needs_processes, reason) in _NEED_PROCESSES.items():
            if name in options and needs_processes(options[name]):
                raise ValueError(
                    f"`{name}` needs worker processes, which {reason}: it cannot be combined with `use_caller=True` "
                    "or `num_workers=0`"
                )
    sizes = one_of(None, "auto", or_=whole(1, num_envs)), f"None, 'auto' or an int within 1..{num_envs}"
    check_option("batch_size", batch_size, sizes)
    for name, value in options.items():
        if name in _CHECKS:
            check_option(name, value)
    if options.get("env_threads", 1) != 1:
        shared = "'shared' beside env_threads: threads of one process share its generators"
        check_option("generators", options.get("generators", "shared"), (one_of("shared"), shared))
        counted = "None or an int from 1 on, beside env_threads: what waits cannot be measured"
        check_option("num_workers", options.get("num_workers"), (one_of(None, or_=whole(1)), counted))
