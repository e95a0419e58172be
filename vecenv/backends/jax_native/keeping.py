"""Saving and loading rows of functional environments: there a state is a pytree, and a row of it is all there is."""

from __future__ import annotations

import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from vecenv.backends.jax_native.driver import Driver, Latest
from vecenv.errors import SnapshotMismatch
from vecenv.front.arguments import rows_of
from vecenv.front.guard import guarded
from vecenv.jax.native.seeding import seed_keys
from vecenv.jax.native.state import EnvState
from vecenv.state.snapshots import FORMAT, Kind, Snapshot, Snapshots, StateDict, each_of

__all__ = ["KeepsStates"]

_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


class KeepsStates:
    """``save``, ``load``, ``state_dict`` and ``load_state_dict``, as of :class:`~vecenv.AsyncVectorEnv`."""

    num_envs: int
    _driver: Driver
    _require_idle: Callable[[str], None]

    @guarded
    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Snapshot, ...]:
        """The state of every environment, or of some: its row of the pytree.

        Args:
            env_id: Which, distinct indices; ``None``: all.
            verify: There is nothing to prove: a functional environment has no other state.

        Raises:
            gymnasium.error.ResetNeeded: Before the first ``reset``.
            gymnasium.error.AlreadyPendingCallError: An answer is owed.
        """
        self._require_idle("save")
        return self._saved(rows_of(env_id, self.num_envs))

    @guarded
    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Let environments go on from saved states; arguments and errors as of :meth:`vecenv.AsyncVectorEnv.load`.

        Returns:
            Their observations, as arrays of ``to``.
        """
        self._require_idle("load")
        return self._loaded(snapshots, rows_of(env_id, self.num_envs))

    @guarded
    def state_dict(self, *, verify: bool = True) -> dict[str, Any]:
        """All of it in one dict that can be pickled."""
        self._require_idle("state_dict")
        return StateDict(format=FORMAT, num_envs=self.num_envs, snapshots=self._saved(rows_of(None, self.num_envs)))

    @guarded
    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Go on from what :meth:`state_dict` gave; as :meth:`load`."""
        self._require_idle("load_state_dict")
        mine = {"format": FORMAT, "num_envs": self.num_envs}
        if (
            not isinstance(state, Mapping)
            or "snapshots" not in state
            or any(state.get(key) != own for key, own in mine.items())
        ):
            raise SnapshotMismatch(f"this is no state_dict() of {self.num_envs} environments")
        return self._loaded(state["snapshots"], rows_of(None, self.num_envs))

    def _saved(self, rows: Sequence[int]) -> tuple[Snapshot, ...]:
        state, seeds = self._driver.current(), self._driver.latest.seeds
        kind, leaves = self._kind(state), [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
        return Snapshots(Snapshot.of(kind, pickle.dumps((seeds[row], [leaf[row] for leaf in leaves]))) for row in rows)

    def _loaded(self, snapshots: Any, rows: Sequence[int]) -> Any:
        driver = self._driver
        state = driver.state
        if state is None:
            state = driver.functional.begin(seed_keys([0] * self.num_envs))
        given = each_of(snapshots, rows)
        kind = self._kind(state)
        for place, one in enumerate(given):
            if wrong := one.row.kind.differs_from(kind):
                raise SnapshotMismatch(f"snapshots[{place}] does not fit: {wrong}")
        seeds = list(driver.latest.seeds)
        try:
            read = [pickle.loads(one.body) for one in given]
            for row, (seed, _) in zip(rows, read, strict=True):
                seeds[row] = seed
            columns = iter(zip(*[leaves for _, leaves in read], strict=True))
        except Exception as error:
            raise SnapshotMismatch(f"its bytes are no state of this environment: {type(error).__name__}: {error}") from error

        def filled(leaf: Any) -> Any:
            whole = np.array(leaf)
            whole[list(rows)] = np.stack(next(columns))
            return jax.device_put(whole, leaf.sharding)

        driver.latest = Latest(jax.tree.map(filled, state), seeds, driver.latest.asked)
        observations = driver.reader.stepped(driver.current(), infos=False)[0]
        return jax.tree.map(lambda leaf: leaf[np.array(rows, np.intp)], observations)

    def _kind(self, state: EnvState) -> Kind:
        functional = self._driver.functional
        single: Any = functional.single_env
        layers = []
        while single is not None:
            layers.append(f"{type(single).__module__}.{type(single).__qualname__}")
            single = vars(single).get("env")
        leaves, shape = jax.tree.flatten(state)
        rows = [(leaf.shape[1:], str(leaf.dtype)) for leaf in leaves]
        form = _ADDRESS.sub("", repr((shape, rows)))  # MJX keeps arrays in objects that say where they are
        arguments = f"a state of {len(leaves)} arrays, {zlib.crc32(form.encode()):08x}"
        name = str(getattr(functional.single_env, "name", layers[-1]))
        return Kind(name, arguments, tuple(layers), (("jax", jax.__version__),))
