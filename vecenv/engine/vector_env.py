"""``AsyncVectorEnv``: environments in worker processes, as a drop-in for Gymnasium's class of that name.

Everything a program written for ``gymnasium.vector.AsyncVectorEnv`` can see is honoured: arguments and their order here,
attributes, the phases and their errors, how seeds, masks, actions, infos and copies behave in
:mod:`vecenv.engine.interface`. What is done differently is what hurts there: an answer is never given to another question, a
failed environment does not take the others along, and closing always ends.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import Space, logger
from gymnasium.core import ActType, Env, ObsType
from gymnasium.error import CustomSpaceError
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.engine.engine import Engine, Policy
from vecenv.engine.interface import EngineVectorEnv
from vecenv.engine.spare_engine import SpareEngine
from vecenv.engine.spares import refuse_different
from vecenv.engine.starting import PoolOptions
from vecenv.front.arguments import check_names
from vecenv.front.gymnasiums import GymnasiumAsync, WrongType
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
from vecenv.planning.plan import workers_and_share
from vecenv.planning.probe import EnvProbe
from vecenv.shm import Batch, Layout, fixed_tree
from vecenv.system.cores import usable_cores
from vecenv.system.generators import GeneratorsOption
from vecenv.system.spawning import WorkerEnv, is_about_main, too_late, variables_of
from vecenv.worker.envs import Expected
from vecenv.worker.main import Plan

__all__ = ["AsyncVectorEnv"]


class _Signature:
    """How a class is called, for editors, ``help`` and notebooks: as its ``__init__``, where it has a ``__new__`` too."""

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        whole = inspect.signature(owner.__init__)
        return whole.replace(parameters=list(whole.parameters.values())[1:], return_annotation=inspect.Signature.empty)


class AsyncVectorEnv(EngineVectorEnv[ObsType, ActType], GymnasiumAsync):  # type: ignore[misc, override]
    """Environments in worker processes, behind ``gymnasium.vector.AsyncVectorEnv``'s interface.

    It is a subclass of that class, so that ``isinstance`` holds, and every method is its own.

    The first nine arguments are Gymnasium's, in its order; see its documentation. Ours are keyword-only.

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
        on_failure: ``"raise"``, or ``"restart"`` what died, raised or hung.
        restart_limit: At most this many restarts of all environments within ``restart_period`` seconds. ``None``: each
            environment, and each worker that dies, has 5 in that time, and one more for every 1,000 steps it made.
        restart_period: Seconds.
        step_timeout: Seconds until a ``reset`` or ``step`` without a timeout of its own is taken to hang.
        start_timeout: Seconds a worker has to build its environments.
        threads_per_worker: Cap for BLAS, OpenMP and torch threads in a worker. Default: the usable cores divided by the
            workers.
        dummy_env: Where metadata and spaces come from. ``True``: an environment built and closed in this process, as
            Gymnasium does. ``False``: one in a process of its own; none is built here. ``None``: as ``True``, but as
            ``False`` where a process tries an environment anyway (``num_workers="auto"``, ``use_caller=True``).
        isolate: For ``"auto"``: ``True`` steps no environment in this process, where a crash of it ends the program;
            ``False`` does where that is faster, and ``None`` where it is faster by more than a tenth.
        worker_env: Environment variables of the workers: name -> value, or a function of the worker's index that gives it
            (``{"CUDA_VISIBLE_DEVICES": lambda worker: worker % 4}``); ``None`` removes one. Under ``spawn`` they are there
            before anything is imported; under ``fork`` modules that this process has imported have read theirs already.
            With them no environment is built in this process, unless ``dummy_env=True``.
        ragged_infos: Info values of one key whose shapes or types differ become an object array, ``None`` where there is
            none. Without it they are an error, or are broadcast, as in Gymnasium.
        spare_workers: That many processes more than there are environments, each with an environment that has been reset
            ahead of time: when an episode is over, the next is one that has begun already. For resets that take long; see
            ``docs/long_resets.md``. All ``env_fns`` must build the same, one process each (``num_workers=None``), and each
            episode has a seed of its own, which follows from the row's and from the number of the episode.
        env_threads: Up to that many environments of a worker run at the same time, each in a thread:
            for those that wait, for a service or a robot, and compute little. They must not mind which thread it is, nor
            share what they change. Needs worker processes.
        generators: What environments draw from by ``random``, ``numpy.random`` and torch's default CPU generator.
            ``"shared"``: the generators of their process, as in Gymnasium; there is a warning where one is seen to draw.
            ``"own"``: each has its own, which follow from the seeds of its resets, so that results do not depend on workers;
            see ``docs/workers.md``. Cannot be combined with ``env_threads``.
        strict: Float observations that become infinite in the cast to the space's dtype are an
            :class:`~vecenv.errors.ObservationError`; without it, one warning.

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
    _backend = "process"
    _spares = 0
    _asks_for_shared_memory = False  # whether `shared_memory=True` was given, and is not just the default

    def __new__(
        cls,
        env_fns: Any = None,
        shared_memory: bool | None = None,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncVectorEnv[ObsType, ActType]:
        if worker is not None:
            from vecenv.engine.custom_worker import with_custom_worker

            return with_custom_worker(cls, kwargs)  # type: ignore[no-any-return]
        if cls.__init__ is AsyncVectorEnv.__init__:
            check_names(kwargs, inspect.signature(cls).parameters, cls.__name__)
        self = super().__new__(cls)
        self._asks_for_shared_memory = shared_memory is True
        return self

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: StartMethod | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | Space[Any] | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: NumWorkers = None,
        use_caller: bool = False,
        batch_size: BatchSize = None,
        on_failure: OnFailure = "raise",
        restart_limit: int | None = None,
        restart_period: float = 60.0,
        step_timeout: float | None = None,
        start_timeout: float = 60.0,
        threads_per_worker: int | None = None,
        strict: bool = False,
        dummy_env: bool | None = None,
        isolate: bool | None = None,
        worker_env: WorkerEnv | None = None,
        ragged_infos: bool = False,
        env_threads: int = 1,
        spare_workers: int = 0,
        generators: GeneratorsOption = "shared",
    ) -> None:
        self._take_options(env_fns, shared_memory, copy, context, daemon, observation_mode, autoreset_mode, max_concurrency)
        self.worker, self.generators = worker, generators
        check_options(
            self.num_envs, batch_size, num_workers=num_workers, use_caller=use_caller, on_failure=on_failure,
            restart_limit=restart_limit, restart_period=restart_period, step_timeout=step_timeout,
            start_timeout=start_timeout, threads_per_worker=threads_per_worker, strict=strict, dummy_env=dummy_env,
            isolate=isolate, worker_env=worker_env, ragged_infos=ragged_infos, env_threads=env_threads,
            generators=generators,
        )  # fmt: skip
        self._take_spares(spare_workers, num_workers, use_caller, batch_size, env_threads)
        policy = Policy.of(
            on_failure, restart_limit, restart_period, step_timeout, start_timeout,
            gymnasiums_words=num_workers is None and not use_caller,
        )  # fmt: skip
        if policy.restart or step_timeout is not None or worker_env:
            isolate = True
        require_processes_for(type(self).__name__, num_workers, use_caller, isolate, dummy_env)
        mp = multiprocessing.get_context(context)
        here = False if dummy_env is None and worker_env else dummy_env
        self._probe = EnvProbe(
            env_fns, mp, start_timeout, here=here, step="auto" in (num_workers, batch_size) or use_caller, daemon=daemon,
            variables=variables_of(worker_env, 0),
        )  # fmt: skip
        if about_main := self._look_and_open(
            (num_workers, use_caller, isolate, self._probe.times, batch_size),
            (mp, policy, batch_size, threads_per_worker, strict, ragged_infos, worker_env, env_threads),
        ):
            raise about_main

    def _look_and_open(self, for_plan: tuple[Any, ...], to_open: tuple[Any, ...]) -> RuntimeError | None:
        """Find out what the environments are and how many workers there will be, and start these.

        Returns:
            What is wrong with the program's main file. Its traceback would say nothing, so it is for the caller to raise.
        """
        try:
            self._read_spaces(self.env_fns)
            self.num_workers, self._share, self.plan = workers_and_share(self.num_envs, *for_plan)
            self._open(*to_open)
        except RuntimeError as error:
            if not is_about_main(error):
                raise
            error.__context__ = None
            return error.with_traceback(None)
        return None

    def _take_spares(
        self, spare_workers: int, num_workers: NumWorkers, use_caller: bool, batch_size: BatchSize, env_threads: int
    ) -> None:
        self._spares = parse_spares(
            spare_workers, self.num_envs, self.autoreset_mode, num_workers=num_workers, use_caller=use_caller,
            batch_size=batch_size, max_concurrency=self.max_concurrency, env_threads=env_threads,
        )  # fmt: skip
        if self._spares:
            refuse_different(self.env_fns)

    def _open(
        self,
        context: Any,
        policy: Policy,
        batch_size: BatchSize,
        threads_per_worker: int | None,
        strict: bool,
        ragged: bool,
        worker_env: WorkerEnv | None,
        env_threads: int,
    ) -> None:
        """Start the workers."""
        threads = threads_per_worker or max(1, usable_cores() // max(self.num_workers, 1))
        options = PoolOptions(context, self.daemon, type(self).__name__, policy.start_timeout, self.max_concurrency)
        if worker_env:
            options.variables = [variables_of(worker_env, index) for index in range(self.num_workers + self._spares)]
            _warn_of_late(options)
        at_once = None
        if batch_size == "auto":
            assert self.plan is not None
            batch_size = self.plan.batch_size
            at_once = self.plan.rows_at_once if env_threads == 1 and self.max_concurrency is None else None
        engine = self._start_engine(options, policy, threads, strict, ragged, env_threads)
        engine.rows_at_once = at_once
        self._adopt(engine, batch_size)

    def _start_engine(
        self, options: PoolOptions, policy: Policy, threads: int, strict: bool, ragged: bool, env_threads: int
    ) -> Engine:
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

        plan = Plan(
            layout,
            self.autoreset_mode,
            Expected(self.observation_mode, self.single_observation_space, self.single_action_space),
            None if registered is None else (self.single_observation_space, registered.memory),
            threads,
            strict,
            ragged,
            env_threads,
            ahead=self._spares > 0,
            generators=self.generators,
        )
        kind = SpareEngine if self._spares else self._engine_class
        return kind(self.env_fns, layout, make_store, plan, options, policy, self.num_workers, self._share)

    # -- spaces -----------------------------------------------------------------------------------------------------

    def _read_spaces(self, env_fns: Sequence[Callable[[], Env[Any, Any]]]) -> None:
        """Metadata and spaces, from an environment that is built here or elsewhere."""
        mode = self.observation_mode
        found = self._probe.describe(all_envs=isinstance(mode, str) and mode == "different")
        self.metadata = {**found.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = found.render_mode
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
            self.observation_space = batch_differing_spaces(found.observation_spaces)
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


def _warn_of_late(options: PoolOptions) -> None:
    """A forked worker has what this process has imported: say which variables come too late for that."""
    if options.context.get_start_method() == "fork" and (late := too_late(options.variables)):
        read = ", ".join(f"{name} (by {module})" for name, module in late.items())
        logger.warn(
            "%s",
            f"`worker_env` comes too late for what this process has imported, and every forked worker with it: {read}. "
            "Use context='spawn', or 'forkserver'.",
        )
