"""Saving and loading environments with agents: the engine's snapshots, and who is there and acts, beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vecenv.errors import SnapshotMismatch
from vecenv.front.arguments import rows_of
from vecenv.state.snapshots import Snapshot, Snapshots, StateDict

if TYPE_CHECKING:
    from vecenv.multi_agent.masks import ActionMasks

__all__ = ["KeepsAgents"]


class KeepsAgents:
    """``save``, ``load``, ``state_dict`` and ``load_state_dict``, as of :class:`~vecenv.AsyncVectorEnv`."""

    num_envs: int
    _rows: Any
    _alive: npt.NDArray[np.bool_]
    _over: npt.NDArray[np.bool_]
    _begun: npt.NDArray[np.bool_]
    _all_begun: bool
    _masks: ActionMasks

    def save(self, env_id: Any = None, *, verify: bool = True) -> tuple[Snapshot, ...]:
        """The state of every environment, or of some; see :meth:`vecenv.AsyncVectorEnv.save`."""
        return self._with_agents(self._rows.save(env_id, verify=verify), rows_of(env_id, self.num_envs))

    def load(self, snapshots: Any, env_id: Any = None) -> Any:
        """Let environments go on from saved states; see :meth:`vecenv.AsyncVectorEnv.load`.

        Returns:
            Their observations, in the layout of :meth:`step`; :attr:`agent_mask` says who has to act.
        """
        rows = rows_of(env_id, self.num_envs)
        beside = self._beside([snapshots] * len(rows) if isinstance(snapshots, Snapshot) else snapshots)
        batch = self._rows.load(snapshots, env_id)
        self._take(rows, beside)
        return None if batch is None else batch["obs"]

    def state_dict(self, *, verify: bool = True) -> dict[str, Any]:
        """All of it; see :meth:`vecenv.AsyncVectorEnv.state_dict`."""
        state = self._rows.state_dict(verify=verify)
        return StateDict({**state, "snapshots": self._with_agents(state["snapshots"], rows_of(None, self.num_envs))})

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Go on from what :meth:`state_dict` gave; returns and raises as :meth:`load`."""
        beside = self._beside(state.get("snapshots") if isinstance(state, Mapping) else None)
        batch = self._rows.load_state_dict(state)
        self._take(rows_of(None, self.num_envs), beside)
        return None if batch is None else batch["obs"]

    def _with_agents(self, snapshots: Sequence[Snapshot], rows: Sequence[int]) -> tuple[Snapshot, ...]:
        def of(row: int) -> Any:
            return self._alive[row].copy(), bool(self._over[row]), bool(self._begun[row]), self._masks.of(row)

        return Snapshots(one.having(beside=of(row)) for one, row in zip(snapshots, rows, strict=True))

    def _beside(self, snapshots: Any) -> list[Any]:
        """What is known of agents, of each snapshot; what is no snapshot is left to the engine to refuse."""
        each = [one.row for one in snapshots if isinstance(one, Snapshot)] if isinstance(snapshots, Sequence) else []
        for place, one in enumerate(each):
            known = one.beside
            if not isinstance(known, tuple) or len(known) != 4 or np.shape(known[0]) != self._alive.shape[1:]:
                raise SnapshotMismatch(
                    f"snapshots[{place}] says nothing of {self._alive.shape[1]} agents: it is of another kind"
                )
        return [one.beside for one in each]

    def _take(self, rows: Sequence[int], beside: Sequence[Any]) -> None:
        for row, known in zip(rows, beside, strict=True):
            self._alive[row], self._over[row], self._begun[row], masks = known
            self._masks.put(row, masks)
        self._all_begun = bool(self._begun.all())
