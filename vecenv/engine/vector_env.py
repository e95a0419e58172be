"""``AsyncVectorEnv``: environments in worker processes, as a drop-in replacement for Gymnasium's class of that name.

It accepts the arguments of ``gymnasium.vector.AsyncVectorEnv`` in the same order, and has the same attributes, phases and
errors. It differs where Gymnasium's class fails: no step returns the result of another, a failed environment does not end
the others, and ``close()`` always returns. :mod:`vecenv.front.vector_env` checks arguments and merges infos.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import numpy as np
from gymnasium import Space, logger
from gymnasium.core import ActType, Env, ObsType
from gymnasium.error import CustomSpaceError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.engine import published
from vecenv.engine.failures import Policy
from vecenv.engine.observers import Observer
from vecenv.engine.process_engine import Engine
from vecenv.engine.stats import WorkerStats, worker_stats
from vecenv.engine.submissions import Submissions
from vecenv.engine.worker_pool import PoolOptions, WorkerPool
from vecenv.front.arguments import (
    CompatTypeError,
    GymnasiumAsync,
    ResetOptions,
    check_option_names,
    parse_close_timeout,
    store_gymnasium_options,
)
from vecenv.front.guard import exclusive, is_inside_call, raise_unusable
from vecenv.front.vector_env import CLOSE_TIMEOUT, SHORT_CLOSE_TIMEOUT, WorkerVectorEnv
from vecenv.link.actions import ActionStage
from vecenv.link.envs import Expected, WorkerPlan, different_action_space_error
from vecenv.link.observations import LendingStore, PickledStore, RegisteredStore, SharedStore, Store, has_dynamic_part
from vecenv.link.own_generators import run_with_own_generators, with_own_generators
from vecenv.planning.options import (
    BatchSize,
    NumWorkers,
    OnFailure,
    StartMethod,
    WorkerOptions,
    check_options,
    options_for_processes,
    require_processes_for,
)
from vecenv.planning.plan import Plan, workers_and_share
from vecenv.planning.probe import EnvProbe
from vecenv.recording.recorder import FlightRecorder, Recorder
from vecenv.shm import Arena, Layout, SharedArrays, fixed_tree
from vecenv.shm.lending import Lender, count_spare_batches
from vecenv.system.cores import bound_placements, usable_cores
from vecenv.system.generators import GeneratorsOption
from vecenv.system.reporting import warn
from vecenv.system.shared_generators import describe_draws
from vecenv.system.signals import deferred_signals
from vecenv.system.spawning import (
    find_late_variables,
    is_main_file_error,
    make_context,
    resolve_variables,
)

__all__ = ["AsyncVectorEnv", "Observer"]


class _Signature:
    """The signature of ``__init__``, for editors and ``help``, which would otherwise show that of ``__new__``."""

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        parameters = list(signature.parameters.values())[1:]
        return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


class AsyncVectorEnv(WorkerVectorEnv[ObsType, ActType, np.ndarray], GymnasiumAsync):  # type: ignore[misc]
    """Environments in worker processes, behind ``gymnasium.vector.AsyncVectorEnv``'s interface.

    It is a subclass of that class, so that ``isinstance`` checks pass, but it implements every method itself.

    The first nine arguments are Gymnasium's, in its order; see its documentation. The others are keyword-only:
    ``num_workers`` to ``env_threads`` are about speed, ``on_failure`` to ``record_failures`` about failures, ``generators``
    and ``worker_options`` about the workers.

    Args:
        env_fns: Functions that build the environments.
        shared_memory: Keep observations of fixed size in shared memory and pickle all others. ``False`` pickles every
            observation. By default, observations of custom spaces are pickled, with a warning; an explicit ``True`` rejects
            such spaces, as in Gymnasium.
        copy: Return observations that belong to the program. Since Linux 5.14, batches of 64 KB or more are usually lent
            instead of copied, with the same effect, and memory for four batches is reserved. With ``False`` the same
            writeable arrays are returned every time and change while environments step.
        context: Start method (``"fork"``, ``"spawn"``, ``"forkserver"``) or ``None`` for the process default.
        daemon: Make the workers daemonic, so that they may not have ``multiprocessing`` children of their own.
        worker: A custom worker function; the result is then an object of Gymnasium's own class.
        observation_mode: ``"same"``, ``"different"``, or (batched space, single space).
        autoreset_mode: ``AutoresetMode`` or its string value.
        max_concurrency: The maximum number of environments that run ``reset`` or ``step`` at once. Not with ``env_threads``.
        num_workers: ``None``: one process per environment; with ``use_caller=True``, one per core except the caller's. An
            int: that many processes, at most one per environment, each with a contiguous share of the environments.
            ``"auto"``: the number that is fastest on this machine. Temporary processes time at most 64 steps and check
            whether environments may share a process; if not, each gets its own (see ``docs/workers.md``). 0: no processes,
            for debugging.
        use_caller: Let the calling process step a share of the environments itself. This is fastest, but a crash of one of
            them ends the program, so use it for environments that you would trust in ``SyncVectorEnv``. ``None``: only
            if ``num_workers="auto"`` estimates that it is more than 10% faster. ``False``: never. ``True`` with ``"auto"``:
            whenever it is faster.
        batch_size: Number of environments that :meth:`recv` returns at a time, 1 to ``num_envs``. ``"auto"``: half of them,
            or all if halves would not pay off, according to a trial of one environment in a temporary process. If a core is
            free, or if steps spend time waiting, a worker may then have two messages in flight. ``print(envs.plan)`` gives
            the reason.
        env_threads: Number of environments that a worker runs at the same time, each in its own thread, for environments
            that mostly wait for a service or a robot. They must work in any thread and share no mutable state. Needs
            worker processes.
        on_failure: ``"raise"``; ``"restart"``, which rebuilds environments that died, raised or hung; or a
            :class:`vecenv.Restart` with a restart budget.
        step_timeout: Seconds until a ``reset`` or ``step`` without a timeout of its own counts as hanging. ``recv`` counts
            from its own beginning, and finds a hang up to ten seconds later while it returns other rows.
        record_failures: A folder, or a :class:`vecenv.FlightRecorder`. Each failure is recorded in a file for
            ``vecenv replay``; see ``docs/recording.md``.
        generators: The random number generators of environments: those of ``random``, ``numpy.random`` and torch (on the
            CPU). ``"shared"``: all environments of a process share them, as in Gymnasium. If an environment is tried before
            the workers start (``"auto"``, ``use_caller=True``) and draws from them, there is a warning. ``"own"``: each
            environment has its own, seeded from the seeds of its resets, so that results do not depend on the workers; see
            ``docs/workers.md``. Cannot be combined with ``env_threads``.
        worker_options: Threads, cores, environment variables and the start of workers: :class:`vecenv.WorkerOptions`.

    Raises:
        RuntimeError: The spaces of an environment do not match those of the others; the message names the environment.
        TypeError, ValueError: An argument is invalid; the message names the accepted values.
        ArenaError: There is not enough memory; nothing was started.
        NotImplementedError: Worker processes were requested on a system without support for them, such as Windows.
        StartupTimeout, WorkerDied: A worker did not become ready. Nothing is left running.
        Exception: The exception that an ``env_fn`` raised.

    ``reset`` returns ``(observations, infos)`` and ``step`` ``(observations, rewards, terminations, truncations, infos)``.
    Observations are in ``observation_space``, rewards (float64) and flags (bool) are new arrays of shape ``(num_envs,)``,
    and infos is a dict of arrays with a mask ``_key`` for every key.
    """

    __signature__ = _Signature()
    _driver: Engine
    _pool: WorkerPool
    _recording: FlightRecorder | None = None
    _stats_file: published.StatsFile | None = None
    _stats_failed = False  # True if the file of `VECENV_TOP=1` could not be written
    plan: Plan | None = None
    generators: GeneratorsOption = "shared"
    _draws_shared = False  # True if the tried environment drew from the shared generators of its process
    _refuses_finished = False  # True if stepping a finished environment is an error, as in SyncVectorEnv
    _requires_shared_memory = False  # True if `shared_memory=True` was passed explicitly

    def __new__(
        cls, env_fns: Any = None, shared_memory: bool | None = None, copy: bool = True, context: str | None = None,
        daemon: bool = True, worker: Any = None, *args: Any, **kwargs: Any,
    ) -> AsyncVectorEnv[ObsType, ActType]:  # fmt: skip
        # a custom worker uses Gymnasium's own pipe protocol; anything else may be an argument of a subclass's own `__init__`
        if callable(worker):
            return _make_gymnasium_env(  # type: ignore[no-any-return]
                env_fns, shared_memory is not False, copy, context, daemon, worker, *args, **kwargs
            )
        if cls.__init__ is AsyncVectorEnv.__init__:
            check_option_names(kwargs, inspect.signature(cls).parameters, cls.__name__)
        self = super().__new__(cls)
        self._requires_shared_memory = shared_memory is True
        return self

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool = True, copy: bool = True, context: StartMethod | None = None, daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | Space[Any] | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, max_concurrency: int | None = None,
        *,
        num_workers: NumWorkers = None, use_caller: bool | None = None, batch_size: BatchSize = None, env_threads: int = 1,
        on_failure: OnFailure = "raise", step_timeout: float | None = None,
        record_failures: str | os.PathLike[str] | FlightRecorder | None = None,
        generators: GeneratorsOption = "shared", worker_options: WorkerOptions | None = None,
    ) -> None:  # fmt: skip
        store_gymnasium_options(
            self, env_fns, shared_memory, copy, context, daemon, observation_mode, autoreset_mode, max_concurrency, worker
        )
        self._refuses_finished = self._refuses_finished or num_workers == 0
        self.generators, self._recording = generators, FlightRecorder.from_option(record_failures)
        check_options(
            self.num_envs, batch_size, num_workers=num_workers, use_caller=use_caller, env_threads=env_threads,
            max_concurrency=max_concurrency, on_failure=on_failure, step_timeout=step_timeout, generators=generators,
            worker_options=worker_options,
        )  # fmt: skip
        workers = worker_options or WorkerOptions()
        policy = Policy.from_options(
            on_failure, step_timeout, workers.start_timeout, logs_like_gymnasium=num_workers is None and not use_caller
        )
        self.start_timeout = policy.start_timeout
        process_options = options_for_processes(on_failure, step_timeout, workers.env, use_caller)
        if use_caller is None and process_options:
            use_caller = False
        dummy_env, example = workers.dummy_env, None
        if dummy_env is not None and not isinstance(dummy_env, bool):
            dummy_env, example = None, dummy_env
        require_processes_for(type(self).__name__, num_workers, use_caller, dummy_env, process_options)
        mp, has_core_per_env = make_context(context, workers.preload), self.num_envs <= usable_cores()
        self._probe = EnvProbe(
            env_fns, mp, workers.start_timeout,
            example=example, in_this_process=False if dummy_env is None and workers.env else dummy_env,
            step="auto" in (num_workers, batch_size) or bool(use_caller),
            check=num_workers == "auto" and not (use_caller is False and has_core_per_env),
            own_generators=generators == "own", daemon=daemon, variables=resolve_variables(workers.env, 0),
        )  # fmt: skip
        main_file_error = None
        try:
            self._read_spaces()
            self.num_workers, share, self.plan = workers_and_share(
                self.num_envs, num_workers, use_caller, self._probe.measure, batch_size, process_options
            )
            options = self._pool_options(mp, workers)
            engine = self._start_engine(options, policy, share, workers.threads, env_threads, copy)
            if batch_size == "auto":
                batch_size = self._apply_plan(engine, env_threads)
            self._attach_engine(engine, batch_size, copy)
        except RuntimeError as error:
            if not is_main_file_error(error):
                raise
            main_file_error, error.__context__ = error.with_traceback(None), None  # the traceback would add nothing
        if main_file_error is not None:
            raise main_file_error

    def _attach_engine(self, engine: Engine, batch_size: int | None, copy: bool) -> None:
        """Attach a started engine, or end it if the spaces of its environments do not match."""
        self._driver = engine
        if batch_size is not None:
            engine.batch_size = batch_size
        engine.copies = copy
        try:
            self._pool = engine.pool
            engine.stage = ActionStage(
                self.single_action_space, self.action_space, self.num_envs, engine.layout.actions, engine.arrays.actions
            )
            self._check_spaces()
            self._open(engine)
            UNCLOSED.add(self)
        except BaseException:
            engine.pool.close(None)
            engine.pool.release()
            raise

    def _pool_options(self, context: Any, workers: WorkerOptions) -> PoolOptions:
        """Return the options of the worker pool."""
        options = PoolOptions(context, self.daemon, type(self).__name__, self.max_concurrency)
        processes = self.num_workers
        if workers.env:
            options.variables = [resolve_variables(workers.env, index) for index in range(processes)]
            if context.get_start_method() == "fork" and (ineffective := find_late_variables(options.variables)):
                names = ", ".join(f"{name} (read by {module})" for name, module in ineffective.items())
                logger.warn(
                    "%s",
                    "WorkerOptions(env) has no effect on modules that this process has imported, because forked workers "
                    f"inherit them: {names}. Use context='spawn', or 'forkserver'.",
                )
        if workers.cores is not None:
            options.placements = bound_placements(workers.cores, processes)
        return options

    def _start_engine(
        self, options: PoolOptions, policy: Policy, share: int, threads: int | None, env_threads: int, copy: bool
    ) -> Engine:
        """Lay out the shared memory, choose the store for observations, and start the workers."""
        if self.generators == "shared" and self._probe.draws:
            self._draws_shared = True
            warn(describe_draws(f"env 0 ({self._env_id})", self._probe.draws))
        observations = fixed_tree(self.single_observation_space) if self.shared_memory else None
        actions = fixed_tree(self.single_action_space, "action")
        registered = self._registered_store(options.context) if self.shared_memory and observations is None else None
        layout = Layout.for_spaces(
            observations, actions, self.num_envs, self.num_workers + 1,
            final=self.autoreset_mode is AutoresetMode.SAME_STEP,
            spare_batches=count_spare_batches(observations, self.num_envs) if copy and self.num_workers else 0,
        )  # fmt: skip

        def make_store(arena: Arena, arrays: SharedArrays) -> Store:
            if observations is not None and arrays.observations is not None:
                if arrays.spare_observations:
                    return LendingStore(observations, arrays, Lender(arena, layout))
                return SharedStore(observations, arrays.observations)
            return registered or PickledStore(self.single_observation_space, self.num_envs)

        plan = WorkerPlan(
            layout, self.autoreset_mode,
            Expected(self.observation_mode, self.single_observation_space, self.single_action_space),
            None if registered is None else (self.single_observation_space, registered.memory),
            threads or max(1, usable_cores() // max(self.num_workers, 1)),
            env_threads, refuses_finished=self._refuses_finished,
        )  # fmt: skip
        env_fns = self.env_fns if self.generators == "shared" else with_own_generators(self.env_fns)
        engine = Engine(env_fns, layout, make_store, plan, options, policy, self.num_workers, share)
        self._record_failures(engine, env_fns, plan)
        return engine

    def _apply_plan(self, engine: Engine, env_threads: int) -> int | None:
        """Apply the plan's rows per message, unless ``env_threads`` or ``max_concurrency`` is set; return its batch size."""
        assert self.plan is not None
        if env_threads == 1 and self.max_concurrency is None:
            engine.exchange.rows_at_once = self.plan.rows_at_once
        return self.plan.batch_size

    # -- spaces -----------------------------------------------------------------------------------------------------

    def _read_spaces(self) -> None:
        """Read metadata and spaces from an environment, or from the given example, and store them as attributes."""
        mode = self.observation_mode
        found = self._probe.describe(all_envs=isinstance(mode, str) and mode == "different")
        self._set_attributes(found)
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise CompatTypeError(
                    f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
                )
            self.observation_space, self.single_observation_space = mode
            return
        self.single_observation_space = found.observation_spaces[0]
        if isinstance(mode, str) and mode == "same":
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        elif isinstance(mode, str) and mode == "different":
            try:
                self.observation_space = batch_differing_spaces(found.observation_spaces)
            except (ValueError, TypeError, AssertionError) as error:
                raise type(error)(f"the observation spaces of these environments cannot be batched: {error}") from error
        else:
            raise ValueError(
                "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
                f"space, actual got {mode}"
            )

    def _registered_store(self, context: Any) -> RegisteredStore | None:
        if has_dynamic_part(self.single_observation_space):
            return None
        try:
            return RegisteredStore(self.single_observation_space, self.num_envs, context)
        except CustomSpaceError as error:
            if self._requires_shared_memory:  # Gymnasium's engine raises this for the default, too
                raise ValueError(
                    f"{type(self).__name__}(..., shared_memory=True): observations of {self.single_observation_space} "
                    "cannot be in shared memory, because its class is not registered with gymnasium.vector.utils."
                    "create_shared_memory; leave `shared_memory` out, or pass shared_memory=False, to pickle them"
                ) from error
            if self.num_workers:
                logger.warn(f"{self.single_observation_space} cannot lie in shared memory: observations are pickled.")
            return None

    def _check_spaces(self) -> None:
        for env, kind, got in self._driver.mismatches:
            if kind == "action":
                raise different_action_space_error(self.single_action_space, env, got)
            detail = f" Env {env} has {got}, expected {self.single_observation_space}."
            if self.observation_mode == "same":
                advice = "If this is intentional, use `observation_mode='different'` instead."
                if kind == "shape":
                    advice = "Their shapes or dtypes differ: no mode can batch these."
                raise RuntimeError(
                    "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation spaces "
                    f"are not equivalent. {advice}{detail}"
                )
            raise RuntimeError(
                "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
                "observation spaces do not share a common shape and dtype." + detail
            )

    # -- attributes ------------------------------------------------------------------------------------------------

    @property
    def processes(self) -> list[Any]:  # type: ignore[override]
        """The worker processes."""
        return [worker.process for worker in self._pool.processes]

    @property
    def parent_pipes(self) -> list[Any]:  # type: ignore[override]
        """The caller's reading ends of the workers' pipes; each has a ``fileno()``."""
        return [worker.channel for worker in self._pool.processes]

    @property
    def step_timeout(self) -> float | None:
        """Seconds until a ``reset`` or ``step`` without a timeout of its own counts as hanging; ``None``: no limit."""
        return self._driver.policy.step_timeout

    @property
    def local_envs(self) -> list[Env[Any, Any]]:
        """The environments of the caller's share, which live in this process."""
        local = self._pool.local
        return [] if local is None else [env for env in local.env_rows.envs if env is not None]

    @property
    def worker_rows(self) -> list[range]:
        """The environments of each worker. If the caller steps a share itself, that share is the first entry."""
        return [range(worker.rows[0], worker.rows[-1] + 1) for worker in self._pool.workers]

    @property
    def _state(self) -> AsyncState:  # type: ignore[override]
        return AsyncState(self._driver.phase.value)

    def _describe_size(self) -> str:
        share = f", caller={len(self._pool.local.rows)}" if self._pool.local is not None else ""
        return f"num_envs={self.num_envs}, workers={self.num_workers}{share}"

    def _record_failures(self, engine: Engine, env_fns: Sequence[Callable[[], Any]], plan: WorkerPlan) -> None:
        """Let a flight recorder observe an engine, if ``record_failures=`` was passed."""
        if self._recording is not None:
            save, stats = weakref.WeakMethod(engine.snapshots), weakref.WeakMethod(engine.stats)
            recorder = Recorder(self._recording, env_fns, self._env_id, plan, save, stats)
            engine.observers.append(recorder)
            self._recorder = weakref.proxy(recorder)

    def add_observer(self, observer: Observer) -> None:
        """Report all further calls, results and failures to an observer, until :meth:`close`.

        Args:
            observer: See :class:`vecenv.Observer`.
        """
        self._driver.observers.append(observer)

    @exclusive
    def submissions(self) -> Submissions:
        """Return a non-blocking interface to single rows, for an event loop to use instead of this object's methods."""
        return Submissions(self._driver)

    @exclusive
    def publish_stats(self, name: str | None = None) -> None:
        """Publish the workers' statistics for ``vecenv top``, run by the same user on this machine, until :meth:`close`.

        The environment variable ``VECENV_TOP=1`` does the same for a whole program, from the first reset, save or load on.
        The program writes a small file, up to twice a second while results are returned, into ``$XDG_RUNTIME_DIR/vecenv`` or
        the user's own folder under the temporary directory, where no other user can read it. Linux only.

        Args:
            name: The name to show; default: the environments' id.

        Raises:
            NotImplementedError: The system is not Linux.
            OSError: The file cannot be written.
            ClosedEnvironmentError: The vector environment is closed.
        """
        self._publish(name)

    def _publish(self, name: str | None) -> None:
        if self._stats_file is None:
            self._stats_file = published.StatsFile(self)
        self._stats_file.publish(str(name or (self.spec and self.spec.id) or type(self).__name__))
        if self._stats_file not in self._driver.observers:
            self._driver.observers.append(self._stats_file)

    def worker_stats(self) -> list[WorkerStats]:
        """Return each worker's statistics since construction: its environments, their steps, and the time spent in them.

        Raises:
            ClosedEnvironmentError: The vector environment is closed.
        """
        if self.closed:
            raise_unusable(self)
        return worker_stats(self._pool.workers, self._driver.arrays)

    def _begin_reset(self, seed: Any, options: ResetOptions, env_id: Any) -> None:
        super()._begin_reset(seed, options, env_id)
        self._publish_if_wanted()

    def _begin_snapshots(self, method: str, env_id: Any) -> list[int]:
        rows = super()._begin_snapshots(method, env_id)
        self._publish_if_wanted()
        return rows

    def _publish_if_wanted(self) -> None:
        """Publish statistics if ``VECENV_TOP=1`` requests it."""
        if self._stats_file not in self._driver.observers and published.is_wanted() and not self._stats_failed:
            try:
                self._publish(None)
            except OSError as error:  # no reason to end a training run
                if isinstance(error, TimeoutError):  # from a signal handler with a time limit
                    raise
                self._stats_failed = True
                warn(f"VECENV_TOP=1 has no effect on this {type(self).__name__}: {error}")

    def _begin_exec(self, method: str, func: Callable[..., Any], indices: Any, args: Any, kwargs: Any) -> None:
        if callable(func) and self.generators == "own":
            func = functools.partial(run_with_own_generators, func)
        super()._begin_exec(method, func, indices, args, kwargs)

    # -- closing ---------------------------------------------------------------------------------------------------

    def close(self, **kwargs: Any) -> None:
        """Close all environments and end all workers, in any state, from any thread or signal handler. Idempotent.

        If it is interrupted, call it again. In a signal handler during another call, it only ends the workers; everything
        else is released when that call raises :class:`~gymnasium.error.ClosedEnvironmentError` or the handler's exception.
        In a forked child it does nothing.

        Args:
            timeout: Seconds for a pending result and for the environments' own ``close()``; then workers are killed.
                Default: a minute, and ``step_timeout`` for a pending step or reset; or a second if a worker was late before
                or is stopped, an earlier ``close()`` was interrupted, or this one interrupts a call of the same thread.
            terminate: Kill the workers at once, without calling the environments' ``close()``.
        """
        if self.closed:
            return
        driver, thread = self._driver, get_ident()
        state = driver.state
        if state.unusable == "forked":
            self.closed = True
            return
        accepted = inspect.signature(self.close_extras)
        accepted.bind(**kwargs)  # raises for unknown arguments, before anything is ended
        seconds = parse_close_timeout(kwargs.get("timeout"))
        was_closing, state.unusable = state.unusable == "closing", "closing"
        self._pool.closing = True
        if state.active_thread and state.active_thread != thread:  # another thread waits for replies; end its wait
            for worker in self._pool.processes:
                worker.watch.signal(9)
            state.wait_for_other_thread()
        nested = state.active_thread == thread and is_inside_call(self)
        if not self._pool.released:
            hurried = was_closing or nested
            options = {**kwargs, "timeout": SHORT_CLOSE_TIMEOUT if hurried and seconds is None else seconds}
            with contextlib.suppress(TypeError):  # a subclass may override `close_extras` without this argument
                accepted.bind(**options)
                kwargs = options
            self.close_extras(**kwargs)
        if self._stats_file is not None:
            self._stats_file.close()
        with deferred_signals():  # an interruption here would make the next close() return before the rest is freed
            self.closed, state.unusable = True, "closed"
            if not nested:
                driver.release()

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers; see :meth:`close`."""
        pool, limit = self._pool, self.step_timeout if timeout is None else None
        if timeout is None:
            late = any(worker.was_late or (worker.death is None and worker.is_stopped()) for worker in pool.processes)
            timeout = SHORT_CLOSE_TIMEOUT if late else CLOSE_TIMEOUT
        self._warn_about_pending_call()
        self._driver.shut_down(None if terminate else timeout, limit)

    def __del__(self) -> None:
        if self.__dict__.get("closed", True):  # not `self.closed`, which is the class attribute if __init__ did not run
            return
        if self._driver.state.unusable == "forked":
            return
        self._pool.end_unclosed()
        if self._stats_file is not None:
            self._stats_file.close()
        self.closed, self._driver.state.unusable = True, "closed"
        warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, source=self, stacklevel=2)


def _make_gymnasium_env(*args: Any, **options: Any) -> Any:
    """Build an object of Gymnasium's own class. Raise ``ValueError`` for an option that Gymnasium does not have."""
    parameters = inspect.signature(AsyncVectorEnv.__init__).parameters
    accepted = inspect.signature(GymnasiumAsync.__init__).parameters
    if refused := [f"`{name}`" for name in parameters if name in options and name not in accepted]:
        raise ValueError(
            f"{', '.join(refused)} cannot be combined with a custom `worker`, which is run by "
            "gymnasium.vector.AsyncVectorEnv; leave one of them out"
        )
    return GymnasiumAsync(*args, **options)


UNCLOSED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The vector environments to end when the program ends."""


def _end_unclosed() -> None:
    """End unclosed vector environments while the modules that :meth:`AsyncVectorEnv.__del__` uses still exist."""
    for envs in list(UNCLOSED):
        try:
            envs.__del__()
        except ResourceWarning:  # under `python -W error`; the others must still be ended
            traceback.print_exc()


atexit.register(_end_unclosed)
