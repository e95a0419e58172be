"""Gymnasium's vector interface, over any :class:`~vecenv.front.driver.Driver`.

Arguments, the order of calls, their errors and what a backend cannot do are the same wherever environments are stepped, so
they are here, once. What differs is the driver.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, ClassVar, Concatenate, Final, Generic, NoReturn, ParamSpec, TypeVar

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.core import ActType, ObsType
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.vector_env import ArrayType

from vecenv.errors import BusyError, ErrorRecord, ForkedError, VecEnvError
from vecenv.front.arguments import (
    NotClosedUnasked,
    ResetOptions,
    count_of,
    deadline_of,
    env_ids_of,
    least_of,
    refuse_options,
    reset_mask_of,
    rows_of,
    seeds_of,
)
from vecenv.front.capabilities import Capabilities, OfWorkers, unable
from vecenv.front.driver import Driver, Phase, advance

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE: Final = 60.0  # close() without a timeout waits this long for another thread's call
_RESERVED: Final = ("reset", "step", "close", "_setattr", "_check_spaces")
_SPACES: Final = "single_action_space", "action_space", "single_observation_space", "observation_space"
_HALVES: Final = {
    "step": ("step_async", "step_wait"), "reset": ("reset_async", "reset_wait"), "call": ("call_async", "call_wait"),
    "exec_func": ("exec_func_send", "exec_func_fetch"),
}  # fmt: skip
"""Call -> the two that it is made of."""


# -- one call at a time: one thread, in the process that built the environments, until they are closed -----------------
#
# The guard also hands answers over. An answer counts as taken when the caller has it, and not before: a method prepares what
# is pending afterwards (:attr:`vecenv.front.driver.Driver.next_pending`), and the guard puts that in place on the line that
# returns. Whatever a signal handler raises before leaves the answer pending. CPython looks for signals and for other threads
# after calls and at jumps: there is none on that line, nor between the look at ``caller`` and the store into it.

_OURS: Final = VecEnvError, gymnasium.error.Error, AlreadyPendingCallError, NoAsyncCallError
_BARE: Final = {AssertionError, AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError}


def exclusive(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let one call in at a time, and lose no answer on its way out.

    Raises (the decorated method):
        ForkedError: In a child of the process that built the vector environment.
        ClosedEnvironmentError: After ``close()``.
        BusyError: Another call is under way, in another thread or around this one.
    """

    name = method.__name__

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        driver, me = self._driver, get_ident()
        if driver.caller or driver.barred or self._in_halves:
            if name in self._in_halves:
                return self._make_in_halves(name, args, kwargs)  # type: ignore[no-any-return]
            if driver.caller or driver.barred:
                _require_right(self, driver, name)
        try:
            ended = driver.last_call_ended
            driver.caller = me
            driver.last_call_ended = False
            driver.next_pending = driver.pending_error = None
            if not ended:
                driver.resume()
            answer = method(self, *args, **kwargs)
            if driver.barred:
                _raise_barred(self, driver)
            next_pending = driver.next_pending
            driver.caller, driver.last_call_ended = 0, True
        except BaseException as error:
            driver.caller = 0
            if not _is_answer(self, driver, error):
                raise
            driver.pending_error = None
            driver.pending = driver.next_pending; raise  # noqa: E702 - no call and no jump between the two
        if next_pending is None:
            return answer
        driver.pending = next_pending; return answer  # noqa: E702 - likewise

    return guarded


def _is_answer(envs: Any, driver: Any, error: BaseException) -> bool:
    """Whether the exception that a call ends by is its answer."""
    if driver.barred:
        driver.leave()
        # What a signal handler raised comes out as it is. So only exceptions count that may follow from a thing that is
        # gone: our own classes and Gymnasium's, and the bare ones of Python, not what is derived from these.
        if driver.barred != "forked" and (isinstance(error, _OURS) or type(error) in _BARE):
            try:
                _raise_barred(envs, driver)
            except ClosedEnvironmentError as closed:
                raise closed from error
    return error is driver.pending_error and driver.next_pending is not None


