"""Spare workers: environments that have been reset already, and go to whichever row wants the episode that they have begun.

There are more processes than rows, each with one environment. A process is at a *place*: that of a row, or one behind the
rows. The caller says to each, in one short message, which place it has and which episode it is to begin ahead of time
(:class:`NextEpisode`). When a row's episode is over, the process there changes places with the one
that has begun its next episode, ready or not; where none has, it begins that itself. So which process has which row depends
on how fast the processes are, and what a row sees does not.

What has to be done follows from three things, each changed in one store: the places (:attr:`SparePool.arranged`), what each
process is to begin, and what was sent to it last. A message is not answered, and may be sent twice. So an interruption
anywhere is made good by looking again (:meth:`SparePool.resume`), and nothing of this is pending. Which episodes the rows
are in lies in the table of pending requests: the guard puts it in place together with the answer that says so.

In next-step mode the processes change places before the step that begins the next episodes, which is then a step like any
other: what an environment has begun ahead of time it gives as the answer. In same-step mode the workers only say that an
episode is over; the first observation comes by one more request, to the worker that has the row from then on. That request
takes the place of the step in the table of pending requests, as the second request of a save does.
"""

from __future__ import annotations

import itertools
import pickle
import select
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.engine.engine import Engine
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import ALL, Pending, Request, Result, Worker, WorkerRequest
from vecenv.engine.pool import WorkerPool
from vecenv.front.arguments import ResetOptions, any_seed
from vecenv.front.capabilities import unable
from vecenv.front.driver import Stepped
from vecenv.link.messages import Op, encode
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Row
from vecenv.worker.variants import WithAttributes

_SAME_STEP: Final = "in same-step mode one answer is of two workers; use autoreset_mode=AutoresetMode.NEXT_STEP"
_NEXT_BEGUN: Final = "the next episodes have begun already; give reset() the options, and a reset_mask"


def refuse_different(env_fns: Sequence[Callable[[], Any]]) -> None:
    """Any environment may run any row's episodes: refuse functions that build different ones.

    Raises:
        ValueError: Names the first that differs.
    """
    first = env_fns[0]
    blob: bytes | None = None
    for row, env_fn in enumerate(env_fns):
        if env_fn is first:
            continue
        if blob is None:
            blob = cloudpickle.dumps(first)
        if cloudpickle.dumps(env_fn) != blob:
            raise ValueError(
                f"env_fns[{row}] is not like env_fns[0]: with spare_workers any environment runs the episodes of any row, "
                "so that all have to be built alike. Let them differ by their seeds, or leave spare_workers out"
            )


# -- which episodes there are: seeds and numbers of those that rows are in, and which will be wanted next -----------------
#
# An episode is known by its row and its number since the row's latest seeded reset, and its seed follows from these. So it
# does not matter which environment runs it, nor when that began with it. Nothing here does anything: this is data, and each
# change is another object, which the guard puts in place with the answer that it follows from.

class EpisodeId(NamedTuple):
    """An episode: the row, how often that was reset by its caller, and the number since the latest seed."""

    row: int
    life: int
    episode: int


@dataclass(frozen=True, slots=True)
class NextEpisode:
    """What an environment is to begin ahead of time.

    Attributes:
        key: Which episode.
        seed: Its seed.
        number: A later one has a higher one.
    """

    key: EpisodeId
    seed: int
    number: int


def derived_seed(seed: int, row: int, episode: int) -> int:
    """The seed of a row's ``episode``-th episode after the one that was reset with ``seed``, which is number 0."""
    return int(np.random.SeedSequence(seed, spawn_key=(row, episode)).generate_state(1)[0] >> 1)


class RowEpisode(NamedTuple):
    """The episode that a row is in.

    Attributes:
        origin: The row in which its seed was given: a snapshot takes both along.
        seed: What the row was reset with by the caller, or what stands for it; ``None``: it never was.
        life: How often it was reset by the caller.
        episode: The number of its episode since its seed.
        began: The number of the request with which that began.
    """

    origin: int
    seed: int | None = None
    life: int = 0
    episode: int = 0
    began: int = 0


