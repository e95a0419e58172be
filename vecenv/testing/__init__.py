"""Tools for users who test their own vector environments and training loops.

:class:`VectorEnvContract` is a mixin for pytest: inherit, override one factory, and every promise of Gymnasium's vector
interface is checked. :mod:`vecenv.testing.faulty` has environments that fail on purpose. Each name loads on first use, so
that faulty environments work without pytest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.state.proof import prove as assert_restorable
    from vecenv.testing.contract import VectorEnvContract, assert_identical, assert_same_trajectory
    from vecenv.testing.isolated import assert_isolated

__all__ = ["VectorEnvContract", "assert_identical", "assert_isolated", "assert_restorable", "assert_same_trajectory"]


_MODULES = {"assert_isolated": "vecenv.testing.isolated", "assert_restorable": "vecenv.state.proof"}
"""Public name -> the module that defines it; all others are defined in the contract."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562), including the names of ``faulty``."""
    if name.startswith("__"):
        raise AttributeError(f"module 'vecenv.testing' has no attribute {name!r}")
    if name in __all__ and name not in _MODULES:
        import pytest

        # Failed assertions then show their values, as in a test module.
        pytest.register_assert_rewrite("vecenv.trajectories", "vecenv.testing.contract")
    if name in __all__:
        module = importlib.import_module(_MODULES.get(name, "vecenv.testing.contract"))
        return getattr(module, "prove" if name == "assert_restorable" else name)
    faulty = importlib.import_module("vecenv.testing.faulty")
    if name in ("faulty", *faulty.__all__):
        return faulty if name == "faulty" else getattr(faulty, name)
    raise AttributeError(f"module 'vecenv.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "faulty"})
