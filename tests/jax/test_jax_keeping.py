"""Snapshots of environments that are JAX functions fit others of their kind, whatever their states are made of."""

from __future__ import annotations

import pickle
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract.jax_env import Walk

from vecenv.backends import JaxVectorEnv
from vecenv.jax import FunctionalVectorEnv
from vecenv.state.snapshots import Snapshot


class Constants:
    """Compared by content, shown by address: so MJX keeps arrays that are no part of a state."""

    def __init__(self, content: tuple[int, ...]) -> None:
        self.content = content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)


class Place:
    def __init__(self, place: Any, constants: Constants) -> None:
        self.place, self.constants = place, constants


jax.tree_util.register_pytree_node(
    Place, lambda node: ((node.place,), node.constants), lambda constants, leaves: Place(leaves[0], constants)
)


class Placed(Walk):
    def init(self, key: Any) -> Any:
        place, seen = super().init(key)
        return Place(place, Constants((1, 2))), seen

    def step(self, state: Any, action: Any, key: Any) -> Any:
        place, *rest = super().step(state.place, action, key)
        return (Place(place, Constants((1, 2))), *rest)


def test_a_state_with_constants_beside_its_arrays_fits_another_engine() -> None:
    one, other = (JaxVectorEnv(FunctionalVectorEnv(Placed(), 2)) for _ in range(2))
    one.reset(seed=3)
    other.reset(seed=4)
    actions = jnp.full((2, 1), 0.5)
    one.step(actions)
    other.load(one.save())
    assert np.array_equal(one.step(actions)[0], other.step(actions)[0])
    one.close()
    other.close()


class Stopped(Exception):
    """As a time limit raises it out of a signal handler."""


class Ringing:
    """Read as a number, and the first time a signal comes."""

    rung = False

    def __init__(self, number: Any) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _read, (self.number,)


def _read(number: Any) -> Any:
    if not Ringing.rung:
        Ringing.rung = True
        signal.raise_signal(signal.SIGUSR2)
    return number


def test_a_load_that_a_signal_handler_interrupts_says_so_and_can_be_made_again() -> None:
    def stop(number: int, frame: object) -> None:
        raise Stopped

    envs = JaxVectorEnv(FunctionalVectorEnv(Walk(), 2))
    envs.reset(seed=3)
    kept = envs.save()
    (seed, leaves), known = pickle.loads(kept[1].body), kept[1].row
    kept = (kept[0], Snapshot.of(known.kind, pickle.dumps((Ringing(seed), leaves))))
    actions = jnp.full((2, 1), 0.5)
    wanted = np.asarray(envs.step(actions)[0])
    before = signal.signal(signal.SIGUSR2, stop)
    try:
        with pytest.raises(Stopped):
            envs.load(kept)
    finally:
        signal.signal(signal.SIGUSR2, before)
    envs.load(kept)
    assert np.array_equal(envs.step(actions)[0], wanted)
    envs.close()
