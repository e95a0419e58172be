"""``AsyncVectorEnv``: Gymnasium's vector interface over the engine.

Everything a program written for ``gymnasium.vector.AsyncVectorEnv`` can see is honoured here: arguments and their order,
attributes, the phases and their errors, how seeds, masks, actions, infos and copies behave. What is done differently is what
hurts there: an answer is never given to another question, a failed environment does not take the others along, and closing
always ends.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Generic, ParamSpec, TypeVar

import cloudpickle
import numpy as np
import numpy.typing as npt
from gymnasium import Space, logger
from gymnasium.core import ActType, Env, ObsType, RenderFrame
from gymnasium.error import AlreadyPendingCallError, CustomSpaceError
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from vecenv.engine import published
from vecenv.engine.actions import ActionStage
from vecenv.engine.engine import Engine, Policy
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.owed import AS_IT_IS, Flight, Result, Worker
from vecenv.engine.pool import WorkerPool
from vecenv.engine.published import StatsCard
from vecenv.engine.starting import PoolOptions, refuse_to_start_while_importing_main
from vecenv.errors import ErrorRecord
from vecenv.front.arguments import count_of, env_ids_of, reset_mask_of, seeds_of
from vecenv.front.capabilities import Capabilities
from vecenv.front.deadlines import seconds_of
from vecenv.front.guard import refuse_busy, refuse_closed, refuse_forked
from vecenv.front.phases import Phase, advance
from vecenv.link.observations import PickledStore, RegisteredStore, SharedStore, Store, has_dynamic_part
from vecenv.link.protocol import Op
from vecenv.planning.options import check_options, workers_and_share
from vecenv.planning.plan import Plan as WorkerPlan
from vecenv.planning.scout import Trial
from vecenv.shm import Batch, Layout, fixed_tree
from vecenv.system.cores import usable_cores
from vecenv.worker.main import Plan
from vecenv.worker.rows import Expected

__all__ = ["AsyncVectorEnv"]

P = ParamSpec("P")
R = TypeVar("R")

_RESERVED = ("reset", "step", "close", "_setattr", "_check_spaces")
_PATIENCE = 60.0  # close() without a timeout waits this long for environments to close
_LITTLE_PATIENCE = 1.0  # the same, when a worker was already late or the caller was interrupted
_OTHER_THREAD = 10.0  # for another thread's call to notice that its workers are gone


def _one_call(method: Callable[P, R]) -> Callable[P, R]:
    """One call at a time, and an answer that counts as taken when it is handed over, not before.

    Refuses a second thread, a process forked from the one that owns the workers, and whoever comes after ``close()``. A call
    within a call (``step`` calls ``step_async`` and ``step_wait``) is part of it. The method prepares how the table of what
    is owed is to be once its answer has been taken; that is put in place on the same line that returns, so that whatever is
    raised before leaves the answer owed. (The interpreter looks for signals and for other threads after calls and at jumps:
    there is none on that line, nor between looking at ``owed.caller`` and setting it.)
    """

    @functools.wraps(method)
    def guarded(self: AsyncVectorEnv[Any, Any], *args: Any, **kwargs: Any) -> R:
        owed = self._owed
        me = get_ident()
        if owed.caller == me:
            return method(self, *args, **kwargs)  # type: ignore[arg-type]
        if owed.caller or self._refuses:
            self._refuse(method.__name__)
        if not owed.calm:
            self._pool.resume()
        try:
            owed.caller, owed.calm, owed.after, owed.verdict = me, False, AS_IT_IS, None
            answer = method(self, *args, **kwargs)  # type: ignore[arg-type]
            owed.caller, owed.calm = 0, True
        except BaseException as error:
            owed.caller = 0
            if self._refuses:
                self._leave()
            if error is not owed.verdict or owed.after is None:
                raise
            owed.verdict = None
            owed.flights, owed.landed, owed.ready, owed.latest, owed.rounds = owed.after; raise  # noqa: E702 - see above
        if self._refuses:
            self._leave()
        if owed.after is None:
            return answer
        owed.flights, owed.landed, owed.ready, owed.latest, owed.rounds = owed.after; return answer  # noqa: E702

    return guarded  # type: ignore[return-value]


class AsyncVectorEnv(VectorEnv[ObsType, ActType, np.ndarray], Generic[ObsType, ActType]):
    """Environments in worker processes, behind ``gymnasium.vector.AsyncVectorEnv``'s interface.

    The first nine arguments are Gymnasium's, in its order; see its documentation. Ours are keyword-only.

    Args:
        env_fns: Functions that build the environments.
        shared_memory: Observations of fixed size lie in shared memory; others, and all with ``False``, travel by pickle.
        copy: Give out a copy of the observations. With ``False`` the same writeable arrays are given out every time and
            change while environments step.
        context: Start method (``"fork"``, ``"spawn"``, ``"forkserver"``) or ``None`` for the process default.
        daemon: Daemonic workers may not have ``multiprocessing`` children of their own.
        worker: A custom worker function: Gymnasium's own class is used for it.
        observation_mode: ``"same"``, ``"different"``, or (batched space, single space).
        autoreset_mode: ``AutoresetMode`` or its string value.
        max_concurrency: At most so many environments are inside ``reset`` or ``step`` at once.
        num_workers: ``None``: one process an environment. An int: so many processes, each over a contiguous share of the
            environments. ``"auto"``: what is fastest here. 0: no process, for debugging.
        use_caller: The calling process steps a share of the environments itself. The fastest there is, for environments one
            would trust in ``SyncVectorEnv``: a crash of one takes the program along.
        batch_size: How many environments :meth:`recv` returns at a time, 1 to ``num_envs``.
        on_failure: ``"raise"``, or ``"restart"`` what died, raised or hung.
        restart_limit, restart_period: At most so many restarts within so many seconds.
        step_timeout: Seconds until a ``reset`` or ``step`` without a timeout of its own is taken to hang.
        start_timeout: Seconds a worker has to build its environments.
        threads_per_worker: Cap for BLAS, OpenMP and torch threads in a worker. Default: the usable cores divided by the
            workers.
        dummy_env: Where metadata and spaces come from. ``True``: an environment built and closed in this process, as
            Gymnasium does. ``False``: one in a process of its own; none is built here. ``None``: as ``True``, but as
            ``False`` where a process tries an environment anyway (``num_workers="auto"``, ``use_caller=True``).
        strict: Float observations that become infinite in the cast to the space's dtype are an
            :class:`~vecenv.errors.ObservationError`; without it, one warning.

    Raises:
        RuntimeError: Spaces of environments do not go together; the environment is named.
        ValueError: An option has no meaning; the accepted values are named.
        ArenaError: There is not enough memory; nothing was started.
        StartupTimeout, WorkerDied: A worker did not get ready. Nothing is left running.
        Exception: Whatever an ``env_fn`` raised, as itself.

    ``reset`` returns ``(observations, infos)`` and ``step`` ``(observations, rewards, terminations, truncations, infos)``:
    observations of ``observation_space``; rewards float64, flags bool, all ``(num_envs,)`` and fresh; infos a dict of arrays
    with a mask ``_key`` for every key.
    """

    _engine_class: type[Engine] = Engine
    _backend = "process"

    def __new__(
        cls,
        env_fns: Any = None,
        shared_memory: bool = True,
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
        return super().__new__(cls)

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Env[Any, Any]]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | Space[Any] | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        *,
        num_workers: int | str | None = None,
        use_caller: bool = False,
        batch_size: int | None = None,
        on_failure: str = "raise",
        restart_limit: int = 5,
        restart_period: float = 60.0,
        step_timeout: float | None = None,
        start_timeout: float = 60.0,
        threads_per_worker: int | None = None,
        strict: bool = False,
        dummy_env: bool | None = None,
    ) -> None:
        refuse_to_start_while_importing_main()
        self.closed = True  # until there is something to close
        self.env_fns = env_fns
        self.shared_memory = shared_memory
        self.copy = copy
        self.context = context
        self.daemon = daemon
        self.worker = worker
        self.observation_mode = observation_mode
        self.autoreset_mode = autoreset_mode if isinstance(autoreset_mode, AutoresetMode) else AutoresetMode(autoreset_mode)
        if max_concurrency is not None:
            if not isinstance(max_concurrency, (int, np.integer)):
                raise ValueError(f"`max_concurrency` must be an integer or None, got {type(max_concurrency)}.")
            if max_concurrency < 1:
                raise ValueError(f"`max_concurrency` must be a positive or None, got {max_concurrency}.")
        self.max_concurrency = max_concurrency
        self.num_envs = len(env_fns)
        if not self.num_envs:
            raise ValueError(f"{type(self).__name__} needs at least one env_fn, got {env_fns!r}")
        check_options(
            self.num_envs, num_workers, batch_size, on_failure, restart_limit, restart_period, step_timeout, start_timeout,
            threads_per_worker, use_caller, strict, dummy_env,
        )  # fmt: skip
        mp = multiprocessing.get_context(context)
        self._trial = Trial(env_fns, mp, start_timeout, dummy_env, step=num_workers == "auto" or use_caller, daemon=daemon)
        self._read_spaces(env_fns)
        self.batch_size = self.num_envs if batch_size is None else batch_size
        self._card: StatsCard | None = None
        self._refuses = ""  # why calls are refused: "closing" or "closed"
        self._figures: dict[str, float] | None = None  # the last, after close()
        kind = type(self)
        self._own_step = kind.step_async is AsyncVectorEnv.step_async and kind.step_wait is AsyncVectorEnv.step_wait
        policy = Policy(
            on_failure == "restart", restart_limit, restart_period, seconds_of(step_timeout, "step_timeout"),
            seconds_of(start_timeout, "start_timeout"),
        )  # fmt: skip
        isolate = policy.restart or step_timeout is not None
        self.num_workers, share, self.plan = workers_and_share(
            self.num_envs, num_workers, use_caller, isolate, self._trial.measure
        )
        threads = threads_per_worker or max(1, usable_cores() // max(self.num_workers, 1))
        self._engine = self._start_engine(mp, policy, share, threads, strict)
        try:
            self._pool: WorkerPool = self._engine.pool
            self._owed = self._engine.owed
            self._owner = os.getpid()
            layout = self._engine.layout
            self._stage = ActionStage(
                self.single_action_space, self.action_space, self.num_envs, layout.actions, self._engine.batch.actions
            )
            self._check_spaces()
        except BaseException:
            self._engine.pool.close(0.0, terminate=True)
            self._engine.pool.release()
            raise
        self.closed = False

    def _start_engine(self, context: Any, policy: Policy, share: int, threads: int, strict: bool) -> Engine:
        """Lay out the shared memory, choose how observations travel, and start the workers."""
        observations = fixed_tree(self.single_observation_space) if self.shared_memory else None
        actions = fixed_tree(self.single_action_space, "action")
        registered = self._registered_store(context) if self.shared_memory and observations is None else None
        layout = Layout.of(
            observations, actions, self.num_envs, self.num_workers + 1, final=self.autoreset_mode is AutoresetMode.SAME_STEP
        )

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
        )
        options = PoolOptions(context, self.daemon, type(self).__name__, policy.start_timeout, self.max_concurrency)
        return self._engine_class(self.env_fns, layout, make_store, plan, options, policy, self.num_workers, share)

    # -- spaces -----------------------------------------------------------------------------------------------------

    def _read_spaces(self, env_fns: Sequence[Callable[[], Env[Any, Any]]]) -> None:
        """Metadata and spaces, from an environment that is built here or elsewhere."""
        mode = self.observation_mode
        found = self._trial.describe(everyone=isinstance(mode, str) and mode == "different")
        self.metadata = {**found.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = found.render_mode
        self.single_action_space = found.action_space
        self.action_space = batch_space(found.action_space, self.num_envs)
        if isinstance(mode, tuple) and len(mode) == 2:
            if not all(isinstance(space, Space) for space in mode):
                raise TypeError(
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
            return RegisteredStore(self.single_observation_space, self.num_envs, context)
        except CustomSpaceError as error:
            raise ValueError(
                "Using `AsyncVector(..., shared_memory=True)` caused an error, you can disable this feature with "
                "`shared_memory=False` however this is slower."
            ) from error

    def _check_spaces(self) -> None:
        for env, which, got in self._engine.mismatches:
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

    # -- reset ------------------------------------------------------------------------------------------------------

    @_one_call
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[ObsType, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``; see :meth:`reset_async`."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    @_one_call
    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
        *,
        env_id: Any = None,
    ) -> None:
        """Begin a reset. The answer is fetched by :meth:`reset_wait` for everybody or by :meth:`recv` as it comes.

        Args:
            seed: An int gives environment i ``seed + i``; a sequence gives each its own; ``None`` none.
            options: Handed to every environment, except ``"reset_mask"``, a bool array ``(num_envs,)``: only those
                environments are reset, the others keep their last observation. Environments that failed are built anew.
            env_id: Only these environments, which must not be in flight, while others may be; :meth:`recv` fetches the
                answers. A sequence of seeds has one for each of them, in their order.

        Raises:
            TypeError, ValueError: Seeds, mask or indices of the wrong length, type or shape; nothing was sent.
            AlreadyPendingCallError: An answer is owed; with ``env_id``, one of these environments is in flight.
        """
        rows = None if env_id is None else env_ids_of(env_id, self.num_envs).tolist()
        seeds = seeds_of(seed, self.num_envs) if rows is None else _seeds_by_row(seed, rows, self.num_envs)
        if (phase := self._owed.phase) is not Phase.DEFAULT:
            advance(phase, "reset_async", self)
        mask, options = reset_mask_of(options, self.num_envs)
        if rows is not None:
            if mask is not None:
                raise ValueError("env_id and options['reset_mask'] both say which environments are to be reset: give one")
            self._require_idle("reset_async", rows)
        if self._card is None and published.asked_for(self._engine):
            self._publish(None)
        if rows is None:
            self._engine.ask_reset(seeds, options, mask)
        else:
            self._engine.ask_reset_rows(rows, seeds, options)

    @_one_call
    def reset_wait(self, timeout: float | None = None) -> tuple[ObsType, dict[str, Any]]:
        """Fetch the answer to :meth:`reset_async`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            Exception: What an environment raised.
        """
        result = self._finish("reset_wait", Phase.WAITING_RESET, timeout)
        engine = self._engine
        if self._card is not None:
            self._card.update()
        try:
            return engine.store.batch(self.copy), engine.infos(result)
        except Exception as error:
            self._blame(error, lambda: (engine.store.batch(self.copy), engine.infos(result)))
            raise

    # -- step -------------------------------------------------------------------------------------------------------

    @_one_call
    def step(
        self, actions: ActType
    ) -> tuple[ObsType, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        """Step all environments; see :meth:`step_async` and :meth:`step_wait`."""
        if not self._own_step:  # a subclass has a part of its own in it
            self.step_async(actions)
            return self.step_wait()
        return self._step_answer(self._told(self._engine.finish(self._ask_step(actions), None)))

    @_one_call
    def step_async(self, actions: ActType) -> None:
        """Begin a step.

        Args:
            actions: A batch of ``action_space``, or whatever ``gymnasium.vector.utils.iterate`` takes for it. Each
                environment gets its action as it is passed here, uncast and unclipped, as an array of its own.

        Raises:
            TypeError, ValueError: Wrong structure, too few or too many; nothing was sent.
            EnvFailed: An environment that failed was not reset since.
        """
        self._ask_step(actions)

    def _ask_step(self, actions: ActType) -> Flight:
        engine, owed = self._engine, self._owed
        if owed.flights or owed.ready:
            advance(owed.phase, "step_async", self)
            engine.first_ready.require_nothing("step_async")
        if engine.failed and not engine.policy.restart:
            engine.ledger.refuse(engine.failed)
        return engine.ask_step(self._stage.put(actions))

    @_one_call
    def step_wait(
        self, timeout: float | None = None
    ) -> tuple[ObsType, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        """Fetch the answer to :meth:`step_async`.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            WorkerDied: A worker process ended; the next ``reset()`` starts it anew.
            Exception: What an environment raised, after all the others have been stepped.
        """
        return self._step_answer(self._finish("step_wait", Phase.WAITING_STEP, timeout))

    def _step_answer(
        self, result: Result
    ) -> tuple[ObsType, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        engine = self._engine
        batch = engine.batch
        if self._card is not None:
            self._card.update()
        try:
            return (
                engine.store.batch(self.copy),
                batch.rewards.copy(),
                batch.terminations.copy(),
                batch.truncations.copy(),
                engine.infos(result) if result.columns else {},
            )
        except Exception as error:
            self._blame(error, lambda: (engine.store.batch(self.copy), engine.infos(result)))
            raise

    def _blame(self, error: Exception, again: Callable[[], object]) -> None:
        """What environments said does not go together, unless it does at the second look: then somebody interrupted."""
        try:
            again()
        except Exception as same:
            if type(same) is type(error):
                self._owed.verdict = error

    def _finish(self, method: str, wanted: Phase, timeout: float | None) -> Result:
        """The answer to the call that is owed."""
        call = self._owed.call
        if call is None or call.phase is not wanted:
            advance(self._owed.phase, method, self)
        assert call is not None
        try:
            return self._told(self._engine.finish(call, seconds_of(timeout)))
        finally:
            del call  # it holds the exception, whose traceback would hold it

    def _told(self, answer: tuple[R, Exception | None]) -> R:
        """What there is to be dressed; or the exception that is the answer, raised where no frame keeps it."""
        if answer[1] is None:
            return answer[0]
        self._owed.verdict = answer[1]
        try:
            raise answer[1]
        finally:
            del answer

    # -- first-ready batches ----------------------------------------------------------------------------------------

    @_one_call
    def send(self, actions: Any, env_id: Any = None) -> None:
        """Step some idle environments, without waiting.

        Args:
            actions: A batch of as many actions as there are environments in ``env_id``, in its order.
            env_id: Which environments, distinct indices; ``None``: those of the latest :meth:`recv`, or all at first.

        Raises:
            ValueError: Indices out of range or twice, or a number of actions that does not go with them.
            AlreadyPendingCallError: One of them is in flight, or was not received yet.
            EnvFailed: One of them failed and was not reset since.
        """
        engine, owed = self._engine, self._owed
        if owed.call is not None:
            advance(owed.phase, "step_async", self)
        rows = owed.latest if env_id is None else env_ids_of(env_id, self.num_envs)
        listed = rows.tolist()
        self._require_idle("send", listed)
        if engine.failed and not engine.policy.restart and (failed := engine.failed.keys() & set(listed)):
            engine.ledger.refuse({row: engine.failed[row] for row in failed})
        engine.ask_rows(listed, self._stage.put_some(actions, rows))

    def _require_idle(self, method: str, rows: Sequence[int]) -> None:
        """None of these environments is in flight."""
        owed = self._owed
        if owed.flights or owed.ready:
            on_their_way = set(owed.waiting())
            if waiting := [row for row in rows if row in on_their_way]:
                raise AlreadyPendingCallError(
                    f"Calling `{method}` for envs {waiting}, which are still in flight: `recv` them first.", "send"
                )

    @_one_call
    def recv(
        self, timeout: float | None = None, *, count: int | None = None
    ) -> tuple[Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]]:
        """The next ``count`` environments that are done, whoever was first.

        Args:
            timeout: Seconds to wait at most.
            count: How many, 1 to ``num_envs``; ``None``: ``batch_size``.

        Returns:
            What ``step`` returns, with ``count`` rows instead of ``num_envs``, all of them fresh arrays.
            ``infos["env_id"]``, int ``(count,)``, tells which environments they are. Environments come in the order in
            which they finished. Rows of a reset have reward 0 and both flags False.

        Raises:
            NoAsyncCallError: Fewer than ``count`` environments are in flight or ready.
            StepTimeout: Not within ``timeout`` seconds; nothing is lost, call again.
            Exception: What an environment raised; the rows of the others are kept for the next call.
        """
        engine, owed = self._engine, self._owed
        number = self.batch_size if count is None else count_of(count, self.batch_size, self.num_envs)
        if (call := owed.call) is not None:
            if call.phase is not Phase.WAITING_RESET:
                advance(call.phase, "reset_async", self)
            engine.first_ready.launch(call)
        rows, infos, finals = self._told(engine.first_ready.receive(number, seconds_of(timeout)))
        if self._card is not None:
            self._card.update()
        batch = engine.batch
        try:
            said = engine.infos_of(rows, infos, finals)
            observations = engine.store.take(rows)
        except Exception as wrong:
            self._blame(wrong, lambda: (engine.infos_of(rows, infos, finals), engine.store.take(rows)))
            raise
        said["env_id"], said["_env_id"] = rows.copy(), rows >= 0
        return observations, batch.rewards[rows], batch.terminations[rows], batch.truncations[rows], said

    # -- calls ------------------------------------------------------------------------------------------------------

    @_one_call
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """``env.get_wrapper_attr(name)`` of every environment, called with the arguments if it can be called."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    @_one_call
    def call_async(self, name: str, /, *args: object, **kwargs: object) -> None:
        """Begin a :meth:`call`."""
        self._require_nothing_owed("call_async", "call_async")
        if name in _RESERVED:
            raise ValueError(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        payload = (name, args, kwargs)
        _require_picklable(payload, self.num_workers)
        self._engine.ask_call(Op.CALL, lambda worker: payload, "call")

    def _require_nothing_owed(self, method: str, name: str) -> None:
        if (phase := self._owed.phase) is not Phase.DEFAULT:
            advance(phase, method, self)
        self._engine.first_ready.require_nothing(name)

    @_one_call
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`call_async`: a tuple of one result an environment.

        The answers to :meth:`exec_func_send`, and to a :meth:`set_attr` that was interrupted, are fetched by it, too.

        Raises:
            StepTimeout: Not within ``timeout`` seconds; the answer is still owed, call again.
            Exception: What the call raised in an environment; the environments stay alive.
        """
        result = self._finish("call_wait", Phase.WAITING_CALL, timeout)
        return tuple(result.results.get(row) for row in range(self.num_envs))

    @_one_call
    def exec_func(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """``func(env, *args, **kwargs)`` in the workers, for the environments ``indices`` (``None``: all).

        ``func`` may be a lambda or a closure. Returns a tuple of ``num_envs`` results, ``None`` for the others.
        """
        self.exec_func_send(func, indices, *args, **kwargs)
        return self.exec_func_fetch()

    @_one_call
    def exec_func_send(
        self, func: Callable[..., Any], indices: Sequence[int] | int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an :meth:`exec_func`."""
        self._require_nothing_owed("call_async", "exec_func")
        if not callable(func):
            raise TypeError(f"exec_func wants a function of an environment, got {func!r}")
        if indices is None:
            chosen = set(range(self.num_envs))
        else:
            named = [indices] if isinstance(indices, (int, np.integer)) else list(indices)
            chosen = set(env_ids_of(named, self.num_envs).tolist())
        _require_picklable((func, args, kwargs), self.num_workers)

        def payload(worker: Worker) -> Any:
            ks = [row - worker.rows[0] for row in worker.rows if row in chosen]
            return (ks, func, args, kwargs) if ks else None

        self._engine.ask_call(Op.EXEC, payload, "exec_func")

    @_one_call
    def exec_func_fetch(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Fetch the answer to :meth:`exec_func_send`."""
        return self.call_wait(timeout)

    @_one_call
    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment (of whichever wrapper has it)."""
        return self.call(name)

    @_one_call
    def set_attr(self, name: str, values: list[Any] | tuple[Any, ...] | object) -> None:
        """Set an attribute of every environment; a list or tuple is one value an environment, else all get the same.

        If it is interrupted while the answer is owed, :meth:`call_wait` fetches that.
        """
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self._require_nothing_owed("set_attr", "set_attr")
        each = values
        _require_picklable(each, self.num_workers)
        self._engine.ask_call(Op.SET_ATTR, lambda worker: (name, [each[row] for row in worker.rows]), "set_attr")
        self._finish("call_wait", Phase.WAITING_CALL, None)

    @_one_call
    def render(self) -> tuple[RenderFrame, ...] | None:
        """One frame (or list of frames) an environment, in a tuple."""
        return self.call("render")

    @property
    @_one_call
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The environments' seeds."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]
    @_one_call
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """Copies of the environments' generators."""
        return self.get_attr("np_random")

    # The second set of names: the same methods.

    reset_send = reset_async
    reset_fetch = reset_wait
    step_send = step_async
    step_fetch = step_wait
    call_send = call_async
    call_fetch = call_wait

    # -- what can be looked at --------------------------------------------------------------------------------------

    @property
    def observations(self) -> ObsType:
        """The latest batch itself, not a copy; zeros before the first reset."""
        if self.closed:
            advance(Phase.CLOSED, "reset_async", self)
        return self._engine.store.observations  # type: ignore[no-any-return]

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
        own = self._pool.own is not None
        return Capabilities(self._backend, restarts=self._engine.policy.restart, in_this_process=own)

    @property
    def step_timeout(self) -> float | None:
        """Seconds until a ``reset`` or ``step`` without a timeout of its own is taken to hang; ``None``: never."""
        return self._engine.policy.step_timeout

    @property
    def local_envs(self) -> list[Env[Any, Any]]:
        """The environments that live in this process, those of the caller's share."""
        own = self._pool.own
        return [] if own is None else [env for env in own.envs if env is not None]

    plan: WorkerPlan | None = None
    """Why ``num_workers="auto"`` chose what it chose."""

    @property
    def errors(self) -> deque[ErrorRecord]:
        """What failed so far, oldest first, at most 1,000 records."""
        return self._engine.ledger.errors

    @property
    def error_queue(self) -> deque[ErrorRecord]:
        """Gymnasium's name for :attr:`errors`."""
        return self._engine.ledger.errors

    @property
    def _state(self) -> AsyncState:
        return AsyncState(self._owed.phase.value)

    @property
    def _phase(self) -> Phase:
        return Phase.CLOSED if self.closed or self._refuses else self._owed.phase

    def stats(self) -> dict[str, float]:
        """Figures since construction.

        ``steps``; ``steps_per_second``; ``wait_fraction`` (of the time, spent by the caller waiting for workers);
        ``step_time_mean`` and ``step_time_slowest_env`` in seconds; ``straggler_share`` (of the workers' time, idle because
        another one took longer); ``resets`` asked for; ``restarts``; ``errors``; ``bytes_pickled``. Counts are exact; times
        inside environments are extrapolated where a worker's share of a batch takes less than a millisecond.
        ``in_flight``: environments that were sent and not received. After :meth:`close` they stay as they were.
        """
        return self._engine.stats() if self._figures is None else dict(self._figures)

    @_one_call
    def publish_stats(self, name: str | None = None) -> None:
        """Let ``vecenv top``, run by the same user on this machine, show the workers until :meth:`close`.

        The environment variable ``VECENV_TOP=1`` does the same for a whole program, from the first reset on. Nothing is
        written to disk and nothing listens; an answer costs half a microsecond more. Linux only.

        Args:
            name: What to call it there; default: the environments' id.

        Raises:
            NotImplementedError: Not on this system, or not with workers on other machines.
            ClosedEnvironmentError: It is closed.
        """
        if not published.available() or not published.has_counters(self._engine):
            raise NotImplementedError("publish_stats() needs Linux and workers on this machine; stats() is there everywhere")
        self._publish(name)

    def _publish(self, name: str | None) -> None:
        if self._card is not None:
            self._card.close()
        self._card = StatsCard(name or (self.spec.id if self.spec is not None else type(self).__name__), self._engine)

    def __repr__(self) -> str:
        name = f"{self.spec.id}, " if self.spec is not None else ""
        if not hasattr(self, "_owed"):
            return f"{type(self).__name__}({name}closed)"
        restarts = f", restarted={self._engine.restarts}" if self._engine.restarts else ""
        failed = f", failed={sorted(self._engine.failed)}" if self._engine.failed else ""
        caller = sum(len(worker.rows) for worker in self._pool.workers if worker.local)
        share = f", caller={caller}" if caller else ""
        return (
            f"{type(self).__name__}({name}num_envs={self.num_envs}, workers={self.num_workers}{share}, "
            f"phase={self._phase.name}{restarts}{failed})"
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def _refuse(self, name: str) -> None:
        """Say why a call is refused."""
        if self._pool.abandoned:
            refuse_forked(self, self._owner, "its workers")
        if self._refuses:
            refuse_closed(self)
        refuse_busy(self, name)

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
        if self._pool.abandoned:
            self.closed = True
            return
        seconds = seconds_of(kwargs.get("timeout"))
        again, self._refuses = self._refuses == "closing", "closing"
        self._pool.closing = True
        owed, me = self._owed, get_ident()
        if owed.caller and owed.caller != me:  # another thread is waiting for an answer: there will be none
            for worker in self._pool.processes:
                worker.signal(9)
            until = time.monotonic() + _OTHER_THREAD
            while owed.caller and time.monotonic() < until:
                time.sleep(0.001)
        nested = owed.caller == me
        if not self._pool.released:
            hurried = again or nested
            self.close_extras(**{**kwargs, "timeout": _LITTLE_PATIENCE if hurried and seconds is None else seconds})
        if not nested:
            self._let_go()
        self.closed = True

    def close_extras(self, timeout: float | None = None, terminate: bool = False, **kwargs: Any) -> None:
        """End the workers; see :meth:`close`."""
        pool, call = self._pool, self._owed.call
        patience = timeout
        if patience is None:
            late = any(worker.overdue or (worker.death is None and worker.is_stopped()) for worker in pool.workers)
            patience = _LITTLE_PATIENCE if late else _PATIENCE
        if call is not None:
            logger.warn(f"Calling `close` while waiting for a pending call to `{call.phase.value}` to complete.")
        self._engine.close(0.0 if terminate else patience, terminate=terminate)

    def _leave(self) -> None:
        """A call has ended in which, or meanwhile, somebody closed us."""
        if self._refuses == "closing" and self.closed:
            self._let_go()

    def _let_go(self) -> None:
        """Free all memory and descriptors. Idempotent."""
        if self._pool.released:
            return
        self._figures = self._engine.stats()
        if self._card is not None:
            self._card.close()
        self._pool.release()
        self._engine.forget()
        self._stage = None  # type: ignore[assignment]
        self._refuses = "closed"

    def __del__(self) -> None:
        if self.__dict__.get("closed", True):  # the class itself has `closed = False`
            return
        if self._pool.abandoned:
            return
        warnings.warn(f"unclosed {type(self).__name__}", ResourceWarning, source=self, stacklevel=2)
        self._pool.end_unclosed()


def _seeds_by_row(seed: Any, rows: Sequence[int], num_envs: int) -> list[Any]:
    """Seeds for some environments, at their places among all: an int gives environment i ``seed + i``."""
    if seed is None or isinstance(seed, (int, np.integer)):
        return seeds_of(seed, num_envs)
    each: list[Any] = [None] * num_envs
    for row, own in zip(rows, seeds_of(seed, len(rows)), strict=True):
        each[row] = own
    return each


def _require_picklable(payload: Any, num_workers: int) -> None:
    """Arguments that cannot travel are the caller's to know, before anything is sent."""
    if num_workers:
        cloudpickle.dumps(payload)
