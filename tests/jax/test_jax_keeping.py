"""Snapshots of environments that are JAX functions fit others of their kind, whatever their states are made of."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from contract.jax_env import Walk

from vecenv.backends import JaxVectorEnv
from vecenv.jax import FunctionalVectorEnv


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
