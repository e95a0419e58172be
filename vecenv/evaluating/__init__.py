"""``vecenv.evaluate``: runs episodes on a vector environment, each environment by itself where it can, else in lock-step.

:class:`FirstReadyRunner` is for engines that answer environment by environment: one that is free gets the next episode, and
none is stepped for nothing. :class:`LockstepRunner` is for the others: an environment whose episode is over begins the next
one by a masked reset with a seed of its own, where the engine has that; else all wait for the last one and are seeded
together. What is left without an episode is stepped along there, and its numbers are dropped. One runner for both would
lose the zero waste of the first: lock-step costs the longest episode of each batch.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import logger
from gymnasium.error import AlreadyPendingCallError
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from vecenv.errors import EnvFailed, SnapshotMismatch, StepTimeout, WorkerDied
from vecenv.evaluating.episodes import Attempt, EpisodeResult, EpisodeResults, Episodes, Listed, listed
from vecenv.evaluating.policies import Acting, join_rows, take_rows
from vecenv.front.arguments import seconds_of
from vecenv.front.capabilities import Capabilities, capabilities_of, unable
from vecenv.front.infos import info_row
from vecenv.state.snapshots import Kind, Snapshot
from vecenv.system.uninterrupted import Noted, by_handler

__all__ = ["evaluate"]

Report: TypeAlias = Callable[[EpisodeResult], None]

_ENVPOOL_SEEDS = 2**31  # below: what its C++ takes


def evaluate(
    envs: VectorEnv[Any, Any, Any], policy: Callable[..., Any], episodes: Listed, *, seed: int | None = None,
    retries: int = 1, timeout: float | None = None, on_episode: Callable[[EpisodeResult], object] | None = None,
    progress: bool = False, frames: Iterable[int] = (), initial_state: Any = None, arrays: str | None = None,
    device: Any = None, batch: str = "ready",
) -> EpisodeResults:  # fmt: skip
    """Run each episode of a list exactly once, and give the results in the order of the list.

    Results do not depend on the number of environments or workers, unless environments share generators: then there is a
    warning, and ``generators="own"`` mends it. ``docs/evaluation.md`` says what each engine does.

    Args:
        envs: A vector environment with one agent each, in any autoreset mode, nothing in flight. Reset it afterwards.
        policy: ``policy(observations)`` gives an action for each row: the environments that are ready, 1 to ``num_envs``.
            It also gets what its parameters name: ``rows``, int ``(k,)``, which environments; ``begins``, bool ``(k,)``,
            which begin an episode; ``episodes``, int ``(k,)``, places in the list; ``rngs``, ``k`` generators, one per
            episode; ``infos``, ``k`` dicts; ``state``. Actions are arrays of numpy, torch or JAX.
        episodes: How many, or a sequence of :class:`vecenv.Episode` or snapshots (``envs.save()``).
        seed: An episode without a seed gets this one plus its place; generators follow from it too. ``None``: a random one.
        retries: How often a failed episode begins again, with its seed; then its result has the error. Where environments
            step together, an exception ends the evaluation.
        timeout: Seconds that one environment has for a step or a reset; then its worker is ended and the episode has failed.
            ``None``: the vector environment's ``step_timeout``.
        on_episode: Called with each result, in the order in which episodes end.
        progress: Show a bar, by ``tqdm``.
        frames: Places of episodes whose frames are kept (``render_mode="rgb_array"``); they run first, one at a time.
        initial_state: For a policy that names ``state``: the state at the beginning of an episode, an array or dicts, lists
            and tuples of them. The policy gets those of its rows, stacked, and returns ``(actions, state)``.
        arrays: Observations are ``"numpy"``, ``"torch"`` or ``"jax"`` arrays; ``None``: tensors for a ``torch.nn.Module``.
        device: Where tensors go; ``None``: where the module's parameters are.
        batch: ``"ready"``; ``"padded"``: always ``num_envs`` rows, the first one repeated, with ``num_envs`` in ``rows``;
            ``"single"``: one row at a time, so that no result depends on the rows beside it.

    Returns:
        A list of :class:`vecenv.EpisodeResult`, with ``returns``, ``lengths``, ``mean`` and ``std``.

    Raises:
        TypeError, ValueError: Wrong arguments, before anything runs; a policy that does not give an action for each row.
        NotImplementedError: The engine lacks seeds, options, snapshots, frames or timeouts for each episode.
        SnapshotMismatch: A snapshot does not fit the environments.
        AlreadyPendingCallError: Something is in flight.
        ImportError: ``progress`` without tqdm.
        Exception: Of the policy, ``on_episode`` or a signal handler. The next ``reset()`` waits for what was in flight.
    """
    _require_vector_env(envs, policy)
    listed_episodes, base = listed(episodes, seed)
    todo = Episodes(listed_episodes, base, retries)
    if on_episode is not None and not callable(on_episode):
        raise TypeError(f"on_episode must be callable, got {on_episode!r}")
    act = Acting(policy, envs, arrays=arrays, device=device, batch=batch, initial_state=initial_state)
    bar: Any = None

    def report(result: EpisodeResult) -> None:
        if bar is not None:
            bar.update()
        if on_episode is not None:
            on_episode(result)

    runner = _runner(envs, todo, act, report, seconds_of(timeout), _filmed(frames, len(todo.episodes)))
    bar = _bar(len(todo.episodes)) if progress else None
    with contextlib.nullcontext() if bar is None else bar, Noted():
        runner.run()
    if getattr(getattr(envs.unwrapped, "_driver", None), "warned_of_draws", ""):
        logger.warn(
            "%s",
            "what evaluate gave depends on which row each episode ran in, and on the others in its process: they draw "
            "from generators that they share. generators='own' makes results the same for every number of environments",
        )
    return EpisodeResults(todo.results[index] for index in range(len(todo.episodes)))


def _require_vector_env(envs: Any, policy: Any) -> None:
    if hasattr(envs, "possible_agents"):
        unable(envs, "evaluate episodes of several agents", "a result has one return")
    if not isinstance(envs, VectorEnv):
        wrong = f" wants a Gymnasium vector environment, as vecenv.make_vec builds, got {envs!r}"
        if isinstance(policy, VectorEnv):
            wrong = f": got envs={envs!r} and policy={policy!r}: are the first two swapped?"
        raise TypeError(f"evaluate(envs, policy, episodes){wrong}")


def _runner(
    envs: Any, todo: Episodes, act: Acting, report: Report, limit: float | None, filmed: frozenset[int]
) -> FirstReadyRunner | LockstepRunner:
    """What runs them on this engine.

    Raises:
        NotImplementedError: Nothing can.
    """
    able = capabilities_of(envs)
    if isinstance(envs, VectorWrapper) and not hasattr(type(envs), "recv"):
        able = None  # what its engine can do by row goes past it
    if (begun := _one_of_each_kind(todo)) and (able is None or not able.snapshots):
        unable(envs, "begin episodes with snapshots", "they cannot be loaded")
    if able is not None and able.first_ready and able.masked_seeds and hasattr(envs, "abandon"):
        if filmed and envs.render_mode != "rgb_array":
            raise ValueError(f"frames need render_mode='rgb_array', got {envs.render_mode!r}")
        if limit is not None and able.in_this_process:
            unable(envs, "end environments that hang", "the calling process steps some: isolate=True, or num_workers=")
        if flying := sorted(envs.in_flight.tolist()):
            raise AlreadyPendingCallError(f"Calling `evaluate` while envs {flying} are in flight: `recv` first.", "send")
        if limit is None and not able.in_this_process:
            limit = envs.step_timeout
        _require_fitting(envs, begun)
        return FirstReadyRunner(envs, todo, act, report, limit, filmed)
    if filmed:
        unable(envs, "give frames of single environments", "they step together")
    if limit is not None:
        unable(envs, "end environments that hang", "they are no processes of vecenv's")
    in_waves = _in_waves(envs, able, todo)
    _require_fitting(envs, begun)
    return LockstepRunner(envs, todo, act, report, in_waves=in_waves)


def _one_of_each_kind(todo: Episodes) -> dict[int, Snapshot]:
    """Of the snapshots that episodes begin with, the first of each kind of environment, by the place of its episode."""
    found: dict[Kind, tuple[int, Snapshot]] = {}
    for index, episode in enumerate(todo.episodes):
        if episode.snapshot is not None:
            found.setdefault(episode.snapshot.row.kind, (index, episode.snapshot))
    return dict(found.values())


def _require_fitting(envs: Any, begun: dict[int, Snapshot]) -> None:
    """Refuse snapshots of other environments. Loading one is the way to know; all rows are reset or loaded anyway."""
    for index, snapshot in begun.items():
        try:
            try:
                envs.load(snapshot, env_id=[0])
            except EnvFailed:  # a worker has died before
                envs.reset()
                envs.load(snapshot, env_id=[0])
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"episodes[{index}].snapshot: {error}") from error


def _in_waves(envs: Any, able: Capabilities | None, todo: Episodes) -> bool:
    """Whether all rows have to be seeded at once.

    Raises:
        NotImplementedError: No row can be given a seed, or an episode its options.
    """
    if able is None:
        if envs.metadata.get("autoreset_mode") not in AutoresetMode:
            unable(envs, "be evaluated", "its metadata say nothing of its autoreset mode")
        return False
    if not able.row_seeds:
        unable(envs, "evaluate episodes with a seed each", "its environments share one generator")
    if any(episode.options for episode in todo.episodes) and not able.reset_options:
        unable(envs, "evaluate episodes with options", "its environments take none")
    largest = max(episode.seed or 0 for episode in todo.episodes)
    if able.backend == "envpool" and largest >= _ENVPOOL_SEEDS:
        unable(envs, f"give an episode the seed {largest}", "EnvPool's seeds are below 2**31")
    return not (able.reset_mask and able.masked_seeds)


def _filmed(frames: Iterable[int], count: int) -> frozenset[int]:
    chosen = frozenset(frames)
    if wrong := [index for index in chosen if not isinstance(index, (int, np.integer)) or not 0 <= index < count]:
        raise ValueError(f"frames must be places of episodes, from 0 to {count - 1}; got {wrong}")
    return frozenset(int(index) for index in chosen)


def _bar(total: int) -> Any:
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]  # (Any where tqdm is not installed)
        monitor_interval = 0  # its thread would be there when a worker is forked

    return Bar(total=total, unit="episode")


class EpisodeRunner:
    """What both share.

    Args:
        envs: The vector environment.
        episodes: The list to be run.
        act: The policy.
        report: Called with each result as it comes.
    """

    def __init__(self, envs: Any, episodes: Episodes, act: Acting, report: Report) -> None:
        self._envs, self._episodes, self._act, self._report = envs, episodes, act, report
        self._mode = envs.metadata.get("autoreset_mode")
        self._waiting: deque[int] = deque()  # places of episodes
        self._running: dict[int, Attempt] = {}  # by environment

    def _begin_attempts(self, rows: Iterable[int]) -> list[Attempt]:
        """The next episode for each of these environments, as long as there are any."""
        attempts = [self._episodes.begin(self._waiting.popleft(), row) for row in rows if self._waiting]
        self._running.update({attempt.row: attempt for attempt in attempts})
        return attempts

    def _end(self, attempt: Attempt, terminated: Any, truncated: Any, infos: Any, place: int) -> None:
        """An episode is over: its info is in row ``place`` of ``infos``."""
        del self._running[attempt.row]
        info = info_row(infos, place)
        info = info.get("final_info", {}) if self._mode is AutoresetMode.SAME_STEP else info
        self._report(self._episodes.ended(attempt, bool(terminated), bool(truncated), info))


class FirstReadyRunner(EpisodeRunner):
    """Runs episodes on an engine with first-ready batches and a seed for each environment.

    What is in flight before and after an exception tells which environments it is about. An exception of an environment is
    its own. A worker that dies takes all its environments with it, and any of them may have caused it: their episodes are
    run again when all others are done, one at a time in a worker, where a death has one cause. So an episode that kills its
    worker costs the others nothing but time, and results do not depend on which environments shared a worker.

    Snapshots are loaded while nothing is in flight: where an environment waits for that, those that arrive are held back
    until all have.

    Args:
        envs, episodes, act, report: As of :class:`EpisodeRunner`.
        timeout: Seconds that a step, or a reset, of an environment takes at most; ``None``: no limit.
        filmed: Places of the episodes whose frames are kept.
    """

    def __init__(
        self, envs: Any, episodes: Episodes, act: Acting, report: Report, timeout: float | None, filmed: frozenset[int]
    ) -> None:
        super().__init__(envs, episodes, act, report)
        self._timeout, self._filmed = timeout, filmed
        self._groups: list[list[int]] = [list(rows) for rows in envs.worker_rows]
        self._group_of = {row: group for group in self._groups for row in group}
        self._suspects: list[int] = []
        self._in_flight: dict[int, float] = {}  # row -> since when
        self._broken: set[int] = set()  # rows that failed and were not reset since
        self._restores = any(episode.snapshot is not None for episode in episodes.episodes)
        self._free: list[int] = []  # rows that get the next episodes
        self._held: list[tuple[list[int], Any, Any, list[int]]] = []  # what `_step` is to be called with then

    def run(self) -> None:
        """Run them all, the filmed ones first, one at a time: frames can be taken while nothing is in flight."""
        for index in sorted(self._filmed):
            self._pass([index], [0])
        count = len(self._episodes.episodes)
        self._pass([index for index in range(count) if index not in self._filmed], range(self._envs.num_envs))
        while self._suspects:
            suspects, self._suspects = sorted(self._suspects), []
            self._pass(suspects, [group[0] for group in self._groups])

    def _pass(self, indices: Sequence[int], rows: Iterable[int]) -> None:
        """Run episodes in some rows."""
        self._waiting.extend(indices)
        self._free = list(rows)
        self._release()
        while self._running:
            try:
                answer = self._receive()
            except WorkerDied as error:
                self._died(error)
            except Exception as error:
                if by_handler(error):  # a time limit, say, which fell into an environment of this process
                    raise
                self._raised(error)
            else:
                self._take(*answer)
            self._release()

    def _take(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: dict[Any, Any]) -> None:
        """Take answers that arrived, begin episodes where one is over, and step the other environments."""
        came = infos.pop("env_id").tolist()
        infos.pop("_env_id", None)
        places: list[int] = []
        for place, row in enumerate(came):
            attempt, over = self._running[row], bool(terminations[place] or truncations[place])
            del self._in_flight[row]
            if "restarted" in infos and infos["_restarted"][place]:  # on_failure="restart": the episode is lost
                self._lost_in_restart(row)
                continue
            if not attempt.begins:
                attempt.episode_return += float(rewards[place])
                attempt.length += 1
            if attempt.index in self._filmed and not (over and self._mode is AutoresetMode.SAME_STEP):
                attempt.frames.append(self._frame(row))
            if not over:
                places.append(place)
                continue
            self._free.append(row)
            self._end(attempt, terminations[place], truncations[place], infos, place)
        self._begin()  # before the policy is asked: resets may take long
        if places:
            if len(places) < len(came):
                observations = take_rows(self._envs.single_observation_space, observations, places)
            self._held.append(([came[place] for place in places], observations, infos, places))

    def _release(self) -> None:
        """Step the environments that have answered, unless others have to answer first."""
        self._begin()
        while self._held and not (self._free and self._in_flight):
            self._step(*self._held.pop(0))

    def _frame(self, row: int) -> Any:
        """The frame of a row. Calls are refused while any worker is dead: then the other rows are reset first."""
        try:
            return self._envs.exec_func(_render, [row])[row]
        except EnvFailed:
            others = np.arange(self._envs.num_envs) != row
            self._envs.reset(options={"reset_mask": others})
            return self._envs.exec_func(_render, [row])[row]

    # -- asking -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the next episodes in rows that are free."""
        while self._waiting and self._free:
            if self._restores and self._in_flight:
                return
            attempts = self._begin_attempts(self._free)
            del self._free[: len(attempts)]
            self._restore([attempt for attempt in attempts if attempt.episode.snapshot is not None])
            fresh = [attempt for attempt in attempts if attempt.episode.snapshot is None]
            broken = [attempt for attempt in fresh if attempt.row in self._broken]
            if len(broken) < len(fresh):
                self._reset([attempt for attempt in fresh if attempt.row not in self._broken])
            for attempt in broken:  # their workers are started anew, which may fail
                try:
                    self._reset([attempt])
                except Exception as error:
                    self._charge(attempt, error)
        self._free.clear()

    def _restore(self, attempts: Sequence[Attempt]) -> None:
        """Put states in place, and have the policy step on from there."""
        rows: list[int] = []
        seen: list[Any] = []
        for attempt in attempts:
            try:
                if self._broken:  # states are put in place while all workers run
                    self._envs.reset(options={"reset_mask": np.isin(np.arange(self._envs.num_envs), list(self._broken))})
                    self._broken.clear()
                seen.append(self._envs.load(attempt.episode.snapshot, env_id=[attempt.row]))
            except SnapshotMismatch:
                raise
            except Exception as error:
                self._broken.add(attempt.row)
                self._charge(attempt, error)
                continue
            rows.append(attempt.row)
            if attempt.index in self._filmed:
                attempt.frames.append(self._frame(attempt.row))
        if rows:
            self._held.append((rows, join_rows(self._envs.single_observation_space, seen), {}, list(range(len(rows)))))

    def _reset(self, attempts: Sequence[Attempt]) -> None:
        rows = [attempt.row for attempt in attempts]
        seeds = [attempt.episode.seed for attempt in attempts]
        options = [None if (given := attempt.episode.options) is None else dict(given) for attempt in attempts]
        self._envs.reset_async(seed=seeds, options=options, env_id=rows)
        self._broken.difference_update(rows)
        self._in_flight.update(dict.fromkeys(rows, time.monotonic()))

    def _step(self, rows: list[int], observations: Any, infos: Any, places: list[int]) -> None:
        """Ask the policy, and step these rows."""
        actions = self._act(observations, [self._running[row] for row in rows], [infos] * len(rows), places)
        try:
            self._send(actions, rows)
        except EnvFailed:  # a worker has died meanwhile: find its rows
            for place, row in enumerate(rows):
                try:
                    self._send(take_rows(self._envs.single_action_space, actions, [place]), [row])
                except EnvFailed as error:
                    self._lose(row, error)
            self._begin()

    def _send(self, actions: Any, rows: list[int]) -> None:
        self._envs.send(actions, rows)
        self._in_flight.update(dict.fromkeys(rows, time.monotonic()))

    def _receive(self) -> Any:
        """Answers of environments that are done, at least one; ends workers that hang."""
        if self._timeout is None:
            return self._envs.recv(count=len(self._in_flight), at_least=1)
        while True:
            now = time.monotonic()
            ends = {row: since + self._limit(row) for row, since in self._in_flight.items()}
            late = [row for row, end in ends.items() if end <= now]
            if late:
                self._envs.abandon(late)
            try:
                return self._envs.recv(None if late else min(ends.values()) - now, count=len(self._in_flight), at_least=1)
            except StepTimeout:
                if late:
                    raise

    def _limit(self, row: int) -> float:
        """A worker steps its rows one after the other."""
        assert self._timeout is not None
        return self._timeout * sum(other in self._running for other in self._group_of[row])

    # -- failures ---------------------------------------------------------------------------------------------------

    def _answered(self, error: Exception) -> list[int]:
        """The rows that an exception is the answer to."""
        flying = set(self._envs.in_flight.tolist())
        rows = [row for row in self._in_flight if row not in flying]
        if not rows:  # it is about nothing that was asked
            raise error
        return rows

    def _died(self, error: WorkerDied) -> None:
        """A worker died."""
        rows = self._answered(error)
        self._suspect(rows)
        for row in rows:
            self._lose(row, error)

    def _raised(self, error: Exception) -> None:
        """Environments raised."""
        for row in self._answered(error):
            del self._in_flight[row]
            self._broken.add(row)
            record = next((each for each in reversed(self._envs.errors) if each.env == row), None)
            own = record.error if record is not None and isinstance(record.error, Exception) else error
            self._charge(self._running[row], own)

    def _lost_in_restart(self, row: int) -> None:
        """The engine has rebuilt an environment by itself."""
        for record in reversed(self._envs.errors):
            error = record.error
            if record.env == row or (isinstance(error, WorkerDied) and row in error.envs):
                if record.env is None:
                    self._suspect([row])
                return self._lose(row, error)
        return self._lose(row, EnvFailed(f"env {row} failed and was rebuilt"))

    def _suspect(self, rows: Sequence[int]) -> None:
        """Mark the attempts that ran in the workers of these rows, where there were several."""
        for group in {id(group): group for group in (self._group_of[row] for row in rows)}.values():
            there = [self._running[row] for row in group if row in self._running]
            for attempt in there:
                attempt.suspect = attempt.suspect or len(there) > 1

    def _lose(self, row: int, error: Any) -> None:
        """The attempt in a row is lost; that is its own failure unless another may have caused it."""
        attempt = self._running[row]
        self._in_flight.pop(row, None)
        self._broken.add(row)
        if not attempt.suspect:
            return self._charge(attempt, error)
        self._suspects.append(attempt.index)
        self._leave(attempt)

    def _leave(self, attempt: Attempt) -> None:
        del self._running[attempt.row]
        self._free.append(attempt.row)

    def _charge(self, attempt: Attempt, error: Exception) -> None:
        """An attempt failed: the episode is begun again or has its result."""
        if by_handler(error):
            raise error
        self._leave(attempt)
        result = self._episodes.failed(attempt, error)
        if result is None:
            self._waiting.append(attempt.index)
        else:
            self._report(result)


