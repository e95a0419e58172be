"""Gymnasium's vector interface, over any :class:`~vecenv.front.driver.Driver`.

This module checks the arguments and the order of calls, and raises the errors for missing capabilities, in the same way for
all backends. Only the drivers differ.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any, ClassVar, Final, Generic, NoReturn

import numpy as np
import numpy.typing as npt
from gymnasium.core import ActType, ObsType
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.vector.vector_env import ArrayType

from vecenv.errors import ErrorRecord
from vecenv.front.arguments import (
    NoCloseOnCollect,
    ResetOptions,
    deadline_after,
    parse_at_least,
    parse_count,
    parse_env_ids,
    parse_rows,
    parse_seeds,
    parse_within,
    reject_options,
    require_callable,
    split_reset_mask,
)
from vecenv.front.capabilities import Capabilities, WorkerOnlyAttribute, overridden_methods, raise_unsupported
from vecenv.front.driver import Driver, Phase, require_order
from vecenv.front.guard import closed_error, exclusive
from vecenv.front.infos import RowInfos
from vecenv.front.results import as_row_infos, finish_result
from vecenv.system.reporting import warn

CLOSE_TIMEOUT: Final = 60.0
"""Seconds that ``close()`` waits by default: for pending results and environments' own ``close()``, or another thread."""
SHORT_CLOSE_TIMEOUT: Final = 1.0
"""The same if a worker was late or is stopped, if ``close()`` interrupts a call, or after an interrupted ``close()``."""

_RESERVED_METHODS: Final = ("reset", "step", "close", "_setattr", "_check_spaces")
SPACES: Final = "single_action_space", "action_space", "single_observation_space", "observation_space"
HALVES: Final = {
    "step": ("step_async", "step_wait"), "reset": ("reset_async", "reset_wait"), "call": ("call_async", "call_wait"),
    "exec_func": ("exec_func_send", "exec_func_fetch"),
}  # fmt: skip
"""Method -> the method that begins its call, and the method that fetches the result."""
_METHODS_WITH_INFOS: Final = ("reset", "reset_wait", "step", "step_wait", "recv")