def _raise_barred(envs: Any, driver: Any) -> NoReturn:
    """Say that the vector environment was closed, or that this is another process. Lets go of what a call still used."""
    kind = type(envs).__name__
    if driver.barred == "forked":
        raise ForkedError(
            f"this {kind} belongs to another process (pid {driver.owner}); a forked child cannot use {driver.own_means}: "
            "build a new one in the child"
        )
    driver.leave()
    raise ClosedEnvironmentError(f"Trying to operate on `{kind}`, after a call to `close()`.")


def _require_right(envs: Any, driver: Any, method: str) -> None:
    """Refuse a call where there is a reason to."""
    kind = type(envs).__name__
    if driver.barred:
        _raise_barred(envs, driver)
    if driver.caller != get_ident():
        raise BusyError(f"another thread is in a call on this {kind}; `{method}` was refused")
    if is_within_a_call(envs, 3):  # around the one that asks
        raise BusyError(f"a call on this {kind} is under way in this thread; `{method}` was refused")


def is_within_a_call(envs: object, depth: int = 1) -> bool:
    """Whether a call on a vector environment is on this thread's stack, from that many frames up on.

    ``caller`` alone does not tell: an exception that falls into the very first instruction after a call has failed leaves it
    as it was.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        if frame.f_code is _GUARDED and frame.f_locals["self"] is envs and "ended" in frame.f_locals:
            return True
        frame = frame.f_back
    return False


_GUARDED: Final = exclusive(is_within_a_call).__code__


# -- the vector environment ---------------------------------------------------------------------------------------------

class VectorEnvBase(NotClosedUnasked, VectorEnv[ObsType, ActType, ArrayType], Generic[ObsType, ActType, ArrayType]):
    """The front of all backends.

    A subclass sets Gymnasium's attributes and gives its driver to :meth:`_open`. ``step``, ``reset`` and others have two
    halves each, of which a subclass may have its own: then the guard makes the call in two.
    """

    autoreset_mode: AutoresetMode
    _driver: Any
    _in_halves: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = {name for halves in _HALVES.values() for name in halves if getattr(cls, name) is not vars(VectorEnvBase)[name]}
        cls._in_halves = frozenset(whole for whole, halves in _HALVES.items() if not own.isdisjoint(halves))

    def _open(self, driver: Driver) -> None:
        self._driver = driver
        driver.open(type(self).__name__)
        self.closed = False

    # -- reset -----------------------------------------------------------------------------------------------------

    @exclusive
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: ResetOptions = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin new episodes in all environments, or in those of ``options["reset_mask"]``; see :meth:`reset_async`.

        Returns:
            Observations of all environments, and infos.
        """
        self._begin_reset(seed, options, None)
        observations, *_, infos = self._driver.answer(Phase.WAITING_RESET, None)
        return observations, infos

    @exclusive
    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: ResetOptions = None, *, env_id: Any = None
    ) -> None:
        """Begin a reset. The answer is fetched by :meth:`reset_wait` for all environments, or by :meth:`recv` as it comes.
        What was sent and not received is dropped; EnvPool with ``batch_size=None`` refuses.

        Args:
            seed: An int gives environment i ``seed + i``; a sequence gives each its own; ``None`` none: each goes on with
                the random numbers it has (the first time, with unpredictable ones).
            options: Handed to every environment, except ``"reset_mask"``, a bool array ``(num_envs,)``: only those
                environments are reset, the others keep their last observation. Environments that failed are built anew; one
                that the mask leaves out has an observation of zeros meanwhile, as it may have been written in part. A
                sequence of ``num_envs`` dicts (or ``None``) gives each its own. The dict is not changed.
            env_id: Only these environments, which must not be in flight, while others may be; :meth:`recv` fetches the
                answers. A sequence of seeds, or of options, has one for each of them, in their order. Where environments
                step together, all indices in order.

        Raises:
            NotImplementedError: What the backend cannot do, see :attr:`capabilities`.
            TypeError, ValueError: Seeds, options, mask or indices of the wrong length, type or shape; nothing was sent.
            gymnasium.error.ResetNeeded: EnvPool and JAX: the first reset is not of all environments.
            gymnasium.error.AlreadyPendingCallError: A call is pending; with ``env_id``, one of these is in flight.
        """
        self._begin_reset(seed, options, env_id)

    def _begin_reset(self, seed: Any, options: ResetOptions, env_id: Any) -> None:
        ids = None if env_id is None else env_ids_of(env_id, self.num_envs)
        rows = None if ids is None else ids.tolist()
        seeds = seeds_of(seed, self.num_envs, rows)
        self._require_phase("reset_async")
        mask, others = reset_mask_of(options, self.num_envs, rows)
        if others is not None:
            able = self.capabilities
            if not (able.row_options if isinstance(others, list) else able.reset_options):
                refuse_options(self, others, "its environments take none")
        if ids is not None and mask is not None:
            raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
        self._driver.reset(seeds, ids if mask is None else np.flatnonzero(mask), others, by_row=ids is not None)

    @exclusive
    def reset_wait(self, timeout: float | None = None) -> tuple[ObsType, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`; as :meth:`reset`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: Not within ``timeout`` seconds; the answer is still pending, call again.
            Exception: What an environment raised.
        """
        observations, *_, infos = self._answer("reset_wait", Phase.WAITING_RESET, timeout)
        return observations, infos

    # -- step ------------------------------------------------------------------------------------------------------

    @exclusive
    def step(self, actions: ActType) -> tuple[ObsType, ArrayType, ArrayType, ArrayType, dict[str, Any]]:
        """Step every environment once; see :meth:`step_async` and :meth:`step_wait`.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``; for NumPy ``float64`` rewards and ``bool`` flags.
        """
        driver = self._driver
        driver.step(actions)
        return driver.answer(Phase.WAITING_STEP, None)  # type: ignore[no-any-return]

    @exclusive
    def step_async(self, actions: ActType) -> None:
        """Begin a step.

        Args:
            actions: A batch of ``action_space``. For Python environments whatever ``gymnasium.vector.utils.iterate`` takes
                for it, and each gets its action as it is passed here, uncast and unclipped, as an array of its own.

        Raises:
            TypeError, ValueError: Wrong number, shape, structure or dtype; nothing was sent.
            EnvFailed: An environment that failed was not reset since.
            gymnasium.error.ResetNeeded: EnvPool and JAX: before the first reset; without autoreset, after an episode's end.
            gymnasium.error.AlreadyPendingCallError: A call is pending, or an environment is in flight.
        """
        self._driver.step(actions)

    @exclusive
    def step_wait(self, timeout: float | None = None) -> tuple[ObsType, ArrayType, ArrayType, ArrayType, dict[str, Any]]:
        """Fetch the answer to :meth:`step_async`; as :meth:`step`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: Not within ``timeout`` seconds; the answer is still pending, call again.
            WorkerDied: A worker process ended; the next ``reset()`` starts it anew.
            Exception: What an environment raised, after all the others have been stepped.
        """
        return self._answer("step_wait", Phase.WAITING_STEP, timeout)  # type: ignore[no-any-return]

    # -- send and recv ---------------------------------------------------------------------------------------------

    @exclusive
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some environments that are not in flight, without waiting; :meth:`recv` gives their results.

        Args:
            actions: A batch of as many actions as there are environments in ``env_id``, in its order.
            env_id: Which environments, distinct indices; ``None``: those of the latest :meth:`recv`, or all at first. Where
                environments step together, all of them in order.

        Raises:
            ValueError, TypeError: Indices out of range or twice, or actions that do not go with them; nothing was sent.
            NotImplementedError: It names only some environments, and they step together.
            gymnasium.error.AlreadyPendingCallError: One of them is in flight, or was not received yet.
            EnvFailed: One of them failed and was not reset since.
        """
        self._driver.send(actions, env_id)

    @exclusive
    def recv(
        self, timeout: float | None = None, *, count: int | None = None, at_least: int | None = None,
        within: float | None = None,
    ) -> tuple[Any, ArrayType, ArrayType, ArrayType, dict[str, Any]]:  # fmt: skip
        """The next ``count`` environments that are done, of :meth:`send` or :meth:`reset_async`, in the order of their ends.

        Args:
            timeout: Seconds to wait at most.
            count: How many, 1 to ``num_envs``; ``None``: :attr:`batch_size`. Without first-ready rows
                (:attr:`capabilities`) it is all of the outstanding call.
            at_least: That many are enough once ``within`` seconds have passed; the others stay in flight. Default 1 where
                ``within`` is given.
            within: Seconds from the call on; default 0 where ``at_least`` is given: what is there, as soon as it is
                that many. Where fewer than ``count`` are in flight, it waits for no more than these.

        Returns:
            What ``step`` returns, with ``count`` rows instead of ``num_envs``, all of them fresh arrays.
            ``infos["env_id"]``, int ``(count,)``, tells which environments they are. Rows of a reset have reward 0 and both
            flags False.

        Raises:
            NoAsyncCallError: Fewer than ``count`` environments, or than are enough, are in flight or ready.
            gymnasium.error.AlreadyPendingCallError: The answer to :meth:`step_async` is pending.
            TypeError, ValueError: ``timeout``, ``count``, ``at_least`` or ``within`` without a meaning.
            NotImplementedError: Only that many, or at least that many, where all are answered at once.
            StepTimeout: Not within ``timeout`` seconds; nothing is lost, call again.
            Exception: What an environment raised; the rows of the others are kept for the next call.
        """
        driver = self._driver
        if count is not None:
            count = count_of(count, self.num_envs)
        deadline = None if timeout is None else deadline_of(timeout)
        if at_least is within is None:
            answer = driver.recv(count, deadline)
        else:
            least = least_of(at_least, within, self.batch_size if count is None else count)
            answer = driver.recv_enough(count, deadline, *least)
        if answer is None:
            raise driver.too_late("recv", timeout)
        return answer  # type: ignore[no-any-return]

    # -- the environments themselves: methods, attributes, functions, frames -----------------------------------------

    @exclusive
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """``env.get_wrapper_attr(name)`` of every environment, called with the arguments if it can be called.

        Raises:
            NotImplementedError: The backend has no Python environments.
        """
        self._begin_call("call", name, args, kwargs)
        return self._driver.call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        """Begin a :meth:`call`."""
        self._begin_call("call_async", name, args, kwargs)

    def _begin_call(self, method: str, name: str, args: Any, kwargs: Any) -> None:
        self._need("attributes", method)
        self._driver.require_idle("call_async")
        if name in _RESERVED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        self._driver.begin_call(name, args, kwargs)

    @exclusive
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`call_async`: a tuple of one result an environment.

        The answers to :meth:`exec_func_send`, and to a :meth:`set_attr`, a save or a load that was interrupted, are fetched
        by it, too.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still pending, call again.
            Exception: What the call raised in an environment; the environments stay alive.
        """
        self._need("attributes", "call_wait")
        self._require_phase("call_wait")
        return self._driver.call_answer(timeout)  # type: ignore[no-any-return]

    @exclusive
    def exec_func(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """``func(env, *args, **kwargs)`` in the workers, for the environments ``indices`` (``None``: all).

        ``func`` may be a lambda or a closure. Returns a tuple of ``num_envs`` results, ``None`` for the others.
        """
        self._begin_exec("exec_func", func, indices, args, kwargs)
        return self._driver.call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def exec_func_send(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an :meth:`exec_func`."""
        self._begin_exec("exec_func_send", func, indices, args, kwargs)

    def _begin_exec(self, method: str, func: Callable[..., Any], indices: Any, args: Any, kwargs: Any) -> None:
        self._need("attributes", method)
        self._driver.require_idle("exec_func")
        if not callable(func):
            raise TypeError(f"exec_func wants a function of an environment, got {func!r}")
        named = [indices] if isinstance(indices, (int, np.integer)) else indices
        self._driver.begin_exec(func, rows_of(named if named is None else list(named), self.num_envs), args, kwargs)

    @exclusive
    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`exec_func_send`."""
        self._need("attributes", "exec_func_fetch")
        self._require_phase("call_wait")
        return self._driver.call_answer(timeout)  # type: ignore[no-any-return]

    @exclusive
    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment (of whichever wrapper has it)."""
        self._begin_call("get_attr", name, (), {})
        return self._driver.call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | object) -> None:
        """Set an attribute of every environment; a list or tuple is one value an environment, else all get the same.

        If it is interrupted while the call is pending, :meth:`call_wait` fetches that.
        """
        self._need("attributes", "set_attr")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._driver.require_idle("set_attr")
        self._driver.begin_set_attr(name, values)
        self._driver.call_answer(None)

    @exclusive
    def set_next_options(
        self, options: ResetOptions = None, *, seed: int | Sequence[int | None] | None = None, env_id: Any = None
    ) -> None:
        """Options, and seeds, of the next episode that autoreset begins in each environment; once.

        They wait there until its episode is over, through resets by name, by a mask or of all environments, which have
        options of their own. Later ones take their place; ``set_next_options()`` takes them away. An environment that
        fails, or whose worker dies, forgets them. If it is interrupted while the call is pending, :meth:`call_wait` fetches
        that.

        Args:
            options: A dict for each of them, of which each gets a copy; or a sequence with a dict or ``None`` for each.
            seed: As of ``reset``: an int gives environment i ``seed + i``; a sequence gives each its own.
            env_id: Only these environments; a sequence of options or seeds is in their order. The others keep what they
                have.

        Raises:
            TypeError, ValueError: Options, seeds or indices of the wrong length, type or range, options that cannot be
                pickled; a ``reset_mask``, which is about a reset of many; an autoreset mode that begins no episodes.
                Nothing was sent.
            AlreadyPendingCallError: Something is in flight.
        """
        self._need("attributes", "set_next_options")
        rows = rows_of(env_id, self.num_envs)
        if self.autoreset_mode is AutoresetMode.DISABLED:
            raise ValueError("autoreset_mode=DISABLED begins no episodes: give reset() the options, and a reset_mask")
        seeds = seeds_of(seed, self.num_envs, rows)
        mask, options = reset_mask_of(options, self.num_envs, rows)
        if mask is not None:
            raise ValueError("options['reset_mask'] is about a reset of many environments: use env_id instead")
        self._driver.require_idle("set_next_options")
        each = options if isinstance(options, list) else [options] * self.num_envs
        given = [(own, None if one is None else dict(one)) for own, one in zip(seeds, each, strict=True)]  # kept until then
        self._driver.begin_set_next(rows, given)
        self._driver.call_answer(None)

    @exclusive
    def render(self) -> Any:
        """One frame (or list of frames) an environment, in a tuple."""
        self._begin_call("render", "render", (), {})
        return self._driver.call_answer(None)

    # -- saving and loading ----------------------------------------------------------------------------------------

    @exclusive
    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Any, ...]:
        """The state of every environment, or of some: all that decides how it goes on, bit for bit.

        The first time that a kind of environment is saved, environments of its own are built, by the same ``env_fn`` and in
        the same place, to prove that their state can be taken and put back exactly; see ``docs/state.md``. Environments
        are not touched. If it is interrupted while the call is pending, :meth:`call_wait` gives that. Of environments on a
        JAX device it is their row of the pytree, and there is nothing to prove.

        Args:
            env_id: Which environments, distinct indices; ``None``: all.
            verify: ``False`` leaves the proof out.

        Returns:
            One :class:`~vecenv.state.snapshots.Snapshot` an environment, in the order of ``env_id``. They can be pickled.

        Raises:
            NotImplementedError: The backend saves nothing.
            NotRestorable: An environment cannot be saved, or not exactly; says which, what and where.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
            EnvFailed: One of them failed and was not reset since.
            gymnasium.error.ResetNeeded: JAX: before the first ``reset``.
        """
        self._need("snapshots", "save")
        rows = rows_of(env_id, self.num_envs)
        self._driver.require_idle("save")
        return self._driver.save(rows, verify)  # type: ignore[no-any-return]

    @exclusive
    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Let environments go on from saved states, exactly as those that were saved would have gone on.

        They may come from other rows, engines, processes and machines; what they must agree in is the environment, what it
        was made with, its wrappers and their versions. Environments that raised are built anew.

        Args:
            snapshots: As many as there are environments in ``env_id``, in its order; or one, for all of them. Loading runs
                what their bytes say, as unpickling does: load only what you have kept yourself.
            env_id: Which environments, distinct indices; ``None``: all.

        Returns:
            Their observations, as they were when they were saved: fresh arrays, as :meth:`recv` gives.

        Raises:
            SnapshotMismatch: The number is wrong, or one does not fit: says which and what differs. Nothing was touched.
            EnvFailed: The worker of one of them is dead; a reset of its rows comes first.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        self._need("snapshots", "load")
        rows = rows_of(env_id, self.num_envs)
        self._driver.require_idle("load")
        return self._driver.load(snapshots, rows)

    @exclusive
    def state_dict(self, *, verify: bool = True) -> dict[str, Any]:
        """All of it in one dict that can be pickled: snapshots of all environments, counters, seeds of restarts, and the
        generators of the vector environment's own spaces. Errors as of :meth:`save`."""
        self._need("snapshots", "state_dict")
        self._driver.require_idle("state_dict")
        return self._driver.state_dict([getattr(self, name) for name in _SPACES], verify)  # type: ignore[no-any-return]

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Go on from what :meth:`state_dict` gave, here or elsewhere; returns and raises as :meth:`load`."""
        self._need("snapshots", "load_state_dict")
        self._driver.require_idle("load_state_dict")
        return self._driver.load_state_dict(state, [getattr(self, name) for name in _SPACES])

    @exclusive
    def freeze(self, env_id: Any = None) -> Any:
        """Copy the processes of environments, whatever these are made of: C code, other libraries, generators.

        A copy waits, on this machine and for this program, and takes the memory that it or the environment has written to
        since: some MiB. On Linux, with one process per environment (``num_workers=None``).

        Args:
            env_id: Which environments, distinct indices; ``None``: all.

        Returns:
            A list of :class:`vecenv.Frozen`, for :meth:`thaw`.

        Raises:
            NotImplementedError: The backend or the system cannot (:attr:`capabilities`).
            NotRestorable: A process has more than one thread, uses a GPU, or has sockets, pipes or files open that a copy
                would share: says which environment and what.
            EnvFailed: The worker of one of them is dead.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        self._need("freezing", "freeze")
        rows = rows_of(env_id, self.num_envs)
        self._driver.require_idle("freeze")
        return self._driver.freeze(rows)

    @exclusive
    def thaw(self, frozen: Any, into: Any, *, reseed: bool = False) -> tuple[ObsType, dict[str, Any]]:
        """Let environments go on from a frozen one, exactly as that would have.

        Args:
            frozen: What :meth:`freeze` of this vector environment gave. It can be thawed any number of times.
            into: Which environments go on from there; their own end.
            reseed: Each gets random numbers of its own; else all of them draw the same.

        Returns:
            Their observations and infos as of the freeze; of the infos, what does not travel by pickle.

        Raises:
            NotImplementedError: As of :meth:`freeze`.
            ValueError: It is closed, or of another vector environment; indices that are out of range or twice.
            WorkerDied: The copy has ended. Nothing was changed.
            AlreadyPendingCallError: A call is pending, or environments are in flight.
        """
        self._need("freezing", "thaw")
        rows = rows_of(into, self.num_envs)
        self._driver.require_idle("thaw")
        return self._driver.thaw(frozen, rows, reseed)  # type: ignore[no-any-return]

    @exclusive
    def record(self, env_id: int, path: str | os.PathLike[str] | None = None) -> Path:
        """Write what an environment was asked so far to a file that ``vecenv replay`` takes, without a failure.

        Args:
            env_id: Which environment.
            path: Where; ``None``: a name of its own in the folder of ``record_failures=``.

        Returns:
            Where it is.

        Raises:
            NotImplementedError: The backend records nothing, or ``record_failures=`` was not given.
            ValueError: There is no such environment.
            OSError: The file cannot be written.
        """
        self._need("recording", "record")
        return self._driver.record(rows_of([env_id], self.num_envs)[0], path)  # type: ignore[no-any-return]

    # the second set of names
    reset_send, reset_fetch = reset_async, reset_wait
    step_send, step_fetch = step_async, step_wait
    call_send, call_fetch = call_async, call_wait

    # -- what only workers have ------------------------------------------------------------------------------------

    def abandon(self, env_id: Any) -> None:
        """Wait no longer for some environments; see :meth:`vecenv.AsyncVectorEnv.abandon`."""
        self._need("workers", "abandon")

    def publish_stats(self, name: str | None = None) -> None:
        """Let ``vecenv top`` show the workers; see :meth:`vecenv.AsyncVectorEnv.publish_stats`."""
        self._need("workers", "publish_stats")

    for _name in (  # a `__getattr__` would make every look at an attribute slow
        "env_fns", "observations", "shared_memory", "context", "daemon", "worker", "observation_mode", "max_concurrency",
        "generators", "processes", "parent_pipes", "worker_rows",
    ):  # fmt: skip
        locals()[_name] = OfWorkers()
    del _name
    local_envs: Any = OfWorkers("attributes")

    # -- what can be looked at -------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        return self._driver.capabilities  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int:
        """Rows that :meth:`recv` returns."""
        return self._driver.batch_size  # type: ignore[no-any-return]

    @property
    def copy(self) -> bool:
        """Each answer has observations of its own, which stay as they are."""
        return self._driver.copies  # type: ignore[no-any-return]

    @copy.setter
    def copy(self, copy: bool) -> None:
        self._driver.copies = copy

    num_workers: int = 0
    """Worker processes."""
    plan: Any = None
    """Why it was chosen how environments are stepped, where there was a choice."""

    @property
    def step_timeout(self) -> float | None:
        """Seconds until a ``reset`` or ``step`` without a timeout of its own is taken to hang; ``None``: never."""
        return None

    @property
    def errors(self) -> deque[ErrorRecord]:
        """What failed so far, oldest first, at most 1,000 records; empty where environments are no Python objects."""
        return deque()

    @property
    def error_queue(self) -> deque[ErrorRecord]:
        """Gymnasium's name for :attr:`errors`."""
        return self.errors

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """The environments that were sent to, or reset by name, and whose rows were not received, in no order.

        Raises:
            NotImplementedError: Some are, and the library does not tell which.
        """
        return self._driver.in_flight  # type: ignore[no-any-return]

    def stats(self) -> dict[str, float]:
        """Figures since construction.

        ``steps`` of environments, and ``resets``, whose answers were taken; ``steps_per_second``; ``wait_fraction`` (of the
        time, spent by the caller waiting); ``step_time_mean`` and ``step_time_slowest_env`` in seconds; ``straggler_share``
        (of the workers' time, idle because another one took longer); ``restarts``; ``errors``; ``bytes_pickled``. Counts are
        exact; times inside environments are extrapolated where a worker's share of a batch takes less than a millisecond.
        ``in_flight``: environments whose step or reset was asked for and not fetched. What a backend does not know is nan.
        After :meth:`close` they stay as they were.
        """
        return self._driver.stats()  # type: ignore[no-any-return]

    # -- the end ---------------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = _PATIENCE, terminate: bool = False) -> None:
        """Let go of the backend. In a forked child, do nothing.

        Args:
            timeout: Seconds to wait for another thread that is in a call, where the backend cannot be closed in the middle
                of one; afterwards it is left to that call.
            terminate: Do not wait.
        """
        until = deadline_of(0.0 if terminate else timeout)
        driver = self._driver
        driver.keep_figures()
        self.closed = True
        if driver.barred == "forked":  # what the backend has is not ours
            return
        driver.barred = "closed"  # before anything is missing: a call in the middle of which this comes says so
        me = get_ident()
        while driver.caller not in (0, me) and not driver.yields and (until is None or time.monotonic() < until):
            time.sleep(0.001)
        if driver.caller in (0, me) or driver.yields:
            driver.close(terminate=terminate)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _answer(self, method: str, kind: Phase, timeout: float | None) -> Any:
        """The answer that is pending; it is so until it has been handed over."""
        self._require_phase(method)
        answer = self._driver.answer(kind, deadline_of(timeout))
        if answer is None:
            raise self._driver.too_late(method, timeout)
        return answer

    def _make_in_halves(self, whole: str, args: Any, kwargs: Any) -> Any:
        """A call of which a subclass has a half of its own."""
        begin, wait = _HALVES[whole]
        getattr(self, begin)(*args, **kwargs)
        return getattr(self, wait)()

    def _need(self, capability: str, name: str) -> None:
        """Refuse ``name`` where there is no such capability.

        Raises:
            NotImplementedError: Says which backend it is, and why.
        """
        if not getattr(self.capabilities, capability, False):
            unable(self, f"`{name}`", self._driver.reason(capability))

    @property
    def _phase(self) -> Phase:
        """What the vector environment is in the middle of; rows that ``recv`` fetches do not count."""
        if self.closed or self._driver.barred:
            return Phase.CLOSED
        return self._driver.phase  # type: ignore[no-any-return]

    def _require_phase(self, method: str) -> None:
        """Refuse one of the methods of :data:`vecenv.front.driver.NEXT` that is out of order."""
        advance(self._phase, method, self)
