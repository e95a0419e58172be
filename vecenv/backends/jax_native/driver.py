"""The state of functional environments, and what is done with it: begun, stepped, read, copied, assigned.

A :class:`vecenv.front.together.Together`, and what JAX alone can do beside it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp

from vecenv.backends.jax_native import resets
from vecenv.backends.jax_native.results import Reader
from vecenv.errors import StaleStateError
from vecenv.front.arguments import ResetOptions
from vecenv.front.capabilities import Capabilities
from vecenv.front.driver import Call, Stepped
from vecenv.front.phases import Phase
from vecenv.front.together import Together
from vecenv.jax.native.functional import FunctionalVectorEnv
from vecenv.jax.native.handover import from_torch
from vecenv.jax.native.state import EnvState

__all__ = ["Driver"]

_CAPABILITIES: Final = Capabilities(
    "jax", attributes=False, first_ready=False, reset_options=False, row_options=False, snapshots=True,
    in_this_process=True, runs_jax=True,
)  # fmt: skip


class Latest(NamedTuple):
    """The newest state, ``None`` where there is none; what seed each environment was last given, ``None`` where its stream
    came from a state that was assigned; and the call that was made last."""

    state: EnvState | None
    seeds: list[int | None]
    asked: Call | None


class Driver(Together):
    """Holds the state. It asks the device and returns; only reading waits. What a call in another thread still needs of the
    state when it is closed, that call holds.

    Args:
        functional: The environments.
        to: ``"numpy"``, ``"jax"`` or ``"torch"``.
        infos: Report the environments' metrics.

    Attributes:
        latest: The state and what it is of.
        reader: Makes results of states.
    """

    def __init__(self, functional: FunctionalVectorEnv, to: str, infos: bool) -> None:
        super().__init__(functional.num_envs)
        self.functional = functional
        self.reader = Reader(functional, to, infos)
        self.latest = Latest(None, [None] * functional.num_envs, None)
        self._torch = to == "torch"
        self._chunk: Any = None

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def state(self) -> EnvState | None:
        """The newest, which the device may still be computing; ``None`` before the first reset."""
        return self.latest.state

    @state.setter
    def state(self, state: EnvState | None) -> None:
        self.latest = self.latest._replace(state=state)

    @property
    def asked(self) -> Call | None:
        return self.latest.asked

    @property
    def waited(self) -> float:
        """Seconds spent waiting for the device; what ``to="jax"`` and ``"torch"`` leave to the caller is not in it."""
        return self.reader.waited

    def current(self) -> EnvState:
        """The state.

        Raises:
            gymnasium.error.ResetNeeded: There is none.
        """
        if self.state is None:
            raise gym.error.ResetNeeded("Call reset first.")
        return self.state

    def begin_reset(
        self, call: Call, seeds: resets.Seeds, mask: resets.Mask | None, options: ResetOptions = None
    ) -> None:
        """Begin episodes; raises as :func:`vecenv.backends.jax_native.resets.begin`."""
        self.latest = Latest(*resets.begin(self.functional, self.state, seeds, mask, self.latest.seeds), call)

    def begin_step(self, call: Call, actions: Any) -> None:
        """One step of every environment."""
        state = self.current()
        if self._torch:
            actions = from_torch(actions)
        try:
            self.latest = Latest(self.functional.step_donating(state, actions), self.latest.seeds, call)
        except BaseException:
            self._drop_given_up(state)
            raise

    def chunk(self, actions: Any) -> tuple[int, Stepped]:
        """``T`` steps in one program: ``T``, and their results."""
        state = self.current()
        actions = jax.tree.map(jnp.asarray, from_torch(actions) if self._torch else actions)
        if self._chunk is None:
            self._chunk = jax.jit(self._steps_of, donate_argnums=0)
        try:
            self.state, out = self._chunk(state.inner, state.replace(inner=None), actions)
        except BaseException:
            self._drop_given_up(state)
            raise
        return out.reward.shape[0], self.reader.chunk(out)

    def copied(self) -> EnvState:
        """The state, in arrays of its own."""
        copied: EnvState = jax.tree.map(jnp.copy, self.current())
        return copied

    def assign(self, state: EnvState) -> None:
        """Go on from a copy of ``state``.

        Raises:
            TypeError, ValueError: No state of such an environment, or of another number of them.
            StaleStateError: Its arrays have been donated to another computation.
        """
        self.functional._check_state(state)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            raise StaleStateError(
                "The arrays of this state are gone: it was donated to another computation. Keep a copy instead, which is "
                "what reading envs.state gives."
            )
        copied = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), state)
        self.latest = self.latest._replace(state=copied, seeds=[None] * self.functional.num_envs)

    def wait(self, deadline: float) -> bool:
        """Wait for the device."""
        return self.reader.wait(self.current(), deadline)

    def read(self, kind: Phase) -> Stepped:
        """The state, read."""
        try:
            return self.reader.stepped(self.current(), infos=kind is Phase.WAITING_STEP)
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # an environment's own: there is no state to go on from
            self.failure, self.state = error, None
            raise

    def close(self, *, terminate: bool = False) -> None:
        """Let go of the device's memory, and of what was compiled here."""
        self.state = self._chunk = None

    def _steps_of(self, inner: Any, rest: EnvState, actions: Any) -> tuple[EnvState, EnvState]:
        def one(state: EnvState, action: Any) -> tuple[EnvState, EnvState]:
            state = self.functional.step(state, action)
            return state, state.replace(inner=None)

        return jax.lax.scan(one, rest.replace(inner=inner), actions)

    def _drop_given_up(self, state: EnvState) -> None:
        """If a state was donated and nothing came of it, there is none until the next reset."""
        inner: Any = state.inner
        if self.state is state and any(leaf.is_deleted() for leaf in jax.tree.leaves(inner) if isinstance(leaf, jax.Array)):
            self.state = None