class VectorEnvBase(NoCloseOnCollect, VectorEnv[ObsType, ActType, ArrayType], Generic[ObsType, ActType, ArrayType]):
    """The common base of the vector environments of all backends.

    A subclass sets Gymnasium's attributes and passes its driver to :meth:`_open`. The methods in :data:`HALVES` have two
    halves each. If a subclass overrides a half, the guard calls both halves instead of the method.
    """

    autoreset_mode: AutoresetMode
    _collected_infos: list[RowInfos] | None = None  # collects the infos of each result, for `infos_by_row` around wrappers
    _driver: Any
    _methods_in_halves: ClassVar[frozenset[str]] = frozenset()
    _supports_row_infos: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        overridden = overridden_methods(cls, VectorEnvBase)
        cls._supports_row_infos = overridden.isdisjoint(_METHODS_WITH_INFOS)
        cls._methods_in_halves = frozenset(name for name, halves in HALVES.items() if not overridden.isdisjoint(halves))

    def _open(self, driver: Driver) -> None:
        self._driver = driver
        driver.open(type(self).__name__)
        self.closed = False

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        reason = "owns processes or threads and cannot be copied or pickled: pass a function that builds another one"
        raise TypeError(f"this {type(self).__name__} {reason}")

    # -- reset -----------------------------------------------------------------------------------------------------

    @exclusive
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: ResetOptions = None, _unmerged: bool = False
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin new episodes in all environments, or in those of ``options["reset_mask"]``; see :meth:`reset_async`.

        Returns:
            Observations of all environments, and infos.
        """
        self._begin_reset(seed, options, None)
        observations, *_, infos = self._merge_infos(self._driver.wait_for_result(None), _unmerged)
        return observations, infos

    @exclusive
    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: ResetOptions = None, *, env_id: Any = None
    ) -> None:
        """Begin a reset. Fetch the result with :meth:`reset_wait` or :meth:`recv`; with ``env_id``, only with :meth:`recv`.

        Without ``env_id``, results in flight are dropped; EnvPool with ``batch_size=None`` raises instead.

        Args:
            seed: An int gives environment i the seed ``seed + i``; a sequence has one seed per environment. ``None`` sets no
                seeds: the environments continue their sequences of random numbers, which begin with unpredictable seeds.
            options: Passed to every environment, except ``"reset_mask"``, a bool array ``(num_envs,)``: only the selected
                environments are reset, the others keep their last observation. Selected ones that failed are rebuilt; others
                that failed have zeros or, with restarts or pickled observations, their last complete observation. A sequence
                of ``num_envs`` dicts (or ``None``) has one per environment. The dict is not modified.
            env_id: Reset only these environments, none of which may be in flight; others may be. A sequence of seeds, or of
                options, then has one for each index, in the order of ``env_id``. On backends that step all environments
                together: all indices in order.

        Raises:
            NotImplementedError: The backend lacks a capability, see :attr:`capabilities`.
            TypeError, ValueError: Seeds, options, mask or indices of the wrong length, type or shape; nothing was sent.
            gymnasium.error.ResetNeeded: The reset is not of all environments, and either it is the first (EnvPool, JAX,
                native), or an exception interrupted an earlier call, so that its result is lost.
            gymnasium.error.AlreadyPendingCallError: A call is pending, or an environment in ``env_id`` is in flight. If
                an exception (Ctrl-C) interrupted the wait for the call's result, a reset of all environments drops it.
        """
        self._begin_reset(seed, options, env_id)

    def _begin_reset(self, seed: Any, options: ResetOptions, env_id: Any) -> None:
        ids = None if env_id is None else parse_env_ids(env_id, self.num_envs)
        rows = None if ids is None else ids.tolist()
        seeds = parse_seeds(seed, self.num_envs, rows)
        resets_all = ids is None and not (isinstance(options, Mapping) and "reset_mask" in options)
        if not (resets_all and self._driver.is_interrupted):
            require_order(self._phase, "reset_async", self)  # passes after an interrupted change: the phase is DEFAULT
        mask, others = split_reset_mask(options, self.num_envs, rows)
        capability = "row_options" if isinstance(others, list) else "reset_options"
        if others is not None and not getattr(self.capabilities, capability):
            reject_options(self, others)
        if ids is not None and mask is not None:
            raise ValueError("env_id and options['reset_mask'] both select the environments to reset: pass one of them")
        if self._driver.state.changing and not resets_all:
            raise ResetNeeded("an exception interrupted an earlier call: reset() all environments first")
        self._driver.submit_reset(seeds, ids if mask is None else np.flatnonzero(mask), others, for_recv=ids is not None)

    @exclusive
    def reset_wait(self, timeout: float | None = None, *, _unmerged: bool = False) -> tuple[ObsType, dict[str, Any]]:
        """Fetch the result of :meth:`reset_async`, in the form of :meth:`reset`.

        Raises:
            gymnasium.error.NoAsyncCallError: No reset is pending.
            vecenv.errors.StepTimeout: No result within ``timeout`` or ``step_timeout``; it is still pending: call again.
            Exception: An environment's exception.
        """
        observations, *_, infos = self._wait_for_result("reset_wait", timeout, _unmerged)
        return observations, infos

    # -- step ------------------------------------------------------------------------------------------------------

    @exclusive
    def step(
        self, actions: ActType, *, _unmerged: bool = False
    ) -> tuple[ObsType, ArrayType, ArrayType, ArrayType, dict[str, Any]]:
        """Step every environment once; see :meth:`step_async` and :meth:`step_wait`.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``; with NumPy, ``float64`` rewards and ``bool``
            flags.
        """
        driver = self._driver
        driver.submit_step(actions)
        stepped = driver.wait_for_result(None)
        if stepped[4] or _unmerged:  # an empty dict needs no merging; a `RowInfos` is always truthy
            stepped = self._merge_infos(stepped, _unmerged)
        return stepped  # type: ignore[no-any-return]

    @exclusive
    def step_async(self, actions: ActType) -> None:
        """Begin a step.

        Args:
            actions: A batch of ``action_space``. For Python environments, anything that ``gymnasium.vector.utils.iterate``
                accepts for it; each receives its action unchanged, neither cast nor clipped, as an array of its own.

        Raises:
            TypeError, ValueError: Wrong number, shape, structure or dtype; nothing was sent.
            EnvFailed: A failed environment has not been reset since (not with ``on_failure="restart"``).
            gymnasium.error.ResetNeeded: No reset yet (EnvPool, JAX, native); an ended episode, without autoreset (EnvPool).
            gymnasium.error.AlreadyPendingCallError: A call is pending, or an environment is in flight.
        """
        self._driver.submit_step(actions)

    @exclusive
    def step_wait(
        self, timeout: float | None = None, *, _unmerged: bool = False
    ) -> tuple[ObsType, ArrayType, ArrayType, ArrayType, dict[str, Any]]:
        """Fetch the result of :meth:`step_async`, in the form of :meth:`step`.

        Raises:
            gymnasium.error.NoAsyncCallError: No step is pending.
            vecenv.errors.StepTimeout: No result within ``timeout`` or ``step_timeout``; it is still pending: call again.
            WorkerDied: A worker process ended; the next ``reset()`` starts a new one.
            Exception: An environment's exception, after all others have been stepped.
        """
        return self._wait_for_result("step_wait", timeout, _unmerged)  # type: ignore[no-any-return]

    # -- send and recv ---------------------------------------------------------------------------------------------

    @exclusive
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some environments that are not in flight, without waiting; :meth:`recv` returns their results.

        Args:
            actions: A batch with one action per environment in ``env_id``, in its order.
            env_id: Distinct indices of environments; ``None``: those of the latest :meth:`recv`, or all at first and
                after :meth:`step` or :meth:`reset`. On backends that step all environments together: all of them in order.

        Raises:
            ValueError, TypeError: Indices out of range or repeated, or actions that do not match them; nothing was sent.
            NotImplementedError: ``env_id`` has only some environments, but the backend steps all of them together.
            gymnasium.error.AlreadyPendingCallError: A call is pending, or one of them is in flight.
            EnvFailed: One of them failed and has not been reset since (not with ``on_failure="restart"``).
        """
        self._driver.send(actions, env_id)

    @exclusive
    def recv(
        self, timeout: float | None = None, *, count: int | None = None, at_least: int | None = None,
        within: float | None = None, _unmerged: bool = False,
    ) -> tuple[Any, ArrayType, ArrayType, ArrayType, dict[str, Any]]:  # fmt: skip
        """Wait for the next ``count`` environments of :meth:`send` or :meth:`reset_async`, in order of completion.

        Args:
            timeout: Maximum number of seconds to wait.
            count: Number of environments, 1 to ``num_envs``; ``None``: :attr:`batch_size`. Backends without the capability
                ``first_ready`` (:attr:`capabilities`) can only return all rows of the pending call.
            at_least: Number of environments that suffice after ``within`` seconds; the others stay in flight. Default 1 if
                ``within`` is given.
            within: Seconds from the beginning of the call until ``at_least`` environments suffice; default 0 if ``at_least``
                is given. If fewer than ``count`` environments are in flight, the call waits only for those.

        Returns:
            The values of ``step`` for ``count`` rows (with ``at_least``, for that many or more), all of them new arrays.
            ``infos["env_id"]``, int, has the environment of each row. Rows of a reset have reward 0 and both flags False.

        Raises:
            NoAsyncCallError: Fewer environments than ``count``, or than a given ``at_least``, are in flight or ready.
            gymnasium.error.AlreadyPendingCallError: The result of :meth:`step_async` or :meth:`call_async` is pending.
            TypeError, ValueError: An invalid ``timeout``, ``count``, ``at_least`` or ``within``.
            NotImplementedError: ``count`` or ``at_least``, on a backend that finishes all environments at once.
            StepTimeout: Too few results within ``timeout`` or ``step_timeout``; nothing is lost: call again.
            Exception: An environment's exception; the rows of the others are kept for the next call.
        """
        driver = self._driver
        if count is not None:
            count = parse_count(count, self.num_envs)
        deadline = None if timeout is None else deadline_after(timeout)
        if at_least is None and within is None:
            stepped = driver.recv(count, deadline)
        else:
            enough_from = parse_within(within)
            enough = parse_at_least(at_least, self.batch_size if count is None else count)
            stepped = driver.recv_enough(count, deadline, enough, enough_from)
        if stepped is None:
            raise driver.timeout_error("recv", timeout)
        return self._merge_infos(stepped, _unmerged, len(stepped[1]))  # type: ignore[no-any-return]

    # -- the environments themselves: methods, attributes, functions, frames -----------------------------------------

    @exclusive
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call the attribute ``env.get_wrapper_attr(name)`` of every environment, or return it if it is not callable.

        Raises:
            NotImplementedError: The backend has no Python environments.
        """
        return self._call("call", name, *args, **kwargs)

    @exclusive
    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        """Begin a :meth:`call`."""
        self._begin_call("call_async", name, args, kwargs)
        self._driver.keep_call()

    def _call(self, method: str, name: str, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self._begin_call(method, name, args, kwargs)
        return self._driver.wait_for_call(None)  # type: ignore[no-any-return]

    def _begin_call(self, method: str, name: str, args: Any, kwargs: Any) -> None:
        self._require_capability("attributes", method)
        self._driver.require_idle("call_async")
        if name in _RESERVED_METHODS:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._driver.begin_call(name, args, kwargs)

    @exclusive
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the result of :meth:`call_async`, or of :meth:`exec_func_send`: a tuple of one result per environment.

        Raises:
            StepTimeout: Not finished within ``timeout`` seconds; the result is still pending: call again.
            Exception: An environment's exception; the environments stay alive.
        """
        self._require_capability("attributes", "call_wait")
        require_order(self._phase, "call_wait", self)
        return self._driver.wait_for_call(timeout)  # type: ignore[no-any-return]

    @exclusive
    def exec_func(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Call ``func(env, *args, **kwargs)`` in the workers, for the environments ``indices`` (``None``: all).

        ``func`` may be a lambda or a closure. Returns a tuple of ``num_envs`` results, with ``None`` for environments that
        are not in ``indices``.
        """
        self._begin_exec("exec_func", func, indices, args, kwargs)
        return self._driver.wait_for_call(None)  # type: ignore[no-any-return]

    @exclusive
    def exec_func_send(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an :meth:`exec_func`."""
        self._begin_exec("exec_func_send", func, indices, args, kwargs)
        self._driver.keep_call()

    def _begin_exec(self, method: str, func: Callable[..., Any], indices: Any, args: Any, kwargs: Any) -> None:
        self._require_capability("attributes", method)
        require_callable(func)
        env_ids = [indices] if isinstance(indices, (int, np.integer)) else indices
        rows = parse_rows(env_ids if env_ids is None else list(env_ids), self.num_envs)
        self._driver.require_idle("exec_func", rows)
        self._driver.begin_exec(func, rows, args, kwargs)

    @exclusive
    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the result of :meth:`exec_func_send`."""
        self._require_capability("attributes", "exec_func_fetch")
        require_order(self._phase, "call_wait", self)
        return self._driver.wait_for_call(timeout)  # type: ignore[no-any-return]

    @exclusive
    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of every environment, from the outermost wrapper that has it; the same as ``call(name)``."""
        return self._call("get_attr", name)

    @exclusive
    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | object) -> None:
        """Set an attribute of every environment. A list or tuple has one value for each; any other value is set in all."""
        self._require_capability("attributes", "set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._driver.require_idle("set_attr")
        self._driver.begin_set_attr(name, values)
        self._driver.wait_for_call(None)

    @exclusive
    def set_next_options(
        self, options: ResetOptions = None, *, seed: int | Sequence[int | None] | None = None, env_id: Any = None
    ) -> None:
        """Set options and seeds for the next episode that autoreset begins in each environment. They are used once.

        Calls of :meth:`reset` and :meth:`reset_async`, which have options of their own, neither use nor remove them. A later
        call replaces them; ``set_next_options()`` removes them. They are lost if an environment fails or its worker dies.

        Args:
            options: A dict, of which each environment receives a copy; or a sequence with a dict or ``None`` for each.
            seed: Seeds as for ``reset``: an int gives environment i the seed ``seed + i``; a sequence has one for each.
            env_id: Only these environments; a sequence of options or seeds is in their order. The others keep theirs.

        Raises:
            TypeError, ValueError, PicklingError: Options, seeds or indices have the wrong length, type or range; options
                cannot be pickled or contain a ``reset_mask``; or the mode begins no episodes. Nothing was sent.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        self._require_capability("attributes", "set_next_options")
        rows = parse_rows(env_id, self.num_envs)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError("autoreset_mode=DISABLED begins no episodes: pass the options to reset(), with a reset_mask")
        seeds = parse_seeds(seed, self.num_envs, rows)
        mask, options = split_reset_mask(options, self.num_envs, rows)
        if mask is not None:
            raise ValueError("options['reset_mask'] selects environments to reset: use env_id instead")
        self._driver.require_idle("set_next_options")
        options_by_row = options if isinstance(options, list) else [options] * self.num_envs
        pairs = [  # copies, because the options are kept until the next episode begins
            (env_seed, None if env_options is None else dict(env_options))
            for env_seed, env_options in zip(seeds, options_by_row, strict=True)
        ]
        self._driver.begin_set_next(rows, pairs)
        self._driver.wait_for_call(None)

    @exclusive
    def render(self) -> Any:
        """Return one frame (or list of frames) per environment, in a tuple."""
        return self._call("render", "render")

    # -- saving and loading ----------------------------------------------------------------------------------------

    @exclusive
    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Any, ...]:
        """Return the state of every environment, or of some: everything that determines how it continues, bit for bit.

        Before an environment is saved for the first time, three more are built by the same ``env_fn`` in the same process,
        and take about a thousand steps to prove that their state can be saved and loaded exactly; see ``docs/state.md``. The
        environment itself is not stepped. For environments on a JAX device the state is their row of the pytree, which needs
        no proof.

        Args:
            env_id: Distinct indices of environments; ``None``: all.
            verify: Run this proof. The side effects of its environments are real. ``False`` skips it.

        Returns:
            One :class:`~vecenv.state.snapshots.Snapshot` per environment, in the order of ``env_id``. They can be pickled.

        Raises:
            NotImplementedError: The backend cannot save environments.
            NotRestorable: An environment cannot be saved exactly; the text names it, the part of its state, and the reason.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
            EnvFailed: One of them failed and has not been reset since.
            gymnasium.error.ResetNeeded: JAX: before the first ``reset``.
        """
        rows = self._begin_snapshots("save", env_id)
        return self._driver.save(rows, verify)  # type: ignore[no-any-return]

    @exclusive
    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Load saved states. The environments continue exactly as the saved ones would have.

        The states may come from other rows, engines, processes and machines; the environment, its constructor arguments, its
        wrappers and their versions must be the same. Environments that raised are rebuilt.

        Args:
            snapshots: One per environment in ``env_id``, in its order; or one for all of them. Loading can run code, like
                unpickling: load only snapshots that you have saved yourself.
            env_id: Distinct indices of environments; ``None``: all.

        Returns:
            Their observations when they were saved, as new arrays; ``None`` if one was saved before its first reset.

        Raises:
            SnapshotMismatch: The number or a snapshot does not fit; the text names the difference. Nothing has changed.
            EnvFailed: The worker of one of them is dead; reset its rows first.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
            Exception: Environments failed while states were loaded; except with Ray, all not in its ``envs`` are loaded.
        """
        rows = self._begin_snapshots("load", env_id)
        return self._driver.load(snapshots, rows)

    @exclusive
    def state_dict(self, env_id: Any = None, *, verify: bool = True) -> dict[str, Any]:
        """Return the whole state in one dict that can be pickled.

        It has the snapshots of :meth:`save` and, except with JAX, counters, seeds of restarts, and the generators of the
        vector environment's own spaces. Arguments and errors are those of :meth:`save`.
        """
        rows = self._begin_snapshots("state_dict", env_id)
        return self._driver.state_dict(rows, [getattr(self, name) for name in SPACES], verify)  # type: ignore[no-any-return]

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any], env_id: Any = None) -> Any:
        """Load the result of :meth:`state_dict`, here or elsewhere. Returns and raises like :meth:`load`."""
        rows = self._begin_snapshots("load_state_dict", env_id)
        return self._driver.load_state_dict(state, rows, [getattr(self, name) for name in SPACES])

    def _begin_snapshots(self, method: str, env_id: Any) -> list[int]:
        """Return the rows ``env_id``, or raise if they cannot be saved or loaded now."""
        self._require_capability("snapshots", method)
        rows = parse_rows(env_id, self.num_envs)
        self._driver.require_idle(method, rows)
        return rows

    @exclusive
    def freeze(self, env_id: Any = None) -> Any:
        """Copy the processes of environments of any kind, including the state of C code and libraries. Experimental.

        A copy is a waiting process on this machine, which only this program can use. It occupies the memory that it or the
        environment has written to since the copy was made: some MiB. Requires Linux, and one process per environment
        (``num_workers=None``).

        Args:
            env_id: Distinct indices of environments; ``None``: all.

        Returns:
            A list of :class:`vecenv.Frozen`, for :meth:`thaw`.

        Raises:
            NotImplementedError: The backend or the system cannot do it (:attr:`capabilities`).
            NotRestorable: A process has more than one thread, child processes or a timer, uses a GPU, or has memory,
                sockets, pipes or files that a copy would share; the text names the environment and the reason.
            EnvFailed: One of them failed and has not been reset since.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        self._require_capability("freezing", "freeze")
        rows = parse_rows(env_id, self.num_envs)
        self._driver.require_idle("freeze")
        return self._driver.freeze(rows)

    @exclusive
    def thaw(self, frozen: Any, into: Any, *, reseed: bool = False) -> tuple[ObsType, dict[str, Any]]:
        """Replace environments with copies of a frozen one, which continue exactly as it would have. Experimental.

        Args:
            frozen: One of the results of :meth:`freeze` of this vector environment. It can be thawed any number of times.
            into: Distinct indices of the environments to replace. Their processes end.
            reseed: Give each copy its own random numbers; otherwise all copies draw the same ones.

        Returns:
            Their observations and infos at the time of the freeze; an empty info if it was pickled, as for strings.

        Raises:
            NotImplementedError: As for :meth:`freeze`.
            TypeError, ValueError: ``frozen`` is not an open copy from this vector environment, or indices are out of range
                or repeated.
            WorkerDied: The copy has ended. Nothing has changed.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        self._require_capability("freezing", "thaw")
        rows = parse_rows(into, self.num_envs)
        self._driver.require_idle("thaw")
        return self._driver.thaw(frozen, rows, reseed)  # type: ignore[no-any-return]

    def record(self, env_id: int, path: str | os.PathLike[str] | None = None) -> Path:
        """Write a file for ``vecenv replay``; see :meth:`vecenv.AsyncVectorEnv.record`."""
        raise_unsupported(self, "`record`", self._driver.reason("recording"))

    reset_send, reset_fetch = reset_async, reset_wait
    step_send, step_fetch = step_async, step_wait
    call_send, call_fetch = call_async, call_wait

    # -- members of backends with workers --------------------------------------------------------------------------

    def add_observer(self, observer: Any) -> None:
        """Add an observer of all calls; see :meth:`vecenv.AsyncVectorEnv.add_observer`."""
        self._require_capability("workers", "add_observer")

    def abandon(self, env_id: Any) -> None:
        """Stop waiting for some environments; see :meth:`vecenv.AsyncVectorEnv.abandon`."""
        self._require_capability("workers", "abandon")

    def submissions(self) -> Any:
        """Return the interface for requests to single environments; see :meth:`vecenv.AsyncVectorEnv.submissions`."""
        self._require_capability("workers", "submissions")

    def publish_stats(self, name: str | None = None) -> None:
        """Publish statistics for ``vecenv top``; see :meth:`vecenv.AsyncVectorEnv.publish_stats`."""
        self._require_capability("workers", "publish_stats")

    def worker_stats(self) -> Any:
        """Return the statistics of each worker; see :meth:`vecenv.AsyncVectorEnv.worker_stats`."""
        self._require_capability("workers", "worker_stats")

    for _name in (  # a `__getattr__` would slow down all attributes
        "env_fns", "observations", "shared_memory", "context", "daemon", "worker", "observation_mode", "max_concurrency",
        "generators", "last_received", "processes", "parent_pipes", "worker_rows",
    ):  # fmt: skip
        locals()[_name] = WorkerOnlyAttribute()
    del _name
    local_envs: Any = WorkerOnlyAttribute("attributes")

    # -- attributes ------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this backend."""
        return self._driver.capabilities  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int:
        """Default number of rows that :meth:`recv` returns."""
        return self._driver.batch_size  # type: ignore[no-any-return]

    @property
    def copy(self) -> bool:
        """True if each result has its own observations, which never change later."""
        return self._driver.copies  # type: ignore[no-any-return]

    @copy.setter
    def copy(self, copy: bool) -> None:
        self._driver.copies = copy

    num_workers: int = 0
    """Number of worker processes."""
    start_timeout: float = math.inf
    """Seconds until a worker that has not built its environments is considered to hang; infinite: never."""
    plan: Any = None
    """The plan with the reasons for the choice of workers, if there was a choice."""

    @property
    def step_timeout(self) -> float | None:
        """Seconds until a ``reset`` or ``step`` without a timeout of its own is considered to hang; ``None``: never."""
        return None

    @property
    def errors(self) -> deque[ErrorRecord]:
        """The failures so far, oldest first, at most 1,000 records; empty if environments are not Python objects."""
        return deque()

    @property
    def error_queue(self) -> deque[ErrorRecord]:
        """Gymnasium's name for :attr:`errors`."""
        return self.errors

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """Environments of :meth:`send`, or of a reset by index, not yet returned by :meth:`recv`; in no particular order.

        Raises:
            NotImplementedError: Some are in flight, and the library does not report which ones.
        """
        return self._driver.in_flight  # type: ignore[no-any-return]

    def stats(self) -> dict[str, float]:
        """Return statistics since construction.

        ``steps`` and ``resets`` of single environments, counted when their results are returned, or when an exception of
        another one is raised in their place; ``seconds`` and ``steps_per_second``; ``wait_fraction`` (share of the time that
        the caller spent waiting); ``step_time_mean`` and ``step_time_slowest_env`` in seconds; ``straggler_share`` (share of
        their time that workers were idle because another one took longer); ``restarts``; ``errors``; ``bytes_pickled``;
        ``in_flight`` (environments with a step or reset that has not been fetched). Counts are exact; times inside
        environments are extrapolated if a worker's share of a batch takes less than a millisecond. Values unknown to a
        backend are nan. After :meth:`close` they stay unchanged.
        """
        return self._driver.stats()  # type: ignore[no-any-return]

    # -- the end ---------------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = CLOSE_TIMEOUT, terminate: bool = False) -> None:
        """Release the backend. In a forked child, do nothing.

        Args:
            timeout: Seconds to wait for a call in another thread, if the backend cannot be closed in the middle of one.
                After that time, the call itself releases the backend when it ends.
            terminate: Do not wait.
        """
        deadline = deadline_after(0.0 if terminate else timeout)
        driver = self._driver
        driver.freeze_stats()
        state = driver.state
        if state.unusable == "forked":  # the backend's resources belong to the parent
            return
        state.unusable = "closed"  # before anything is released, so that a call in progress raises the right error
        own_or_none = 0, get_ident()
        closable = driver.can_be_closed_during_call
        while state.active_thread not in own_or_none and not closable and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.001)
        if state.active_thread in own_or_none or closable:
            driver.close(terminate=terminate)

    # -- internal --------------------------------------------------------------------------------------------------

    def _wait_for_result(self, method: str, timeout: float | None, unmerged: bool) -> Any:
        """Wait for the result of the pending call."""
        require_order(self._phase, method, self)
        if (stepped := self._driver.wait_for_result(deadline_after(timeout))) is None:
            raise self._driver.timeout_error(method, timeout)
        return self._merge_infos(stepped, unmerged)

    def _merge_infos(self, stepped: Any, unmerged: bool, count: int | None = None) -> Any:
        """Return a driver's result with merged infos; with ``unmerged``, with its :class:`RowInfos`."""
        infos = as_row_infos(stepped[4], count or self.num_envs)
        if self._collected_infos is not None:
            self._collected_infos.append(infos)
        return finish_result(self._driver, stepped, infos, unmerged=unmerged)

    def _call_halves(self, name: str, args: Any, kwargs: Any) -> Any:
        """Call the two halves of the method ``name``, at least one of which a subclass has overridden."""
        begin, wait = HALVES[name]
        wait_options = {"_unmerged": True} if kwargs.pop("_unmerged", False) else {}
        getattr(self, begin)(*args, **kwargs)
        return getattr(self, wait)(**wait_options)

    def _require_capability(self, capability: str, name: str) -> None:
        """Raise ``NotImplementedError`` for the method ``name`` if the backend lacks a capability."""
        if not getattr(self.capabilities, capability, False):
            raise_unsupported(self, f"`{name}`", self._driver.reason(capability))

    @property
    def _phase(self) -> Phase:
        """The pending operation of the vector environment, not counting rows that ``recv`` fetches."""
        if self.closed or self._driver.state.unusable:
            return Phase.CLOSED
        return self._driver.phase  # type: ignore[no-any-return]


