"""What the options of a vector environment may be, and how many workers follow from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias, TypedDict

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.planning.plan import Plan, caller_share, choose, in_batches
from vecenv.planning.scout import Probe
from vecenv.system.cores import usable_cores
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerEnv, check_variables, require_processes

__all__ = [
    "BatchSize", "EngineOptions", "NumWorkers", "OnFailure", "RestartFrom", "StartMethod", "check_options", "require_a_way",
    "spares_of", "workers_and_share",
]  # fmt: skip

NumWorkers: TypeAlias = int | Literal["auto"] | None
BatchSize: TypeAlias = int | Literal["auto"] | None
OnFailure: TypeAlias = Literal["raise", "restart"]
RestartFrom: TypeAlias = Literal["reset", "snapshot"]
StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]


class EngineOptions(TypedDict, total=False):
    """What classes over :class:`vecenv.AsyncVectorEnv` hand on to it; see there."""

    shared_memory: bool
    copy: bool
    context: StartMethod | None
    daemon: bool
    max_concurrency: int | None
    num_workers: NumWorkers
    use_caller: bool
    batch_size: BatchSize
    on_failure: OnFailure
    restart_from: RestartFrom
    restart_limit: int | None
    restart_period: float
    step_timeout: float | None
    start_timeout: float
    threads_per_worker: int | None
    strict: bool
    dummy_env: bool | None
    isolate: bool | None
    worker_env: WorkerEnv | None
    ragged_infos: bool
    env_threads: int
    generators: GeneratorsOption


def workers_and_share(
    num_envs: int,
    num_workers: int | str | None,
    use_caller: bool,
    isolate: bool | None,
    measure: Callable[[], Probe],
    batch_size: int | str | None = None,
) -> tuple[int, int, Plan | None]:
    """How many worker processes, how many environments the caller steps itself, and the plan if one was made.

    ``measure`` steps one environment for a moment; it is called only where the answer depends on it.
    """
    cores = usable_cores()
    if batch_size == "auto":
        processes, share, chosen = workers_and_share(num_envs, num_workers, use_caller, isolate, measure)
        if chosen is None:
            chosen = Plan(num_envs, processes, share > 0 and processes > 0, share, "as asked for", measure(), cores, {})
        elif chosen.use_caller:  # who steps a share of its own is not there for whoever is first
            halves = in_batches(choose(chosen.probe, num_envs, cores, isolate=True))
            if halves.batch_size != num_envs:
                return halves.num_workers, 0, replace(halves, reason="first-ready batches want a caller that is free")
        return processes, share, in_batches(chosen)
    if num_workers == "auto" and not use_caller:
        chosen = choose(measure(), num_envs, cores, isolate=isolate)
        share = num_envs if chosen.num_workers == 0 else chosen.caller_share
        return chosen.num_workers, share, chosen
    if num_workers is None or num_workers == "auto":
        processes = max(cores - 1, 1) if use_caller else num_envs
    else:
        processes = int(num_workers)
    processes = min(processes, num_envs - 1 if use_caller else num_envs)
    if processes == 0:
        return 0, num_envs, None
    if not use_caller:
        return processes, 0, None
    measured = measure()
    if measured.failure:
        return processes, max(num_envs // (processes + 1), 1), None
    return processes, caller_share(num_envs, processes, measured.step), None


def require_a_way(
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


def spares_of(spare_workers: Any, num_envs: int, mode: AutoresetMode, **beside: Any) -> int:
    """How many spare workers there are to be; ``beside``: other options.

    Raises:
        ValueError: It is no number, or cannot be combined with another option; says why.
    """
    if not _whole(spare_workers, 0):
        raise ValueError(f"`spare_workers` must be an int from 0 on, got {spare_workers!r}.")
    own = beside["num_workers"]
    reasons = {
        "num_workers": own is None or own == num_envs or "each row has a process of its own: num_workers=None",
        "use_caller": not beside["use_caller"] or "an environment of the calling process can go nowhere else",
        "batch_size": beside["batch_size"] is None or "they are there for batches of all environments",
        "max_concurrency": beside["max_concurrency"] is None or "they reset while all the others step",
        "env_threads": beside["env_threads"] == 1 or "each has one environment",
        "restart_from": beside["restart_from"] == "reset" or "environments that go from row to row cannot be saved",
        "autoreset_mode": mode is not AutoresetMode.DISABLED or "an episode that begins by itself is what they are for",
    }
    for option, reason in reasons.items():
        if spare_workers and reason is not True:
            raise ValueError(f"`spare_workers` cannot be combined with this `{option}`: {reason}.")
    return int(spare_workers)


def _whole(value: Any, low: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= low)


def _seconds(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and bool(value > 0)


def _one_of(*accepted: Any) -> Callable[[Any], bool]:
    return lambda value: any(value is one or (isinstance(one, str) and value == one) for one in accepted)


def _or(other: Any, check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is other or check(value)


_RESTART_FROM: Final = "'reset', or 'snapshot' where on_failure is 'restart'"
_SWITCH: Final = _one_of(True, False), "True or False"
_SWITCH_OR_NONE: Final = _one_of(None, True, False), "None, True or False"
_DURATION: Final = _seconds, "a number of seconds above 0"
_CHECKS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "num_workers": (lambda value: _one_of(None, "auto")(value) or _whole(value, 0),
                    "None (one process per environment), 'auto', or an int from 0 on"),
    "on_failure": (_one_of("raise", "restart"), "'raise' or 'restart'"),
    "restart_from": (_one_of("reset", "snapshot"), _RESTART_FROM),
    "restart_limit": (_or(None, lambda value: _whole(value, 0)), "None or an int from 0 on"),
    "restart_period": _DURATION,
    "step_timeout": (_or(None, _seconds), "None or a number of seconds above 0"),
    "start_timeout": _DURATION,
    "threads_per_worker": (_or(None, lambda value: _whole(value, 1)), "None or an int from 1 on"),
    "env_threads": (lambda value: _whole(value, 1), "an int from 1 on"),
    "generators": (_one_of("shared", "own"), "'shared' or 'own'"),
    "isolate": _SWITCH_OR_NONE,
    "dummy_env": _SWITCH_OR_NONE,
    "strict": _SWITCH,
    "ragged_infos": _SWITCH,
}  # fmt: skip
"""Option -> what it may be, and that in words. What depends on another option stands in :func:`check_options`."""

_OF_PROCESSES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "step_timeout": (lambda value: value is not None, "can be killed"),
    "worker_env": (bool, "have environment variables of their own"),
    "isolate": (lambda value: value is True, "keep a crash of an environment from the program"),
    "env_threads": (lambda value: value != 1, "are the ones that have these threads"),
}
"""Option -> whether a value needs worker processes, and what these do for it."""


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
    num_workers, env_threads = options.get("num_workers"), options.get("env_threads", 1)
    if options.get("use_caller") or num_workers == 0:
        for name, (needs, reason) in _OF_PROCESSES.items():
            if name in options and needs(options[name]):
                raise ValueError(
                    f"`{name}` needs worker processes, which {reason}: it cannot be combined with `use_caller=True` "
                    "or `num_workers=0`"
                )
    fits = _one_of(None, "auto")(batch_size) or (_whole(batch_size, 1) and batch_size <= num_envs)
    _require("batch_size", batch_size, fits, f"None, 'auto' or an int within 1..{num_envs}")
    for name, (check, accepted) in _CHECKS.items():
        if name in options:
            _require(name, options[name], check(options[name]), accepted)
    if options.get("restart_from") == "snapshot":
        _require("restart_from", "snapshot", options["on_failure"] == "restart", _RESTART_FROM)
    if options.get("generators") == "own":
        accepted = "'shared' beside env_threads: threads of one process share its generators"
        _require("generators", "own", env_threads == 1, accepted)
    accepted = "None or an int from 1 on, beside env_threads: what waits cannot be measured"
    _require("num_workers", num_workers, num_workers != "auto" or env_threads == 1, accepted)


def _require(name: str, value: Any, good: bool, accepted: str) -> None:
    if not good:
        raise ValueError(f"`{name}` must be {accepted}, got {value!r}.")
