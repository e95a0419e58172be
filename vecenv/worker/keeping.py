"""Rows that can be saved and loaded: each is its environment's state, and what the engine knows of the row beside it.

All of it may be done again after an interruption: a state is taken twice, or put in place twice, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.utils import seeding

from vecenv.errors import NotRestorable, SnapshotMismatch, VecEnvError
from vecenv.link.messages import Failure, Outcome
from vecenv.state.capture import capture_state, layers_of, prepare_restore
from vecenv.state.proof import prove
from vecenv.state.snapshots import Row, Snapshot, kind_of
from vecenv.system.generators import seed_process, unwatched, watch_by
from vecenv.system.uninterrupted import succeeds_when_repeated
from vecenv.worker.rows import EnvRows


class SnapshotRows(EnvRows):
    """Environments that are stepped and reset (:class:`~vecenv.worker.rows.EnvRows`), saved and loaded."""

    def __init__(self, *rows: Any, **how: Any) -> None:
        super().__init__(*rows, **how)
        self._opened: dict[int, tuple[Callable[[], None], Snapshot]] = {}
        """Of the rows that are about to be loaded: what fills them, and with what."""

    def follow(self, before: SnapshotRows) -> None:
        """Take over the environment of rows that have one, in this process."""
        pending = before._is_pending(0)
        self.envs, self.forked, self._used, self._next = before.envs, before.forked, before._used, before._next
        self.generators = before.generators
        watch_by(self.saw)
        if (env := self.envs[0]) is not None:
            self._steps[0] = self._first_step(0, pending)
            self._offer(0, env)
        self._dirty = True  # infos of the one that had the row before

    def reseed(self, seed: int) -> None:
        """Let the environment's generator, and those that it draws from in this process, begin anew."""
        base = self._env(0).unwrapped
        with self._turn(0, seed, begins=True):
            base._np_random, base._np_random_seed = seeding.np_random(seed)
        if self.generators is None:
            seed_process(np.random.SeedSequence(seed))()

    def save(self, seq: int, ks: Sequence[int]) -> Outcome:
        """A :class:`~vecenv.state.snapshots.Snapshot` of each of the rows ``ks``, without its last observation."""

        def one(k: int) -> Snapshot:
            env = self._env(k)
            layers = layers_of(env)
            kind = kind_of(layers)
            try:
                with self._turn(k):
                    state = capture_state(env, layers)
            except NotRestorable as error:
                raise NotRestorable(f"{kind.env_id} cannot be saved: {error}") from error
            return Snapshot.of(
                kind, state, pending=self._is_pending(k), used=self._used[k], upcoming=self._next.get(k),
                generators=None if self.generators is None else self.generators.each[k].state(),
            )  # fmt: skip

        return self._again(seq, ks, one)

    def prove(self, seq: int, ks: Sequence[int]) -> Outcome:
        """Prove that environments like those of the rows ``ks`` go on from a saved state exactly as they would have."""
        with unwatched():
            return self._again(seq, ks, lambda k: prove(self.env_fns[k], own_generators=self.generators is not None))

    def check(self, seq: int, snapshots: Sequence[tuple[int, Snapshot]]) -> Outcome:
        """Read the snapshots that rows are to be filled with, and refuse those that do not fit. Rows stay as they are."""
        given = dict(snapshots)

        def one(k: int) -> None:
            self._opened[k] = self._fitting(k, given[k]), given[k]

        return self._again(seq, list(given), one)

    def load(self, seq: int, ks: Sequence[int]) -> Outcome:
        """Fill the rows with what was checked."""

        def one(k: int) -> None:
            fill, snapshot = self._opened[k]
            known = snapshot.row
            self._fill(k, fill, known)
            self._steps[k] = self._first_step(k, known.pending)
            self._used[k] = known.used

        out = self._again(seq, ks, one, fatal=True)
        if not self._interrupts:  # in the calling process it may be asked for again, and is kept until the next check
            for k in ks:
                self._opened.pop(k, None)
        return out

    def _fitting(self, k: int, snapshot: Snapshot) -> Callable[[], None]:
        """What fills row k with a snapshot."""
        env = self.envs[k] or self._build(k)
        try:
            layers = layers_of(env)
            known = snapshot.row
            if wrong := known.kind.differs_from(kind_of(layers)):
                raise SnapshotMismatch(wrong)
            if self.generators is None and known.generators is not None and known.generators["used"]:
                raise SnapshotMismatch("it has states of generators of its own, which go with generators='own' only")
            return prepare_restore(env, snapshot.body, layers)
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"the snapshot does not fit: {error}") from error

    def _fill(self, k: int, fill: Callable[[], None], known: Row) -> None:
        env = self._env(k)
        with self._turn(k):
            fill()
        if self.generators is not None and known.generators is not None:
            self.generators.each[k].load(known.generators)
        self._next.pop(k, None)
        if known.upcoming is not None:
            self._next[k] = known.upcoming
        if self._offered[k] is not None:
            env.unwrapped.observation_buffer(self._offered[k])  # type: ignore[attr-defined]

    def _again(self, seq: int, ks: Sequence[int], function: Callable[[int], Any], *, fatal: bool = False) -> Outcome:
        """``function`` of each row. One that was interrupted is done again.

        Args:
            seq: The number of the message; see ``_begin``.
            ks: Which rows.
            function: What is done.
            fatal: A row where that fails is no more what it was: its environment is dropped.
        """
        if seq != self._seq:
            self._begin(seq, ks, batch=False)
        out = self._out
        for k in ks[self._done :]:
            try:
                out.results[self.first + k] = function(k)
            except BaseException as error:
                if succeeds_when_repeated(partial(function, k)):  # the call was interrupted and is made again
                    raise _first_of(error)  # noqa: B904 - it is one of its causes
                self._let_through(error)
                if fatal:
                    self._drop(k)
                out.failures.append(Failure(self.first + k, self._named(k, error), fatal=fatal))
            self._done += 1
        return out


def _first_of(error: BaseException) -> BaseException:
    """What an exception of ours was made of."""
    while isinstance(error, VecEnvError) and error.__cause__ is not None:
        error = error.__cause__
    return error