class WorkerVectorEnv(VectorEnvBase[ObsType, ActType, ArrayType]):
    """The common base of vector environments with workers, on this machine or on others."""

    _env_id: str
    _recorder: Any = None  # a weak reference to the recorder of `record_failures=`, one of the driver's observers

    def __repr__(self) -> str:
        name = f"{self.spec.id}, " if self.spec is not None else ""
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}({name}closed)"
        failures, state = self._driver.failure_log, self._driver.state
        restarts = f", restarted={failures.restarts}" if failures.restarts else ""
        failed = f", failed={sorted(failures.failed)}" if failures.failed else ""
        phase = "RESET_NEEDED" if state.changing and not state.active_thread else self._phase.name
        return f"{type(self).__name__}({name}{self._describe_size()}, phase={phase}{restarts}{failed})"

    def _set_attributes(self, description: Any) -> None:
        """Set Gymnasium's attributes, except the observation spaces, from the description of the first environment."""
        self.metadata = {**description.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode, self._env_id = description.render_mode, description.env_id
        self.single_action_space = description.action_space
        self.action_space = batch_space(description.action_space, self.num_envs)

    def _warn_about_pending_call(self) -> None:
        """Warn if a call is pending, because ``close`` was called."""
        if (phase := self._driver.phase) is not Phase.DEFAULT:
            warn(f"Calling `close` while waiting for a pending call to `{phase.value}` to complete.")

    def _describe_size(self) -> str:
        """Return the numbers of environments and workers for ``repr``."""
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of this backend."""
        return replace(self._driver.capabilities, recording=self._recorder is not None)  # type: ignore[no-any-return]

    @property
    def observations(self) -> ObsType:
        """The latest batch itself, not a copy; before the first reset, a placeholder such as zeros."""
        if self.closed:
            raise closed_error(f"`{type(self).__name__}`")
        return self._driver.store.observations  # type: ignore[no-any-return]

    @property
    def last_received(self) -> np.ndarray:
        """The environments that :meth:`send` steps by default: those of the latest :meth:`recv`, or all of them."""
        return self._driver.last_received.copy()  # type: ignore[no-any-return]

    @property
    def errors(self) -> deque[ErrorRecord]:
        """The last 1,000 failures, oldest first; also after :meth:`close`."""
        return self._driver.failure_log.errors  # type: ignore[no-any-return]

    @property
    @exclusive
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The environments' seeds."""
        return self._call("np_random_seed", "np_random_seed")

    @property  # type: ignore[misc]  # Gymnasium's property has a setter
    @exclusive
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The environments' generators: copies, except those of environments in this process."""
        return self._call("np_random", "np_random")

    @exclusive
    def record(self, env_id: int, path: str | os.PathLike[str] | None = None) -> Path:
        """Write a file for ``vecenv replay`` about an environment that has not failed.

        Args:
            env_id: Index of the environment.
            path: Path of the file; ``None``: a new name in the folder of ``record_failures=``.

        Returns:
            The path.

        Raises:
            NotImplementedError: ``record_failures=`` was not given.
            ValueError: There is no such environment.
            OSError: The file cannot be written.
        """
        self._require_capability("recording", "record")
        return self._recorder.record(parse_rows([env_id], self.num_envs)[0], path)  # type: ignore[no-any-return]

    @exclusive
    def abandon(self, env_id: Any) -> None:
        """Stop waiting for some environments: kill those of their workers that have pending requests.

        All environments of such a worker then raise :class:`~vecenv.errors.WorkerDied`, or are rebuilt with
        ``on_failure="restart"``. The calling process is never killed. Requests that ``max_concurrency`` still holds back do
        not count. On other machines, whole hosts are killed, if they have pending requests about these environments.

        Args:
            env_id: Distinct indices of environments.

        Raises:
            ValueError: Indices out of range or repeated.
        """
        self._driver.kill_pending(parse_env_ids(env_id, self.num_envs).tolist())
