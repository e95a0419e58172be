"""The host's side of the bridge: a Gymnasium vector env as a handful of functions of numpy arrays.

Nothing here imports JAX. A host callback that so much as looks at a JAX array other than its argument waits for a program
that waits for the callback, so the line is drawn by module.

Environments do not go back by themselves: a program that steps a state twice, or an old one, would silently get the
transition of another. So every state carries a ticket, ``(epoch, count)``: which reset it descends from, and the number of
the call since then that made it. It is handed in with every call, and must be the newest.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector import AutoresetMode, VectorEnv

from vecenv.errors import ObservationError, StaleStateError
from vecenv.jax.bridging.info_spec import InfoColumns
from vecenv.jax.bridging.vector_calls import Rows, Stepped, autoreset_mode_of, calls_of
from vecenv.shm.layout import Tree, fixed_tree

__all__ = ["Host", "leaves_of", "space_tree"]

Array: TypeAlias = npt.NDArray[Any]
Result: TypeAlias = tuple[tuple[int, ...], np.dtype[Any]]  # shape and dtype

_epochs = itertools.count(1)  # of all bridges, so that a state of another one is recognised
_holders: weakref.WeakValueDictionary[int, Host] = weakref.WeakValueDictionary()
"""Id of a vector env -> which of the hosts over it reset it last; no other one's states are of use."""


def space_tree(space: gymnasium.Space[Any], name: str) -> Tree:
    """The arrays of a space.

    Raises:
        TypeError: Its values have no fixed size, so they cannot be arrays of a compiled program.
    """
    tree = fixed_tree(space, name)
    if tree is None:
        raise TypeError(
            f"The bridge needs {name}s of fixed size (Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of "
            f"those), got {space}."
        )
    return tree


