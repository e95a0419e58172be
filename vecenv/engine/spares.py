"""Spare workers: environments that have been reset already, and go to whichever row wants the episode that they have begun.

There are more processes than rows, each with one environment. A process is at a *place*: that of a row, or one behind the
rows. The caller says to each, in one short message, which place it has and which episode it is to begin ahead of time
(:class:`NextEpisode`). When a row's episode is over, the process there changes places with the one
that has begun its next episode, ready or not; where none has, it begins that itself. So which process has which row depends
on how fast the processes are, and what a row sees does not.

What has to be done follows from three things, each changed in one store: the places (:attr:`SparePool.arranged`), what each
process is to begin, and what was sent to it last. A message is not answered, and may be sent twice. So an interruption
anywhere is made good by looking again (:meth:`SparePool.resume`), and nothing of this is pending.

In next-step mode the processes change places before the step that begins the next episodes, which is then a step like any
other: what an environment has begun ahead of time it gives as the answer. In same-step mode the workers only say that an
episode is over; the first observation comes by one more request, to the worker that has the row from then on. That request
is in the table of pending requests beside the step that it belongs to, and is taken with it.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

import cloudpickle
import numpy as np
from gymnasium.vector import AutoresetMode

from vecenv.engine.engine import Engine
from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import Request, Result, Settlement, Worker, WorkerRequest
from vecenv.engine.pool import WorkerPool
from vecenv.engine.steps import Received
from vecenv.front.arguments import ResetOptions, any_seed
from vecenv.front.capabilities import unable
from vecenv.link.channel import ChannelClosed
from vecenv.link.infos import NO_INFO
from vecenv.link.messages import Op, encode
from vecenv.shm.layout import Array
from vecenv.state.snapshots import Row
from vecenv.worker.variants import WithAttributes

__all__ = ["EpisodeTable", "SpareEngine", "SparePool", "refuse_different"]

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
# change is another object, which takes the place of the one before in one store.

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
        began: The step with which that began.
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
        answered: The number of the latest step whose answer is in here.
        steps: How many there were.
    """

    rows: tuple[RowEpisode, ...]
    ended: tuple[int, ...] = ()
    answered: int = 0
    steps: int = 0

    def next_key(self, row: int) -> EpisodeId:
        """The episode that follows the one that a row is in, or was in."""
        return EpisodeId(row, self.rows[row].life, self.rows[row].episode + 1)

    def seed_of(self, key: EpisodeId) -> int:
        """The seed of an episode that begins by itself."""
        one = self.rows[key.row]
        assert one.seed is not None
        return derived_seed(one.seed, one.origin, key.episode)

    def is_to_come(self, key: EpisodeId) -> bool:
        """Whether no step has asked for an episode yet, and one may."""
        return key.life == self.rows[key.row].life and key.episode > self.rows[key.row].episode

    def coming(self, count: int, held: set[EpisodeId]) -> list[EpisodeId]:
        """The next ``count`` episodes that are not ``held``: each row's next, of the oldest one first; and on."""
        waiting = [(row not in self.ended, one.began, row) for row, one in enumerate(self.rows) if one.seed is not None]
        rows = [row for *_, row in sorted(waiting)]
        found: list[EpisodeId] = []
        ahead = 0
        while rows and len(found) < count:
            for row in rows:
                key = self.next_key(row)
                key = key._replace(episode=key.episode + ahead)
                if key not in held and len(found) < count:
                    found.append(key)
            ahead += 1
        return found

    def reset(self, rows: Sequence[int], seeds: Sequence[Any]) -> tuple[EpisodeTable, list[int | None]]:
        """As it will be when rows were reset by the caller, and the seeds for that.

        A row that is given a seed begins to count anew; one that is not goes on to its next episode; one that never had any
        gets one of no row's.
        """
        then = list(self.rows)
        given: list[int | None] = list(seeds)
        for row in rows:
            seed, one = seeds[row], then[row]._replace(life=then[row].life + 1, began=self.steps)
            if seed is None and one.seed is not None:
                then[row] = one._replace(episode=one.episode + 1)
                given[row] = derived_seed(one.seed, one.origin, one.episode + 1)
                continue
            given[row] = any_seed() if seed is None else int(seed)
            then[row] = one._replace(episode=0, origin=row, seed=given[row])
        ended = tuple(row for row in self.ended if row not in set(rows))
        return replace(self, rows=tuple(then), ended=ended), given

    def source(self, row: int) -> tuple[int | None, int, int]:
        """Of a row's episodes: the seed, the row that it was given to, and the number of the present one."""
        one = self.rows[row]
        return one.seed, one.origin, one.episode

    def loaded(self, sources: Mapping[int, tuple[int | None, int, int] | None], pending: Sequence[int]) -> EpisodeTable:
        """Once rows go on from other states; it may be done again.

        Args:
            sources: By row, as :meth:`source` gives them; ``None``: it is not known.
            pending: Those whose next step begins an episode.
        """
        then = list(self.rows)
        for row, source in sources.items():
            seed, origin, episode = source or (any_seed(), row, 0)
            then[row] = then[row]._replace(seed=seed, origin=origin, episode=episode, life=then[row].life + 1)
        ended = tuple({*pending} | {row for row in self.ended if row not in sources})
        return replace(self, rows=tuple(then), ended=ended)

    def stepped(self, answered: int, over: Array, *, at_once: bool) -> EpisodeTable:
        """After a step of all rows.

        Args:
            answered: Its number.
            over: bool ``(n,)``: whose episode is over.
            at_once: The next one has begun in the same step.
        """
        if answered == self.answered:
            return self
        ended = tuple(np.flatnonzero(over).tolist())
        rows = ended if at_once else self.ended
        after = self.begun(rows) if rows else replace(self, steps=self.steps + 1)  # its rows stay the same object
        return replace(after, ended=() if at_once else ended, answered=answered)

    def begun(self, rows: Sequence[int]) -> EpisodeTable:
        """Once steps were asked for that begin the next episodes of rows."""
        then = list(self.rows)
        for row in rows:
            then[row] = then[row]._replace(episode=then[row].episode + 1, began=self.steps)
        ended = tuple(row for row in self.ended if row not in rows)
        return replace(self, rows=tuple(then), ended=ended, steps=self.steps + 1)

    def received(self, rows: Array, over: Array) -> EpisodeTable:
        """After the answers of some rows; ``over``: bool ``(n,)``, whose episode is over. It may be done again."""
        ended = tuple(rows[over[rows]].tolist())
        return replace(self, ended=tuple({*self.ended, *ended})) if ended else self


