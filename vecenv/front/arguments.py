"""Parses and checks the arguments of calls, for all backends: timeouts, seeds, options, reset masks, indices, counts.

A wrong argument raises before anything is sent, with Gymnasium's message where there is one. A ``parse_*`` function returns
the argument in the form that backends use; a ``check_*`` function returns nothing. The caller's objects are never modified.
"""

from __future__ import annotations

import difflib
import inspect
import math
import multiprocessing
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from vecenv.front.capabilities import raise_unsupported
from vecenv.system.spawning import end_if_importing_main

# -- differences between the versions of Gymnasium ---------------------------------------------------------------------
#
# vecenv supports Gymnasium 1.1 to 1.4 and behaves like the installed version. The differences that calling Gymnasium's own
# functions does not cover are handled here:
#
# * Before 1.4, wrong seeds, reset masks and observation spaces raise AssertionError; since 1.4, ValueError and TypeError.
#   Programs may catch either, so with older versions our exceptions inherit from both.
# * Before 1.3, a vector environment is closed when it is garbage-collected, even if its constructor failed.

GymnasiumAsync: TypeAlias = AsyncVectorEnv  # Gymnasium's own classes, even after vecenv.patching has replaced them
GymnasiumSync: TypeAlias = SyncVectorEnv
HAS_MAX_CONCURRENCY: Final = "max_concurrency" in inspect.signature(GymnasiumAsync.__init__).parameters
"""True from Gymnasium 1.4 on, which added this option and changed the exceptions."""


class NoCloseOnCollect:
    """A mixin, listed before ``VectorEnv``: garbage collection does not close it, as in Gymnasium 1.3 and later."""

    if hasattr(VectorEnv, "__del__"):

        def __del__(self) -> None:
            pass


class AssertionValueError(ValueError, AssertionError):
    """A ``ValueError`` that is also the ``AssertionError`` of Gymnasium before 1.4."""


class AssertionTypeError(TypeError, AssertionError):
    """A ``TypeError`` that is also the ``AssertionError`` of Gymnasium before 1.4."""


CompatValueError: Final[type[ValueError]] = ValueError if HAS_MAX_CONCURRENCY else AssertionValueError
CompatTypeError: Final[type[TypeError]] = TypeError if HAS_MAX_CONCURRENCY else AssertionTypeError

RESET_MASK_NAME: Final = "`options['reset_mask']`" if HAS_MAX_CONCURRENCY else "`options['reset_mask': mask]`"
"""The name of the reset mask in the error messages of the installed Gymnasium."""

MASK_MUST_SELECT: Final = "contain a boolean array" + (" with at least one True value" if HAS_MAX_CONCURRENCY else "")
"""The part after "must" in Gymnasium's message for a mask that selects no environment."""


# -- timeouts and deadlines --------------------------------------------------------------------------------------------

MAX_TIMEOUT_SECONDS: Final = 1e6
"""Timeouts of this length (11.6 days) or more count as infinite, because ``poll`` takes milliseconds as a C int."""


