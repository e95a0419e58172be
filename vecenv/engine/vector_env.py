"""``AsyncVectorEnv``: environments in worker processes, as a drop-in for Gymnasium's class of that name.

Everything a program written for ``gymnasium.vector.AsyncVectorEnv`` can see is honoured: arguments and their order here,
attributes, the phases and their errors, how seeds, masks, actions, infos and copies behave in
:mod:`vecenv.front.vector_env`. What is done differently is what hurts there: an answer is never given to another question, a
failed environment does not take the others along, and closing always ends.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

import numpy as np
from gymnasium import Space, logger
from gymnasium.core import ActType, Env, ObsType
from gymnasium.error import CustomSpaceError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.engine import published
from vecenv.engine.engine import Engine
from vecenv.engine.handles import PoolOptions, ProcessWorker
from vecenv.engine.pool import WorkerPool
from vecenv.engine.published import StatsFile
from vecenv.engine.recovery import Policy
from vecenv.engine.spares import SpareEngine, refuse_different
from vecenv.engine.steps import ActionStage
from vecenv.errors import ErrorRecord
from vecenv.front.arguments import (
    GymnasiumAsync,
    ResetOptions,
    WrongType,
    check_env_fns,
    check_names,
    check_switches,
    env_ids_of,
    mode_of,
    seconds_of,
)
from vecenv.front.driver import Phase, advance
from vecenv.front.vector_env import VectorEnvBase, exclusive, is_within_a_call
from vecenv.link.observations import PickledStore, RegisteredStore, SharedStore, Store, has_dynamic_part
from vecenv.planning.options import (
    BatchSize,
    NumWorkers,
    OnFailure,
    StartMethod,
    check_options,
    parse_spares,
    require_processes_for,
)  # fmt: skip
from vecenv.planning.plan import Plan, workers_and_share
from vecenv.planning.probe import EnvProbe
from vecenv.recording.recorder import FlightRecorder, Recorder
from vecenv.shm import Batch, Layout, fixed_tree
from vecenv.system.cores import bound_placements, usable_cores
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerEnv, context_of, end_if_importing_main, is_about_main, too_late, variables_of
from vecenv.system.uninterrupted import Uninterrupted
from vecenv.worker.envs import Expected, WorkerPlan

__all__ = ["AsyncVectorEnv", "EngineVectorEnv"]


_PATIENCE = 60.0  # close() without a timeout waits this long for environments to close
_LITTLE_PATIENCE = 1.0  # the same, when a worker was already late or the caller was interrupted
_OTHER_THREAD = 10.0  # for another thread's call to notice that its workers are gone


class EngineVectorEnv(VectorEnvBase[ObsType, ActType, np.ndarray]):
    """A vector environment over worker processes, the calling process, or hosts on other machines.

    A subclass takes the arguments, reads the spaces, starts an engine and gives it to :meth:`_adopt`.
    """

    _driver: Engine
    plan: Plan | None = None

    def _take_options(
        self, env_fns: Sequence[Callable[[], Env[Any, Any]]], shared_memory: bool, copy: bool, context: str | None,
        daemon: bool, observation_mode: Any, autoreset_mode: str | AutoresetMode, max_concurrency: int | None,
    ) -> None:  # fmt: skip
        """Keep Gymnasium's own arguments, which programs may look at."""
        end_if_importing_main()
        self.closed = True  # until there is something to close
        check_env_fns(env_fns, type(self).__name__)
        check_switches(type(self).__name__, shared_memory=shared_memory, copy=copy)
        if context not in (None, *(accepted := multiprocessing.get_all_start_methods())):
            raise ValueError(f"cannot find context for {context!r}: wanted None or one of {', '.join(map(repr, accepted))}.")
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self._copies = copy
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
        self._driver = engine
        if batch_size is not None:
            engine.batch_size = batch_size
        engine.copies = self._copies
        try:
            self._pool: WorkerPool = engine.pool
            engine.stage = ActionStage(
                self.single_action_space, self.action_space, self.num_envs, engine.layout.actions, engine.batch.actions
            )
            self._check_spaces()
            self._open(engine)
        except BaseException:
            engine.pool.close(0.0, terminate=True)
            engine.pool.release()
            raise

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
                advice = "If this is intentional, use `observation_mode='different'` instead."
                if which == "shape":
                    advice = "Their shapes or dtypes differ: no mode can batch these."
                raise RuntimeError(
                    "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation spaces "
                    f"are not equivalent. {advice}{detail}"
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
    def step_timeout(self) -> float | None:
        return self._driver.policy.step_timeout

    @property
    def local_envs(self) -> list[Env[Any, Any]]:
        """The environments that live in this process, those of the caller's share."""
        own = self._pool.own
        return [] if own is None else [env for env in own.envs if env is not None]

    @property
    def worker_rows(self) -> list[range]:
        """The environments of each worker; those that the caller steps itself are the first."""
        return [range(worker.rows[0], worker.rows[-1] + 1) for worker in self._pool.workers]

    @property
    def errors(self) -> deque[ErrorRecord]:
        return self._driver.ledger.errors

    @property
    def _state(self) -> AsyncState:
        return AsyncState(self._driver.phase.value)

    @property
    @exclusive
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The environments' seeds."""
        self._begin_call("np_random_seed", "np_random_seed", (), {})
        return self._driver.call_answer(None)  # type: ignore[no-any-return]

    @property  # type: ignore[misc]  # Gymnasium's can be set
    @exclusive
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the environments' generators."""
        self._begin_call("np_random", "np_random", (), {})
        return self._driver.call_answer(None)  # type: ignore[no-any-return]

    @exclusive
    def abandon(self, env_id: Any) -> None:
        """Wait no longer for some environments: kill the workers whose answers about these are pending.

        What these were asked is answered by :class:`~vecenv.errors.WorkerDied`, of all their environments; or, with
        ``on_failure="restart"``, by rows of new ones. Workers of which nothing is pending, and the calling process, are left
        alone.

        Args:
            env_id: Which environments, distinct indices.

        Raises:
            ValueError: Indices out of range or twice.
        """
        rows = set(env_ids_of(env_id, self.num_envs).tolist())
        engine = self._driver
        late = [
            worker
            for worker in self._pool.workers
            if not worker.local and not rows.isdisjoint(worker.rows) and engine.is_pending(worker)
        ]
        engine.end_late(late, None)

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

    def _begin_reset(self, seed: Any, options: ResetOptions, env_id: Any) -> None:
        super()._begin_reset(seed, options, env_id)
        if self._driver.card is None and published.asked_for(self._driver):
            self._publish(None)

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
        with Uninterrupted():  # the next close() sees that it is closed, and would not let go of what is left
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


class _Signature:
    """How a class is called, for editors, ``help`` and notebooks: as its ``__init__``, where it has a ``__new__`` too."""

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        whole = inspect.signature(owner.__init__)
        return whole.replace(parameters=list(whole.parameters.values())[1:], return_annotation=inspect.Signature.empty)


class AsyncVectorEnv(EngineVectorEnv[ObsType, ActType], GymnasiumAsync):  # type: ignore[misc, override]
    """Environments in worker processes, behind ``gymnasium.vector.AsyncVectorEnv``'s interface.

    It is a subclass of that class, so that ``isinstance`` holds, and every method is its own.

    The first nine arguments are Gymnasium's, in its order; see its documentation. Ours are keyword-only. About speed:
    ``num_workers`` to ``worker_affinity``. About failures: ``on_failure`` to ``strict``. About the start of workers and what
    environments see: ``start_timeout`` to ``ragged_infos``.

    Args:
        env_fns: Functions that build the environments.
        shared_memory: Observations of fixed size lie in shared memory; others, and all with ``False``, travel by pickle.
            Left out, those of custom spaces travel by pickle, with a warning; ``True`` refuses them, as in Gymnasium.
        copy: Give out a copy of the observations. With ``False`` the same writeable arrays are given out every time and
            change while environments step.
        context: Start method (``"fork"``, ``"spawn"``, ``"forkserver"``) or ``None`` for the process default.
        daemon: Daemonic workers may not have ``multiprocessing`` children of their own.
        worker: A custom worker function: Gymnasium's own class is used for it.
        observation_mode: ``"same"``, ``"different"``, or (batched space, single space).
        autoreset_mode: ``AutoresetMode`` or its string value.
        max_concurrency: The most environments that are inside ``reset`` or ``step`` at once.
        num_workers: ``None``: one process per environment. An int: that many processes, each over a contiguous share of the
            environments. ``"auto"``: what is fastest here, see ``isolate``. 0: no process, for debugging.
        use_caller: The calling process steps a share of the environments itself. The fastest there is, for environments one
            would trust in ``SyncVectorEnv``: a crash of one ends the program.
        batch_size: How many environments :meth:`recv` returns at a time, 1 to ``num_envs``. ``"auto"``: an environment is
            tried, and it is half of them, or all where halves would not pay; where a core is free, or steps wait, each
            worker has two messages in flight then. ``print(envs.plan)`` says why.
        spare_workers: That many processes more than there are environments, each with an environment that has been reset
            ahead of time: when an episode is over, the next is one that has begun already. For resets that take long; see
            ``docs/workers.md``. All ``env_fns`` must build the same, one process each (``num_workers=None``), and each
            episode has a seed of its own, which follows from the row's and from the number of the episode.
        env_threads: Up to that many environments of a worker run at the same time, each in a thread:
            for those that wait, for a service or a robot, and compute little. They must not mind which thread it is, nor
            share what they change. Needs worker processes.
        isolate: For ``"auto"``: ``True`` steps no environment in this process, where a crash of it ends the program;
            ``False`` does where that is faster, and ``None`` where it is faster by more than a tenth.
        threads_per_worker: Cap for BLAS, OpenMP and torch threads in a worker. Default: the usable cores divided by the
            workers.
        worker_affinity: The cores of each worker: a list with a core, or a list of cores, for each process. Without it the
            scheduler of the system decides, and workers that have a core to themselves stay on that.
        on_failure: ``"raise"``, or ``"restart"`` what died, raised or hung.
        restart_limit: At most this many restarts of all environments within ``restart_period`` seconds. ``None``: each
            environment, and each worker that dies, has 5 in that time, and one more for every 1,000 steps it made.
        restart_period: Seconds.
        step_timeout: Seconds until a ``reset`` or ``step`` without a timeout of its own is taken to hang.
        record_failures: A folder, or a :class:`vecenv.FlightRecorder`: what fails leaves a file there by which
            ``vecenv replay`` lets it fail again; see ``docs/recording.md``.
        strict: Float observations that become infinite in the cast to the space's dtype are an
            :class:`~vecenv.errors.ObservationError`; without it, one warning.
        start_timeout: Seconds a worker has to build its environments.
        dummy_env: Where metadata and spaces come from. ``True``: an environment built and closed in this process, as
            Gymnasium does. ``False``: one in a process of its own; none is built here. ``None``: as ``True``, but as
            ``False`` where a process tries an environment anyway (``num_workers="auto"``, ``use_caller=True``).
        preload: With ``context="forkserver"``, modules that the fork server imports once for all workers of the program.
        worker_env: Environment variables of the workers: name -> value, or a function of the worker's index that gives it
            (``{"CUDA_VISIBLE_DEVICES": lambda worker: worker % 4}``); ``None`` removes one. Under ``spawn`` they are there
            before anything is imported; under ``fork`` modules that this process has imported have read theirs already.
            With them no environment is built in this process, unless ``dummy_env=True``.
        generators: What environments draw from by ``random``, ``numpy.random`` and torch's default CPU generator.
            ``"shared"``: the generators of their process, as in Gymnasium; there is a warning where one is seen to draw.
            ``"own"``: each has its own, which follow from the seeds of its resets, so that results do not depend on workers;
            see ``docs/workers.md``. Cannot be combined with ``env_threads``.
        ragged_infos: Info values of one key whose shapes or types differ become an object array, ``None`` where there is
            none. Without it they are an error, or are broadcast, as in Gymnasium.

    Raises:
        RuntimeError: Spaces of environments do not go together; the environment is named.
        ValueError: An option has no meaning; the accepted values are named.
        ArenaError: There is not enough memory; nothing was started.
        NotImplementedError: Worker processes were asked for on a system that cannot have them, as Windows.
        StartupTimeout, WorkerDied: A worker did not get ready. Nothing is left running.
        Exception: Whatever an ``env_fn`` raised, as itself.

    ``reset`` returns ``(observations, infos)`` and ``step`` ``(observations, rewards, terminations, truncations, infos)``:
    observations of ``observation_space``; rewards float64, flags bool, all ``(num_envs,)`` and fresh; infos a dict of arrays
    with a mask ``_key`` for every key.
    """

    __signature__ = _Signature()
    _engine_class: type[Engine] = Engine
    _spares = 0
    _env_id = "env"
    _asks_for_shared_memory = False  # whether `shared_memory=True` was given, and is not just the default

    def __new__(
        cls, env_fns: Any = None, shared_memory: bool | None = None, copy: bool = True, context: str | None = None,
        daemon: bool = True, worker: Any = None, *args: Any, **kwargs: Any,
    ) -> AsyncVectorEnv[ObsType, ActType]:  # fmt: skip
        if worker is not None:
            return _with_custom_worker(cls, kwargs)  # type: ignore[no-any-return]
        if cls.__init__ is AsyncVectorEnv.__init__:
            check_names(kwargs, inspect.signature(cls).parameters, cls.__name__)
        self = super().__new__(cls)
        self._asks_for_shared_memory = shared_memory is True
        return self

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool = True, copy: bool = True, context: StartMethod | None = None, daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | Space[Any] | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, max_concurrency: int | None = None,
        *,
        num_workers: NumWorkers = None, use_caller: bool = False, batch_size: BatchSize = None,
        on_failure: OnFailure = "raise", restart_limit: int | None = None, restart_period: float = 60.0,
        step_timeout: float | None = None, start_timeout: float = 60.0, threads_per_worker: int | None = None,
        strict: bool = False, dummy_env: bool | None = None, isolate: bool | None = None,
        worker_env: WorkerEnv | None = None, worker_affinity: Sequence[int | Sequence[int]] | None = None,
        preload: Sequence[str] | None = None, ragged_infos: bool = False, env_threads: int = 1, spare_workers: int = 0,
        generators: GeneratorsOption = "shared", record_failures: str | os.PathLike[str] | FlightRecorder | None = None,
    ) -> None:  # fmt: skip
        self._take_options(env_fns, shared_memory, copy, context, daemon, observation_mode, autoreset_mode, max_concurrency)
        self.worker, self.generators, self._recording = worker, generators, FlightRecorder.of(record_failures)
        check_options(
            self.num_envs, batch_size, num_workers=num_workers, use_caller=use_caller, on_failure=on_failure,
            restart_limit=restart_limit, restart_period=restart_period, step_timeout=step_timeout,
            start_timeout=start_timeout, threads_per_worker=threads_per_worker, strict=strict, dummy_env=dummy_env,
            isolate=isolate, worker_env=worker_env, ragged_infos=ragged_infos, env_threads=env_threads,
            generators=generators,
        )  # fmt: skip
        self._spares = parse_spares(
            spare_workers, self.num_envs, self.autoreset_mode, num_workers=num_workers, use_caller=use_caller,
            batch_size=batch_size, max_concurrency=self.max_concurrency, env_threads=env_threads,
        )  # fmt: skip
        if self._spares:
            refuse_different(env_fns)
        policy = Policy.of(
            on_failure, restart_limit, restart_period, step_timeout, start_timeout,
            gymnasiums_words=num_workers is None and not use_caller,
        )  # fmt: skip
        if policy.restart or step_timeout is not None or worker_env:
            isolate = True
        require_processes_for(type(self).__name__, num_workers, use_caller, isolate, dummy_env)
        mp = context_of(context, preload)
        self._probe = EnvProbe(
            env_fns, mp, start_timeout, here=False if dummy_env is None and worker_env else dummy_env,
            step="auto" in (num_workers, batch_size) or use_caller, daemon=daemon, variables=variables_of(worker_env, 0),
        )  # fmt: skip
        about_main = None
        try:
            self._read_spaces(env_fns)
            self.num_workers, share, self.plan = workers_and_share(
                self.num_envs, num_workers, use_caller, isolate, self._probe.times, batch_size
            )
            options = self._pool_options(mp, policy, worker_env, worker_affinity)
            engine = self._start_engine(options, policy, share, threads_per_worker, strict, ragged_infos, env_threads)
            if batch_size == "auto":
                batch_size = self._use_plan(engine, env_threads)
            self._adopt(engine, batch_size)
        except RuntimeError as error:
            if not is_about_main(error):
                raise
            about_main, error.__context__ = error.with_traceback(None), None  # its traceback would say nothing
        if about_main is not None:
            raise about_main

    def _pool_options(
        self, context: Any, policy: Policy, worker_env: WorkerEnv | None,
        worker_affinity: Sequence[int | Sequence[int]] | None,
    ) -> PoolOptions:  # fmt: skip
        """How to run the workers."""
        options = PoolOptions(context, self.daemon, type(self).__name__, policy.start_timeout, self.max_concurrency)
        processes = self.num_workers + self._spares
        if worker_env:
            options.variables = [variables_of(worker_env, index) for index in range(processes)]
            if context.get_start_method() == "fork" and (late := too_late(options.variables)):
                read = ", ".join(f"{name} (by {module})" for name, module in late.items())
                logger.warn(
                    "%s",
                    f"`worker_env` comes too late for what this process has imported, and every forked worker with it: "
                    f"{read}. Use context='spawn', or 'forkserver'.",
                )
        if worker_affinity is not None:
            options.placements = bound_placements(worker_affinity, processes)
        return options

    def _start_engine(
        self, options: PoolOptions, policy: Policy, share: int, threads: int | None, strict: bool, ragged: bool,
        env_threads: int,
    ) -> Engine:  # fmt: skip
        """Lay out the shared memory, choose how observations travel, and start the workers."""
        observations = fixed_tree(self.single_observation_space) if self.shared_memory else None
        actions = fixed_tree(self.single_action_space, "action")
        registered = self._registered_store(options.context) if self.shared_memory and observations is None else None
        layout = Layout.of(
            observations, actions, self.num_envs, self.num_workers + 1, spares=self._spares,
            final=self.autoreset_mode is AutoresetMode.SAME_STEP,
        )  # fmt: skip

        def make_store(batch: Batch) -> Store:
            if observations is not None and batch.observations is not None:
                return SharedStore(observations, batch.observations)
            return registered or PickledStore(self.single_observation_space, self.num_envs)

        plan = WorkerPlan(
            layout, self.autoreset_mode,
            Expected(self.observation_mode, self.single_observation_space, self.single_action_space),
            None if registered is None else (self.single_observation_space, registered.memory),
            threads or max(1, usable_cores() // max(self.num_workers, 1)),
            strict, ragged, env_threads, ahead=self._spares > 0, generators=self.generators,
        )  # fmt: skip
        kind = SpareEngine if self._spares else self._engine_class
        engine = kind(self.env_fns, layout, make_store, plan, options, policy, self.num_workers, share)
        if self._recording is not None:
            save = weakref.WeakMethod(engine.snapshots)
            engine.recorder = engine.ledger.recorder = Recorder(
                self._recording, self.env_fns, self._env_id, layout, engine.arena.buffer, plan, save,
                functools.partial(np.sum, engine.batch.worker_time),
            )  # fmt: skip
        return engine

    def _use_plan(self, engine: Engine, env_threads: int) -> int | None:
        """The batch size of the plan; and how many rows go in one message, where a worker goes through them one by one."""
        assert self.plan is not None
        if env_threads == 1 and self.max_concurrency is None:
            engine.rows_at_once = self.plan.rows_at_once
        return self.plan.batch_size

    # -- spaces -----------------------------------------------------------------------------------------------------

    def _read_spaces(self, env_fns: Sequence[Callable[[], Env[Any, Any]]]) -> None:
        """Metadata and spaces, from an environment that is built here or elsewhere."""
        mode = self.observation_mode
        found = self._probe.describe(all_envs=isinstance(mode, str) and mode == "different")
        self.metadata = {**found.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = found.render_mode
        self._env_id = found.env_id
        self.single_action_space = found.action_space
        self.action_space = batch_space(found.action_space, self.num_envs)
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise WrongType(
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
            return RegisteredStore(self.single_observation_space, self.num_envs, context, self._spares)
        except CustomSpaceError as error:
            if self._asks_for_shared_memory:  # Gymnasium's engine raises this for the default, too
                raise ValueError(
                    f"{type(self).__name__}(..., shared_memory=True): observations of {self.single_observation_space} "
                    "cannot lie in shared memory, since its class is not registered with gymnasium.vector.utils."
                    "create_shared_memory; leave `shared_memory` out, or give shared_memory=False, and they are pickled"
                ) from error
            if self.num_workers:
                logger.warn(f"{self.single_observation_space} cannot lie in shared memory: observations are pickled.")
            return None


# -- custom workers -----------------------------------------------------------------------------------------------------
#
# A custom ``worker`` function speaks Gymnasium's own pipe protocol, so Gymnasium's own class has to be there to hear it.
# ``vecenv.AsyncVectorEnv(..., worker=f)`` is therefore an object of both classes, in which Gymnasium's methods come first:
# it behaves exactly as ``gymnasium.vector.AsyncVectorEnv(..., worker=f)``, and options that only our engine has are refused.

class _Attribute:
    """A plain attribute again, where our class has a property of that name."""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        try:
            return instance.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


class _GymnasiumsOwn(GymnasiumAsync):
    """Gymnasium's methods, before ours in the order of methods, where the class that they are from comes after ours."""

    locals().update({name: value for name, value in vars(GymnasiumAsync).items() if not name.startswith("__")})
    __init__ = GymnasiumAsync.__init__
    __del__ = GymnasiumAsync.__del__
    observations, processes, parent_pipes = _Attribute(), _Attribute(), _Attribute()
    error_queue, copy, _state = _Attribute(), _Attribute(), _Attribute()
    close = VectorEnv.close

    def __repr__(self) -> str:
        return GymnasiumAsync.__repr__(self)


@functools.cache
def _of_both(cls: type[Any]) -> type[Any]:
    return type(cls.__name__, (_GymnasiumsOwn, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _with_custom_worker(cls: type[Any], options: Mapping[str, Any]) -> Any:
    """A new object for ``AsyncVectorEnv.__new__`` to return; Python then calls its ``__init__``, which is Gymnasium's."""
    ours, theirs = (inspect.signature(one.__init__).parameters for one in (AsyncVectorEnv, GymnasiumAsync))
    if refused := [name for name in ours if name in options and name not in theirs]:
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in refused)} cannot be combined with a custom `worker`, which is run by "
            "gymnasium.vector.AsyncVectorEnv; leave one of them out"
        )
    return object.__new__(_of_both(cls))  # type: ignore[arg-type]
