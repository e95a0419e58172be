"""What calls are given, read once for all backends: seeds, reset masks, indices, counts.

Whatever is wrong with them is said before anything is sent, in Gymnasium's words where it has some. Nothing that a caller
passes is changed.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv as GymnasiumAsync
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector import SyncVectorEnv as GymnasiumSync

from vecenv.front.capabilities import unable

__all__ = [
    "HAS_MAX_CONCURRENCY", "LONGEST", "MASK_IS_EMPTY", "RESET_MASK", "GymnasiumAsync", "GymnasiumSync",
    "NotClosedUnasked", "OnlyMask", "ResetOptions", "WrongType", "WrongValue", "any_seed", "check_env_fns", "check_names",
    "check_switches", "count_of", "deadline_of", "env_ids_of", "least_of", "milliseconds", "mode_of",
    "options_of_rows", "refuse_options", "reset_mask_of", "rows_of", "seconds_of", "seeds_of", "wrong_shape",
]  # fmt: skip


# -- what differs between the versions of Gymnasium --------------------------------------------------------------------
#
# vecenv goes with Gymnasium 1.1 to 1.4 and means what the installed one means. What their engines differ in, apart from what
# their own functions do for us, is kept here and nowhere else:
#
# * Before 1.4 wrong seeds, reset masks and observation spaces were refused by ``assert``, since then by ``ValueError`` and
#   ``TypeError``. Programs may catch either, so with the older ones ours are both.
# * Before 1.3 every vector environment is closed when it is collected, one whose constructor failed too.
# * Before 1.4 a custom worker function is given seven arguments, since then an eighth, for ``max_concurrency``.
#
# The classes are Gymnasium's as they were before anything was put in their place (:mod:`vecenv.patching`).

HAS_MAX_CONCURRENCY: Final = "max_concurrency" in inspect.signature(GymnasiumAsync.__init__).parameters
"""Whether Gymnasium's own class has this option. It came with 1.4, as the exceptions did; ours has it always."""


class NotClosedUnasked:
    """A vector environment that is not closed when it is collected, as since Gymnasium 1.3; goes before ``VectorEnv``."""

    if hasattr(VectorEnv, "__del__"):

        def __del__(self) -> None:
            pass


class AssertedValue(ValueError, AssertionError):
    """A ``ValueError`` where the installed Gymnasium has an ``AssertionError``."""


class AssertedType(TypeError, AssertionError):
    """A ``TypeError`` where the installed Gymnasium has an ``AssertionError``."""


WrongValue: Final[type[ValueError]] = ValueError if HAS_MAX_CONCURRENCY else AssertedValue
WrongType: Final[type[TypeError]] = TypeError if HAS_MAX_CONCURRENCY else AssertedType

RESET_MASK: Final = "`options['reset_mask']`" if HAS_MAX_CONCURRENCY else "`options['reset_mask': mask]`"
"""What a wrong mask is called."""

MASK_IS_EMPTY: Final = "contain a boolean array" + (" with at least one True value" if HAS_MAX_CONCURRENCY else "")
"""What a mask must do that chooses no environment."""


# -- timeouts and deadlines --------------------------------------------------------------------------------------------

LONGEST: Final = 1e6
"""Seconds (eleven days); a longer wait never ends, since the kernel counts milliseconds in 31 bits."""


