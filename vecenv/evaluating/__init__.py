"""``vecenv.evaluate``: runs a list of episodes on a vector environment, row by row if the engine can, otherwise in lockstep.

:class:`FirstReadyRunner` is for engines that return results row by row: a free environment gets the next episode, and no
step is wasted. :class:`LockstepRunner` is for the other engines. When an episode ends, its environment begins the next one
with a masked reset and that episode's seed, if the engine supports that; otherwise all environments wait for the last
episode, and are then seeded together. Rows without an episode are stepped too, and their results are dropped. A single
runner for both would lose the efficiency of the first: in lockstep, a batch takes as long as its longest episode.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation

from vecenv.errors import (
    EnvFailed,
    ErrorRecord,
    RestartsExhausted,
    SnapshotMismatch,
    StepTimeout,
    WorkerDied,
    envs_text,
    how_to_install,
)  # fmt: skip
from vecenv.evaluating.episodes import (
    Attempt,
    EpisodeList,
    EpisodeResult,
    EpisodeResults,
    Episodes,
    episode_statistics_keys,
    first_snapshot_per_kind,
    parse_episodes,
    parse_frames,
    shared_options,
)  # fmt: skip
from vecenv.evaluating.journal import Journal, stored_seed
from vecenv.evaluating.policies import PolicyCaller, join_rows, take_rows
from vecenv.evaluating.tasks import WaitingEpisodes, find_offered, require_offered
from vecenv.front.arguments import parse_timeout
from vecenv.front.by_row import infos_by_row
from vecenv.front.capabilities import Capabilities, capabilities_of, raise_unsupported, wrappers_around
from vecenv.front.infos import RowInfos
from vecenv.link.messages import original_summary
from vecenv.multi_agent.views import FlattenAgents
from vecenv.state.snapshots import Snapshot
from vecenv.system.reporting import warn
from vecenv.system.signals import raised_by_handler, watched_handlers

__all__ = ["evaluate"]

Report: TypeAlias = Callable[[EpisodeResult], None]

_ENVPOOL_SEED_LIMIT = 2**31  # seeds must be below this limit of EnvPool's C++ code


def evaluate(
    envs: VectorEnv[Any, Any, Any], policy: Callable[..., Any], episodes: EpisodeList, *, seed: int | None = None,
    retries: int = 1, timeout: float | None = None, on_episode: Callable[[EpisodeResult], object] | None = None,
    progress: bool = False, frames: Iterable[int] = (), initial_state: Any = None, arrays: str | None = None,
    device: Any = None, batch: str = "ready", folder: str | os.PathLike[str] | None = None, name: str | None = None,
) -> EpisodeResults:  # fmt: skip
    """Run each episode of a list exactly once, and return the results in the order of the list.

    Results do not depend on the number of environments or workers, unless environments draw from shared random generators
    (``generators="own"`` separates them), a network rounds a row differently in another batch size (``batch="single"``
    prevents it), or episodes depend on earlier ones. See ``docs/evaluation.md`` for each engine.

    Args:
        envs: A vector environment of single-agent environments, in any autoreset mode, with no request in flight. Reset it
            before using it again.
        policy: ``policy(observations)`` returns one action per row. There are ``k`` rows (1 to ``num_envs``), one per
            ready environment. The policy also gets the following, if it has parameters with these names: ``rows``, int
            ``(k,)``, indices of the environments; ``begins``, bool ``(k,)``, True at the beginning of an episode;
            ``episodes``, int ``(k,)``, indices in the list; ``rngs``, ``k`` generators, one per episode; ``infos``, ``k``
            dicts; ``state``. Actions are numpy, torch or JAX arrays.
        episodes: A number of episodes, or a sequence of :class:`vecenv.Episode` or snapshots (``envs.save()``).
        seed: An episode without a seed gets this one plus its index; ``rngs`` depend on it, too. ``None``: a random one.
        retries: The number of times that a failed episode is repeated with its seed before its result reports the error. If
            environments step together, an exception ends the evaluation.
        timeout: Seconds that a step or a reset of one environment may take; after that, the environment's worker is killed
            and the episode fails. ``None``: the vector environment's ``step_timeout``.
        on_episode: Called with each result, in the order in which episodes end.
        progress: Show a progress bar.
        frames: Indices of episodes for which to record frames (``render_mode="rgb_array"``); they run first, one at a time.
        initial_state: For a policy with a parameter ``state``: the state at the beginning of an episode, an array or a tree
            of dicts, lists and tuples. The policy gets the states of its rows, stacked, and returns ``(actions, state)``.
        arrays: Library of observations, ``"numpy"``, ``"torch"`` or ``"jax"``; ``None``: torch for a ``torch.nn.Module``.
        device: The device of tensors; ``None``: that of the module's parameters.
        batch: ``"ready"``: the rows of all ready environments; ``"padded"``: always ``num_envs`` rows, filled up with copies
            of the first one, marked by ``num_envs`` in ``rows``; ``"single"``: one row at a time, so that no result depends
            on other rows.
        folder: Store results in ``episodes.jsonl`` in this folder, and run only episodes that have no result there, or that
            failed. Infos made of ``None``, bools, ints, floats, strings, arrays of numbers or strings, lists, tuples and
            dicts are read back unchanged; other objects as their ``repr``. Without ``seed``, the folder's is used again.
        name: The name of the policy; a folder holds the results of one policy.

    Returns:
        A list of :class:`vecenv.EpisodeResult`, with ``returns``, ``lengths``, ``mean`` and ``std``.

    Raises:
        TypeError, ValueError: An argument is invalid (raised before anything runs), or the policy did not return one action
            per row.
        NotImplementedError: The engine does not support seeds, options, snapshots, frames or timeouts per episode.
        SnapshotMismatch: A snapshot does not fit the environments.
        AlreadyPendingCallError: A request is in flight.
        ImportError: ``progress`` needs rich, which is not installed.
        Exception: Raised by the policy, ``on_episode``, a signal handler, or environments that step together. The next
            ``reset()`` waits for the requests in flight.
    """
    _require_vector_env(envs, policy)
    if seed is None and folder is not None:
        seed = stored_seed(folder)
    listed_episodes, base = parse_episodes(episodes, seed)
    todo = Episodes(listed_episodes, base, retries)
    if on_episode is not None and not callable(on_episode):
        raise TypeError(f"on_episode must be callable, got {on_episode!r}")
    with_frames = parse_frames(frames, len(todo.episodes))
    if (limit := parse_timeout(timeout)) == 0.0:
        raise ValueError(f"timeout must be None or a number of seconds above 0, got {timeout!r}")
    journal = _open_journal(folder, name, todo, with_frames)
    act = PolicyCaller(policy, envs, arrays=arrays, device=device, batch=batch, initial_state=initial_state)

    def report(result: EpisodeResult) -> None:
        if journal is not None:
            result = todo.results[result.index] = journal.append(result)
        if show is not None:
            show(len(todo.results))
        if on_episode is not None:
            on_episode(result)

    runner = _make_runner(envs, todo, act, report, limit, with_frames)
    bar = _progress_bar(len(todo.episodes)) if progress else contextlib.nullcontext()
    with bar as show, journal or contextlib.nullcontext(), watched_handlers(), _fixed_statistics(envs):
        if journal is not None:
            todo.results.update(journal.results)
        runner.run()
    if getattr(envs.unwrapped, "_draws_shared", False):
        warn(
            "the results of evaluate depend on the row of each episode and on the other environments of its process, which "
            "draw from the same generators. generators='own' makes results the same for every number of environments",
        )
    results = EpisodeResults(todo.results[index] for index in range(len(todo.episodes)))
    if failed := [result for result in results if result.error is not None]:
        error: Any = failed[0].error
        first, cause = failed[0].index, original_summary(error).partition("\n")[0]
        counts = f"{len(failed)} of {len(results)} episodes failed"
        warn(f"{counts}, the first is episode {first} with {cause}; mean and std leave them out")
    return results


def _open_journal(folder: Any, name: str | None, todo: Episodes, with_frames: frozenset[int]) -> Journal | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string or None, got {name!r}")
    if folder is None:
        if name is not None:
            raise ValueError("name= is stored in a folder: pass folder=, too")
        return None
    if with_frames:
        raise ValueError("frames= cannot be combined with folder=, which does not store frames")
    return Journal(folder, todo.episodes, todo.entropy, name)


def _require_vector_env(envs: Any, policy: Any) -> None:
    if hasattr(envs, "possible_agents"):
        raise_unsupported(envs, "evaluate episodes of several agents", "a result has one return: pass envs.flatten_agents()")
    if not isinstance(envs, VectorEnv):
        problem = f" needs a Gymnasium vector environment, such as one from vecenv.make_vec, got {envs!r}"
        if isinstance(policy, VectorEnv):
            problem = f": got envs={envs!r} and policy={policy!r}: are the first two swapped?"
        raise TypeError(f"evaluate(envs, policy, episodes){problem}")


def _make_runner(
    envs: Any, todo: Episodes, act: PolicyCaller, report: Report, limit: float | None, with_frames: frozenset[int]
) -> FirstReadyRunner | LockstepRunner:
    """Return the runner for this engine; raise ``NotImplementedError`` if it lacks something that the episodes need."""
    runner: FirstReadyRunner | LockstepRunner
    _require_nothing_in_flight(envs.unwrapped)
    capabilities = capabilities_of(envs)
    if isinstance(envs, VectorWrapper) and not hasattr(type(envs), "recv"):
        capabilities = None  # the engine would step single rows without calling the wrapper
    if (snapshots := first_snapshot_per_kind(todo.episodes)) and (capabilities is None or not capabilities.snapshots):
        raise_unsupported(envs, "begin episodes with snapshots", "they cannot be loaded")
    if capabilities is not None and capabilities.first_ready and capabilities.masked_seeds and hasattr(envs, "abandon"):
        if with_frames and envs.render_mode != "rgb_array":
            raise ValueError(f"frames need render_mode='rgb_array', got {envs.render_mode!r}")
        if limit is not None and capabilities.in_this_process:
            reason = "the calling process steps some of them: pass use_caller=False, or num_workers="
            raise_unsupported(envs, "end environments that hang", reason)
        if limit is None and not capabilities.in_this_process:
            limit = envs.step_timeout
        runner = FirstReadyRunner(envs, todo, act, report, limit, with_frames)
    else:
        if with_frames:
            raise_unsupported(envs, "render single environments", "they step together")
        if limit is not None:
            raise_unsupported(envs, "end environments that hang", "vecenv does not run them in processes")
        in_waves = _needs_waves(envs, capabilities, todo)
        if in_waves and envs.num_envs > 1 and shared_options(todo.episodes) is None:
            reason = "all environments are reset together; evaluate the episodes with equal options in one call each"
            raise_unsupported(envs, "evaluate episodes with different options or env=", reason)
        runner = LockstepRunner(envs, todo, act, report, in_waves=in_waves)
    require_offered(find_offered(envs.unwrapped, todo.episodes), type(envs).__name__, todo.episodes)
    _require_loadable(envs, snapshots)
    return runner


def _require_nothing_in_flight(base: Any) -> None:
    """Raise if environments are in flight, because a reset of all would drop their results."""
    description = "environments"
    with contextlib.suppress(NotImplementedError):  # EnvPool may report only their number
        in_flight = sorted(getattr(base, "in_flight", np.arange(0)).tolist())
        if not in_flight:
            return
        description = envs_text(in_flight)
    raise AlreadyPendingCallError(f"Calling `evaluate` with {description} in flight: call `recv` or `reset` first.", "send")


def _require_loadable(envs: Any, snapshots: dict[int, Snapshot]) -> None:
    """Raise if a snapshot does not fit. Loading it as a test is safe, because each episode begins with a reset or a load."""
    for index, snapshot in snapshots.items():
        try:
            try:
                envs.load(snapshot, env_id=[0])
            except (EnvFailed, WorkerDied):  # a worker died earlier
                envs.reset()
                envs.load(snapshot, env_id=[0])
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"episodes[{index}].snapshot: {error}") from error


def _needs_waves(envs: Any, capabilities: Capabilities | None, todo: Episodes) -> bool:
    """True if rows can only be seeded together.

    Raise ``NotImplementedError`` if the engine cannot run episodes with these seeds and options.
    """
    if capabilities is None:
        if not isinstance(envs.metadata.get("autoreset_mode"), AutoresetMode):
            raise_unsupported(envs, "be evaluated", "its metadata has no autoreset mode")
        # the agents of an environment are reset together; NormalizeObservation rejects masks
        without_masked_resets = FlattenAgents, NormalizeObservation
        return any(isinstance(each, without_masked_resets) for each in (*wrappers_around(envs), envs.unwrapped))
    if not capabilities.row_seeds:
        raise_unsupported(envs, "seed each episode separately", "its environments share one generator")
    if any(episode.reset_options for episode in todo.episodes) and not capabilities.reset_options:
        raise_unsupported(envs, "evaluate episodes with options", "its environments have no reset options")
    largest = max(episode.seed or 0 for episode in todo.episodes)
    if capabilities.backend == "envpool" and largest >= _ENVPOOL_SEED_LIMIT:
        raise_unsupported(envs, f"give an episode the seed {largest}", "EnvPool's seeds are below 2**31")
    return not (capabilities.reset_mask and capabilities.masked_seeds)


@contextlib.contextmanager
def _fixed_statistics(envs: Any) -> Iterator[None]:
    """Freeze the running statistics of normalizing wrappers, so that results do not depend on earlier episodes."""
    updating = [wrapper for wrapper in wrappers_around(envs) if getattr(wrapper, "update_running_mean", False)]
    try:
        for wrapper in updating:
            wrapper.update_running_mean = False
        yield
    finally:
        for wrapper in updating:
            wrapper.update_running_mean = True


@contextlib.contextmanager
def _progress_bar(total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on standard error. It uses no thread, because one would interfere with forking workers.

    Yields a function that takes the number of finished episodes; the bar is redrawn at most ten times per second.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError(f"progress=True needs rich: {how_to_install('bench')}") from error
    columns = TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console, next_refresh = Console(stderr=True), 0.0

    def update(completed: int) -> None:
        nonlocal next_refresh
        is_due = time.monotonic() > next_refresh
        bar.update(task, completed=completed, refresh=is_due)
        if is_due:
            next_refresh = time.monotonic() + 0.1

    with Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total)
        yield update


class EpisodeRunner:
    """The base class of both runners.

    Args:
        envs: The vector environment.
        episodes: The list of episodes to run.
        act: The policy.
        report: Called with each result as soon as it is known.
    """

    def __init__(self, envs: Any, episodes: Episodes, act: PolicyCaller, report: Report) -> None:
        self._envs, self._episodes, self._act, self._report = envs, episodes, act, report
        self._by_row = infos_by_row(envs)
        self._mode = envs.metadata.get("autoreset_mode")
        self._added_info_keys = episode_statistics_keys(envs)
        self._waiting = WaitingEpisodes(episodes.episodes, getattr(envs, "worker_rows", ()))
        self._running: dict[int, Attempt] = {}  # by row

    def _begin_attempts(self, rows: Iterable[int]) -> list[Attempt]:
        """Begin the next episodes in these rows, until rows or episodes run out."""
        attempts = []
        for row in rows:
            index = self._waiting.pop_for(row, worker_is_idle=self._worker_is_idle(row)) if self._waiting else None
            if index is not None:
                attempts.append(self._episodes.begin(index, row))
                self._running[row] = attempts[-1]
        return attempts

    def _worker_is_idle(self, row: int) -> bool:
        """True if no row of this row's worker runs an episode. Always True in lockstep, where a row never waits."""
        return True

    def _end(self, attempt: Attempt, terminated: Any, truncated: Any, info: Any) -> None:
        """Report an episode that has ended; ``info`` is that of its last step."""
        del self._running[attempt.row]
        if self._mode is AutoresetMode.SAME_STEP:
            statistics = {key: info[key] for key in self._added_info_keys if key in info}  # wrappers add them beside it
            info = info.get("final_info", {})
            info = {**info, **statistics} if statistics else info
        self._report(self._episodes.record_end(attempt, bool(terminated), bool(truncated), info))


