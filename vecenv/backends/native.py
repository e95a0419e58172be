"""Vector environments that a library steps itself: any ``vector_entry_point``, such as ALE's native ``AtariVectorEnv``.

:class:`NativeVectorEnv` makes the library's calls behave as on the other backends. It refuses calls that the library would
ignore, that would fail one of its assertions, or that would never return, and converts results to Gymnasium's form. A table
lists the features of known libraries. Any other library is assumed to have one seed for all its environments, to reset them
together, and to compute in the caller's thread, so its methods are called only when the results are fetched.
"""

from __future__ import annotations

import copy as copies
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from vecenv.front.arguments import ResetOptions, parse_seeds, shape_error
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import LockstepDriver, Phase, RequestSummary, Stepped
from vecenv.front.guard import exclusive
from vecenv.front.infos import object_column, own_keys
from vecenv.front.vector_env import VectorEnvBase
from vecenv.link.messages import copy_if_possible
from vecenv.system.signals import raise_if_from_handler, raised_by_handler, watched_handlers

_LIBRARIES: Final[dict[str, Collection[str]]] = {
    # class -> its features
    # "rows": reset() accepts a seed per environment (31 bits, -1: none) and reset_mask, and ignores all other options
    # "threads": it steps in its own threads, without the GIL
    # "fresh": its observations belong to the caller
    "ale_py.vector_env.AtariVectorEnv": {"rows", "threads", "fresh"},
}
_ARRAY_SPACES: Final = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class NativeVectorEnv(VectorEnvBase[Any, Any, Any]):
    """A library's own vector environment, with the interface of the other backends.

    Args:
        library: The library's vector environment, which this object owns from now on and closes.
        copy: True: return observations that belong to the caller. False: return the library's own, which may change later.
        reason: Why this library was chosen, for :attr:`plan`.

    Raises:
        NotImplementedError: The library steps only some of its environments at a time (ALE's ``batch_size``).

    Attributes:
        library: The library's vector environment; ``None`` after :meth:`close`.
        plan: A text with the class that steps the environments, and the reason.

    ``step`` returns ``(observations, rewards, terminations, truncations, infos)``: observations of ``observation_space``;
    rewards float64, flags bool, all ``(num_envs,)`` and fresh; infos a (nested) dict of arrays with a mask ``_key`` for
    every key. Under same-step autoreset, ``infos["final_obs"]`` and ``infos["final_info"]`` have Gymnasium's form; ALE
    reports only the observation of an episode's last step, so its ``final_info`` is empty. Actions of another dtype are cast
    if nothing but precision is lost.

    With ALE, ``step_async`` begins the step. Other libraries compute nothing until the results are fetched, do not support
    timeouts, and are seeded by a single int for all environments.
    """

    _driver: _LibraryDriver

    def __init__(self, library: VectorEnv[Any, Any, Any], *, copy: bool = True, reason: str = "it was passed in") -> None:
        self.num_envs, self.spec, self.render_mode = library.num_envs, library.spec, library.render_mode
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(library, name))
        # ALE writes its mode into the dict that all classes without their own metadata share
        metadata = {} if library.metadata is VectorEnv.metadata else library.metadata
        self.autoreset_mode = getattr(library, "autoreset_mode", metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.metadata = {**metadata, "autoreset_mode": self.autoreset_mode}
        driver = _LibraryDriver(library, copy)
        self.plan = f"{driver.title}: {reason}"
        if (batch_size := getattr(library, "batch_size", self.num_envs)) != self.num_envs:
            raise NotImplementedError(f"backend 'native' steps all rows at once; {driver.title} has batch_size={batch_size}")
        self._open(driver)

    @property
    def library(self) -> Any:
        """The library's vector environment; ``None`` after :meth:`close`."""
        return self._driver.library

    @exclusive
    def render(self) -> Any:
        """Return one frame per environment; ``None`` without a render mode."""
        self._driver.require_idle("render")
        return None if self.render_mode is None else self.library.render()


class _LibraryDriver(LockstepDriver):
    """A library's vector environment as a :class:`vecenv.front.driver.Driver`."""

    can_be_closed_during_call = False

    def __init__(self, library: VectorEnv[Any, Any, Any], copy: bool) -> None:
        super().__init__(library.num_envs)
        self.title = f"{type(library).__module__}.{type(library).__qualname__}"
        self.all_or_none_reason = f"{self.title} returns all of them at once"
        self.features = _LIBRARIES.get(self.title, ())
        self.library: Any = library
        self._request: RequestSummary | None = None
        self._library_call: Callable[[], Any]  # runs the latest request in the library
        self._future: Future[Any]
        must_copy = copy and "fresh" not in self.features
        self.copies = copy or "fresh" in self.features
        self._copy_observations: Any = _to_numpy if must_copy else lambda observations: observations
        # A thread waits for the library, so that no results are lost if the caller's wait ends early (a timeout, Ctrl-C).
        self._waiter = ThreadPoolExecutor(1, "vecenv-native") if "threads" in self.features else None

    @property
    def latest_request(self) -> RequestSummary | None:
        return self._request

    @property
    def capabilities(self) -> Capabilities:
        rows = "rows" in self.features
        return Capabilities(
            "native", attributes=False, first_ready=False, timeouts="threads" in self.features, row_seeds=rows,
            reset_mask=rows, masked_seeds=rows, reset_options=not rows, row_options=False, in_this_process=True,
        )  # fmt: skip

    def begin_reset(self, request: RequestSummary, seeds: list[Any], mask: Any, options: ResetOptions) -> None:
        all_rows = mask is None or mask.all()
        if self.latest_request is None and not all_rows:
            raise ResetNeeded("The first reset must be of all environments, without reset_mask.")
        if "rows" in self.features:
            seed: Any = np.array([-1 if one is None else one % 2**31 for one in seeds]).astype(np.int64, casting="safe")
            seed, options = (seed, None) if all_rows else (seed[mask], {"reset_mask": mask})
        elif seeds != parse_seeds(seed := seeds[0], len(seeds)):
            raise NotImplementedError(f"backend 'native': {self.title} resets all environments with one seed; got {seeds}")
        options = copy_if_possible(options)  # the library may get them only when the result is fetched
        mask = np.ones(len(seeds), np.bool_) if mask is None else mask
        self._submit(request, mask, lambda: self.library.reset(seed=seed, options=options or None))

    def begin_step(self, request: RequestSummary, actions: Any) -> None:
        if self.latest_request is None:
            raise ResetNeeded("Call reset first.")
        checked = self._check_actions(actions)
        self._submit(request, np.ones(self.num_envs, np.bool_), lambda: self.library.step(checked))

    def _submit(self, request: RequestSummary, mask: Any, library_call: Callable[[], Any]) -> None:
        """Store the request. Begin it if the library steps in its own threads; otherwise :meth:`read` executes it."""
        self.state.changing = True
        self._request, self._mask, self._library_call = request, mask, library_call
        self._future = Future() if self._waiter is None else self._waiter.submit(library_call)
        self.state.changing = False

    def _check_actions(self, actions: Any) -> Any:
        """Return a copy of the actions as an element of the library's action space; raise if they do not fit."""
        space, given, loses_values = self.library.action_space, actions, False
        if isinstance(space, _ARRAY_SPACES):
            given = np.asarray(actions)
            if given.shape != space.shape:
                raise shape_error("actions", given.shape, tuple(space.shape or ()))
            are_integers = given.dtype.kind in "iu" and space.dtype.kind in "iu"  # their values are compared below
            if not (are_integers or np.can_cast(given.dtype, space.dtype, "same_kind")):
                raise TypeError(f"actions must have dtype {space.dtype}, got {given.dtype}; nothing was sent")
            actions = given.astype(space.dtype)
            loses_values = given.dtype != space.dtype and space.dtype.kind in "iu" and not np.array_equal(actions, given)
        if loses_values or actions not in space:
            single = self.library.single_action_space
            raise ValueError(f"actions must be {self.library.num_envs} actions of {single}, got {given!r}; nothing was sent")
        return copies.deepcopy(actions) if actions is given else actions

    def wait(self, deadline: float) -> bool:
        if self._waiter is None:
            raise NotImplementedError(f"backend 'native': {self.title} steps in the caller's thread, without a timeout")
        began = time.monotonic()
        done = wait([self._future], max(deadline - began, 0.0)).done
        self.seconds_waited += time.monotonic() - began
        return bool(done)

    def read(self, kind: Phase) -> Stepped:
        future = self._future
        if self._waiter is None and not future.done():
            self.state.changing = True  # if a signal handler interrupts the call, some environments may have been stepped
            with watched_handlers():
                try:
                    future.set_result(self._library_call())
                except Exception as error:
                    if raised_by_handler(error):
                        raise
                    future.set_exception(error)
            self.state.changing = False
        try:
            return self._to_gymnasium(future.result())
        except BaseException as error:
            if future.done():
                if error is not future.exception():  # the library's results cannot be converted, or a signal handler raised
                    raise_if_from_handler(error, lambda: self._to_gymnasium(future.result()))
                self.result_error = error
            raise

    def _to_gymnasium(self, results: Any) -> Stepped:
        """Convert the library's results to Gymnasium's form."""
        count = self.num_envs
        observations, *numbers, infos = results
        rewards, *flags = numbers or [np.zeros(count)] * 3
        terminations, truncations = np.array(flags, np.bool_)
        done, infos = terminations | truncations, dict(infos)
        if "_final_obs" not in infos and (last := infos.pop("final_obs", None)) is not None and done.any():
            final = np.full(count, None, dtype=object)
            for row, observation in enumerate(iterate(self.library.observation_space, last)):
                final[row] = copies.deepcopy(observation) if done[row] else None
            infos |= {"final_obs": final, "_final_obs": done, "final_info": infos.get("final_info", {}), "_final_info": done}
        columns = self._expand_infos(infos, self._mask)
        return self._copy_observations(observations), np.array(rewards, np.float64), terminations, truncations, columns

    def _expand_infos(self, infos: Mapping[str, Any], mask: Any) -> dict[str, Any]:
        """Return infos as fresh arrays with a row per environment, each with its mask. A single value is repeated."""
        columns: dict[str, Any] = {}
        for key in own_keys(infos):
            value, own_mask = infos[key], np.array(infos.get(f"_{key}", mask))
            expanded = self._expand_infos(value, own_mask) if isinstance(value, Mapping) else _to_column(value, len(mask))
            columns[key], columns[f"_{key}"] = expanded, own_mask
        return columns

    def close(self, *, terminate: bool = False) -> None:
        if self._waiter is not None:
            self._waiter.shutdown(wait=not terminate)
        library, self.library = self.library, None  # another thread must not close it, too
        if library is not None:
            try:
                library.close()
            except BaseException:
                self.library = library  # so that the next close() finishes this one
                raise


def _to_column(value: Any, count: int) -> Any:
    """Return the rows of ``value`` in a fresh array, or ``value`` repeated; an object array if the rows differ in shape."""
    try:
        return np.array(value if np.shape(value)[:1] == (count,) else [value] * count)
    except ValueError:
        rows = value if len(value) == count else [value] * count
        return object_column(range(count), rows, count)


def _to_numpy(value: Any) -> Any:
    """Return a copy of observations in which arrays of any library are NumPy arrays."""
    if isinstance(value, dict):
        return {key: _to_numpy(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_to_numpy, value))
    return np.array(value) if hasattr(value, "__array__") else copies.deepcopy(value)