# -- the workers --------------------------------------------------------------------------------------------------------

class SpareWorker(ProcessWorker):
    """A worker at a place: that of a row, or one behind the rows.

    Attributes:
        next_episode: What it is to begin ahead of time.
        place_sent: The place that it was sent, and its next episode's number.
    """

    next_episode: NextEpisode | None = None
    place_sent: tuple[int, int] | None = None


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
        self.arrange(tuple(workers))

    def arrange(self, workers: tuple[SpareWorker, ...]) -> None:
        """Put workers in these places. The first store says it all, the rest follows and may be done again."""
        self.arranged = workers
        for place, worker in enumerate(workers):
            if worker.index == place:
                continue
            worker.index, worker.rows, worker.label = place, range(place, place + 1), f"worker {place}, pid {worker.pid}"
        for worker in workers:
            death = worker.death
            if death is not None and death.envs != tuple(worker.rows):
                text = f"{death.text}\n(it was to run an episode of env {worker.index})"
                worker.death = replace(death, text=text, worker=worker.index, envs=tuple(worker.rows))
        super().set_workers(workers[: len(self.batch.rewards)])

    def resume(self) -> None:
        super().resume()
        self.arrange(self.arranged)

    def send_places(self, workers: Iterable[SpareWorker]) -> bool:
        """Send workers their places and next episodes, where they do not know them; returns whether all of them know now.

        A spare one that is busy with an earlier one is left alone: what it does not have, the row begins itself.
        """
        ahead, all_know = self.batch.ahead, True
        for worker in workers:
            upcoming, sent = worker.next_episode, worker.place_sent
            if upcoming is None or worker.death is not None or sent == (worker.index, upcoming.number):
                continue
            stays = sent is not None and sent[0] == worker.index >= len(self.batch.rewards)
            if stays and sent is not None and ahead[sent[1] % len(ahead)] < sent[1]:
                all_know = False
                continue
            self._say(worker, encode(Op.TAKE, 0, pickle.dumps((worker.index, upcoming.number, upcoming.seed))))
            worker.place_sent = worker.index, upcoming.number
        return all_know

    @staticmethod
    def _say(worker: SpareWorker, message: bytes) -> None:
        """Write a message that is short enough for a pipe to take all of it or nothing."""
        try:
            while not worker.channel.write(message, []):
                poll = select.poll()
                poll.register(worker.channel.out, select.POLLOUT)
                poll.poll(1000)
        except ChannelClosed:
            worker.mark_dead()


def _refuse(what: str, reason: str) -> NoReturn:
    unable("AsyncVectorEnv(..., spare_workers=...)", what, reason)


