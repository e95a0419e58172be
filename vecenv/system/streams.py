"""States of a new worker process's generators: they follow from the caller's, and from which worker it is."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import numpy as np

from vecenv.system.generators import become_worker
from vecenv.system.stand_ins import NUMPY

__all__ = ["WorkersOwn", "stream_of_caller"]


def stream_of_caller() -> bytes:
    """What the generators of this process stand at, in a few bytes; they stay as they are."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    numbers: Any = NUMPY.get_state(legacy=False)
    for name, value in (*sorted(numbers["state"].items()), ("gauss", (numbers["has_gauss"], numbers["gauss"]))):
        digest.update(name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
    if (generator := getattr(sys.modules.get("torch"), "default_generator", None)) is not None:
        digest.update(generator.get_state().numpy().tobytes())
    return digest.digest()


class WorkersOwn:
    """In a new worker process: give it states of its own, which follow from the caller's.

    Args:
        stream: Of the caller.
        key: Which worker it is, and how many there were in its place before.
    """

    def __init__(self, stream: bytes, key: tuple[int, ...]) -> None:
        become_worker()
        numpy, python, torch = np.random.SeedSequence(int.from_bytes(stream, "little"), spawn_key=key).spawn(3)
        NUMPY.set_bit_generator(type(NUMPY.get_bit_generator())(numpy))
        random.seed(int.from_bytes(python.generate_state(8).tobytes(), "little"))
        self._torch = int(torch.generate_state(1, np.uint64)[0]) >> 1
        self.seed_torch()

    def seed_torch(self) -> None:
        """To be called again where torch may have been imported since."""
        generator = getattr(sys.modules.get("torch"), "default_generator", None)
        if generator is not None and self._torch >= 0:
            generator.manual_seed(self._torch)
            self._torch = -1
