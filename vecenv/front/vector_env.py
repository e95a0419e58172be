"""Gymnasium's vector interface over a :class:`~vecenv.front.driver.Driver`.

The front of every engine that is not made of workers: EnvPool and its players, JAX on a device, a library's own vector
environment, the double of :mod:`vecenv.testing`. What differs between them is the driver.
"""

from __future__ import annotations

import time
from collections import deque
from threading import get_ident
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from vecenv.errors import ErrorRecord, StepTimeout
from vecenv.front.arguments import ResetOptions, count_of, env_ids_of, refuse_options, reset_mask_of, seeds_of
from vecenv.front.base import RefusedAttribute, VectorEnvBase, refusing
from vecenv.front.capabilities import Capabilities, figures, unable
from vecenv.front.deadlines import deadline_of
from vecenv.front.driver import Driver, Stepped, recv_enough, require_idle
from vecenv.front.guard import exclusive
from vecenv.front.gymnasiums import NotClosedUnasked
from vecenv.front.phases import Phase, advance

__all__ = ["DrivenVectorEnv"]

_PATIENCE: Final = 60.0  # close() without a timeout waits this long for another thread's call

D = TypeVar("D", bound=Driver)


class DrivenVectorEnv(VectorEnvBase, NotClosedUnasked, VectorEnv[Any, Any, Any], Generic[D]):
    """Arguments, phases, figures and the end.

    A subclass sets Gymnasium's attributes and gives its driver to :meth:`_open`.
    """

    def _open(self, driver: D) -> None:
        self._driver = driver
        self._began = time.monotonic()
        self._figures: dict[str, float] | None = None  # the last, after close()
        driver.open(type(self).__name__)
        self.closed = False

    # -- reset -----------------------------------------------------------------------------------------------------

    @exclusive
    def reset(self, *, seed: Any = None, options: ResetOptions = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes in all environments, or in those of ``options["reset_mask"]``; see :meth:`reset_async`.

        Returns:
            Observations of all environments, and infos.
        """
        self._begin_reset(seed, options, None)
        observations, *_, infos = self._answer("reset_wait", Phase.WAITING_RESET, None)
        return observations, infos

    @exclusive
    def reset_async(self, seed: Any = None, options: ResetOptions = None, *, env_id: Any = None) -> None:
        """Begin a reset, answered by :meth:`reset_wait`, or by :meth:`recv`. What was sent and not received is dropped; an
        engine that takes one call at a time of some environments refuses.

        Args:
            seed: An int s (environment i gets s + i), a list of one int or ``None`` an environment, or ``None``: each goes
                on with the random numbers it has (the first time, with unpredictable ones).
            options: ``options["reset_mask"]``, bool ``(num_envs,)``, chooses the environments to reset; the others stay as
                they are. The dict is not changed. Other options, and a sequence with a dict for each environment, where the
                engine takes them.
            env_id: Only these environments, which must not be in flight; then it is answered by :meth:`recv` only. Where
                environments step together, all indices in order.

        Raises:
            NotImplementedError: What the engine cannot do, see :attr:`capabilities`.
            TypeError, ValueError: Seeds, mask, options or indices of the wrong kind, length or range; nothing was asked.
            gymnasium.error.ResetNeeded: The first reset is not of all environments.
            gymnasium.error.AlreadyPendingCallError: The answer to ``step_async`` or ``reset_async`` is pending.
        """
        self._begin_reset(seed, options, env_id)

    def _begin_reset(self, seed: Any, options: ResetOptions, env_id: Any) -> None:
        ids = None if env_id is None else env_ids_of(env_id, self.num_envs)
        seeds = seeds_of(seed, self.num_envs if ids is None else len(ids))
        self._require_phase("reset_async")
        mask, others = reset_mask_of(options, self.num_envs, None if ids is None else ids.tolist())
        able = self.capabilities
        if not (able.row_options if isinstance(others, list) else able.reset_options):
            refuse_options(self, others, "its environments take none")
        if ids is not None and mask is not None:
            raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
        chosen = ids if mask is None else np.flatnonzero(mask)
        self._driver.reset(seeds, chosen, others or None, by_row=ids is not None)

    @exclusive
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`; as :meth:`reset`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: Not within ``timeout`` seconds; the answer is still owed.
        """
        self._require_phase("reset_wait")
        observations, *_, infos = self._answer("reset_wait", Phase.WAITING_RESET, timeout)
        return observations, infos

    # -- step ------------------------------------------------------------------------------------------------------

    @exclusive
    def step(self, actions: Any) -> Stepped:
        """One step of every environment.

        Args:
            actions: A batch of ``action_space``.

        Returns:
            ``(observations, rewards, terminations, truncations, infos)``; for numpy ``float64`` rewards and ``bool`` flags.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``; without autoreset, where an episode is over.
            ValueError, TypeError: Actions of the wrong number, shape, structure or dtype; nothing was asked.
            gymnasium.error.AlreadyPendingCallError: A call is pending, or an environment is in flight.
        """
        driver = self._driver
        driver.step(actions)
        return driver.answer(Phase.WAITING_STEP, None) or self._too_late("step", None)

    @exclusive
    def step_async(self, actions: Any) -> None:
        """Begin a step and return at once; see :meth:`step` and :meth:`step_wait`."""
        self._driver.step(actions)

    @exclusive
    def step_wait(self, timeout: float | None = None) -> Stepped:
        """Fetch the answer to :meth:`step_async`; as :meth:`step`.

        Raises:
            gymnasium.error.NoAsyncCallError: There is none.
            vecenv.errors.StepTimeout: Not within ``timeout`` seconds; the answer is still owed.
            Exception: Whatever an environment, or the library, raises.
        """
        self._require_phase("step_wait")
        return self._answer("step_wait", Phase.WAITING_STEP, timeout)

    _halves: ClassVar[dict[str, Any]] = {
        "step_async": step_async, "step_wait": step_wait, "reset_async": reset_async, "reset_wait": reset_wait
    }  # fmt: skip

    # -- send and recv ---------------------------------------------------------------------------------------------

    @exclusive
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some environments that are not in flight and return at once; :meth:`recv` gives their results.

        Args:
            actions: As many as there are in ``env_id``, in its order.
            env_id: Distinct indices; ``None``: those of the latest :meth:`recv`, or all after a reset. Where environments
                step together, all of them in order.

        Raises:
            ValueError, TypeError: Actions, or indices, that are wrong; nothing was sent.
            NotImplementedError: It names only some environments, and they step together.
            gymnasium.error.AlreadyPendingCallError: One of them is in flight, or the engine takes one call at a time.
            gymnasium.error.ResetNeeded: As :meth:`step`.
        """
        self._driver.send(actions, env_id)

    @exclusive
    def recv(
        self,
        timeout: float | None = None,
        *,
        count: int | None = None,
        at_least: int | None = None,
        within: float | None = None,
    ) -> Stepped:
        """The next ``count`` environments that are done, of :meth:`send` or :meth:`reset_async`.

        Args:
            timeout: Seconds to wait at most; afterwards ``recv`` may be called again.
            count: How many, 1 to ``num_envs``; ``None``: :attr:`batch_size`. Without first-ready rows
                (:attr:`capabilities`) it is all of the outstanding call.
            at_least: So many are enough once ``within`` seconds have passed; the others stay in flight. Default 1 where
                ``within`` is given.
            within: Seconds from the call on; default 0 where ``at_least`` is given: what is there, as soon as it is
                so many.

        Returns:
            As :meth:`step`, with so many rows. ``infos["env_id"]``, int ``(count,)``, tells which environments they are.
            Rows of a reset have reward 0 and both flags False.

        Raises:
            gymnasium.error.NoAsyncCallError: Fewer environments are in flight.
            gymnasium.error.AlreadyPendingCallError: The answer to :meth:`step_async` is pending.
            NotImplementedError: Only so many, or at least so many, where all are answered at once.
            vecenv.errors.StepTimeout: Not in time; nothing is lost.
        """
        driver = self._driver
        if count is not None:
            count = count_of(count, self.num_envs, self.num_envs)
        if at_least is within is None:
            answer = driver.recv(count, None if timeout is None else deadline_of(timeout))
        else:
            answer = recv_enough(driver, count, deadline_of(timeout), at_least, within)
        return answer or self._too_late("recv", timeout)

    # the second set of names
    reset_send = reset_async
    reset_fetch = reset_wait
    step_send = step_async
    step_fetch = step_wait

    # -- what this backend cannot do, as it has no Python environments and no workers --------------------------------

    call = refusing("attributes", "call")
    call_async = call_send = refusing("attributes", "call_async")
    call_wait = call_fetch = refusing("attributes", "call_wait")
    exec_func = refusing("attributes", "exec_func")
    exec_func_send = refusing("attributes", "exec_func_send")
    exec_func_fetch = refusing("attributes", "exec_func_fetch")
    get_attr = refusing("attributes", "get_attr")
    set_attr = refusing("attributes", "set_attr")
    set_next_options = refusing("attributes", "set_next_options")
    save = refusing("snapshots", "save")
    load = refusing("snapshots", "load")
    state_dict = refusing("snapshots", "state_dict")
    load_state_dict = refusing("snapshots", "load_state_dict")
    abandon = refusing("workers", "abandon")
    publish_stats = refusing("workers", "publish_stats")
    for _name in (  # a `__getattr__` would make every look at an attribute slow
        "env_fns", "observations", "shared_memory", "context", "daemon", "worker", "observation_mode", "max_concurrency",
        "generators", "processes", "parent_pipes", "worker_rows",
    ):  # fmt: skip
        locals()[_name] = RefusedAttribute("workers")
    del _name
    local_envs = RefusedAttribute("attributes")

    # -- what can be looked at -------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self._driver.capabilities

    @property
    def batch_size(self) -> int:
        """Rows that :meth:`recv` returns."""
        return self._driver.batch_size

    copy = True
    """Observations that were handed out stay as they are."""
    num_workers = 0
    """There are no worker processes."""
    step_timeout: float | None = None
    """A call without a timeout waits as long as it takes."""
    plan: Any = None
    """Why it was chosen how environments are stepped, where there was a choice."""

    @property
    def errors(self) -> deque[ErrorRecord]:
        """Always empty: what fails is raised, and no record of it is kept."""
        return deque()

    error_queue = errors

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """The environments that were sent to, or reset by name, and whose rows were not received, in no order.

        Raises:
            NotImplementedError: Some are, and the library does not tell which.
        """
        owed = self._driver.owed
        if owed.by_row and 0 < owed.rows < self.num_envs:
            unable(self, "`in_flight`", f"its library tells only that {owed.rows} are, as stats() does")
        return np.arange(owed.rows if owed.by_row else 0, dtype=np.intp)

    def stats(self) -> dict[str, float]:
        """Figures since construction, with the keys of :meth:`vecenv.AsyncVectorEnv.stats`; nan where there is none.

        ``steps`` of environments, and ``resets``, whose answers were taken; ``steps_per_second``; ``wait_fraction`` (of the
        time, spent waiting for the engine); ``in_flight``. After :meth:`close` they stay as they were.
        """
        if self._figures is not None:
            return dict(self._figures)
        elapsed = max(time.monotonic() - self._began, 1e-9)
        _, steps, resets = self._driver.pending
        return figures({
            "steps": float(steps),
            "steps_per_second": steps / elapsed,
            "wait_fraction": self._driver.waited / elapsed,
            "resets": float(resets),
            "restarts": 0.0,
            "errors": 0.0,
            "bytes_pickled": 0.0,
            "in_flight": float(self._driver.owed.rows),
        })  # fmt: skip

    # -- the end ---------------------------------------------------------------------------------------------------

    def close_extras(self, timeout: float | None = _PATIENCE, terminate: bool = False) -> None:
        """Let go of the engine. In a forked child, do nothing.

        Args:
            timeout: Seconds to wait for another thread that is in a call, where the engine cannot be closed in the middle of
                one; afterwards it is left to that call.
            terminate: Do not wait.
        """
        until = deadline_of(0.0 if terminate else timeout)
        self._figures, driver = self.stats(), self._driver
        self.closed = True
        if driver.barred == "forked":  # what the engine has is not ours
            return
        driver.barred = "closed"  # before anything is missing: a call in the middle of which this comes says so
        me = get_ident()
        while driver.caller not in (0, me) and not driver.yields and (until is None or time.monotonic() < until):
            time.sleep(0.001)
        if driver.caller in (0, me) or driver.yields:
            driver.close(terminate=terminate)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _answer(self, method: str, kind: Phase, timeout: float | None) -> Stepped:
        """The answer that is pending; it is so until it has been handed over."""
        return self._driver.answer(kind, deadline_of(timeout)) or self._too_late(method, timeout)

    def _too_late(self, method: str, timeout: float | None) -> NoReturn:
        raise StepTimeout(
            f"The call to `{method}` has timed out after {timeout} second(s).\n"
            f"The answer is still owed: call `{method}` again, or `close()`."
        )

    @property
    def _phase(self) -> Phase:
        """What the vector environment is in the middle of; rows that ``recv`` fetches do not count."""
        owed = self._driver.owed
        return Phase.CLOSED if self.closed else Phase.DEFAULT if owed.by_row else owed.kind

    def _require_phase(self, method: str) -> None:
        """Refuse one of the methods of :data:`vecenv.front.phases.NEXT` that is out of order."""
        advance(self._phase, method, self)

    def _require_idle(self, method: str) -> None:
        """Refuse a method while anything is pending."""
        require_idle(self._driver.owed, method)
