"""The options of vector environments, and a table of their checks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, TypedDict

import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.recording.recorder import FlightRecorder
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerVariables, check_variables, require_processes

NumWorkers: TypeAlias = int | Literal["auto"] | None
BatchSize: TypeAlias = int | Literal["auto"] | None
StartMethod: TypeAlias = Literal["fork", "spawn", "forkserver"]


@dataclass(frozen=True, slots=True)
class Restart:
    """A budget of restarts, for ``on_failure=`` of :class:`vecenv.AsyncVectorEnv`.

    Args:
        limit: Maximum number of restarts of all environments together within ``period``. ``None``: each environment, and
            each worker that dies, is allowed 5 restarts in that time, plus one for every 1,000 steps since the oldest of
            them. ``math.inf``: no limit.
        period: Length of the period in seconds.

    Raises:
        ValueError: ``limit`` is not ``None``, a non-negative int or infinite, or ``period`` is not a positive number.
    """

    limit: float | None = None
    period: float = 60.0

    @classmethod
    def of(cls, on_failure: OnFailure) -> Restart:
        """Return ``on_failure`` if it is a :class:`Restart`, otherwise the default budget."""
        return on_failure if isinstance(on_failure, cls) else cls()

    def __post_init__(self) -> None:
        if self.limit != math.inf:
            accepted = "None, a non-negative int or float('inf')"
            check_option("Restart(limit)", self.limit, (choice_check(None, or_=int_check(0)), accepted))
        check_option("Restart(period)", self.period, _DURATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Rarely needed options of worker processes, for ``worker_options=`` of :class:`vecenv.AsyncVectorEnv`.

    Args:
        threads: Maximum number of BLAS, OpenMP and torch threads in a worker; ``None``: usable cores divided by workers.
        cores: The cores of the workers: a list with one entry per worker, each a core or a list of cores. ``None``: each
            worker is bound to one core if there are enough, except while other programs need the cores.
        env: Environment variables of the workers: name -> value, or a function of the worker's index that returns it
            (``{"CUDA_VISIBLE_DEVICES": lambda worker: worker % 4}``); the value ``None`` removes a variable. ``spawn`` and
            ``forkserver`` set them before all imports but preloaded ones; under ``fork``, modules imported here have read
            the old values. If any are given, no environment is built in this process unless ``dummy_env=True``.
        preload: With ``context="forkserver"``, modules that the fork server imports once for all workers of the program.
        start_timeout: Time limit, in seconds, for a worker to build its environments.
        dummy_env: The source of metadata and spaces. ``True``: an environment that is built and closed in this process, as
            in Gymnasium. ``False``: one in a process of its own; none is built here. ``None``: like ``False`` if an
            environment is tried in a separate process anyway (``num_workers`` or ``batch_size`` is ``"auto"``, or
            ``use_caller=True``), or with ``env``; otherwise like ``True``. An object, such as an environment, with the
            ``observation_space``, ``action_space``, ``metadata`` and ``render_mode`` of all environments: no environment is
            built to read them.

    Raises:
        TypeError, ValueError: A value has the wrong type or is out of range.
    """

    threads: int | None = None
    cores: Sequence[int | Sequence[int]] | None = None
    env: WorkerVariables | None = None
    preload: Sequence[str] | None = None
    start_timeout: float = 60.0
    dummy_env: Any = None

    def __post_init__(self) -> None:
        threads = choice_check(None, or_=int_check(1)), "None or a positive int"
        check_option("WorkerOptions(threads)", self.threads, threads)
        check_option("WorkerOptions(start_timeout)", self.start_timeout, _DURATION)
        check_option(
            "WorkerOptions(dummy_env)", self.dummy_env,
            (
                choice_check(None, True, False, or_=lambda env: all(hasattr(env, name) for name in _DUMMY_ENV_ATTRIBUTES)),
                f"None, True, False or an object with {', '.join(_DUMMY_ENV_ATTRIBUTES)}",
            ),
        )  # fmt: skip
        if self.env is not None:
            check_variables(self.env)


_DUMMY_ENV_ATTRIBUTES: Final = ("observation_space", "action_space", "metadata", "render_mode")

OnFailure: TypeAlias = Literal["raise", "restart"] | Restart


class EngineOptions(TypedDict, total=False):
    """Options that other classes pass on to :class:`vecenv.AsyncVectorEnv`, where they are documented."""

    shared_memory: bool
    copy: bool
    context: StartMethod | None
    daemon: bool
    max_concurrency: int | None
    num_workers: NumWorkers
    use_caller: bool | None
    batch_size: BatchSize
    env_threads: int
    on_failure: OnFailure
    step_timeout: float | None
    record_failures: str | os.PathLike[str] | FlightRecorder | None
    generators: GeneratorsOption
    worker_options: WorkerOptions | None


def options_for_processes(on_failure: Any, step_timeout: Any, variables: Any, use_caller: bool | None = None) -> str:
    """Return the names of the given options that only worker processes can fulfil, or an empty string."""
    given = {
        "on_failure": on_failure != "raise",
        "step_timeout": step_timeout is not None,
        "WorkerOptions(env)": bool(variables),
        "use_caller=False": use_caller is False,
    }
    return " and ".join(name for name, is_given in given.items() if is_given)


