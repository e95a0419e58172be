"""Rows of environments that can be saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import cloudpickle
import gymnasium

from vecenv.errors import NotRestorable, SnapshotMismatch
from vecenv.link.messages import Outcome, summary
from vecenv.state.capture import capture_state, find_layers, prepare_restore
from vecenv.state.proof import Proof, open_proof
from vecenv.state.snapshots import Kind, Snapshot, describe_kind
from vecenv.system.signals import raised_by_handler
from vecenv.worker.rows import EnvRows


class SnapshotRows(EnvRows):
    """The environments of :class:`~vecenv.worker.rows.EnvRows`, with operations to save and load them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prepared: dict[int, tuple[Callable[[], None], Snapshot]] = {}
        """``k`` -> the function that loads the row's snapshot, and the snapshot."""
        self._kinds: dict[int, tuple[list[Any], Kind]] = {}
        """``k`` -> the row's layers and spaces when its kind was determined, and the kind."""
        self._proved_fns: list[Callable[[], Any]] = []
        """The ``env_fns`` that have passed the proof."""

    def take_over(self, previous: SnapshotRows) -> None:
        """Take over the only environment of ``previous``, which this object replaces in its process."""
        reset_due = previous._is_reset_due(0)
        self.envs, self.forked, self._used = previous.envs, previous.forked, previous._used
        self._next_episodes = previous._next_episodes
        if (env := self.envs[0]) is not None:
            self._steps[0] = self._step_after_reset(0, reset_due)
            self._offer_buffer(0, env)
        self._has_old_results = True  # the row may still have an info of its previous environment

    def _close_env(self, k: int) -> BaseException | None:
        self._kinds.pop(k, None)  # which refers to the environment, as does the next entry
        self._prepared.pop(k, None)
        return super()._close_env(k)

    def save(self, ks: Sequence[int]) -> Outcome:
        """Return a :class:`~vecenv.state.snapshots.Snapshot` of each row in ``ks``, without the row's last observation."""

        def save_row(k: int) -> Snapshot:
            env = self._env(k)
            layers = find_layers(env)
            kind = self._find_kind(k, layers)
            return Snapshot.of(
                kind, self._capture(layers, kind), pending=self._is_reset_due(k), used=self._used[k],
                upcoming=self._next_episodes.get(k),
            )  # fmt: skip

        return self._call_each(ks, save_row)

    def _capture(self, layers: list[Any], kind: Kind) -> bytes:
        try:
            return capture_state(layers[0], layers)
        except NotRestorable as error:
            raise NotRestorable(f"{kind.env_id} cannot be saved: {error}") from error

    def _find_kind(self, k: int, layers: list[Any]) -> Kind:
        """Return the kind of a row's environment, cached until its layers or spaces change."""
        spaces = [value for layer in layers for value in vars(layer).values() if isinstance(value, gymnasium.Space)]
        key = [*layers, layers[0].observation_space, layers[0].action_space, *spaces]
        cached = self._kinds.get(k)
        if cached is None or len(cached[0]) != len(key) or not all(map(is_, cached[0], key)):
            cached = self._kinds[k] = key, describe_kind(layers)
        return cached[1]

    def prove(self, ks: Sequence[int]) -> Outcome:
        """Prove that environments restored from the states of rows ``ks`` continue exactly as the originals would.

        Successive rows with equivalent ``env_fns`` share scratch environments. Each row that has been reset is also checked
        with its own state.
        """
        scratch = contextlib.ExitStack()
        warnings: list[tuple[str, str]] = []
        latest: list[tuple[Callable[[], Any], Proof | NotRestorable]] = []

        def proof_for(k: int) -> Proof:
            env_fn = self.env_fns[k]
            if not latest or not _are_equivalent(latest[0][0], env_fn):
                self._close_scratch(scratch, warnings)
                latest[:] = [(env_fn, self._new_proof(env_fn, scratch))]
            if isinstance(proof := latest[0][1], NotRestorable):
                raise proof
            return proof

        def prove_row(k: int) -> None:
            env = self._env(k)
            layers = find_layers(env)
            state = self._capture(layers, self._find_kind(k, layers))
            proof = proof_for(k)
            if self._used[k]:  # others cannot be stepped
                proof.check(env, state, over=self._is_reset_due(k))

        try:
            outcome = self._call_each(ks, prove_row)
        finally:
            self._close_scratch(scratch, warnings)
        outcome.warnings += warnings
        return outcome

    def _close_scratch(self, scratch: contextlib.ExitStack, warnings: list[tuple[str, str]]) -> None:
        """Close scratch environments. An exception of their ``close()`` is only a warning, as for the worker's own."""
        try:
            scratch.close()
        except Exception as error:
            if self._in_caller and raised_by_handler(error):
                raise
            warnings.append(
                ("scratch close", f"a copy of {self.span}, built for a save, raised in close(): {summary(error)}")
            )

    def _new_proof(self, env_fn: Callable[[], Any], scratch: contextlib.ExitStack) -> Proof | NotRestorable:
        try:
            proof = scratch.enter_context(open_proof(env_fn))
            if not any(_are_equivalent(env_fn, known) for known in self._proved_fns):
                proof.run()
                self._proved_fns.append(env_fn)
        except NotRestorable as error:
            return error
        return proof

    def check(self, snapshots: Sequence[tuple[int, Snapshot]]) -> Outcome:
        """Prepare to load snapshots, and build missing environments. Each snapshot that does not fit is a failure."""
        snapshot_by_row = dict(snapshots)

        def prepare_row(k: int) -> None:
            self._prepared[k] = self._prepare(k, snapshot_by_row[k]), snapshot_by_row[k]

        return self._call_each(list(snapshot_by_row), prepare_row)

    def load(self, ks: Sequence[int]) -> Outcome:
        """Load the snapshots that :meth:`check` has prepared."""

        def load_row(k: int) -> None:
            env, (restore, snapshot) = self._env(k), self._prepared[k]
            saved = snapshot.row
            restore()
            self._next_episodes.pop(k, None)
            if saved.upcoming is not None:
                self._next_episodes[k] = saved.upcoming
            self._offer_buffer(k, env)
            self._steps[k] = self._step_after_reset(k, saved.pending)
            self._used[k] = saved.used

        outcome = self._call_each(ks, load_row, fatal=True)
        for k in ks:
            self._prepared.pop(k, None)
        return outcome

    def _prepare(self, k: int, snapshot: Snapshot) -> Callable[[], None]:
        """Return a function that loads a snapshot into row k. Raise ``SnapshotMismatch`` if it does not fit."""
        env = self.envs[k]
        env = self._build(k) if env is None else env
        try:
            layers = find_layers(env)
            if difference := snapshot.row.kind.differs_from(self._find_kind(k, layers)):
                raise SnapshotMismatch(difference)
            return prepare_restore(env, snapshot.body, layers)
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"the snapshot does not fit: {error}") from error


def _are_equivalent(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    """True if two functions certainly build equal environments."""
    if first is second:
        return True
    try:
        return bool(cloudpickle.dumps(first) == cloudpickle.dumps(second))
    except Exception:
        return False