@dataclass(frozen=True, slots=True)
class EpisodeTable:
    """The episodes that rows are in.

    Attributes:
        rows: One for each.
        ended: Rows whose episode is over, and whose next begins with the next step.
    """

    rows: tuple[RowEpisode, ...]
    ended: frozenset[int] = frozenset()

    def next_key(self, row: int, ahead: int = 1) -> EpisodeId:
        """The episode that comes after the one that a row is in; ``ahead``: how far after it."""
        return EpisodeId(row, self.rows[row].life, self.rows[row].episode + ahead)

    def seed_of(self, key: EpisodeId) -> int:
        """The seed of an episode that begins by itself."""
        one = self.rows[key.row]
        assert one.seed is not None
        return derived_seed(one.seed, one.origin, key.episode)

    def is_to_come(self, key: EpisodeId) -> bool:
        """Whether no answer to a step has begun an episode yet, and one may."""
        return key.life == self.rows[key.row].life and key.episode > self.rows[key.row].episode

    def coming(self, held: set[EpisodeId]) -> Iterator[EpisodeId]:
        """The episodes to come that are not ``held``: each row's next, of the oldest one first; and on, without end."""
        waiting = [(row not in self.ended, one.began, row) for row, one in enumerate(self.rows) if one.seed is not None]
        for ahead in itertools.count(1) if waiting else ():
            for *_, row in sorted(waiting):
                if (key := self.next_key(row, ahead)) not in held:
                    yield key

    def after_step(self, rows: Iterable[int]) -> dict[int, RowEpisode]:
        """The next episodes of rows, which a step begins."""
        return {row: self.rows[row]._replace(episode=self.rows[row].episode + 1) for row in rows}

    def after_reset(self, rows: Sequence[int], seeds: Sequence[Any]) -> tuple[dict[int, RowEpisode], list[int | None]]:
        """The episodes that a reset by the caller begins in rows, and the seeds for it.

        A row that is given a seed begins to count anew; one that is not goes on to its next episode; one that never had any
        gets one of no row's.
        """
        begun: dict[int, RowEpisode] = {}
        given: list[int | None] = list(seeds)
        for row in rows:
            seed, one = seeds[row], self.rows[row]._replace(life=self.rows[row].life + 1)
            if seed is None and one.seed is not None:
                begun[row] = one._replace(episode=one.episode + 1)
                given[row] = derived_seed(one.seed, one.origin, one.episode + 1)
                continue
            given[row] = any_seed() if seed is None else int(seed)
            begun[row] = one._replace(episode=0, origin=row, seed=given[row])
        return begun, given

    def loaded(self, known: Mapping[int, Row]) -> EpisodeTable:
        """Once rows go on from snapshots."""
        then = list(self.rows)
        for row, one in known.items():
            seed, origin, episode = one.episodes or (any_seed(), row, 0)
            then[row] = then[row]._replace(seed=seed, origin=origin, episode=episode, life=then[row].life + 1)
        return EpisodeTable(tuple(then), self.ended.difference(known).union(row for row in known if known[row].pending))

    def taken(self, seq: int, rows: Iterable[int], begun: Mapping[int, RowEpisode], ended: Iterable[int]) -> EpisodeTable:
        """Once an answer is taken.

        Args:
            seq: The number of the request.
            rows: Which the answer is about.
            begun: Of those, the episodes that have begun.
            ended: Of those, the ones whose episode is over.
        """
        over = self.ended.difference(rows).union(ended)
        if not begun and over == self.ended:
            return self
        then = list(self.rows)
        for row, one in begun.items():
            then[row] = one._replace(began=seq)
        return EpisodeTable(tuple(then), over)


# -- the workers --------------------------------------------------------------------------------------------------------

class SpareWorker(ProcessWorker):
    """A worker at a place: that of a row, or one behind the rows.

    Attributes:
        next_episode: What it is to begin ahead of time.
        place_sent: The place that it was sent, and its next episode's number.
    """

    next_episode: NextEpisode | None = None
    place_sent = -1, 0

    def has_begun(self, key: EpisodeId) -> bool:
        """Whether it begins an episode, or was sent the order to."""
        upcoming = self.next_episode
        return upcoming is not None and upcoming.key == key and self.place_sent == (self.index, upcoming.number)


