"""Vector environments whose environments are stepped together: one call owes one answer, which is everybody's.

The front of every engine that is not made of workers and has no first-ready rows: JAX on a device, a library's own vector
environment, the double of :mod:`vecenv.testing`. What differs between them is a :class:`Driver`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, Final, Generic, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import VectorEnv

from vecenv.errors import StepTimeout
from vecenv.front.arguments import count_of, env_ids_of, reset_mask_of, seeds_of
from vecenv.front.attributes import NoAttributes
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.front.deadlines import deadline_of
from vecenv.front.guard import one_call, refuse_closed
from vecenv.front.phases import Phase, advance

__all__ = ["Driver", "Stepped", "TogetherVectorEnv"]

Stepped: TypeAlias = tuple[Any, Any, Any, Any, dict[str, Any]]
"""What ``step`` returns."""
_PATIENCE: Final = 60.0  # close() without a timeout waits this long for another thread's call

guarded = one_call("its threads")
"""One call at a time, in the process that built it, until it is closed."""


class Driver(Protocol):
    """What an engine does whose environments are stepped together.

    An exception may come out of any line, a Ctrl-C or a time limit. So a driver says itself whether a call was made
    (:attr:`asked`) and whether an exception is the answer (:attr:`failure`); every other one leaves the answer owed.

    Attributes:
        capabilities: What it can do.
        asked: What was asked last: another object from the moment on in which a call is made, ``None`` before the first one
            and where nothing came of it.
        failure: The exception that is the answer, where one is.
        waited: Seconds spent waiting.
        yields: Another thread may close it in the middle of a call.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def asked(self) -> object: ...

    @property
    def waited(self) -> float: ...

    failure: BaseException | None
    yields: bool

    def reset(self, seeds: list[Any], mask: npt.NDArray[np.bool_] | None, options: dict[str, Any] | None) -> None:
        """Begin to reset the rows of ``mask`` (``None``: all); checks first, and raises before anything is asked."""

    def step(self, actions: Any) -> None:
        """Begin a step; checks first, and raises before anything is asked."""

    def wait(self, deadline: float) -> bool:
        """Wait for the answer until ``deadline`` (monotonic); whether it is there."""

    def answer(self, kind: Phase) -> Stepped:
        """The answer to a step, or to a reset, whose rewards are 0 and flags ``False``. It can be called again."""

    def close(self, *, terminate: bool) -> None:
        """Let go of everything. Idempotent."""


D = TypeVar("D", bound=Driver)


class TogetherVectorEnv(NoAttributes, VectorEnv[Any, Any, Any], Generic[D]):
    """Gymnasium's vector interface over a :class:`Driver`.

    A subclass sets Gymnasium's attributes and gives its driver to :meth:`_open`.
    """

    _why_together = "they step together"

    def _open(self, driver: D) -> None:
        self._driver = driver
        self._kind, self._rows, self._by_row = Phase.DEFAULT, 0, False  # what is owed: of how many rows, and by `recv` only
        self._steps = self._resets = 0
        self._began = time.monotonic()
        self._figures: dict[str, float] | None = None  # the last, after close()
        self._owner, self._caller = os.getpid(), 0
        self.closed = False

    # -- reset -----------------------------------------------------------------------------------------------------

    @guarded
    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments, or in those of ``options["reset_mask"]``; see :meth:`reset_async`.

        Returns:
            Observations of all environments, and infos.
        """
        self.reset_async(seed, options)
        return self.reset_wait()

    @guarded
    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None, *, env_id: Any = None) -> None:
        """Begin a reset, answered by :meth:`reset_wait`, or by :meth:`recv`. What was sent and not received is dropped.

        Args:
            seed: An int s (environment i gets s + i), a list of one int or ``None`` an environment, or ``None``: each goes
                on with the random numbers it has (the first time, with unpredictable ones).
            options: ``options["reset_mask"]``, bool ``(num_envs,)``, chooses the environments to reset; the others stay as
                they are. The dict is not changed.
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
        if others and not able.reset_options:
            keys = sorted(map(str, others))
            raise ValueError(f"{type(self).__name__} takes no reset options but 'reset_mask', got {keys}; nothing was sent")
        rows = self.num_envs if mask is None else int(np.count_nonzero(mask))
        if rows < self.num_envs and not able.reset_mask:
            unable(self, f"reset {rows} of {self.num_envs} environments", self._why_together)
        self._ask(Phase.WAITING_RESET, rows, env_id is not None, lambda: self._driver.reset(seeds, mask, others or None))

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
        self._ask(Phase.WAITING_STEP, self.num_envs, False, lambda: self._driver.step(actions))

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
        self._ask(Phase.WAITING_STEP, self.num_envs, True, lambda: self._driver.step(actions))

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
        if self._kind is Phase.WAITING_STEP and not self._by_row:
            advance(self._kind, "reset_async", self)
        if self._rows < self.num_envs:
            raise NoAsyncCallError(
                f"Calling `recv` for {self.num_envs} environments, but only {self._rows} are in flight and 0 are ready: "
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
            "in_flight": float(self._rows),
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
            self._settle()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _ask(self, kind: Phase, rows: int, by_row: bool, ask: Callable[[], None]) -> None:
        """Make a call. When the driver has asked, its answer is owed, whatever is raised behind that."""
        driver = self._driver
        before = driver.asked
        try:
            ask()
        finally:
            if driver.asked is not before and driver.asked is not None:
                self._kind, self._rows, self._by_row = kind, rows, by_row
                if kind is Phase.WAITING_STEP:
                    self._steps += rows
                else:
                    self._resets += rows

    def _answer(self, method: str, timeout: float | None) -> Stepped:
        """The answer that is owed; once it has been read it is owed no more."""
        driver = self._driver
        if timeout is not None:
            deadline = deadline_of(timeout)
            if deadline is not None and not driver.wait(deadline):
                raise StepTimeout(
                    f"The call to `{method}` has timed out after {timeout} second(s).\n"
                    "The answer is still owed: wait again, or close()."
                )
        try:
            answer = driver.answer(self._kind)
        except BaseException as error:
            if error is driver.failure:
                driver.failure = None
                self._settle()
            raise
        if self.closed:  # meanwhile, by another thread or a signal handler
            driver.close(terminate=False)
            refuse_closed(self)
        self._settle()
        return answer

    def _settle(self) -> None:
        """Nothing is owed."""
        self._kind, self._rows, self._by_row = Phase.DEFAULT, 0, False

    def _require_everybody(self, env_id: Any, method: str) -> None:
        if not np.array_equal(env_ids_of(env_id, self.num_envs), np.arange(self.num_envs)):
            unable(self, f"{method} to some environments", f"{self._why_together}: name all of them, in order, or none")

    def _require_phase(self, method: str) -> None:
        """Refuse one of the methods of :data:`vecenv.front.phases.NEXT` that is out of order."""
        advance(Phase.DEFAULT if self._by_row else self._kind, method, self)

    def _require_idle(self, method: str) -> None:
        """Refuse a method while anything is owed."""
        if self._by_row:
            self._refuse_in_flight(method)
        if self._kind is not Phase.DEFAULT:
            raise AlreadyPendingCallError(
                f"Calling `{method}` while waiting for a pending call to `{self._kind.value}` to complete.", self._kind.value
            )

    def _refuse_in_flight(self, method: str) -> NoReturn:
        raise AlreadyPendingCallError(
            f"Calling `{method}` for envs 0..{self.num_envs - 1}, which are still in flight: `recv` them first.", "send"
        )
