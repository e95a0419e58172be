"""What differs between the versions of Gymnasium, and what can be put in another's place.

vecenv goes with Gymnasium 1.1 to 1.4 and means what the installed one means. What their engines differ in, apart from what
their own functions do for us, is kept here and nowhere else:

* Before 1.4 wrong seeds, reset masks and observation spaces were refused by ``assert``, since then by ``ValueError`` and
  ``TypeError``. Programs may catch either, so with the older ones ours are both.
* Before 1.3 every vector environment is closed when it is collected, one whose constructor failed too.
* Before 1.4 a custom worker function is given seven arguments, since then an eighth, for ``max_concurrency``.

The classes are Gymnasium's as they were before anything was put in their place (:mod:`vecenv.patching`).
"""

from __future__ import annotations

import inspect
from typing import Final

from gymnasium.vector import AsyncVectorEnv as GymnasiumAsync
from gymnasium.vector import SyncVectorEnv as GymnasiumSync
from gymnasium.vector import VectorEnv

__all__ = [
    "HAS_MAX_CONCURRENCY", "MASK_IS_EMPTY", "RESET_MASK", "GymnasiumAsync", "GymnasiumSync", "NotClosedUnasked", "WrongType",
    "WrongValue",
]  # fmt: skip

HAS_MAX_CONCURRENCY: Final = "max_concurrency" in inspect.signature(GymnasiumAsync.__init__).parameters
"""Whether Gymnasium's own class has this option. It came with 1.4, as the exceptions did; ours has it always."""


class NotClosedUnasked:
    """A vector environment that is not closed when it is collected, as since Gymnasium 1.3; goes before ``VectorEnv``."""

    if hasattr(VectorEnv, "__del__"):

        def __del__(self) -> None:
            pass


class AssertedValue(ValueError, AssertionError):
    """A ``ValueError`` where the installed Gymnasium has an ``AssertionError``."""


class AssertedType(TypeError, AssertionError):
    """A ``TypeError`` where the installed Gymnasium has an ``AssertionError``."""


WrongValue: Final[type[ValueError]] = ValueError if HAS_MAX_CONCURRENCY else AssertedValue
WrongType: Final[type[TypeError]] = TypeError if HAS_MAX_CONCURRENCY else AssertedType

RESET_MASK: Final = "`options['reset_mask']`" if HAS_MAX_CONCURRENCY else "`options['reset_mask': mask]`"
"""What a wrong mask is called."""

MASK_IS_EMPTY: Final = "contain a boolean array" + (" with at least one True value" if HAS_MAX_CONCURRENCY else "")
"""What a mask must do that chooses no environment."""