class FirstReadyRunner(EpisodeRunner):
    """A runner for engines with first-ready batches and a seed for each environment.

    An exception concerns the environments that were in flight before it and are not in flight after it. The death of a
    worker ends all its environments, any of which may have caused it. So their episodes are repeated after all others, one
    at a time per worker, which identifies the cause. An episode that kills its worker thus costs the others only time, and
    results do not depend on which environments shared a worker.

    Snapshots can be loaded only while nothing is in flight: until then, the steps of other rows are queued.

    Args:
        envs, episodes, act, report: See :class:`EpisodeRunner`.
        timeout: The limit of a step or a reset of an environment in seconds; ``None``: no limit.
        with_frames: Indices of the episodes for which to record frames.
    """

    def __init__(
        self, envs: Any, episodes: Episodes, act: PolicyCaller, report: Report, timeout: float | None,
        with_frames: frozenset[int],
    ) -> None:  # fmt: skip
        super().__init__(envs, episodes, act, report)
        self._timeout, self._with_frames = timeout, with_frames
        self._groups: list[list[int]] = [list(rows) for rows in envs.worker_rows]
        self._group_by_row = {row: group for group in self._groups for row in group}
        self._suspects: list[int] = []  # indices of the episodes to repeat one at a time per worker
        self._in_flight: dict[int, tuple[float, float]] = {}  # row -> start of its request, and its deadline
        self._starting: dict[int, float] = {}  # row -> time at which its worker was found dead, until the new one replies
        self._broken: set[int] = set()  # rows that failed and have not been reset since
        self._has_snapshots = any(episode.snapshot is not None for episode in episodes.episodes)
        self._free: list[int] = []  # rows for the next episodes
        self._idle: list[int] = []  # rows that got no episode: none was left, or those left suit other rows better
        self._queued_steps: list[tuple[list[int], Any, list[Any]]] = []  # arguments for pending calls of `_step`
        self._restarts = envs.capabilities.restarts

    def run(self) -> None:
        """Run all episodes; those with frames first, one at a time, because rows in flight prevent rendering."""
        for index in sorted(self._with_frames):
            self._run_episodes([index], [0])
        remaining = [index for index in range(len(self._episodes.episodes)) if index not in self._episodes.results]
        self._run_episodes(remaining, range(self._envs.num_envs))
        while self._suspects:
            suspects, self._suspects = sorted(self._suspects), []
            self._run_episodes(suspects, [group[0] for group in self._groups])

    def _run_episodes(self, indices: Sequence[int], rows: Iterable[int]) -> None:
        """Run these episodes in these rows."""
        self._waiting.add(indices)
        self._free, self._idle = list(rows), []
        self._advance()
        while self._running:
            try:
                results = self._receive()
            except WorkerDied as error:
                self._handle_death(error)
            except Exception as error:
                if raised_by_handler(error):  # e.g. a time limit that expired in an environment of this process
                    raise
                self._handle_exception(error)
            else:
                if results is not None:
                    self._apply_results(*results)
            self._advance()

    def _apply_results(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: RowInfos) -> None:
        """Apply received results, begin episodes where one has ended, and queue a step of the other environments."""
        assert infos.env_ids is not None
        rows = infos.env_ids.tolist()
        executed = infos.executed_steps()
        positions: list[int] = []
        for position, row in enumerate(rows):
            attempt, ended = self._running[row], bool(terminations[position] or truncations[position])
            sent, _ = self._in_flight.pop(row)
            restarted = self._restarts and (attempt.begins or truncations[position]) and _is_restart(infos.row(position))
            if restarted or sent > self._starting.get(row, math.inf):  # the new process is ready
                self._mark_ready(row)
            if restarted:
                self._fail_as_recorded(row)
                continue
            if not attempt.begins:
                attempt.episode_return += float(rewards[position])
                attempt.length += executed if isinstance(executed, int) else int(executed[position])
            if attempt.index in self._with_frames and not (ended and self._mode is AutoresetMode.SAME_STEP):
                try:
                    attempt.frames.append(self._frame(row))
                except Exception as error:
                    self._mark_starting([row] if isinstance(error, WorkerDied) else [])
                    self._fail_or_requeue(row, error)
                    continue
            if not ended:
                positions.append(position)
                continue
            self._free.append(row)
            self._end(attempt, terminations[position], truncations[position], infos.row(position))
        latest_infos = [infos.row(position) for position in positions] if self._act.takes_infos else []
        self._begin()  # before the policy is called, so that slow resets run during that call
        if positions:
            if len(positions) < len(rows):
                observations = take_rows(self._envs.single_observation_space, observations, positions)
            self._queued_steps.append(([rows[position] for position in positions], observations, latest_infos))

    def _advance(self) -> None:
        """Begin episodes and step ready environments, unless a snapshot or a late row has to wait for replies."""
        self._begin()
        while self._queued_steps and not (self._free and self._in_flight) and not self._expired_rows():
            self._step(*self._queued_steps.pop(0))

    def _frame(self, row: int) -> Any:
        """Return a rendered frame of a row. If calls are refused because a worker is dead, reset the other rows first."""
        try:
            return self._envs.exec_func(_render, [row])[row]
        except EnvFailed:
            others = np.arange(self._envs.num_envs) != row
            self._envs.reset(options={"reset_mask": others})
            return self._envs.exec_func(_render, [row])[row]

    # -- requests ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the next episodes in free rows."""
        if self._waiting:
            self._free += self._idle
            self._idle.clear()
        while self._waiting and self._free:
            if self._has_snapshots and self._in_flight:
                return
            attempts = self._begin_attempts(self._free)
            begun = {attempt.row for attempt in attempts}
            self._idle += [row for row in self._free if row not in begun]
            self._free.clear()
            self._restore([attempt for attempt in attempts if attempt.episode.snapshot is not None])
            fresh = [attempt for attempt in attempts if attempt.episode.snapshot is None]
            broken = [attempt for attempt in fresh if attempt.row in self._broken]
            if len(broken) < len(fresh):
                self._reset([attempt for attempt in fresh if attempt.row not in self._broken])
            for attempt in broken:  # one by one: the reset restarts the row's worker, which may fail
                try:
                    self._reset([attempt])
                except Exception as error:
                    self._record_failure(attempt, error)
        self._free.clear()

    def _worker_is_idle(self, row: int) -> bool:
        return not any(other in self._running for other in self._group_by_row[row])

    def _restore(self, attempts: Sequence[Attempt]) -> None:
        """Load the snapshots of these attempts, and queue their first steps."""
        rows: list[int] = []
        observations: list[Any] = []
        for attempt in attempts:
            try:
                if self._broken:  # load() is refused while a worker is dead
                    self._envs.reset(options={"reset_mask": np.isin(np.arange(self._envs.num_envs), list(self._broken))})
                    self._broken.clear()
                    self._starting.clear()
                observation = self._envs.load(attempt.episode.snapshot, env_id=[attempt.row])
                if attempt.index in self._with_frames:
                    attempt.frames.append(self._frame(attempt.row))
            except SnapshotMismatch:
                raise
            except Exception as error:
                self._broken.add(attempt.row)
                self._record_failure(attempt, error)
                continue
            rows.append(attempt.row)
            observations.append(observation)
        if rows:
            batch = join_rows(self._envs.single_observation_space, observations)
            self._queued_steps.append((rows, batch, [{} for _ in rows]))

    def _reset(self, attempts: Sequence[Attempt]) -> None:
        rows = [attempt.row for attempt in attempts]
        seeds = [attempt.episode.seed for attempt in attempts]
        options = [attempt.episode.reset_options for attempt in attempts]
        self._envs.reset_async(seed=seeds, options=options, env_id=rows)
        self._broken.difference_update(rows)
        self._begin_limits(rows)

    def _step(self, rows: list[int], observations: Any, infos: list[Any]) -> None:
        """Call the policy, and step these rows."""
        actions = self._act(observations, [self._running[row] for row in rows], infos)
        try:
            self._send(actions, rows)
        except (EnvFailed, RestartsExhausted):  # a worker died in the meantime: step rows one by one to find its rows
            for position, row in enumerate(rows):
                try:
                    self._send(take_rows(self._envs.single_action_space, actions, [position]), [row])
                except (EnvFailed, RestartsExhausted):
                    self._mark_starting([row])
                    self._fail_as_recorded(row)
            self._begin()

    def _send(self, actions: Any, rows: list[int]) -> None:
        self._envs.send(actions, rows)
        self._begin_limits(rows)

    def _receive(self) -> Any:
        """Wait for at least one ready environment and return the results; kill workers that hang.

        Return ``None`` if none becomes ready in time. Replies that arrive during a call of the policy are never late.
        """
        receive = partial(self._by_row.results, "recv", count=len(self._in_flight), at_least=1)
        if self._timeout is None:
            return receive()
        if self._envs.max_concurrency:  # requests may have been held back until now
            seconds = max(map(self._request_limit, self._in_flight))
        else:
            seconds = max(min(deadline for _, deadline in self._in_flight.values()) - time.monotonic(), 0.0)
        with contextlib.suppress(StepTimeout):
            return receive(seconds)
        expired = self._expired_rows()
        if hanging := [row for row in expired if not (self._restarts and self._is_rebuilding(row))]:
            self._envs.abandon(hanging)
        if self._restarts:  # the engine rebuilds these rows, which stay in flight
            self._begin_limits(self._mark_starting(expired) & self._in_flight.keys())
        return None

    def _expired_rows(self) -> list[int]:
        now = time.monotonic()
        return [row for row, (_, deadline) in self._in_flight.items() if deadline <= now]

    def _begin_limits(self, rows: Iterable[int]) -> None:
        """Begin the time limits of these rows' requests."""
        now = time.monotonic()
        self._in_flight.update({row: (now, now + self._request_limit(row)) for row in rows})

    def _request_limit(self, row: int) -> float:
        """Return the time limit of a row's request: a timeout for it and for each running row that may come before it.

        A worker that is starting gets ``start_timeout`` in addition.
        """
        if self._timeout is None:
            return math.inf
        before = self._running if self._envs.max_concurrency else self._group_by_row[row]
        limit = self._timeout * sum(other in self._running for other in before)
        return limit + (self._envs.start_timeout if row in self._starting else 0.0)

    def _mark_starting(self, rows: Iterable[int]) -> set[int]:
        """Mark the workers of these rows as starting, which extends their next time limits, and return all their rows."""
        started = {other for row in rows for other in self._group_by_row[row]}
        self._starting.update(dict.fromkeys(started, time.monotonic()))
        return started

    def _mark_ready(self, row: int) -> None:
        """Mark the worker of this row as ready, and recompute the deadlines of its requests."""
        now = time.monotonic()
        for other in self._group_by_row[row]:
            self._starting.pop(other, None)
            if other in self._in_flight:
                self._in_flight[other] = self._in_flight[other][0], now + self._request_limit(other)

    def _is_rebuilding(self, row: int) -> bool:
        """True if an environment in flight in this row's worker has failed since its request was sent."""
        sent = {other: self._in_flight[other][0] for other in self._group_by_row[row] if other in self._in_flight}
        records = {other: _latest_failure(self._envs, other) for other in sent}
        return any(record is not None and record.time > sent[other] for other, record in records.items())

    # -- failures ---------------------------------------------------------------------------------------------------

    def _failed_rows(self, error: Exception) -> list[int]:
        """Return the rows with a request that ended with this exception."""
        in_flight = set(self._envs.in_flight.tolist())
        rows = [row for row in self._in_flight if row not in in_flight]
        if not rows:  # the exception is unrelated to any request
            raise error
        return rows

    def _handle_death(self, error: WorkerDied) -> None:
        """Fail or requeue the attempts that a worker's death ended, or failures beyond the limit of restarts."""
        rows = self._failed_rows(error)
        self._mark_starting(rows)
        for row in rows:
            self._fail_as_recorded(row)

    def _handle_exception(self, error: Exception) -> None:
        """Record the failure of the attempts that an environment's exception ended."""
        for row in self._failed_rows(error):
            record = next((record for record in reversed(self._envs.errors) if record.env == row), None)
            is_recorded = record is not None and record.time > self._in_flight[row][0]  # since the request was sent
            cause = record.error if record is not None and is_recorded and isinstance(record.error, Exception) else error
            self._fail_or_requeue(row, cause)

    def _fail_as_recorded(self, row: int) -> None:
        """Fail or requeue the attempt in a row with its latest recorded failure: that of its environment or its worker."""
        record = _latest_failure(self._envs, row)
        if record is None:
            return self._fail_or_requeue(row, EnvFailed(f"env {row} failed"))
        if record.env is None:
            self._mark_suspects(row)
        return self._fail_or_requeue(row, record.error)

    def _mark_suspects(self, row: int) -> None:
        """Mark the attempts of this row's worker as suspects if it ran several."""
        attempts = [self._running[other] for other in self._group_by_row[row] if other in self._running]
        for attempt in attempts:
            attempt.suspect = attempt.suspect or len(attempts) > 1

    def _fail_or_requeue(self, row: int, error: Any) -> None:
        """End the attempt in a row: record its failure, or requeue the episode if another attempt may have caused it."""
        attempt = self._running[row]
        self._in_flight.pop(row, None)
        self._broken.add(row)
        if not attempt.suspect:
            return self._record_failure(attempt, error)
        self._suspects.append(attempt.index)
        self._free_row(attempt)

    def _free_row(self, attempt: Attempt) -> None:
        del self._running[attempt.row]
        self._free.append(attempt.row)

    def _record_failure(self, attempt: Attempt, error: Exception) -> None:
        """Record the failure of an attempt, and repeat the episode or report its result."""
        if raised_by_handler(error):
            raise error
        self._free_row(attempt)
        result = self._episodes.record_failure(attempt, error)
        if result is None:
            self._waiting.add([attempt.index])
        else:
            self._report(result)


