"""Vector environments whose environments are stepped together: one call owes one answer, which is everybody's.

The front of every engine that is not made of workers and has no first-ready rows: JAX on a device, a library's own vector
environment, the double of :mod:`vecenv.testing`. What differs between them is a :class:`~vecenv.front.driver.Driver`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import VectorEnv

from vecenv.errors import StepTimeout
from vecenv.front.arguments import ResetOptions, count_of, env_ids_of, refuse_options, reset_mask_of, seeds_of
from vecenv.front.attributes import NoAttributes
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.front.deadlines import deadline_of
from vecenv.front.driver import NOTHING, Call, Driver, Stepped
from vecenv.front.guard import refuse_busy, refuse_closed, refuse_forked, say_it_was_closed
from vecenv.front.gymnasiums import NotClosedUnasked
from vecenv.front.phases import Phase, advance

__all__ = ["TogetherVectorEnv", "guarded"]

_PATIENCE: Final = 60.0  # close() without a timeout waits this long for another thread's call

P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """One call at a time, in the process that built it, until it is closed; and no answer is lost on its way out.

    An answer counts as taken on the line that returns it, so that whatever is raised before leaves it owed. (The interpreter
    looks for signals and for other threads after calls and at jumps: there is none on that line.)
    """

    @functools.wraps(method)
    def outermost(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        me = get_ident()
        if self._caller == me and _is_within(self):
            return method(self, *args, **kwargs)
        if os.getpid() != self._owner:
            refuse_forked(self, self._owner, "its threads")
        if self.closed:
            refuse_closed(self)
        if self._caller not in (0, me):
            refuse_busy(self, method.__name__)
        driver = self._driver
        try:
            self._caller, self._after = me, None
            answer = method(self, *args, **kwargs)
            self._caller = 0
        except BaseException as error:
            self._caller = 0
            if self.closed:
                say_it_was_closed(self, error)
            if error is not driver.failure:
                raise
            self._taken, driver.failure = driver.asked, None; raise  # noqa: E702 - see above
        if self._after is None:
            return answer
        self._taken, self._steps, self._resets = self._after; return answer  # noqa: E702

    return outermost


def _is_within(envs: object) -> bool:
    """Whether a call on a vector environment is on this thread's stack.

    ``_caller`` alone does not tell: an exception that falls into the very first instruction after a call has failed leaves
    it as it was.
    """
    frame: FrameType | None = sys._getframe(1)
    assert frame is not None
    inner, frame = frame, frame.f_back  # `inner` asks about the calls around itself
    while frame is not None:
        if frame.f_code is inner.f_code and frame.f_locals["self"] is envs:
            return True
        frame = frame.f_back
    return False


D = TypeVar("D", bound=Driver)


class TogetherVectorEnv(NotClosedUnasked, NoAttributes, VectorEnv[Any, Any, Any], Generic[D]):
    """Gymnasium's vector interface over a :class:`Driver`.

    A subclass sets Gymnasium's attributes and gives its driver to :meth:`_open`.
    """

    _why_together = "they step together"

    def _open(self, driver: D) -> None:
        self._driver = driver
        self._taken: Call | None = None  # the call whose answer was taken; another one that was made is owed
        self._after: tuple[Call | None, int, int] | None = None  # that and the counters, when an answer has been taken
        self._steps = self._resets = 0
        self._began = time.monotonic()
        self._figures: dict[str, float] | None = None  # the last, after close()
        self._owner, self._caller = os.getpid(), 0
        self.closed = False

    # -- reset -----------------------------------------------------------------------------------------------------

    @guarded
    def reset(self, *, seed: Any = None, options: ResetOptions = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments, or in those of ``options["reset_mask"]``; see :meth:`reset_async`.

        Returns:
            Observations of all environments, and infos.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    @guarded
    def reset_async(self, seed: Any = None, options: ResetOptions = None, *, env_id: Any = None) -> None:
        """Begin a reset, answered by :meth:`reset_wait`, or by :meth:`recv`. What was sent and not received is dropped.

        Args:
            seed: An int s (environment i gets s + i), a list of one int or ``None`` an environment, or ``None``: each goes
                on with the random numbers it has (the first time, with unpredictable ones).
            options: ``options["reset_mask"]``, bool ``(num_envs,)``, chooses the environments to reset; the others stay as
                they are. The dict is not changed. Other options, and a sequence with a dict for each environment, where the
                engine takes them.
            env_id: ``None``, or all indices in order: then it is answered by :meth:`recv` only.

        Raises:
            NotImplementedError: What the engine cannot do, see :attr:`capabilities`; ``env_id`` names only some.
            TypeError, ValueError: Seeds, mask or options of the wrong kind, length or range; nothing was asked.
            gymnasium.error.ResetNeeded: The first reset is not of all environments.
            gymnasium.error.AlreadyPendingCallError: The answer to ``step_async`` or ``reset_async`` is owed.
        """
        if env_id is not None:
            self._require_everybody(env_id, "reset_async")
        seeds = seeds_of(seed, self.num_envs)
        self._require_phase("reset_async")
        mask, others = reset_mask_of(options, self.num_envs)
        if env_id is not None:
            if mask is not None:
                raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
            self._require_idle("reset_async")
        able = self._driver.capabilities
        if not (able.row_options if isinstance(others, list) else able.reset_options):
            refuse_options(self, others, self._why_together)
        rows = self.num_envs if mask is None else int(np.count_nonzero(mask))
        if rows < self.num_envs and not able.reset_mask:
            unable(self, f"reset {rows} of {self.num_envs} environments", self._why_together)
        self._driver.reset(Call(Phase.WAITING_RESET, rows, env_id is not None), seeds, mask, others or None)

    @guarded
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`; as :meth:`reset`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: Not within ``timeout`` seconds; the answer is still owed.
        """
        self._require_phase("reset_wait")
        observations, *_, infos = self._answer("reset_wait", timeout)
        return observations, infos

    # -- step ------------------------------------------------------------------------------------------------------

    @guarded
    def step(self, actions: Any) -> Stepped:
        """One step of every environment.

        Args:
            actions: A batch of ``action_space``.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``; for numpy ``float64`` rewards and ``bool`` flags.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            ValueError, TypeError: Actions of the wrong number, shape, structure or dtype; nothing was asked.
            gymnasium.error.AlreadyPendingCallError: An answer is owed.
        """
        self.step_async(actions)
        return self.step_wait()

    @guarded
    def step_async(self, actions: Any) -> None:
        """Begin a step and return at once; see :meth:`step` and :meth:`step_wait`."""
        self._require_phase("step_async")
        self._require_idle("step_async")
        self._driver.step(Call(Phase.WAITING_STEP, self.num_envs, by_row=False), actions)

    @guarded
    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Fetch the answer to :meth:`step_async`; as :meth:`step`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: Not within ``timeout`` seconds; the answer is still owed.
            Exception: Whatever an environment, or the library, raises.
        """
        self._require_phase("step_wait")
        return self._answer("step_wait", timeout)

    # -- send and recv ---------------------------------------------------------------------------------------------

    @guarded
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Begin a step and return at once; :meth:`recv` gives its results.

        Args:
            actions: As for :meth:`step`.
            env_id: All environments step together: ``None``, or all indices in order.

        Raises:
            ValueError: ``env_id`` is no sequence of distinct indices.
            NotImplementedError: It names only some environments.
            gymnasium.error.AlreadyPendingCallError: What was sent before has not been received.
        """
        if env_id is not None:
            self._require_everybody(env_id, "send")
        self._require_phase("step_async")
        self._require_idle("send")
        self._driver.step(Call(Phase.WAITING_STEP, self.num_envs, by_row=True), actions)

    @guarded
    def recv(self, timeout: float | None = None, *, count: int | None = None) -> Stepped:
        """The results of :meth:`send` or :meth:`reset_async`, of all environments.

        Args:
            timeout: Seconds to wait at most; afterwards ``recv`` may be called again.
            count: ``None`` or ``num_envs``.

        Returns:
            As :meth:`step`. ``infos["env_id"]`` is ``arange(num_envs)``. After a reset, rewards are 0 and flags False.

        Raises:
            gymnasium.error.NoAsyncCallError: Not all environments are in flight.
            NotImplementedError: Another ``count``.
            vecenv.errors.StepTimeout: Not in time.
        """
        number = count_of(count, self.num_envs, self.num_envs)
        if number != self.num_envs:
            unable(self, f"recv {number} of {self.num_envs} environments", "all of them are done at the same time")
        owed = self._owed
        if owed.kind is Phase.WAITING_STEP and not owed.by_row:
            advance(owed.kind, "reset_async", self)
        if owed.rows < self.num_envs:
            raise NoAsyncCallError(
                f"Calling `recv` for {self.num_envs} environments, but only {owed.rows} are in flight and 0 are ready: "
                "send() more first.",
                "recv",
            )
        stepped = self._answer("recv", timeout)
        infos = stepped[4]
        infos["env_id"], infos["_env_id"] = np.arange(self.num_envs, dtype=np.intp), np.ones(self.num_envs, np.bool_)
        return stepped

    # the second set of names
    reset_send = reset_async
    reset_fetch = reset_wait
    step_send = step_async
    step_fetch = step_wait

    # -- what can be looked at -------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self._driver.capabilities

    @property
    def batch_size(self) -> int:
        """Rows that :meth:`recv` returns: all."""
        return self.num_envs

    def stats(self) -> dict[str, float]:
        """Figures since construction, with the keys of :meth:`vecenv.AsyncVectorEnv.stats`; nan where there is none.

        ``steps`` of environments; ``steps_per_second``; ``wait_fraction`` (of the time, spent waiting for the engine);
        ``resets`` asked for; ``in_flight``. After :meth:`close` they stay as they were.
        """
        if self._figures is not None:
            return dict(self._figures)
        elapsed = max(time.monotonic() - self._began, 1e-9)
        return figures({
            "steps": float(self._steps),
            "steps_per_second": self._steps / elapsed,
            "wait_fraction": self._driver.waited / elapsed,
            "resets": float(self._resets),
            "restarts": 0.0,
            "errors": 0.0,
            "bytes_pickled": 0.0,
            "in_flight": float(self._owed.rows),
        })  # fmt: skip

    # -- the end ---------------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = _PATIENCE, terminate: bool = False, **_: Any) -> None:
        """Let go of the engine. In a forked child, do nothing.

        Args:
            timeout: Seconds to wait for another thread that is in a call, where the engine cannot be closed in the middle of
                one; afterwards it is left to that call.
            terminate: Do not wait.
        """
        until = deadline_of(0.0 if terminate else timeout)
        self._figures = self.stats()
        self.closed = True  # before anything is missing: a call in the middle of which this comes says so
        if os.getpid() != self._owner:  # what the engine has is not ours
            return
        me, driver = get_ident(), self._driver
        while self._caller not in (0, me) and not driver.yields and (until is None or time.monotonic() < until):
            time.sleep(0.001)
        if self._caller in (0, me) or driver.yields:
            driver.close(terminate=terminate)
            self._taken = driver.asked

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _owed(self) -> Call:
        """The call whose answer is owed."""
        asked = self._driver.asked
        return NOTHING if asked is None or asked is self._taken else asked

    def _answer(self, method: str, timeout: float | None) -> Stepped:
        """The answer that is owed; it is owed until it has been handed over."""
        driver, owed = self._driver, self._owed
        if timeout is not None:
            deadline = deadline_of(timeout)
            if deadline is not None and not driver.wait(deadline):
                raise StepTimeout(
                    f"The call to `{method}` has timed out after {timeout} second(s).\n"
                    "The answer is still owed: wait again, or close()."
                )
        answer = driver.answer(owed.kind)
        if self.closed:  # meanwhile, by another thread or a signal handler
            driver.close(terminate=False)
            refuse_closed(self)
        stepped = owed.rows if owed.kind is Phase.WAITING_STEP else 0
        self._after = driver.asked, self._steps + stepped, self._resets + owed.rows - stepped
        return answer

    def _require_everybody(self, env_id: Any, method: str) -> None:
        if not np.array_equal(env_ids_of(env_id, self.num_envs), np.arange(self.num_envs)):
            unable(self, f"{method} to some environments", f"{self._why_together}: name all of them, in order, or none")

    def _require_phase(self, method: str) -> None:
        """Refuse one of the methods of :data:`vecenv.front.phases.NEXT` that is out of order."""
        owed = self._owed
        advance(Phase.DEFAULT if owed.by_row else owed.kind, method, self)

    def _require_idle(self, method: str) -> None:
        """Refuse a method while anything is owed."""
        owed = self._owed
        if owed.by_row:
            raise AlreadyPendingCallError(
                f"Calling `{method}` for envs 0..{self.num_envs - 1}, which are still in flight: `recv` them first.", "send"
            )
        if owed.kind is not Phase.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{owed.kind.value}` to complete.", owed.kind.value
            )