@dataclass(slots=True)
class _EpisodeEnds:
    """The second half of a step in same-step mode: rows whose episode is over, and what they said of it.

    Attributes:
        seq: The number of the step.
        rows: Which.
        infos, finals: By row, of the episode that is over.
        begin: What the next episodes are asked for by.
        settlement: Their answers.
        answer: What the step comes to.
    """

    seq: int
    rows: list[int]
    infos: dict[int, Any]
    finals: dict[int, Any]
    begin: Request | None = None
    settlement: Settlement | None = None
    answer: Result | None = None


class SpareEngine(Engine):
    """An engine with spare workers."""

    why_not: ClassVar[Mapping[str, str]] = {**Engine.why_not, "first_ready": _SAME_STEP}
    pool: SparePool
    _pool_class = SparePool

    def __init__(self, env_fns: Sequence[Callable[[], Any]], *rest: Any) -> None:
        self.episodes = EpisodeTable(tuple(map(RowEpisode, range(len(env_fns)))))
        self._asked = self.episodes  # as it will be when the reset that is pending has been answered
        self._numbers = itertools.count(1)
        self._ends: _EpisodeEnds | None = None
        self._by_row: tuple[Sequence[int], EpisodeTable | None] = (), None
        """Rows that are being asked one by one, and the episodes after a reset; ``None``: after a step."""
        self._looked: tuple[object, ...] = ()
        self._setting = b""  # the name and the value that set_attr was asked for last
        attributes: dict[str, bytes] = {}  # one for all: what is built later has what was set before
        self._env_fns = [WithAttributes(env_fn, attributes) for env_fn in env_fns]
        super().__init__(self._env_fns, *rest)

    def _parts(
        self, env_fns: Sequence[Callable[[], Any]], num_workers: int, caller_share: int
    ) -> list[tuple[range, Sequence[Callable[[], Any]]]]:
        rows = super()._parts(env_fns, num_workers, caller_share)
        places = range(self.num_envs, self.num_envs + self.layout.spares)
        return rows + [(range(place, place + 1), env_fns[:1]) for place in places]

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask_step(self, actions: list[Any] | None) -> None:
        if self.episodes.ended:
            self._begin_episodes(self.episodes.ended)
        super().ask_step(actions)
        self._look_ahead()

    def _begin_episodes(self, rows: Sequence[int]) -> None:
        """The next step of rows begins their next episodes. It may be done again."""
        rows = [row for row in rows if self.episodes.rows[row].seed is not None]
        self._change_places(rows, begin=True)
        if self.recorder is not None:
            for key in map(self.episodes.next_key, rows):
                self.recorder.heard(key, Op.TAKE, [key.row], key.row, pickle.dumps(self.episodes.seed_of(key)))

    def ask_reset(self, seeds: Sequence[Any], options: ResetOptions, mask: Array | None) -> None:
        self._note_asked()
        if not self.idle:
            self.drain()
            self.episodes = self._with_ended(np.arange(self.num_envs))
        chosen = list(range(self.num_envs)) if mask is None else np.flatnonzero(mask).tolist()
        if mask is None:
            for worker in self.pool.spares:
                if worker.death is not None or (worker.wait(0.0) and worker.receive() and worker.death is not None):
                    self.pool.replace(worker)
        self._asked, given = self.episodes.reset(chosen, seeds)
        super().ask_reset(given, options, mask)

    # -- row by row -------------------------------------------------------------------------------------------------

    def launch(self, request: Request) -> None:
        self._require_rows()
        self.episodes = self._asked
        super().launch(request)

    def ask_rows(self, rows: Sequence[int], actions: list[Any] | None) -> None:
        self._require_rows()
        self._note_asked()
        beginning = [row for row in rows if row in self.episodes.ended]
        if beginning:
            self._begin_episodes(beginning)
            self._by_row = beginning, None
        super().ask_rows(rows, actions)
        self._note_asked()
        self._look_ahead()

    def ask_reset_rows(self, rows: Sequence[int], seeds: Sequence[Any], options: ResetOptions) -> None:
        self._require_rows()
        self._note_asked()
        after, given = self.episodes.reset(rows, seeds)
        self._by_row = rows, after
        super().ask_reset_rows(rows, given, options)
        self._note_asked()

    def _note_asked(self) -> None:
        """Note the episodes of rows that were asked one by one, where an interruption has kept that from being done."""
        rows, after = self._by_row
        if not rows:
            return
        if rows[0] in self.waiting():  # otherwise the call was not made
            if after is None:
                upcoming = [(row, self.pool.arranged[row].next_episode) for row in rows]
                table = self.episodes
                after = table.begun([row for row, one in upcoming if one is not None and one.key == table.next_key(row)])
            self.episodes = after
        self._by_row = (), None

    def receive(
        self, count: int, deadline: float | None, least: tuple[int, float] | None = None
    ) -> tuple[Received, Exception | None] | None:
        self._require_rows()
        self._note_asked()
        answer = super().receive(count, deadline, least)
        if answer is not None:
            self.episodes = self._with_ended(answer[0][0])
            self._look_ahead()
        return answer

    def _with_ended(self, rows: Array) -> EpisodeTable:
        return self.episodes.received(rows, self.batch.terminations | self.batch.truncations)

    def _require_rows(self) -> None:
        if self.mode is AutoresetMode.SAME_STEP:
            _refuse("send to some environments or receive those that are done first", _SAME_STEP)

    # -- snapshots --------------------------------------------------------------------------------------------------

    def episodes_of(self, row: int) -> tuple[int | None, int, int]:
        return self.episodes.source(row)

    def were_loaded(self, known: Mapping[int, Row]) -> None:
        pending = [row for row, one in known.items() if one.pending]
        self.episodes = self.episodes.loaded({row: one.episodes for row, one in known.items()}, pending)

    # -- calls ------------------------------------------------------------------------------------------------------

    def ask_call(self, op: Op, payload_of: Callable[[Worker], Any], command: str, **how: Any) -> None:
        if op is Op.SET_NEXT:
            _refuse("set_next_options", _NEXT_BEGUN)
        if op is not Op.SET_ATTR:
            super().ask_call(op, payload_of, command, **how)
            return
        payloads = [payload_of(worker) for worker in self.pool.workers]
        blobs = {cloudpickle.dumps(payload) for payload in payloads}
        if len(blobs) > 1:
            _refuse(
                "set an attribute to one value for each row",
                "the next episode of a row is run by another environment; give one value for all, or options of reset()",
            )
        self._setting = blobs.pop()
        alive = [worker for worker in self.pool.arranged if worker.death is None or worker.index < self.num_envs]
        super().ask_call(op, lambda _: payloads[0], command, workers=alive)

    # -- which worker has which row --------------------------------------------------------------------------------

    def _change_places(self, rows: Sequence[int], *, begin: bool) -> None:
        """Let rows have the workers that have begun their next episodes. It may be done again.

        Args:
            rows: Whose episode is over.
            begin: Where there is none, the row's own begins it now.
        """
        arranged = list(self.pool.arranged)
        for row in rows:
            key = self.episodes.next_key(row)
            own = arranged[row]
            if own.next_episode is not None and own.next_episode.key == key:
                continue
            place = next((worker.index for worker in self.pool.spares if _has_begun(worker, key)), None)
            if place is not None:
                arranged[row], arranged[place] = arranged[place], own
            elif begin:
                own.next_episode = self._next(key)
        self.pool.arrange(tuple(arranged))
        self.pool.send_places([arranged[row] for row in rows])

    def _next(self, key: EpisodeId) -> NextEpisode:
        return NextEpisode(key, self.episodes.seed_of(key), next(self._numbers))

    def _look_ahead(self, *, anew: bool = False) -> None:
        """See to it that every spare worker begins an episode that is to come. It may be done again; ``anew``: from new."""
        table, spares = self.episodes, self.pool.spares
        # Each of these is another object once it has changed, so most steps find at once that there is nothing to do.
        on = table.rows, table.ended, self.pool.arranged
        if not anew and len(self._looked) == len(on) and all(map(operator.is_, on, self._looked)):
            return
        rows = self.pool.arranged[: self.num_envs]
        held = {worker.next_episode.key for worker in rows if worker.next_episode is not None}
        for worker in rows if anew else ():
            known = worker.next_episode
            if known is not None and table.is_to_come(known.key):  # a step was about to ask for it
                worker.next_episode = self._next(known.key)
        free: list[SpareWorker] = []
        for worker in spares:
            known = worker.next_episode
            if known is None or not table.is_to_come(known.key) or known.key in held:
                free.append(worker)
            else:
                held.add(known.key)
                if anew:
                    worker.next_episode = self._next(known.key)
        if free:
            for worker, key in zip(free, table.coming(len(free), held), strict=False):
                worker.next_episode = self._next(key)
        if self.pool.send_places(spares):
            self._looked = on

    # -- answers ----------------------------------------------------------------------------------------------------

    def finish(self, request: Request, deadline: float | None) -> tuple[Result, Exception | None] | None:
        answer = super().finish(request, deadline)
        if answer is None:
            return None
        command = request.command
        if command == "step":
            over = self.batch.terminations | self.batch.truncations
            at_once = self.mode is AutoresetMode.SAME_STEP
            if at_once and answer[1] is None and over.any():
                answer = self._begin_next(request, answer[0], deadline, np.flatnonzero(over).tolist())
                if answer is None:
                    return None
            self.episodes = self.episodes.stepped(request.seq, over, at_once=at_once)
        elif command == "reset":
            self.episodes = self._asked
        elif command == "set_attr":
            failed = len(answer[0].failures) + len(answer[0].deaths)
            if failed < len(request.workers):  # what is built later has it too, unless it could be set nowhere
                name, values = pickle.loads(self._setting)
                self._env_fns[0].keep(name, values[0])
        for row in [row for row in self.failed if row >= self.num_envs]:
            self.ledger.mark_recovered(row)
        self._look_ahead(anew=command == "set_attr")
        return answer

    def _begin_next(
        self, request: Request, result: Result, deadline: float | None, over: list[int]
    ) -> tuple[Result, Exception | None] | None:
        """Same-step mode: get the first observations of the next episodes. It may be done again, and goes on."""
        ends = self._ends
        if ends is None or ends.seq != request.seq:
            known, lost = self.episodes.rows, result.infos  # of rows that were rebuilt in this step the next has begun
            rows = [row for row in over if not lost.get(row, {}).get("restarted") and known[row].seed is not None]
            infos = {row: result.infos.get(row) or self._infos.one(row) for row in rows}
            ends = self._ends = _EpisodeEnds(request.seq, rows, infos, self.finals(rows) | result.finals)
        if ends.answer is None:
            if ends.rows:
                begin = self._ask_next(ends)
                if not begin.answered and not self.wait_for(begin, deadline):
                    return None
                if (error := self._settle_next(ends, begin)) is not None:
                    return result, error
            ends.answer = self._with_next(ends, result)
        self.batch.info_schemas[ends.rows] = NO_INFO  # it is in the answer
        self.next_pending = self.emptied(request.steps, 0)
        return ends.answer, None

    def _ask_next(self, ends: _EpisodeEnds) -> Request:
        """Ask for the next episodes' first observations."""
        if ends.begin is None:
            self._change_places(ends.rows, begin=False)
            ends.begin = self._begin_request(ends)
        begin = ends.begin
        if begin.seq not in self.requests:
            self.pool.ask(begin)
        return begin

    def _settle_next(self, ends: _EpisodeEnds, begin: Request) -> Exception | None:
        """See to the answers; the exception that is to be raised instead."""
        if ends.settlement is None:
            ends.settlement = Settlement(begin, ends.rows, ())
        settlement = ends.settlement
        if self.recorder is not None:
            self.recorder.answered(begin)
        if settlement.result is None:
            settlement.result = self.read((worker, begin.answers[worker.index]) for worker in begin.workers)
        if (error := self.resolve(settlement)) is None and self.policy.restart:
            self.remembered.keep(ends.rows, all_rows=False)
        return error

    def _begin_request(self, ends: _EpisodeEnds) -> Request:
        seeds = {row: self.episodes.seed_of(self.episodes.next_key(row)) for row in ends.rows}
        parts = [WorkerRequest(self.pool.workers[row], [row], Op.RESET_SOME, ([seed], None)) for row, seed in seeds.items()]
        request = self.composed("step", parts)  # it is part of one
        self.batch.info_schemas[ends.rows] = NO_INFO
        self.batch.final[ends.rows] = False
        self.batch.requested[ends.rows] = request.seq
        return request

    def _with_next(self, ends: _EpisodeEnds, result: Result) -> Result:
        """What the step comes to: of each of these rows, the end of one episode and the beginning of the next."""
        infos, finals = dict(result.infos), dict(result.finals)
        settlement = ends.settlement
        said = Result() if settlement is None or settlement.result is None else settlement.result
        for row in ends.rows:
            finals.pop(row, None)
            first = said.infos.get(row) or self._infos.one(row)
            if settlement is not None and row in settlement.rebuilt:
                infos[row] = first
                if row in said.finals:
                    finals[row] = said.finals[row]
                continue
            infos[row] = {**ends.infos[row], **first}
            if "final_obs" not in first:  # Gymnasium lets the reset's own keys win
                finals[row] = ends.finals[row]
        return replace(result, columns=True, infos=infos, finals=finals)


def _has_begun(worker: SpareWorker, key: EpisodeId) -> bool:
    """Whether a worker begins an episode, or was sent the order to."""
    upcoming = worker.next_episode
    return upcoming is not None and upcoming.key == key and worker.place_sent == (worker.index, upcoming.number)