def leaves_of(tree: Tree, value: Any) -> list[Any]:
    """The arrays of a batch, in the order of the space."""
    found: list[Any] = []

    def keep(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    tree.map(keep, value)
    return found


class Host:
    """One vector env and the newest ticket.

    Args:
        envs: Any Gymnasium vector env.
        infos: The infos to report.
        timeout: Seconds that an answer may take; ``None`` waits for ever. ``"auto"``: see :func:`vecenv.jax.bridge`.

    Attributes:
        failure: The exception of the last call that failed, with its number; see
            :class:`~vecenv.jax.bridging.host_call.HostFunction`.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], infos: InfoColumns, timeout: float | str | None) -> None:
        self.envs = envs
        self.num_envs = envs.num_envs
        self.mode = autoreset_mode_of(envs)
        self.observation_tree = space_tree(envs.single_observation_space, "observation")
        self.action_tree = space_tree(envs.single_action_space, "action")
        self.failure: tuple[int, BaseException] | None = None
        self.closed = False
        self._infos = infos
        self._calls = calls_of(envs, timeout)
        self._action_specs = [((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self.action_tree.leaves()]
        self._epoch = self._count = 0
        self._why_not: str | None = "before the first reset"  # there is no newest state, because ...
        self._underway: Rows | None = None  # the rows of a step of some
        self._pending = False
        self._over = np.zeros(self.num_envs, np.bool_)  # DISABLED: rows that ended and were not reset

    def call(self, command: str, results: Sequence[Result], *arrays: Array) -> list[Array]:
        """One call of a program: a ticket and arrays in, a ticket and arrays of the shapes and dtypes ``results`` out."""
        if self.closed:
            raise ClosedEnvironmentError("The bridge was closed: its environments cannot be stepped any more.")
        outcome = _COMMANDS[command](self, *arrays)
        ticket = np.empty(*results[0])
        ticket[..., 0], ticket[..., 1] = self._epoch, self._count
        return [ticket, *map(_fitted, outcome, results[1:])]

    def close(self) -> None:
        """Close the environments."""
        if not self.closed:
            self.closed = True
            self.envs.close()

    # -- the calls -------------------------------------------------------------------------------------------------------

    def _reset(self, seeds: Array) -> list[Array]:
        self._why_not = "because a reset failed"
        self._pending, self._underway = False, None
        self._take_over()
        observations, infos = self._calls.reset(seeds.reshape(-1).tolist())
        self._over[:] = False
        outcome = self._apart(observations, self.num_envs) + self._infos.read(infos, self.num_envs)
        self._epoch, self._count = next(_epochs), 0
        self._why_not = None
        return outcome

    def _step(self, ticket: Array, *actions: Array) -> list[Array]:
        self._spend(ticket)
        self._begin(actions)
        return self._renew(self._finish())

    def _send(self, ticket: Array, *actions: Array) -> list[Array]:
        self._spend(ticket)
        self._begin(actions)
        self._pending = True
        return self._renew([])

    def _recv(self, ticket: Array) -> list[Array]:
        self._spend(ticket, pending=True)
        self._pending = False
        return self._renew(self._finish())

    def _reset_mask(self, ticket: Array, mask: Array, seeds: Array) -> list[Array]:
        self._spend(ticket)
        mask = mask.reshape(-1)
        if not mask.any():
            return self._renew(self._blank(self._outcome_specs(stepped=False)))
        seeded = seeds.reshape(-1).tolist() if self._calls.seeded_masks else None
        observations, infos = self._calls.reset(seeded, mask.copy())
        self._over[mask] = False
        return self._renew(self._apart(observations, self.num_envs) + self._infos.read(infos, self.num_envs))

    # -- a step ----------------------------------------------------------------------------------------------------------

    def _begin(self, actions: Sequence[Array]) -> None:
        # Copies, in the dtypes of the space: arguments are read-only, and environments may write to what they are given.
        specs = self._action_specs
        own = [np.array(array, dtype).reshape(shape) for array, (shape, dtype) in zip(actions, specs, strict=True)]
        build = self.action_tree.build
        if self.mode is not AutoresetMode.DISABLED or not self._over.any():
            self._underway = None
            self._calls.begin(build(iter(own)))
            return
        rows = self._underway = np.flatnonzero(~self._over)
        if len(rows):
            self._calls.begin_some(rows, build(iter(own)), build(array[rows] for array in own))

    def _finish(self) -> list[Array]:
        rows = self._underway
        if rows is None:
            stepped = self._calls.finish()
            if self.mode is AutoresetMode.DISABLED:
                self._over = np.asarray(stepped[2] | stepped[3])
            return self._outcome(stepped, self.num_envs)
        whole = self._blank(self._outcome_specs(stepped=True))
        if len(rows):
            answered, stepped = self._calls.finish_some(rows)
            part = self._outcome(stepped, self.num_envs if answered is None else len(rows))
            if answered is None:
                part = [array[rows] for array in part]
                answered = rows
            for array, values in zip(whole, part, strict=True):
                array[answered] = values
            ended = stepped[2] | stepped[3]
            self._over[answered] = ended[rows] if len(ended) != len(answered) else ended
        return whole

    def _outcome(self, stepped: Stepped, rows: int) -> list[Array]:
        """Observations, reward, flags, in same-step mode what was observed last, and infos."""
        observations, rewards, terminations, truncations, infos = stepped
        leaves = self._apart(observations, rows)
        outcome = [*leaves, rewards, terminations, truncations]
        if self.mode is AutoresetMode.SAME_STEP:
            outcome += self._successors(leaves, terminations | truncations, infos)
        return outcome + self._infos.read(infos, rows)

    def _successors(self, leaves: list[Array], ended: Array, infos: dict[str, Any]) -> list[Array]:
        """What followed the actions: ``leaves``, but the last observation of an episode where one ended."""
        if not ended.any():
            return leaves
        if "final_obs" not in infos:
            raise ObservationError("an episode ended in same-step mode and infos['final_obs'] is missing")
        successors = [leaf.copy() for leaf in leaves]
        for row in np.flatnonzero(ended).tolist():
            for leaf, value in zip(successors, leaves_of(self.observation_tree, infos["final_obs"][row]), strict=True):
                leaf[row] = value
        return successors

    def _apart(self, observations: Any, rows: int) -> list[Array]:
        """The arrays of a batch of observations, checked."""
        exact = self.observation_tree.exact(observations, rows)
        if exact is not None:
            return exact
        try:
            arrays = [np.asarray(array) for array in leaves_of(self.observation_tree, observations)]
        except (KeyError, IndexError, TypeError) as error:
            raise ObservationError(f"observations are not structured as {self.envs.single_observation_space}") from error
        for array, leaf in zip(arrays, self.observation_tree.leaves(), strict=True):
            if array.shape != (rows, *leaf.shape):
                raise ObservationError(f"{leaf.name}: got {array.shape}, wanted {(rows, *leaf.shape)}")
        return arrays

    def _outcome_specs(self, stepped: bool) -> list[Result]:
        observations = [(leaf.shape, leaf.dtype) for leaf in self.observation_tree.leaves()]
        numbers: list[Result] = [((), np.dtype(np.float64)), ((), np.dtype(np.bool_)), ((), np.dtype(np.bool_))]
        infos = [spec for column in self._infos.columns for spec in ((column.shape, column.dtype), ((), np.dtype(np.bool_)))]
        return observations + (numbers if stepped else []) + infos  # rows are stepped apart under DISABLED only

    def _blank(self, specs: Sequence[Result]) -> list[Array]:
        return [np.zeros((self.num_envs, *shape), dtype) for shape, dtype in specs]

    # -- several bridges over one vector env -----------------------------------------------------------------------------

    def _take_over(self) -> None:
        """End the states of another bridge over the same vector env: this one resets what they are states of."""
        name = id(self.envs.unwrapped)  # wrapped once more, it is the same
        holder = _holders.get(name)
        if holder is not None and holder is not self:
            holder._why_not = "because another bridge over the same vector env has reset them"
            holder._calls.drain()  # raises while there is an answer that does not come; then it is still the holder
            holder._pending, holder._underway = False, None
        _holders[name] = self

    # -- the ticket ------------------------------------------------------------------------------------------------------

    def _spend(self, ticket: Array, pending: bool = False) -> None:
        """Check a ticket and take it: whatever happens now, that state cannot be used again."""
        newest = [self._epoch, self._count]
        for row in ticket.reshape(-1, 2).tolist():
            if row != newest or self._why_not is not None:
                self._refuse(*row)
        if pending and not self._pending:
            raise NoAsyncCallError("Calling `recv` of a state that was not returned by `send`.", "recv")
        if self._pending and not pending:
            raise AlreadyPendingCallError("This state was returned by `send`: call `recv` of it first.", "send")
        self._why_not = "because an earlier call failed"

    def _refuse(self, epoch: int, count: int) -> None:
        if self._why_not is not None:
            raise StaleStateError(f"The environments have no state to go on from, {self._why_not}: call reset(key).")
        if epoch != self._epoch:
            what = f"belongs to another bridge or an earlier reset (epoch {epoch}, the environments are in {self._epoch})"
        else:
            what = f"was used before (it is number {count} after its reset, the environments are at {self._count})"
        raise StaleStateError(f"This state {what}. Step the newest one, and only once: processes do not go back.")

    def _renew(self, outcome: list[Array]) -> list[Array]:
        self._count += 1
        self._why_not = None
        return outcome


_COMMANDS: dict[str, Callable[..., list[Array]]] = {
    "reset": Host._reset,
    "step": Host._step,
    "send": Host._send,
    "recv": Host._recv,
    "reset_mask": Host._reset_mask,
}


def _fitted(array: Array, result: Result) -> Array:
    shape, dtype = result
    if array.dtype != dtype:
        narrow = array.astype(dtype)
        if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
            raise OverflowError(f"an integer of the environments does not fit {dtype}: enable JAX's 64-bit mode")
        array = narrow
    return array if array.shape == shape else array.reshape(shape)