class SparePool(WorkerPool):
    """Workers of rows, and others behind them.

    Attributes:
        arranged: All of them, by their places: first those of the rows.
    """

    _worker_class = SpareWorker
    arranged: tuple[SpareWorker, ...] = ()

    @property
    def spares(self) -> tuple[SpareWorker, ...]:
        """Those that have no row."""
        return self.arranged[len(self.batch.rewards) :]

    def all_workers(self) -> Sequence[Worker]:
        return self.arranged

    def set_workers(self, workers: Sequence[Any]) -> None:
        """Put workers in these places. The first store says it all, the rest follows and may be done again."""
        self.arranged = tuple(workers)
        for place, worker in enumerate(self.arranged):
            if worker.index != place:
                worker.index, worker.rows, worker.label = place, range(place, place + 1), f"worker {place}, pid {worker.pid}"
            death = worker.death
            if death is not None and death.envs != (place,):
                text = f"{death.text}\n(it was to run an episode of env {place})"
                worker.death = replace(death, text=text, worker=place, envs=(place,))
        super().set_workers(workers[: len(self.batch.rewards)])

    def resume(self) -> None:
        super().resume()
        self.set_workers(self.arranged)

    def send_places(self, workers: Iterable[SpareWorker]) -> bool:
        """Send workers their places and next episodes, where they do not know them; returns whether all of them know now.

        A spare one that is busy with an earlier one is left alone: what it does not have, the row begins itself.
        """
        ahead, all_know = self.batch.ahead, True
        for worker in workers:
            upcoming, sent = worker.next_episode, worker.place_sent
            if upcoming is None or worker.death is not None or sent == (worker.index, upcoming.number):
                continue
            if sent[0] == worker.index >= len(self.batch.rewards) and ahead[sent[1] % len(ahead)] < sent[1]:
                all_know = False
                continue
            message = encode(Op.TAKE, 0, pickle.dumps((worker.index, upcoming.number, upcoming.seed)))
            part = WorkerRequest(worker, worker.rows, Op.TAKE, data=message)
            while not worker.send(part):  # it is so short that a pipe takes all of it or nothing
                poll = select.poll()
                poll.register(worker.channel.out, select.POLLOUT)
                poll.poll(1000)
            worker.place_sent = worker.index, upcoming.number
        return all_know


def _refuse(what: str, reason: str) -> NoReturn:
    unable("AsyncVectorEnv(..., spare_workers=...)", what, reason)


