"""Going back: the latest states of a vector env, by the tickets of the ``EnvState`` that they belong to.

Each is what :meth:`save <vecenv.AsyncVectorEnv.save>` gives. One is taken after every call, for nobody knows which state a
program will step again; of those, so many are kept that were made or gone back to last.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv

from vecenv.front.capabilities import capabilities_of
from vecenv.jax.bridging.vector_calls import Calls

__all__ = ["USUAL", "Kept", "Ticket"]

USUAL: Final = 16
"""How many states ``rewind=True`` keeps."""

Ticket: TypeAlias = tuple[int, int]


class Kept:
    """The latest states.

    Args:
        envs: What can be saved and loaded.
        calls: How it is asked.
        most: How many are kept; 0: none.

    Raises:
        NotImplementedError: ``envs`` cannot be saved.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], calls: Calls, most: int) -> None:
        able = capabilities_of(envs)
        if most and not (able is not None and able.snapshots):
            raise NotImplementedError(
                f"rewind needs environments that can be saved, and {type(envs).__name__} cannot save them: see "
                "`capabilities.snapshots`. State of a wrapper of vector environments is saved by nobody: leave it out."
            )
        self.most = most
        self._calls = calls
        self._states: OrderedDict[Ticket, tuple[Any, npt.NDArray[np.bool_]]] = OrderedDict()

    def forget(self) -> None:
        """There was a reset: what was before it is over."""
        self._states.clear()

    def keep(self, ticket: Ticket, over: npt.NDArray[np.bool_]) -> None:
        """The environments are now where the state of this ticket is; ``over``: which rows ended and were not reset."""
        if self.most:
            self._states[ticket] = self._calls.save(), over.copy()
            while len(self._states) > self.most:
                self._states.popitem(last=False)

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._states

    def back(self, ticket: Ticket) -> npt.NDArray[np.bool_]:
        """Go back there; ``over`` as it was."""
        snapshots, over = self._states[ticket]
        self._states.move_to_end(ticket)
        self._calls.load(snapshots)
        return over.copy()