class LockstepRunner(EpisodeRunner):
    """A runner for any vector environment.

    Args:
        envs, episodes, act, report: See :class:`EpisodeRunner`.
        in_waves: True if environments can only be seeded together.
    """

    def __init__(self, envs: Any, episodes: Episodes, act: PolicyCaller, report: Report, *, in_waves: bool) -> None:
        super().__init__(envs, episodes, act, report)
        self._in_waves = in_waves
        self._all_rows = range(envs.num_envs)
        self._infos: list[Any] = []  # the latest info of each row, if the policy has a parameter `infos`
        capabilities = capabilities_of(envs.unwrapped)
        self._restarts = capabilities is not None and capabilities.restarts

    def run(self) -> None:
        """Run all episodes."""
        self._waiting.add(index for index in range(len(self._episodes.episodes)) if index not in self._episodes.results)
        while self._waiting:
            observations = self._begin_all()
            while self._running:
                observations, rewards, terminations, truncations, infos = self._step(observations)
                self._infos = infos.rows() if self._act.takes_infos else []
                ended = self._record_step(np.asarray(rewards), np.asarray(terminations), np.asarray(truncations), infos)
                free = [row for row in self._all_rows if row not in self._running]
                if self._waiting and free and not self._in_waves:
                    observations = self._begin(observations, free)
                if self._running and self._mode is AutoresetMode.DISABLED:  # ended rows are stepped too, after a reset
                    over = infos.values("env_done", ended) if self._in_waves else ended  # agents may end earlier
                    if idle := [row for row in np.flatnonzero(over).tolist() if row not in self._running]:
                        observations, _ = self._envs.reset(options={"reset_mask": self._mask(idle)})

    def _begin_all(self) -> Any:
        """Begin the next episodes by resetting all environments; rows without an episode are seeded too."""
        rows = [attempt.row for attempt in self._begin_attempts(self._all_rows)]
        seeds = [self._running[min(row, rows[-1])].episode.seed for row in self._all_rows]
        options = shared_options([self._running[row].episode for row in rows])
        observations, infos = self._by_row.results("reset", seed=seeds, options=options or None)
        self._raise_failures(rows, infos)
        self._infos = infos.rows() if self._act.takes_infos else []
        return self._restore(self._reset(rows) if options is None else observations, rows)

    def _begin(self, observations: Any, free: list[int]) -> Any:
        """Begin the next episodes in free rows, and return the observations of all rows."""
        rows = [attempt.row for attempt in self._begin_attempts(free)]
        if reset := [row for row in rows if self._running[row].episode.snapshot is None]:
            observations = self._reset(reset)
        return self._restore(observations, rows)

    def _restore(self, observations: Any, rows: list[int]) -> Any:
        """Load the snapshots of episodes in these rows, and return the observations of all rows."""
        snapshots = {row: snapshot for row in rows if (snapshot := self._running[row].episode.snapshot) is not None}
        if not snapshots:
            return observations
        loaded = self._envs.load(list(snapshots.values()), env_id=list(snapshots))
        self._infos = [{} if row in snapshots else info for row, info in enumerate(self._infos)]
        space = self._envs.single_observation_space
        indices = {row: index for index, row in enumerate(snapshots, len(self._all_rows))}
        return take_rows(space, join_rows(space, [observations, loaded]), [indices.get(row, row) for row in self._all_rows])

    def _reset(self, rows: list[int]) -> Any:
        """Reset these rows with a mask, or one after the other if their options differ."""
        options = shared_options([self._running[row].episode for row in rows])
        if options is None:
            return [self._reset([row]) for row in rows][-1]
        mask = self._mask(rows)
        seeds = [self._running[row].episode.seed if mask[row] else None for row in self._all_rows]
        observations, infos = self._by_row.results("reset", seed=seeds, options={**options, "reset_mask": mask})
        self._raise_failures(rows, infos)
        if self._act.takes_infos:
            self._infos = [infos.row(row) if mask[row] else self._infos[row] for row in self._all_rows]
        return observations

    def _mask(self, rows: list[int]) -> Any:
        return np.isin(self._all_rows, rows)

    def _step(self, observations: Any) -> Any:
        """Call the policy for the rows with an episode, and step all rows; the others get the first action."""
        envs, rows = self._envs, sorted(self._running)
        attempts, infos = [self._running[row] for row in rows], [self._infos[row] for row in rows if self._infos]
        if len(rows) == envs.num_envs:
            return self._by_row.results("step", self._act(observations, attempts, infos))
        some_actions = self._act(take_rows(envs.single_observation_space, observations, rows), attempts, infos)
        positions = {row: position for position, row in enumerate(rows)}
        actions = take_rows(envs.single_action_space, some_actions, [positions.get(row, 0) for row in self._all_rows])
        return self._by_row.results("step", actions)

    def _record_step(self, rewards: Any, terminations: Any, truncations: Any, infos: RowInfos) -> Any:
        """Add up rewards and lengths, report ended episodes, and return the mask of the rows that ended."""
        ended = terminations | truncations
        executed = infos.executed_steps()
        self._raise_failures([row for row in self._running if ended[row]], infos)
        for row, attempt in list(self._running.items()):
            attempt.episode_return += float(rewards[row])
            attempt.length += executed if isinstance(executed, int) else int(executed[row])
            if ended[row]:
                self._end(attempt, terminations[row], truncations[row], infos.row(row))
        return ended

    def _raise_failures(self, rows: Sequence[int], infos: RowInfos) -> None:
        """Raise the recorded failure of an environment in these rows that the engine rebuilt."""
        for row in rows if self._restarts else ():
            if _is_restart(infos.row(row)) and (record := _latest_failure(self._envs.unwrapped, row)) is not None:
                raise record.error


def _is_restart(info: Any) -> bool:
    """True if the engine rebuilt the environment of this info, with ``on_failure="restart"``."""
    return isinstance(info, dict) and info.get("restarted") is True


def _latest_failure(envs: Any, row: int) -> ErrorRecord | None:
    """Return the latest record of a failure of this row or of its worker."""
    records: Iterable[ErrorRecord] = reversed(envs.errors)
    for record in records:
        if record.env == row or (isinstance(record.error, WorkerDied) and row in record.error.envs):
            return record
    return None


def _render(env: Any) -> Any:
    return copy.deepcopy(env.render())  # in this process, the environment may draw its next frame into the same array