def require_processes_for(
    name: str, num_workers: int | str | None, use_caller: bool | None, dummy_env: bool | None, cause: str
) -> None:
    """Raise if options need worker processes but none are possible.

    ``num_workers="auto"`` falls back to this process, and so needs none, unless ``use_caller`` is ``False``. ``cause`` names
    the options from which ``use_caller=False`` follows.

    Raises:
        NotImplementedError: Worker processes are not possible here. The text names an alternative; nothing has been built.
    """
    if dummy_env is False:
        require_processes(f"{name} with dummy_env=False")
    elif use_caller:
        require_processes(f"{name} with use_caller=True")
    elif num_workers != 0 and num_workers != "auto":
        require_processes(f"{name} with num_workers={num_workers}")
    elif use_caller is False and num_workers == "auto":
        require_processes(f"{name} with {cause}")


def parse_spares(spare_workers: Any, num_envs: int, mode: AutoresetMode, **others: Any) -> int:
    """Check the number of spare workers and return it. ``others`` are the other options.

    Raises:
        ValueError: The number is invalid, or cannot be combined with another option; the text gives the reason.
    """
    check_option("spare_workers", spare_workers)
    workers = others["num_workers"]
    reasons = {
        "num_workers": workers is None or workers == num_envs or "each row needs a process of its own: num_workers=None",
        "use_caller": not others["use_caller"] or "an environment of the calling process cannot move elsewhere",
        "max_concurrency": others["max_concurrency"] is None or "they reset while all the others step",
        "env_threads": others["env_threads"] == 1 or "a spare has only one environment",
        "autoreset_mode": mode is not AutoresetMode.DISABLED or "they serve only episodes that begin by autoreset",
    }
    for option, reason in reasons.items():
        if spare_workers and reason is not True:
            raise ValueError(f"`spare_workers` cannot be combined with this `{option}`: {reason}.")
    return int(spare_workers)


_Check: TypeAlias = Callable[[Any], bool]


def int_check(low: int, high: float = math.inf) -> _Check:
    """Return a check that accepts ints from ``low`` to ``high``, but not bools."""
    return lambda value: isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(low <= value <= high)


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and bool(value > 0)


def choice_check(*accepted: Any, or_: _Check = lambda value: False) -> _Check:
    """Return a check for these constants (0 is not ``False``, nor 1 ``True``) and for the values that ``or_`` accepts."""
    return lambda value: (
        any(value is choice or (isinstance(choice, str) and value == choice) for choice in accepted) or or_(value)
    )


_OPTIONAL_BOOL: Final = choice_check(None, True, False), "None, True or False"
_DURATION: Final = _is_positive_number, "a number of seconds above 0"
_CHECKS: Final[dict[str, tuple[_Check, str]]] = {
    "num_envs": (int_check(1), "a positive int"),
    "num_workers": (
        choice_check(None, "auto", or_=int_check(0)),
        "None (one process per environment), 'auto', or a non-negative int",
    ),
    "spare_workers": (int_check(0), "a non-negative int"),
    "on_failure": (
        choice_check("raise", "restart", or_=lambda value: isinstance(value, Restart)),
        "'raise', 'restart' or a vecenv.Restart(limit=, period=)",
    ),
    "step_timeout": (choice_check(None, or_=_is_positive_number), "None or a number of seconds above 0"),
    "env_threads": (int_check(1), "a positive int"),
    "generators": (choice_check("shared", "own"), "'shared' or 'own'"),
    "use_caller": _OPTIONAL_BOOL,
    "worker_options": (
        choice_check(None, or_=lambda value: isinstance(value, WorkerOptions)),
        "None or a vecenv.WorkerOptions(...)",
    ),
}
"""Option -> (check, accepted values). Checks that depend on other options are in :func:`check_options`."""


def check_option(name: str, value: Any, check: tuple[_Check, str] | None = None) -> None:
    """Raise if the value of an option is invalid.

    Args:
        name: The option.
        value: Its value.
        check: A check and a description of the accepted values; ``None``: the option's entry in ``_CHECKS``.

    Raises:
        ValueError: The text names the accepted values.
    """
    accepts, accepted = check or _CHECKS[name]
    if not accepts(value):
        raise ValueError(f"`{name}` must be {accepted}, got {value!r}.")


def check_options(num_envs: int, batch_size: Any, **options: Any) -> None:
    """Raise for invalid options. The error names the option and the accepted values.

    Args:
        num_envs: Number of environments.
        batch_size: Number of environments that ``recv`` returns.
        options: Any of the other options in :class:`EngineOptions`.

    Raises:
        ValueError: An option is invalid. Nothing has been built.
    """
    for name, value in options.items():
        if name in _CHECKS:
            check_option(name, value)
    sizes = choice_check(None, "auto", or_=int_check(1, num_envs)), f"None, 'auto' or an int within 1..{num_envs}"
    check_option("batch_size", batch_size, sizes)
    if options.get("use_caller") or options.get("num_workers") == 0:
        workers = options.get("worker_options")
        needs_processes = {
            "step_timeout": (options.get("step_timeout") is not None, "can be killed"),
            "worker_options": (workers and workers.env, "can have the environment variables of WorkerOptions(env)"),
            "env_threads": (options.get("env_threads", 1) != 1, "can run these threads"),
        }
        for name, (is_used, reason) in needs_processes.items():
            if is_used:
                raise ValueError(
                    f"`{name}` needs worker processes, which {reason}: it cannot be combined with `use_caller=True` "
                    "or `num_workers=0`"
                )
    if options.get("env_threads", 1) != 1:
        shared = "'shared' with env_threads, because threads of one process share its generators"
        check_option("generators", options.get("generators", "shared"), (choice_check("shared"), shared))
        most = "None with env_threads, which runs that many environments of each worker at once"
        check_option("max_concurrency", options.get("max_concurrency"), (choice_check(None), most))
        counted = "None or a positive int with env_threads, because waiting environments cannot be measured"
        check_option("num_workers", options.get("num_workers"), (choice_check(None, or_=int_check(1)), counted))
