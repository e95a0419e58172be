"""Spare workers: environments that have been reset already, and go to whichever row wants the episode that they have begun.

There are more processes than rows, each with one environment. A process is at a *place*: that of a row, or one behind the
rows. The caller says to each, in one short message, which place it has and which episode it is to begin ahead of time
(:class:`~vecenv.engine.episodes.Wish`). When a row's episode is over, the process there changes places with the one that
has begun its next episode, ready or not; where none has, it begins that itself. So who is where depends on how fast the
processes are, and what a row sees does not.

What has to be done follows from three things, each changed in one store: the places (:attr:`SparePool.arranged`), what each
process is to begin, and what was sent to it last. A message is not answered, and may be sent twice. So an interruption
anywhere is made good by looking again (:meth:`SparePool.resume`), and nothing of this is pending.
"""

from __future__ import annotations

import pickle
import select
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from vecenv.engine.handles import ProcessWorker
from vecenv.engine.pending import Worker
from vecenv.engine.pool import WorkerPool
from vecenv.link.channel import ChannelClosed
from vecenv.link.messages import Op, encode

__all__ = ["SparePool", "refuse_different"]


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


class SparePool(WorkerPool):
    """Workers of rows, and others behind them.

    Attributes:
        arranged: All of them, by their places: first those of the rows.
    """

    arranged: tuple[ProcessWorker, ...] = ()

    @property
    def spares(self) -> tuple[ProcessWorker, ...]:
        """Those that have no row."""
        return self.arranged[len(self.batch.rewards) :]

    def all_workers(self) -> Sequence[Worker]:
        return self.arranged

    def _all_processes(self) -> Sequence[ProcessWorker]:
        return self.arranged

    def set_workers(self, workers: list[Any]) -> None:
        self.arrange(tuple(workers))

    def arrange(self, workers: tuple[ProcessWorker, ...]) -> None:
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
        super().set_workers(list(workers[: len(self.batch.rewards)]))

    def resume(self) -> None:
        super().resume()
        self.arrange(self.arranged)

    def send_places(self, workers: Iterable[ProcessWorker]) -> bool:
        """Send workers their places and wishes, where they do not know them; returns whether all of them know now.

        A spare one that is busy with an earlier wish is left alone: what it does not have, the row begins itself.
        """
        ahead, all_know = self.batch.ahead, True
        for worker in workers:
            wish, sent = worker.wish, worker.place_sent
            if wish is None or worker.death is not None or sent == (worker.index, wish.number):
                continue
            stays = sent is not None and sent[0] == worker.index >= len(self.batch.rewards)
            if stays and sent is not None and ahead[sent[1] % len(ahead)] < sent[1]:
                all_know = False
                continue
            self._say(worker, encode(Op.TAKE, 0, pickle.dumps((worker.index, wish.number, wish.seed))))
            worker.place_sent = worker.index, wish.number
        return all_know

    @staticmethod
    def _say(worker: ProcessWorker, message: bytes) -> None:
        """Write a message that is short enough for a pipe to take all of it or nothing."""
        try:
            while not worker.channel.write(message, []):
                poll = select.poll()
                poll.register(worker.channel.out, select.POLLOUT)
                poll.poll(1000)
        except ChannelClosed:
            worker.mark_dead()
