"""Who owns an engine: what it was given, what can be looked at, and the end of it."""

from __future__ import annotations

import inspect
import multiprocessing
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
from gymnasium import logger
from gymnasium.core import ActType, Env, ObsType
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from vecenv.engine import published
from vecenv.engine.actions import ActionStage
from vecenv.engine.engine import Engine
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pool import WorkerPool
from vecenv.engine.published import StatsFile
from vecenv.errors import ErrorRecord
from vecenv.front.arguments import check_env_fns, check_switches, mode_of
from vecenv.front.base import VectorEnvBase
from vecenv.front.capabilities import Capabilities
from vecenv.front.deadlines import seconds_of
from vecenv.front.guard import exclusive, is_within_a_call
from vecenv.front.phases import Phase, advance
from vecenv.planning.plan import Plan as WorkerPlan
from vecenv.system.spawning import end_if_importing_main

__all__ = ["EngineOwner"]


_PATIENCE = 60.0  # close() without a timeout waits this long for environments to close
_LITTLE_PATIENCE = 1.0  # the same, when a worker was already late or the caller was interrupted
_OTHER_THREAD = 10.0  # for another thread's call to notice that its workers are gone


class EngineOwner(VectorEnvBase, VectorEnv[ObsType, ActType, np.ndarray], Generic[ObsType, ActType]):
    """A vector environment over an engine, without the calls.

    A subclass takes the arguments, reads the spaces, starts an engine and gives it to :meth:`_adopt`.
    """

    _backend: str
    num_workers: int

    def _take_options(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool,
        copy: bool,
        context: str | None,
        daemon: bool,
        observation_mode: Any,
        autoreset_mode: str | AutoresetMode,
        max_concurrency: int | None,
    ) -> None:
        """Keep Gymnasium's own arguments, which programs may look at."""
        end_if_importing_main()
        self.closed = True  # until there is something to close
        check_env_fns(env_fns, type(self).__name__)
        check_switches(type(self).__name__, shared_memory=shared_memory, copy=copy)
        if context not in (None, *(accepted := multiprocessing.get_all_start_methods())):
            raise ValueError(f"cannot find context for {context!r}: wanted None or one of {', '.join(map(repr, accepted))}.")
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker: Callable[..., None] | None = None
        self.observation_mode = observation_mode
        self.autoreset_mode = mode_of(autoreset_mode)
        if max_concurrency is not None:
            if not isinstance(max_concurrency, (int, np.integer)):
                raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
            if max_concurrency < 1:
                raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
        self.max_concurrency = max_concurrency
        self.num_envs = len(env_fns)

    def _adopt(self, engine: Engine, batch_size: int | None) -> None:
        """Take over an engine that was started; it is ended if its environments do not go together."""
        self.batch_size = self.num_envs if batch_size is None else batch_size
        self._driver = engine
        try:
            self._pool: WorkerPool = engine.pool
            engine.stage = ActionStage(
                self.single_action_space, self.action_space, self.num_envs, engine.layout.actions, engine.batch.actions
            )
            self._check_spaces()
            engine.open(type(self).__name__)
        except BaseException:
            engine.pool.close(0.0, terminate=True)
            engine.pool.release()
            raise
        self.closed = False

    def _check_spaces(self) -> None:
        for env, which, got in self._driver.mismatches:
            if which == "action":
                raise RuntimeError(
                    f"Some environments have an action space different from `{self.single_action_space}`. In order to "
                    "batch actions, the action spaces from all environments must be equal. "
                    f"Env {env} has {got}."
                )
            detail = f" Env {env} has {got}, wanted {self.single_observation_space}."
            if self.observation_mode == "same":
                raise RuntimeError(
                    "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation spaces "
                    "are not equivalent. If this is intentional, use `observation_mode='different'` instead." + detail
                )
            raise RuntimeError(
                "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
                "observation spaces do not share a common shape and dtype." + detail
            )

    # -- what can be looked at --------------------------------------------------------------------------------------

    @property
    def observations(self) -> ObsType:
        """The latest batch itself, not a copy; zeros before the first reset."""
        if self.closed:
            advance(Phase.CLOSED, "reset_async", self)
        return self._driver.store.observations  # type: ignore[no-any-return]

    @property
    def processes(self) -> list[Any]:
        """The worker processes."""
        return [worker.process for worker in self._pool.workers if isinstance(worker, ProcessWorker)]

    @property
    def parent_pipes(self) -> list[Any]:
        """The caller's reading ends of the workers' pipes; each has a ``fileno()``."""
        return [worker.channel for worker in self._pool.workers if isinstance(worker, ProcessWorker)]

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        own, engine = self._pool.own is not None, self._driver
        plain = not engine.layout.spares
        return Capabilities(
            self._backend, first_ready=plain, restarts=engine.policy.restart, snapshots=plain, spare_workers=not plain,
            in_this_process=own,
        )  # fmt: skip

    @property
    def step_timeout(self) -> float | None:
        """Seconds until a ``reset`` or ``step`` without a timeout of its own is taken to hang; ``None``: never."""
        return self._driver.policy.step_timeout

    @property
    def local_envs(self) -> list[Env[Any, Any]]:
        """The environments that live in this process, those of the caller's share."""
        own = self._pool.own
        return [] if own is None else [env for env in own.envs if env is not None]

    @property
    def in_flight(self) -> npt.NDArray[np.intp]:
        """The environments that were sent to, or reset by name, and whose rows were not received, in no order."""
        return np.array(self._driver.waiting(), np.intp)

    @property
    def worker_rows(self) -> list[range]:
        """The environments of each worker; those that the caller steps itself are the first."""
        return [range(worker.rows[0], worker.rows[-1] + 1) for worker in self._pool.workers]

    plan: WorkerPlan | None = None
    """Why ``num_workers="auto"`` chose what it chose."""

    @property
    def errors(self) -> deque[ErrorRecord]:
        """What failed so far, oldest first, at most 1,000 records."""
        return self._driver.ledger.errors

    @property
    def error_queue(self) -> deque[ErrorRecord]:
        """Gymnasium's name for :attr:`errors`."""
        return self._driver.ledger.errors

    @property
    def _state(self) -> AsyncState:
        return AsyncState(self._driver.phase.value)

    @property
    def _phase(self) -> Phase:
        return Phase.CLOSED if self.closed or self._driver.barred else self._driver.phase

    def stats(self) -> dict[str, float]:
        """Figures since construction.

        ``steps``; ``steps_per_second``; ``wait_fraction`` (of the time, spent by the caller waiting for workers);
        ``step_time_mean`` and ``step_time_slowest_env`` in seconds; ``straggler_share`` (of the workers' time, idle because
        another one took longer); ``resets`` asked for; ``restarts``; ``errors``; ``bytes_pickled``. Counts are exact; times
        inside environments are extrapolated where a worker's share of a batch takes less than a millisecond.
        ``in_flight``: environments whose step or reset was asked for and not fetched. After :meth:`close` they stay as they
        were.
        """
        return self._driver.stats()

    @exclusive
    def publish_stats(self, name: str | None = None) -> None:
        """Let ``vecenv top``, run by the same user on this machine, show the workers until :meth:`close`.

        The environment variable ``VECENV_TOP=1`` does the same for a whole program, from the first reset on. The
        program writes a small file, twice a second while answers come, into ``$XDG_RUNTIME_DIR/vecenv`` or a folder of the
        user's among temporary files, where no other user can read it. Linux only.

        Args:
            name: What to call it there; default: the environments' id.

        Raises:
            NotImplementedError: Not on this system, or not with workers on other machines.
            OSError: The file cannot be written.
            ClosedEnvironmentError: It is closed.
        """
        if not published.available() or not published.has_counters(self._driver):
            raise NotImplementedError("publish_stats() needs Linux and workers on this machine; stats() is there everywhere")
        self._publish(name)

    def _publish(self, name: str | None) -> None:
        if self._driver.card is not None:
            self._driver.card.close()
        self._driver.card = StatsFile(name or (self.spec.id if self.spec is not None else type(self).__name__), self._driver)

    def __repr__(self) -> str:
        name = f"{self.spec.id}, " if self.spec is not None else ""
        if not hasattr(self, "_driver"):
            return f"{type(self).__name__}({name}closed)"
        restarts = f", restarted={self._driver.restarts}" if self._driver.restarts else ""
        failed = f", failed={sorted(self._driver.failed)}" if self._driver.failed else ""
        caller = sum(len(worker.rows) for worker in self._pool.workers if worker.local)
        share = f", caller={caller}" if caller else ""
        share += f", spares={spares}" if (spares := self._driver.layout.spares) else ""
        return (
            f"{type(self).__name__}({name}num_envs={self.num_envs}, workers={self.num_workers}{share}, "
            f"phase={self._phase.name}{restarts}{failed})"
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Close all environments and end all workers; idempotent, from any thread or signal handler, in whatever state.

        Interrupted, it can be called again, and goes on. From a signal handler that came in the middle of another call, it
        ends the workers; what that call still looks at is let go of when the call has ended, by
        :class:`~gymnasium.error.ClosedEnvironmentError` or whatever the handler raises. In a forked child it does nothing.

        Args:
            timeout: Seconds for a pending answer and for the environments' own ``close()``; then workers are killed.
                Default: a minute, or a second if a worker was late before or a call was interrupted.
            terminate: Kill at once; the environments' ``close()`` is not called.
        """
        if self.closed:
            return
        driver, me = self._driver, get_ident()
        if driver.barred == "forked":
            self.closed = True
            return
        inspect.signature(self.close_extras).bind(**kwargs)  # refuses what it does not know, before anything is ended
        seconds = seconds_of(kwargs.get("timeout"))
        again, driver.barred = driver.barred == "closing", "closing"
        self._pool.closing = True
        if driver.caller and driver.caller != me:  # another thread is waiting for an answer: there will be none
            for worker in self._pool.processes:
                worker.signal(9)
            until = time.monotonic() + _OTHER_THREAD
            while driver.caller and time.monotonic() < until:
                time.sleep(0.001)
        nested = driver.caller == me and is_within_a_call(self)
        if not self._pool.released:
            hurried = again or nested
            self.close_extras(**{**kwargs, "timeout": _LITTLE_PATIENCE if hurried and seconds is None else seconds})
        self.closed, driver.barred = True, "closed"
        if not nested:
            driver.leave()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers; see :meth:`close`."""
        pool, call = self._pool, self._driver.call
        patience = timeout
        if patience is None:
            late = any(worker.overdue or (worker.death is None and worker.is_stopped()) for worker in pool.workers)
            patience = _LITTLE_PATIENCE if late else _PATIENCE
        if call is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{call.phase.value}` to complete.")
        self._driver.shut(0.0 if terminate else patience, terminate=terminate)

    def __del__(self) -> None:
        if self.__dict__.get("closed", True):  # the class itself has `closed = False`
            return
        if self._driver.barred == "forked":
            return
        warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, source=self, stacklevel=2)
        self._pool.end_unclosed()