def parse_timeout(timeout: Any, name: str = "timeout") -> float | None:
    """Return a timeout in seconds: 0 for a negative one, ``None`` for an infinite one.

    Raises:
        TypeError: ``timeout`` is not a number.
        ValueError: ``timeout`` is nan.
    """
    if timeout is None:
        return None
    if isinstance(timeout, (bool, np.bool_)) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` must be a number of seconds or None, got {timeout!r}")
    seconds = float(min(timeout, 2 * MAX_TIMEOUT_SECONDS))  # an int may be too large for a float
    if math.isnan(seconds):
        raise ValueError(f"`{name}` must be a number of seconds or None, got {timeout!r}")
    return None if seconds >= MAX_TIMEOUT_SECONDS else max(seconds, 0.0)


def parse_close_timeout(timeout: Any) -> float | None:
    """Return the timeout of ``close()``, where ``None`` stands for the default: a long one for an infinite timeout."""
    seconds = parse_timeout(timeout)
    return MAX_TIMEOUT_SECONDS if seconds is None and timeout is not None else seconds


def deadline_after(timeout: Any, name: str = "timeout") -> float | None:
    """Return the ``time.monotonic()`` at which a timeout ends, ``None`` if never; raises like :func:`parse_timeout`."""
    seconds = parse_timeout(timeout, name)
    return None if seconds is None else time.monotonic() + seconds


def milliseconds_until(deadline: float | None) -> float | None:
    """Return the time left until ``deadline``, in the unit of ``select.poll``."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000


def require_callable(func: Any) -> None:
    """Raise ``TypeError`` unless the argument of an ``exec_func`` can be called."""
    if not callable(func):
        raise TypeError(f"exec_func needs a callable that takes an environment, got {func!r}")


# -- constructor arguments ---------------------------------------------------------------------------------------------


def check_env_fns(env_fns: Any, class_name: str, example: str = "") -> None:
    """Raise unless ``env_fns`` is a sequence of one or more callables.

    Args:
        env_fns: The argument to check.
        class_name: The name of the class that takes the argument, for the message.
        example: An expression that builds an environment, for classes that cannot use ``gymnasium.make(id)``.

    Raises:
        TypeError: ``env_fns`` is something else; the message shows what to write instead.
        ValueError: ``env_fns`` is empty.
    """
    build_expression = example or "gymnasium.make(id)"
    usage = f"{class_name} takes a sequence of functions that each build one environment: [lambda: {build_expression}] * 8"
    if isinstance(env_fns, str):
        hint = "" if example else f": use vecenv.make_vec({env_fns!r}, 8) instead"
        raise TypeError(f"{usage}; got the id {env_fns!r}{hint}")
    if isinstance(env_fns, Mapping) or not hasattr(env_fns, "__len__") or not hasattr(env_fns, "__getitem__"):
        hint = "; for copies of one environment, write [function] * 8" if callable(env_fns) else ""
        raise TypeError(f"{usage}; got {env_fns!r}{hint}")
    for index in range(len(env_fns)):
        if not callable(item := env_fns[index]):
            got = f"an environment, {item}, not a function" if isinstance(item, gymnasium.Env) else repr(item)
            raise TypeError(f"{usage}; env_fns[{index}] is {got}")
    if not len(env_fns):
        raise ValueError(f"{class_name} needs at least one env_fn, got {env_fns!r}")


_ADVICE: Final = {
    "ragged_infos": "It was removed: values that differ in type or shape become object arrays automatically, and "
    "vecenv.infos_by_row(envs) returns infos unmerged.",
    "strict": "It was removed: numbers that become infinite in the cast to the space's dtype cause one warning.",
    "spare_workers": "Write vecenv.make_vec(env_fn, num_envs, spare_workers=k), or "
    "vecenv.EpisodePrefetcher(vecenv.AsyncVectorEnv([env_fn] * (num_envs + k), autoreset_mode='Disabled'), k).",
    "isolate": "Write use_caller=False in place of isolate=True, and use_caller=True in place of isolate=False.",
    "restart_limit": "Write on_failure=vecenv.Restart(limit=...).",
    "restart_period": "Write on_failure=vecenv.Restart(limit=..., period=...).",
    "threads_per_worker": "Write worker_options=vecenv.WorkerOptions(threads=...).",
    "worker_affinity": "Write worker_options=vecenv.WorkerOptions(cores=...).",
    "worker_env": "Write worker_options=vecenv.WorkerOptions(env=...).",
    "preload": "Write worker_options=vecenv.WorkerOptions(preload=...).",
    "start_timeout": "Write worker_options=vecenv.WorkerOptions(start_timeout=...).",
    "dummy_env": "Write worker_options=vecenv.WorkerOptions(dummy_env=...).",
    "zero_copy": "Remove it: recv copies the observations.",
    "record_failures": "AsyncVectorEnv, MultiAgentVecEnv and RayVectorEnv record failures.",
    "seed": "Pass it to reset(seed=...).",
    "num_envs": "Pass that many functions: [env_fn] * num_envs.",
    "n_envs": "Did you mean 'num_envs'?",
    "spares": "Write spare_workers=k, an option of vecenv.make_vec.",
    "start_method": "Write context=...",
    "vec_env_cls": "Write backend='process', or backend='serial' for DummyVecEnv.",
    "vectorization_mode": "Pass backend='process' for 'async', or backend='serial' for 'sync'.",
}
"""Name of a removed option, or of another library's option -> the advice in the error message."""


def check_option_names(
    names: Iterable[str], accepted: Iterable[str], owner: str, *, vector_options: Sequence[str] = ()
) -> None:
    """Raise for an unknown option, and suggest a similar one.

    Args:
        names: The names to check.
        accepted: The known names.
        owner: The function or class with these options, for the message.
        vector_options: Options of the vector environment, which the caller may have meant.

    Raises:
        TypeError: An option is unknown.
    """
    accepted = list(accepted)
    for name in names:
        if name in accepted:
            continue
        hint = ""
        if name in _ADVICE:
            hint = f" {_ADVICE[name]}"
        elif name in vector_options:
            hint = " It is an option of the vector environment: pass it directly to vecenv.make_vec or vecenv.register."
        elif misplaced := _find_similar(name, vector_options, cutoff=0.75):
            hint = f" Did you mean {misplaced!r}, an option of the vector environment?"
        elif similar := _find_similar(name, accepted, cutoff=0.6):
            hint = f" Did you mean {similar!r}?"
        raise TypeError(f"{owner} has no option {name!r}.{hint} Options: {', '.join(accepted) or 'none'}")


def _find_similar(name: str, options: Iterable[str], *, cutoff: float) -> str | None:
    """Return the most similar option, except ``worker``: it takes a function, and ``workers=2`` means ``num_workers``."""
    return next(iter(difflib.get_close_matches(name, set(options) - {"worker"}, n=1, cutoff=cutoff)), None)


def check_start_method(context: Any) -> None:
    """Raise for a ``context`` that is neither ``None`` nor a start method of this system.

    Raises:
        ValueError: ``context`` is something else; the message lists the start methods.
    """
    if context not in (None, *(accepted := multiprocessing.get_all_start_methods())):
        raise ValueError(f"cannot find context for {context!r}: expected None or one of {', '.join(map(repr, accepted))}.")


def check_flags(**flags: Any) -> None:
    """Raise for an option that must be True or False and is neither.

    A truthy value is not enough: OpenRL's ``AsyncVectorEnv`` takes ``(env_fns, observation_space, action_space)``, so its
    users would pass spaces as the second and third argument without noticing.

    Raises:
        TypeError: An option is not a boolean.
    """
    for option, value in flags.items():
        if not (isinstance(value, (bool, np.bool_, int)) and value in (0, 1)):
            raise TypeError(f"`{option}` must be True or False, got {value!r}")


def parse_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """Return the autoreset mode for a member of ``AutoresetMode`` or for its string value.

    Raises:
        ValueError: There is no such mode.
    """
    try:
        return AutoresetMode(mode)
    except ValueError:
        accepted = ", ".join(repr(member.value) for member in AutoresetMode)
        raise ValueError(f"{mode!r} is not a valid AutoresetMode: expected one of {accepted}.") from None


def store_gymnasium_options(
    envs: Any, env_fns: Sequence[Callable[[], Any]], shared_memory: bool, copy: bool, context: str | None, daemon: bool,
    observation_mode: Any, autoreset_mode: str | AutoresetMode, max_concurrency: int | None, worker: Any = None,
) -> None:  # fmt: skip
    """Check Gymnasium's own arguments, and store them as attributes of ``envs``, because programs may read them."""
    end_if_importing_main()
    envs.closed = True  # until there is something to close
    check_env_fns(env_fns, type(envs).__name__)
    check_flags(shared_memory=shared_memory, copy=copy)
    check_start_method(context)
    if worker is not None:  # `AsyncVectorEnv.__new__` handles one that is passed to the class itself
        raise ValueError(f"`worker` must be a function, and a subclass cannot pass it to its base class; got {worker!r}")
    envs.env_fns, envs.num_envs = env_fns, len(env_fns)
    envs.shared_memory, envs.context, envs.daemon, envs.worker = shared_memory, context, daemon, worker
    envs.observation_mode, envs.autoreset_mode = observation_mode, parse_autoreset_mode(autoreset_mode)
    if max_concurrency is not None:
        if not isinstance(max_concurrency, (int, np.integer)):
            raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
        if max_concurrency < 1:
            raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
    envs.max_concurrency = max_concurrency


# -- actions -----------------------------------------------------------------------------------------------------------


def shape_error(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    """Return the error for an argument of the wrong shape. Raise it before anything is sent."""
    return ValueError(f"{name}: got shape {got}, expected {expected}; nothing was sent")


# -- seeds and options of a reset --------------------------------------------------------------------------------------

ResetOptions: TypeAlias = dict[str, Any] | Sequence[dict[str, Any] | None] | None
"""One dict for every environment, or a sequence with a dict or ``None`` for each."""


class MaskOnlyOptions(dict[str, Any]):
    """Reset options with a mask. If they hold nothing else, environments receive ``None`` instead of ``{}``.

    Adapters that add a mask use this class: an environment that checks for options must find none if the user passed none.
    """


def random_seed() -> int:
    """Return a seed from the operating system."""
    return int(np.random.SeedSequence().generate_state(1)[0] >> 1)


def parse_seeds(seed: Any, num_envs: int, rows: Sequence[int] | None = None) -> list[Any]:
    """Return a seed or ``None`` for each environment.

    Args:
        seed: ``None``, an int (environment i gets ``seed + i``), or a sequence or array of seeds.
        num_envs: Number of environments.
        rows: The environment of each entry of a sequence; ``None``: all, in order. Other environments get ``None``.

    Raises:
        TypeError: The seed is neither an int nor a sequence.
        ValueError: A sequence has the wrong length.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    expected = num_envs if rows is None else len(rows)
    if isinstance(seed, str | bytes) or not hasattr(seed, "__len__"):
        raise TypeError(f"seed must be an integer, a sequence of {expected} integers, or None; got {type(seed).__name__}")
    if len(seed) != expected:
        raise CompatValueError(
            f"If seeds are passed as a list the length must match num_envs={expected} but got length={len(seed)}."
        )
    return _expand([int(value) if isinstance(value, np.integer) else value for value in seed], rows, num_envs)


def _expand(values: list[Any], rows: Sequence[int] | None, num_envs: int) -> list[Any]:
    """Expand the values of some rows to a list for all environments, with ``None`` for the others."""
    if rows is None:
        return values
    by_row = dict(zip(rows, values, strict=True))
    return [by_row.get(row) for row in range(num_envs)]


def split_reset_mask(
    options: ResetOptions, num_envs: int, rows: Sequence[int] | None = None
) -> tuple[npt.NDArray[np.bool_] | None, ResetOptions]:
    """Split reset options into the mask and the other options.

    Gymnasium pops the mask from the caller's dict. Its own ``RecordEpisodeStatistics`` looks for the mask after the reset,
    finds none, and clears the statistics of all environments. This function therefore leaves the dict unchanged.

    Args:
        options: One dict for all environments, or a sequence with a dict or ``None`` for each.
        num_envs: Number of environments.
        rows: The environment of each entry of a sequence; ``None``: all, in order. Other environments get ``None``.

    Returns:
        A copy of the mask, bool ``(num_envs,)``, or ``None``; and a copy of the options without it, ``None`` if they were
        ``None`` or a :class:`MaskOnlyOptions` of only the mask. A sequence is returned as a list with an entry for every
        environment.

    Raises:
        TypeError: The mask is not a bool array (of NumPy, JAX or torch), or the options are neither a dict nor a sequence of
            dicts.
        ValueError: The mask has the wrong shape or selects no environment, or a sequence has the wrong length or contains a
            mask.
    """
    if options is None:
        return None, None
    if not isinstance(options, Mapping):
        return None, _expand(_parse_options_per_env(options, num_envs if rows is None else len(rows)), rows, num_envs)
    if "reset_mask" not in options:
        return None, dict(options)
    mask, mask_must = _to_numpy(options["reset_mask"]), f"{RESET_MASK_NAME} must"
    if not isinstance(mask, np.ndarray):
        raise CompatTypeError(f"{mask_must} be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise CompatValueError(f"{mask_must} have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise CompatTypeError(f"{mask_must} have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise CompatValueError(f"{mask_must} {MASK_MUST_SELECT}, got reset_mask={mask}")
    others = {key: value for key, value in options.items() if key != "reset_mask"}
    return mask.copy(), None if isinstance(options, MaskOnlyOptions) and not others else others


def _to_numpy(mask: Any) -> Any:
    """Convert a JAX or torch array to NumPy, because Gymnasium's array-conversion wrappers convert options as well."""
    if type(mask).__module__.partition(".")[0] not in ("jax", "jaxlib", "torch"):
        return mask
    return np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask)


def _parse_options_per_env(options: Any, expected: int) -> list[dict[str, Any] | None]:
    """Check a sequence with the options of each environment, and return a list of copies."""
    if isinstance(options, str | bytes) or not isinstance(options, Sequence):
        kind = type(options).__name__
        raise TypeError(f"options must be a dict, or a sequence of {expected} dicts, one per environment; got {kind}")
    if len(options) != expected:
        raise ValueError(f"options has {len(options)} dicts, expected {expected}: one per environment")
    for index, env_options in enumerate(options):
        if env_options is not None and not isinstance(env_options, Mapping):
            raise TypeError(f"options[{index}] must be a dict or None, got {type(env_options).__name__}")
        if env_options is not None and "reset_mask" in env_options:
            raise ValueError(f"options[{index}] has 'reset_mask', which applies to all environments: use env_id instead")
    return [None if env_options is None else dict(env_options) for env_options in options]


def select_options(options: ResetOptions, rows: Sequence[int]) -> ResetOptions:
    """Select the options of some rows: the shared dict, or a list in the order of ``rows``."""
    return [options[row] for row in rows] if isinstance(options, list) else options


def reject_options(envs: object, options: ResetOptions) -> None:
    """Raise if there are options other than the mask, for environments that take no options.

    Raises:
        NotImplementedError: There are options per environment.
        ValueError: There are options for all environments.
    """
    if isinstance(options, list):
        raise_unsupported(envs, "reset each environment with its own options", "its environments take no options")
    if options:
        keys = sorted(map(str, options))
        raise ValueError(f"{type(envs).__name__} takes no reset options except 'reset_mask', got {keys}; nothing was sent")


# -- indices and counts of environments --------------------------------------------------------------------------------

_LIST_CHECK_MAX: Final = 64
"""The largest number of indices for which a check in Python is faster than one with a NumPy table."""


def parse_env_ids(env_id: Any, num_envs: int) -> npt.NDArray[np.intp]:
    """Return the indices of environments as a new array, ``(k,)``.

    Raises:
        ValueError: ``env_id`` does not consist of one or more distinct integers from 0 to ``num_envs - 1``.
    """
    ids = np.asarray(env_id)
    if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
        got = "a mask: use np.flatnonzero(mask)" if ids.dtype == np.bool_ else repr(env_id)
        raise ValueError(f"env_id must be a sequence of integers, got {got}")
    if ids.size == 0:
        raise ValueError("env_id is empty: pass at least one index")
    if len(ids) <= _LIST_CHECK_MAX:
        listed = ids.tolist()
        out_of_range = min(listed) < 0 or max(listed) >= num_envs
        duplicates = len(set(listed)) != len(listed)
    else:
        wide = ids.astype(np.int64)
        # viewed as unsigned, negative numbers are huge, so one comparison checks both ends
        out_of_range = bool(np.maximum.reduce(wide.view(np.uint64)) >= num_envs)
        if not out_of_range:
            present = np.zeros(num_envs, np.bool_)
            present[wide] = True
            duplicates = np.count_nonzero(present) != len(ids)
    if out_of_range:
        raise ValueError(f"env_id must be within 0..{num_envs - 1}, got {ids.tolist()}")
    if duplicates:
        raise ValueError(f"env_id must not contain duplicates, got {ids.tolist()}")
    return ids.astype(np.intp)


def parse_rows(env_id: Any, num_envs: int) -> list[int]:
    """Return the rows for ``env_id``, all of them for ``None``; raises like :func:`parse_env_ids`."""
    return list(range(num_envs)) if env_id is None else parse_env_ids(env_id, num_envs).tolist()


def parse_count(count: Any, num_envs: int) -> int:
    """Return the number of environments that a ``recv`` returns.

    Raises:
        TypeError: ``count`` is not an integer.
        ValueError: ``count`` is not from 1 to ``num_envs``.
    """
    return _parse_number("count", count, "num_envs", num_envs)


def parse_at_least(at_least: Any, count: int) -> int:
    """Return how many ready rows are enough for a ``recv`` of ``count`` rows; 1 for ``None``.

    Raises:
        TypeError: ``at_least`` is not an integer.
        ValueError: ``at_least`` is not from 1 to ``count``.
    """
    if at_least is None:
        return 1
    return _parse_number("at_least", at_least, "count", count)


def parse_within(within: Any) -> float:
    """Return the ``time.monotonic()`` from which ``at_least`` rows are enough; the current time for ``None``.

    Raises:
        TypeError: ``within`` is not a number.
        ValueError: ``within`` is nan.
    """
    deadline = deadline_after(0.0 if within is None else within, "within")
    return math.inf if deadline is None else deadline


def _parse_number(name: str, value: Any, maximum_name: str, maximum: int) -> int:
    """Return an integer from 1 to ``maximum``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer or None, got {type(value).__name__}") from None
    if not 1 <= number <= maximum:
        raise ValueError(f"{name} must be from 1 to {maximum_name}={maximum}, got {number}")
    return number
