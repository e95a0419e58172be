"""Tools for users who test their own vector environments and training loops.

:class:`VectorEnvContract` is a mixin for pytest: inherit from it and override its factory ``make`` to test the promises
of Gymnasium's vector interface. :mod:`vecenv.testing.faulty` has environments that fail on purpose. Each name loads on first
use, so that everything but the mixin works without pytest.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.state.proof import prove as assert_restorable
    from vecenv.testing.contract import VectorEnvContract
    from vecenv.testing.isolated import assert_isolated
    from vecenv.trajectories import assert_identical, assert_same_trajectory

__all__ = ["VectorEnvContract", "assert_identical", "assert_isolated", "assert_restorable", "assert_same_trajectory"]


_MODULES = {
    "VectorEnvContract": "vecenv.testing.contract",
    "assert_identical": "vecenv.trajectories",
    "assert_isolated": "vecenv.testing.isolated",
    "assert_same_trajectory": "vecenv.trajectories",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562), including the names of ``faulty``."""
    if name == "assert_restorable":
        return importlib.import_module("vecenv.state.proof").prove
    if name.startswith("__"):
        raise AttributeError(f"module 'vecenv.testing' has no attribute {name!r}")
    source = _MODULES.get(name, "vecenv.testing.faulty")
    if source == "vecenv.testing.contract" and (pytest := sys.modules.get("pytest")) is not None:
        pytest.register_assert_rewrite(source)  # failed assertions then show their values, as in a test module
    try:
        module = importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(f"vecenv.testing.{name} needs pytest, not installed here: pip install pytest") from error
    return module if name == "faulty" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "faulty"})
