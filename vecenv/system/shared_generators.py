"""The generators of ``random``, ``numpy.random`` and torch that all code in a process shares: reading, seeding, restoring.

Nothing here changes how they generate numbers. :mod:`vecenv.system.generators` gives each environment its own.
"""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

SharedStates: TypeAlias = dict[str, bytes]
"""Name of a generator -> its state, as bytes that can be compared."""

GENERATORS: Final = {
    "random": "the generator of Python's module random",
    "numpy": "numpy.random's global generator",
    "torch": "torch's default generator",
}


def torch_generator() -> Any:
    """Return torch's default generator, or ``None`` if torch has not been imported completely."""
    return getattr(sys.modules.get("torch"), "default_generator", None)


def torch_state(generator: Any) -> bytes:
    """Return the state of a torch generator."""
    state: bytes = generator.get_state().numpy().tobytes()
    return state


def read_states() -> SharedStates:
    """Read the states of the shared generators of this process."""
    states = {"random": pickle.dumps(random.getstate()), "numpy": pickle.dumps(np.random.get_state(legacy=False))}
    if (generator := torch_generator()) is not None:
        states["torch"] = torch_state(generator)
    return states


def restore_states(states: SharedStates) -> None:
    """Restore states that :func:`read_states` returned."""
    random.setstate(pickle.loads(states["random"]))
    np.random.set_state(pickle.loads(states["numpy"]))
    if "torch" in states and (generator := torch_generator()) is not None:
        torch = sys.modules["torch"]
        generator.set_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))


def find_draws(before: SharedStates) -> list[str]:
    """Return the names of the generators that were drawn from, or seeded, since :func:`read_states` returned ``before``.

    Generators of libraries imported since then are omitted, because they have no earlier state.
    """
    now = read_states()
    return [name for name, state in before.items() if now.get(name) != state]


def describe_draws(env: str, drawn: Sequence[str]) -> str:
    """Return the text of the warning about an environment that draws from shared generators.

    Args:
        env: The environment, for example ``"env 0 (CartPole-v1)"``.
        drawn: The result of :func:`find_draws`.
    """
    *others, last = ({"numpy": "numpy.random"}.get(name, name) for name in drawn)
    names = f"generators of {', '.join(others)} and {last}" if others else f"generator of {last}"
    return (
        f"{env} draws from the {names}, which everything in its process shares: its results depend on the "
        "other environments there, so the same seeds may give different results with a different number of workers, or of "
        "environments in vecenv.evaluate. generators='own' gives each environment its own"
    )


def fingerprint() -> bytes:
    """Return a digest of the states of the shared generators, from which the workers' generators are seeded."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    numpy_state: Any = np.random.get_state(legacy=False)
    for name, value in (*sorted(numpy_state["state"].items()), ("gauss", (numpy_state["has_gauss"], numpy_state["gauss"]))):
        digest.update(name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
    if (generator := torch_generator()) is not None:
        digest.update(torch_state(generator))
    return digest.digest()


def seed_process(sequence: np.random.SeedSequence) -> Callable[[], None]:
    """Seed the shared generators of this process.

    Returns:
        A function that seeds torch, unless torch has already been seeded. Call it after code that may have imported torch.
    """
    numpy_seeds, python_seeds, torch_seeds = sequence.spawn(3)
    numpy_random: Any = np.random
    numpy_random.set_bit_generator(type(numpy_random.get_bit_generator())(numpy_seeds))
    random.seed(int.from_bytes(python_seeds.generate_state(8).tobytes(), "little"))
    seeds = [int(torch_seeds.generate_state(1, np.uint64)[0]) >> 1]

    def seed_torch() -> None:
        if seeds and (generator := torch_generator()) is not None:
            generator.manual_seed(seeds.pop())

    seed_torch()
    return seed_torch