class LockstepRunner(EpisodeRunner):
    """Runs episodes on any vector environment.

    Args:
        envs, episodes, act, report: As of :class:`EpisodeRunner`.
        in_waves: Seeds are given to all environments at once or not at all.
    """

    def __init__(self, envs: Any, episodes: Episodes, act: Acting, report: Report, *, in_waves: bool) -> None:
        super().__init__(envs, episodes, act, report)
        self._in_waves = in_waves
        self._waiting.extend(range(len(episodes.episodes)))
        self._all_rows = range(envs.num_envs)
        self._infos: list[Any] = []  # where the latest info of each environment is

    def run(self) -> None:
        """Run them all."""
        while self._waiting:
            observations = self._begin_all()
            while self._running:
                observations, *numbers, infos = self._step(observations)
                self._infos = [{key: infos[key] for key in infos if key not in ("env_id", "_env_id")}] * len(self._all_rows)
                ended = self._note(*map(np.asarray, numbers))
                free = [row for row in self._all_rows if row not in self._running]
                if self._waiting and free and not self._in_waves:
                    observations = self._begin(observations, free)
                idle = [row for row in ended if row not in self._running]
                if idle and self._running and self._mode is AutoresetMode.DISABLED:  # (they are stepped, as all are)
                    observations, _ = self._envs.reset(options={"reset_mask": self._mask(idle)})

    def _begin_all(self) -> Any:
        """Begin the next episodes by a reset of all environments; those that get none are seeded too."""
        rows = [attempt.row for attempt in self._begin_attempts(self._all_rows)]
        seeds = [self._running[min(row, rows[-1])].episode.seed for row in self._all_rows]
        options = self._shared_options(rows)
        observations, infos = self._envs.reset(seed=seeds, options=options or None)
        self._infos = [infos] * len(self._all_rows)
        return self._restore(self._reset(rows) if options is None else observations, rows)

    def _begin(self, observations: Any, free: list[int]) -> Any:
        """The next episodes in rows that are free."""
        rows = [attempt.row for attempt in self._begin_attempts(free)]
        if anew := [row for row in rows if self._running[row].episode.snapshot is None]:
            observations = self._reset(anew)
        return self._restore(observations, rows)

    def _restore(self, observations: Any, rows: list[int]) -> Any:
        """Put states in place in those of the rows whose episodes begin with one."""
        snapshots = {row: snapshot for row in rows if (snapshot := self._running[row].episode.snapshot) is not None}
        if not snapshots:
            return observations
        seen = self._envs.load(list(snapshots.values()), env_id=list(snapshots))
        self._infos = [{} if row in snapshots else info for row, info in enumerate(self._infos)]
        space = self._envs.single_observation_space
        place = {row: at for at, row in enumerate(snapshots, len(self._all_rows))}
        return take_rows(space, join_rows(space, [observations, seen]), [place.get(row, row) for row in self._all_rows])

    def _shared_options(self, rows: list[int]) -> dict[str, Any] | None:
        """The options of the episodes of these rows; ``None`` if they differ."""
        options = [dict(self._running[row].episode.options or {}) for row in rows]
        return options[0] if all(each == options[0] for each in options) else None

    def _reset(self, rows: list[int]) -> Any:
        """Reset these rows by a mask; where they have options of their own, one after the other."""
        options = self._shared_options(rows)
        if options is None:
            return [self._reset([row]) for row in rows][-1]
        mask = self._mask(rows)
        seeds = [self._running[row].episode.seed if mask[row] else None for row in self._all_rows]
        observations, infos = self._envs.reset(seed=seeds, options={**options, "reset_mask": mask})
        self._infos = [infos if mask[row] else self._infos[row] for row in self._all_rows]
        return observations

    def _mask(self, rows: list[int]) -> Any:
        return np.isin(self._all_rows, rows)

    def _step(self, observations: Any) -> Any:
        """Ask the policy about the rows that have an episode; the others do as the first of those."""
        envs, rows = self._envs, sorted(self._running)
        attempts, infos = [self._running[row] for row in rows], [self._infos[row] for row in rows]
        if len(rows) == envs.num_envs:
            return envs.step(self._act(observations, attempts, infos, rows))
        some = self._act(take_rows(envs.single_observation_space, observations, rows), attempts, infos, rows)
        place = {row: at for at, row in enumerate(rows)}
        return envs.step(take_rows(envs.single_action_space, some, [place.get(row, 0) for row in self._all_rows]))

    def _note(self, rewards: Any, terminations: Any, truncations: Any) -> list[int]:
        """Add up, and report episodes that are over; which environments have ended."""
        ended = terminations | truncations
        for row, attempt in list(self._running.items()):
            attempt.episode_return += float(rewards[row])
            attempt.length += 1
            if ended[row]:
                self._end(attempt, terminations[row], truncations[row], self._infos[row], row)
        return np.flatnonzero(ended).tolist()


def _render(env: Any) -> Any:
    return env.render()
