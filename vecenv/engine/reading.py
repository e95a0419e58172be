"""What workers said, read: from sealed answers to one :class:`~vecenv.engine.owed.Result`."""

from __future__ import annotations

from collections.abc import Iterable

from gymnasium import logger

from vecenv.engine.owed import COLUMNS, NOTHING, ONLY_COLUMNS, PLAIN, Answer, Result, Worker
from vecenv.link.infos import InfoReader
from vecenv.link.messages import decode_outcome
from vecenv.link.observations import Store

__all__ = ["Reading"]


class Reading:
    """Reads answers. Reading one twice does no harm, so an interrupted call reads it again.

    Args:
        infos: Learns the definitions of info columns.
        store: Takes the observations that came in answers.
    """

    def __init__(self, infos: InfoReader, store: Store) -> None:
        self._infos = infos
        self._store = store
        self.said: dict[str, str] = {}  # warnings by name, each once

    def read(self, answers: Iterable[tuple[Worker, Answer]]) -> Result:
        """All of them together. A result with nothing of its own in it is a shared one, and not to be written to."""
        result = NOTHING
        for worker, answer in answers:
            if answer is PLAIN or (answer is ONLY_COLUMNS and result.columns):
                continue
            if answer is ONLY_COLUMNS and result is NOTHING:
                result = COLUMNS
                continue
            if result is NOTHING or result is COLUMNS:
                result = Result(columns=result.columns)
            self._add(result, worker, answer)
        return result

    def _add(self, result: Result, worker: Worker, answer: Answer) -> None:
        if answer.columns:
            result.columns = True
        if answer.death is not None:
            result.deaths.append(answer.death)
        out = answer.outcome if answer.sealed is None else decode_outcome(answer.sealed)
        if out is None:
            return
        self._infos.learn(out.schemas)
        result.infos.update(out.infos)
        result.finals.update(out.finals)
        result.results.update(out.results)
        for row, observation in out.observations.items():
            self._store.accept(row, observation)
        result.failures.extend((failure, worker) for failure in out.failures)
        for name, text in out.warnings:
            if name not in self.said:
                self.said[name] = text
                logger.warn("%s", text)