def seconds_of(timeout: Any, name: str = "timeout") -> float | None:
    """A timeout in seconds: ``None`` for one that never ends, 0 for a negative one.

    Raises:
        TypeError: It is no number.
        ValueError: It is not a number (nan).
    """
    if timeout is None:
        return None
    if isinstance(timeout, (bool, np.bool_)) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` must be a number of seconds or None, got {timeout!r}")
    seconds = float(min(timeout, 2 * LONGEST))  # an int may be too large for a float
    if math.isnan(seconds):
        raise ValueError(f"`{name}` must be a number of seconds or None, got {timeout!r}")
    return None if seconds >= LONGEST else max(seconds, 0.0)


def deadline_of(timeout: Any, name: str = "timeout") -> float | None:
    """The moment of ``time.monotonic()`` at which a timeout is over; ``None``: never. Raises as :func:`seconds_of`."""
    seconds = seconds_of(timeout, name)
    return None if seconds is None else time.monotonic() + seconds


def milliseconds(deadline: float | None) -> float | None:
    """What is left until ``deadline``, as ``poll`` wants it."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0) * 1000


# -- what calls are given ----------------------------------------------------------------------------------------------

_FEW: Final = 64

ResetOptions: TypeAlias = dict[str, Any] | Sequence[dict[str, Any] | None] | None
"""Options of a reset: one dict for every environment, or a sequence with one (or ``None``) for each."""


class OnlyMask(dict[str, Any]):
    """Reset options that are nothing but a mask: environments get ``None`` then, not ``{}``.

    For interfaces whose own resets have no options, so that environments which look whether there are any see none.
    """


def check_env_fns(env_fns: Any, name: str) -> None:
    """A sequence of one or more functions that build an environment each.

    Args:
        env_fns: What a vector environment was given.
        name: Its class.

    Raises:
        TypeError: Something else; says what came, and what to write instead.
        ValueError: There is none.
    """
    wanted = f"{name} wants a sequence of functions that build one environment each, as [lambda: gymnasium.make(id)] * 8"
    if isinstance(env_fns, str):
        raise TypeError(f"{wanted}; got the id {env_fns!r}, which vecenv.make_vec({env_fns!r}, 8) takes")
    if not hasattr(env_fns, "__len__") or not hasattr(env_fns, "__getitem__"):
        hint = "; one function is [function] * 8" if callable(env_fns) else ""
        raise TypeError(f"{wanted}; got {env_fns!r}{hint}")
    for index in range(len(env_fns)):
        if not callable(item := env_fns[index]):
            what = f"the environment {item}, built already" if isinstance(item, gymnasium.Env) else repr(item)
            raise TypeError(f"{wanted}; env_fns[{index}] is {what}")
    if not len(env_fns):
        raise ValueError(f"{name} needs at least one env_fn, got {env_fns!r}")


def check_names(given: Iterable[str], accepted: Iterable[str], whose: str, *, elsewhere: Sequence[str] = ()) -> None:
    """Refuse options that there are not, and say which are close.

    Args:
        given: The names that were given.
        accepted: The names that there are.
        whose: What takes them, for the message.
        elsewhere: Options that belong into ``vector_kwargs``.

    Raises:
        TypeError: One of them is no option.
    """
    accepted = list(accepted)
    for name in given:
        if name in accepted:
            continue
        close = difflib.get_close_matches(name, accepted, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        other = [name] if name in elsewhere else difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.8)
        if other:
            what = "It" if other == [name] else f"{other[0]!r}"
            hint = f" {what} is an option of the vector environment: vector_kwargs={{{other[0]!r}: ...}}."
        if name == "n_envs":
            hint = " Did you mean 'num_envs'?"
        if name == "vectorization_mode":
            hint = " What steps the environments is said by backend='process' (async) or backend='serial' (sync)."
        raise TypeError(f"{whose} has no option {name!r}.{hint} Options: {', '.join(accepted)}")


def wrong_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> ValueError:
    """The error of a batch of another shape, on every backend."""
    return ValueError(f"{name}: got shape {got}, wanted {wanted}; nothing was sent")


def check_switches(name: str, **switches: Any) -> None:
    """Refuse a value that is neither True nor False where one of those is wanted, by the option's name.

    OpenRL's class of the same name takes ``(env_fns, observation_space, action_space)``: spaces in the second and third
    place would be true, and no error.

    Raises:
        TypeError: Says what came, and for a space what to write.
    """
    for option, value in switches.items():
        if not (isinstance(value, (bool, np.bool_, int)) and value in (0, 1)):
            hint = ""
            if isinstance(value, gymnasium.Space):
                hint = (
                    f"; {name} reads spaces from the environments, and its second and third argument are `shared_memory` "
                    "and `copy`. vecenv.multi_agent.make_openrl takes OpenRL's arguments in OpenRL's order"
                )
            raise TypeError(f"`{option}` must be True or False, got {value!r}{hint}")


def any_seed() -> int:
    """A seed from the operating system, for an environment that was given none."""
    return int(np.random.SeedSequence().generate_state(1)[0] >> 1)


def seeds_of(seed: Any, num_envs: int, rows: Sequence[int] | None = None) -> list[Any]:
    """A seed, or ``None``, for each environment.

    Args:
        seed: An int gives environment i ``seed + i``; a sequence of ``num_envs`` gives each its own; ``None`` none.
        num_envs: Number of environments.
        rows: A sequence has one for each of these, in their order; the others get ``None``.

    Raises:
        TypeError: Neither an int nor a sequence.
        ValueError: A sequence of another length.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    wanted = num_envs if rows is None else len(rows)
    if isinstance(seed, str | bytes) or not hasattr(seed, "__len__"):
        raise TypeError(f"seed must be an integer, a sequence of {wanted} of them, or None; got {type(seed).__name__}")
    if len(seed) != wanted:
        raise WrongValue(
            f"If seeds are passed as a list the length must match num_envs={wanted} but got length={len(seed)}."
        )
    return _placed(list(seed), rows, num_envs)


def _placed(values: list[Any], rows: Sequence[int] | None, num_envs: int) -> list[Any]:
    """What some environments are given, at their places among all."""
    if rows is None:
        return values
    given = dict(zip(rows, values, strict=True))
    return [given.get(row) for row in range(num_envs)]


def reset_mask_of(
    options: ResetOptions, num_envs: int, rows: Sequence[int] | None = None
) -> tuple[npt.NDArray[np.bool_] | None, ResetOptions]:
    """``options["reset_mask"]``, and the other options.

    Gymnasium pops the mask out of the caller's dict, so that its own ``RecordEpisodeStatistics``, which looks for the mask
    after the reset, clears the statistics of all environments. Here the dict stays as it is.

    Args:
        options: One dict for all environments, or a sequence of ``num_envs``, with a dict or ``None`` for each.
        num_envs: Number of environments.
        rows: A sequence has one for each of these, in their order; the others get ``None``.

    Returns:
        A copy of the mask, bool ``(num_envs,)``, or ``None``; the options without it, or ``None`` if there were none. A
        sequence comes back as a list with an entry for every environment.

    Raises:
        TypeError: The mask is no array of bool (NumPy's, JAX's or torch's); the options are neither a dict nor a sequence of
            dicts.
        ValueError: The mask has another shape, or chooses no environment; a sequence has another length, or a mask in it.
    """
    if options is None:
        return None, None
    if not isinstance(options, Mapping):
        return None, _placed(_options_of_each(options, num_envs if rows is None else len(rows)), rows, num_envs)
    if "reset_mask" not in options:
        return None, options
    mask, name = _on_the_host(options["reset_mask"]), f"{RESET_MASK} must"
    if not isinstance(mask, np.ndarray):
        raise WrongType(f"{name} be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise WrongValue(f"{name} have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise WrongType(f"{name} have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise WrongValue(f"{name} {MASK_IS_EMPTY}, got reset_mask={mask}")
    others = {key: value for key, value in options.items() if key != "reset_mask"}
    return mask.copy(), None if isinstance(options, OnlyMask) and not others else others


def _on_the_host(mask: Any) -> Any:
    """A mask of JAX's or torch's as NumPy's: Gymnasium's wrappers that convert arrays convert options, too."""
    if type(mask).__module__.partition(".")[0] not in ("jax", "jaxlib", "torch"):
        return mask
    return np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask)


def _options_of_each(options: Any, num_envs: int) -> list[dict[str, Any] | None]:
    if isinstance(options, str | bytes) or not isinstance(options, Sequence):
        kind = type(options).__name__
        raise TypeError(f"options must be a dict, or a sequence of {num_envs} with one for each environment; got {kind}")
    if len(options) != num_envs:
        raise ValueError(f"options has {len(options)} dicts, wanted {num_envs}: one for each environment")
    for place, own in enumerate(options):
        if own is not None and not isinstance(own, Mapping):
            raise TypeError(f"options[{place}] must be a dict or None, got {type(own).__name__}")
        if own is not None and "reset_mask" in own:
            raise ValueError(f"options[{place}] has 'reset_mask', which is about all environments: use env_id instead")
    return list(options)


def options_of_rows(options: ResetOptions, rows: Sequence[int]) -> ResetOptions:
    """What of checked options goes to some environments: the one dict for all, or their own, in their order."""
    return [options[row] for row in rows] if isinstance(options, list) else options


def refuse_options(envs: object, options: ResetOptions, reason: str) -> None:
    """Refuse checked options other than the mask, where environments take none: by name, and before anything is sent.

    Raises:
        NotImplementedError: There are options for each environment.
        ValueError: There are options for all.
    """
    if isinstance(options, list):
        unable(envs, "reset each environment with options of its own", reason)
    if options:
        keys = sorted(map(str, options))
        raise ValueError(f"{type(envs).__name__} takes no reset options but 'reset_mask', got {keys}; nothing was sent")


def mode_of(mode: str | AutoresetMode) -> AutoresetMode:
    """An autoreset mode, which may be given by its value.

    Raises:
        ValueError: There is no such mode; names those there are.
    """
    try:
        return AutoresetMode(mode)
    except ValueError:
        accepted = ", ".join(repr(one.value) for one in AutoresetMode)
        raise ValueError(f"{mode!r} is not a valid AutoresetMode: wanted one of {accepted}.") from None


def env_ids_of(env_id: Any, num_envs: int) -> npt.NDArray[np.intp]:
    """Indices of environments, fresh, ``(k,)``.

    Raises:
        ValueError: Not one or more distinct integers from 0 to ``num_envs - 1``.
    """
    ids = np.asarray(env_id)
    if ids.ndim != 1 or not (ids.dtype.kind in "iu" or ids.size == 0):
        raise ValueError(f"env_id must be a sequence of int, got {env_id!r}")
    if ids.size == 0:
        raise ValueError("env_id is empty: name at least one environment")
    if len(ids) <= _FEW:  # lists are faster for few, tables for many
        listed = ids.tolist()
        outside = min(listed) < 0 or max(listed) >= num_envs
        twice = len(set(listed)) != len(listed)
    else:
        wide = ids.astype(np.int64)
        # one comparison for both ends: negative numbers become huge without their sign
        outside = bool(np.maximum.reduce(wide.view(np.uint64)) >= num_envs)
        if not outside:
            named = np.zeros(num_envs, np.bool_)
            named[wide] = True
            twice = np.count_nonzero(named) != len(ids)
    if outside:
        raise ValueError(f"env_id must lie within 0..{num_envs - 1}, got {ids.tolist()}")
    if twice:
        raise ValueError(f"env_id must not name an environment twice, got {ids.tolist()}")
    return ids.astype(np.intp)


def rows_of(env_id: Any, num_envs: int) -> list[int]:
    """The rows of environments by their indices; ``None``: all. Errors as of :func:`env_ids_of`."""
    return list(range(num_envs)) if env_id is None else env_ids_of(env_id, num_envs).tolist()


def count_of(count: Any, num_envs: int) -> int:
    """How many environments a ``recv`` is to return.

    Raises:
        TypeError: No integer.
        ValueError: Not from 1 to ``num_envs``.
    """
    return _rows_within("count", count, num_envs, f"num_envs={num_envs},")


def _rows_within(name: str, value: Any, most: int, words: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer or None, got {type(value).__name__}") from None
    if not 1 <= number <= most:
        raise ValueError(f"{name} must be from 1 to {words} got {number}")
    return number


def least_of(at_least: Any, within: Any, count: int) -> tuple[int, float]:
    """How many rows are enough for a ``recv`` of ``count``, and from which moment of ``time.monotonic()`` on.

    Args:
        at_least: That many; ``None``: one.
        within: Once that many seconds have passed; ``None``: at once.
        count: The most that are wanted.

    Raises:
        TypeError: No integer; no number of seconds.
        ValueError: Not from 1 to ``count``; nan.
    """
    seconds = 0.0 if within is None else seconds_of(within, "within")
    moment = math.inf if seconds is None else time.monotonic() + seconds
    if at_least is None:
        return 1, moment
    return _rows_within("at_least", at_least, count, f"the count of rows, which is {count};"), moment