class SpareEngine(Engine):
    """An engine with spare workers. The episodes of its rows lie in the table of pending requests."""

    why_not: ClassVar[Mapping[str, str]] = {**Engine.why_not, "first_ready": _SAME_STEP}
    pool: SparePool
    _pool_class = SparePool

    def __init__(self, env_fns: Sequence[Callable[[], Any]], *rest: Any) -> None:
        self._numbers = itertools.count(1)
        self._looked: tuple[object, object] = None, None
        self._setting = b""  # the name and the value that set_attr was asked for last
        attributes: dict[str, bytes] = {}  # one for all: what is built later has what was set before
        self._env_fns = [WithAttributes(env_fn, attributes) for env_fn in env_fns]
        super().__init__(self._env_fns, *rest)
        self.pending.episodes = EpisodeTable(tuple(map(RowEpisode, range(self.num_envs))))

    def _parts(
        self, env_fns: Sequence[Callable[[], Any]], num_workers: int, caller_share: int
    ) -> list[tuple[range, Sequence[Callable[[], Any]]]]:
        rows = super()._parts(env_fns, num_workers, caller_share)
        places = range(self.num_envs, self.num_envs + self.layout.spares)
        return rows + [(range(place, place + 1), env_fns[:1]) for place in places]

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask_step(self, actions: list[Any] | None) -> None:
        self._begin_episodes(self.pending.episodes.ended)
        super().ask_step(actions)
        self._look_ahead(self.pending.episodes)

    def ask_rows(self, rows: Sequence[int], actions: list[Any] | None) -> None:
        self._require_rows()
        self._begin_episodes([row for row in rows if row in self.pending.episodes.ended])
        super().ask_rows(rows, actions)
        self._look_ahead(self.pending.episodes)

    def _begin_episodes(self, rows: Collection[int]) -> None:
        """The next step of rows begins their next episodes. It may be done again."""
        if not rows:
            return
        for key in self._change_places(rows):
            if self.recorder is not None:
                self.recorder.heard(key, Op.TAKE, [key.row], key.row, pickle.dumps(self.pending.episodes.seed_of(key)))

    def reset(self, seeds: list[Any], ids: Array | None, options: ResetOptions, *, by_row: bool, **about: Any) -> None:
        if by_row:
            self._require_rows()
        elif not self.idle:
            self.drain()
        if ids is None:
            for worker in self.pool.spares:
                if worker.death is not None or (worker.wait(0.0) and worker.receive() and worker.death is not None):
                    self.pool.replace(worker)
        rows = range(self.num_envs) if ids is None else ids.tolist()
        begun, given = self._dropped().after_reset(rows, seeds)
        super().reset(given, ids, options, by_row=by_row, episodes=begun, **about)

    def recv(self, count: int | None, deadline: float | None, least: tuple[int, float] | None = None) -> Stepped | None:
        self._require_rows()
        return super().recv(count, deadline, least)

    def _require_rows(self) -> None:
        if self.mode is AutoresetMode.SAME_STEP:
            _refuse("send to some environments or receive those that are done first", _SAME_STEP)

    def begin_set_attr(self, name: str, values: Sequence[Any]) -> None:
        if len({cloudpickle.dumps(value) for value in values}) > 1:
            _refuse(
                "set an attribute to one value for each row",
                "the next episode of a row is run by another environment; give one value for all, or options of reset()",
            )
        self._setting = cloudpickle.dumps((name, values[0]))
        alive = [worker for worker in self.pool.arranged if worker.death is None or worker.index < self.num_envs]
        self.ask_call(Op.SET_ATTR, lambda _: (name, [values[0]]), "set_attr", workers=alive)

    def begin_set_next(self, rows: Collection[int], given: Sequence[Any]) -> None:
        _refuse("set_next_options", _NEXT_BEGUN)

    # -- which worker has which row --------------------------------------------------------------------------------

    def _change_places(self, rows: Iterable[int]) -> list[EpisodeId]:
        """Let rows whose episode is over have the workers that have begun the next; where none has, the row's own begins it.

        It may be done again. Returns the next episodes.
        """
        table, arranged = self.pending.episodes, list(self.pool.arranged)
        keys = [table.next_key(row) for row in rows if table.rows[row].seed is not None]
        for key in keys:
            own = arranged[key.row]
            if own.next_episode is not None and own.next_episode.key == key:
                continue
            place = next((worker.index for worker in self.pool.spares if worker.has_begun(key)), None)
            if place is None:
                own.next_episode = self._next(table, key)
            else:
                arranged[key.row], arranged[place] = arranged[place], own
        self.pool.set_workers(arranged)
        self.pool.send_places([arranged[key.row] for key in keys])
        return keys

    def _next(self, table: EpisodeTable, key: EpisodeId) -> NextEpisode:
        return NextEpisode(key, table.seed_of(key), next(self._numbers))

    def _look_ahead(self, table: EpisodeTable) -> None:
        """See to it that every spare worker begins an episode that is to come. It may be done again."""
        pool = self.pool
        if self._looked[0] is table and self._looked[1] is pool.arranged:  # another object, once it has changed
            return
        held = {worker.next_episode.key for worker in pool.arranged[: self.num_envs] if worker.next_episode is not None}
        free: list[SpareWorker] = []
        for worker in pool.spares:
            known = worker.next_episode
            if known is None or not table.is_to_come(known.key) or known.key in held:
                free.append(worker)
            else:
                held.add(known.key)
        for worker, key in zip(free, table.coming(held), strict=False):
            worker.next_episode = self._next(table, key)
        if pool.send_places(pool.spares):
            self._looked = table, pool.arranged

    # -- answers ----------------------------------------------------------------------------------------------------

    def emptied(self, steps: int, resets: int, *requests: Request) -> Pending:
        then = super().emptied(steps, resets, *requests)
        then.episodes = self._dropped()
        return then

    def _dropped(self) -> EpisodeTable:
        """The episodes once the answers by row that have arrived are dropped."""
        return self._taken((request, request.rows_at(index)) for (_, index), request in self.pending.arrived.items())

    def _taken(self, answers: Iterable[tuple[Request, Sequence[int]]]) -> EpisodeTable:
        """The episodes once the answers to these requests are taken, which are about these rows."""
        table: EpisodeTable = self.pending.episodes
        over = np.flatnonzero(self.batch.terminations | self.batch.truncations).tolist()
        for request, rows in answers:
            if request.command == "reset":
                table = table.taken(request.seq, rows, {row: request.episodes[row] for row in rows}, ())
            elif request.command == "step":
                ended = [row for row in over if row in rows]
                at_once = self.mode is AutoresetMode.SAME_STEP
                begun = table.after_step(ended if at_once else table.ended.intersection(rows))
                table = table.taken(request.seq, rows, begun, () if at_once else ended)
        return table

    def _set_next(self, seen: dict[tuple[int, int], Request], *taken: Any) -> None:
        super()._set_next(seen, *taken)
        self._give(self._taken((request, request.rows_at(index)) for (_, index), request in seen.items()))

    def _give(self, table: EpisodeTable) -> None:
        """These are the episodes once the answer that is being given is taken."""
        assert self.next_pending is not None
        self.next_pending.episodes = table
        self._look_ahead(table)

    def finish(self, request: Request, deadline: float | None) -> tuple[Result, Exception | None] | None:
        answer = super().finish(request, deadline)
        if answer is None:
            return None
        result, error = answer
        if request.command == "step" and self.mode is AutoresetMode.SAME_STEP and error is None:
            if request.sequel is not None:
                result = request.sequel(result, deadline, None)
            elif (begin := self._next_request(request, result)) is not None:
                self.pool.ask(begin, alone=True)
                return self.finish(begin, deadline)
        elif request.command == "set_attr":
            self._attribute_was_set(request, result)
        for row in [row for row in self.failed if row >= self.num_envs]:
            self.ledger.mark_recovered(row)
        self._give(self._taken([(request, request.episodes or range(self.num_envs))]))
        return result, error

    def _attribute_was_set(self, request: Request, result: Result) -> None:
        """What has begun ahead of time begins anew."""
        if len(result.failures) + len(result.deaths) < len(request.workers):  # unless it could be set nowhere
            self._env_fns[0].keep(*pickle.loads(self._setting))  # what is built later has it too
        for worker in self.pool.arranged:
            worker.next_episode = None
        self._looked = None, None

    def _next_request(self, request: Request, result: Result) -> Request | None:
        """Same-step mode: the second half of a step, which asks for the first observations of the next episodes.

        It takes the place of the first half, and has what those rows said of the episodes that are over.
        """
        over = np.flatnonzero(self.batch.terminations | self.batch.truncations).tolist()
        rebuilt = self._rebuilt(request.seq)  # their next ones have begun
        keys = self._change_places([row for row in over if row not in rebuilt])
        if not keys:
            return None
        rows = [key.row for key in keys]
        infos = {row: result.infos.get(row) or self._infos.one(row) for row in rows}
        parts = [
            WorkerRequest(self.pool.workers[key.row], [key.row], Op.RESET_SOME, ([self.pending.episodes.seed_of(key)], None))
            for key in keys
        ]
        begin = self.composed("step", parts)
        finals = self.finals(rows) | result.finals
        begin.steps, begin.sequel = request.steps, partial(self._with_next, begin.seq, result, infos, finals)
        self.batch.requested[rows] = begin.seq
        return begin

    def _rebuilt(self, seq: int) -> Collection[int]:
        """Rows whose environments were rebuilt on the way to the answer to a request."""
        settlement = self.pending.settlements.get((seq, ALL))
        return () if settlement is None else settlement.rebuilt

    def _with_next(
        self, seq: int, before: Result, infos: dict[int, Any], finals: dict[int, Any], begun: Result, *_: Any
    ) -> Result:
        """What a step comes to, after both halves: of each row, the end of one episode and the beginning of the next.

        Args:
            seq: The number of the second half.
            before, begun: What the first half came to, and the second.
            infos, finals: Of rows whose episode is over.
        """
        all_infos, all_finals, rebuilt = dict(before.infos), dict(before.finals), self._rebuilt(seq)
        for row, info in infos.items():
            first = begun.infos.get(row) or self._infos.one(row)
            all_infos[row] = first if row in rebuilt else {**info, **first}
            all_finals.pop(row, None)
            final = begun.finals if row in rebuilt else {} if "final_obs" in first else finals  # the reset's own keys win
            if row in final:
                all_finals[row] = final[row]
        return replace(before, columns=True, infos=all_infos, finals=all_finals)

    # -- snapshots --------------------------------------------------------------------------------------------------

    def episodes_of(self, row: int) -> tuple[int | None, int, int]:
        one: RowEpisode = self.pending.episodes.rows[row]
        return one.seed, one.origin, one.episode

    def were_loaded(self, known: Mapping[int, Row]) -> None:
        assert self.next_pending is not None
        self.next_pending.episodes = self.pending.episodes.loaded(known)
