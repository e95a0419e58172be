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


_MODULES = {
    "VectorEnvContract": "contract", "assert_identical": "contract", "assert_same_trajectory": "contract",
    "assert_isolated": "isolated",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562), including the names of ``faulty``."""
    if name == "assert_restorable":
        return importlib.import_module("vecenv.state.proof").prove
    if name.startswith("__"):
        raise AttributeError(f"module 'vecenv.testing' has no attribute {name!r}")
    if _MODULES.get(name) == "contract":
        import pytest

        # Failed assertions then show their values, as in a test module.
        pytest.register_assert_rewrite("vecenv.trajectories", "vecenv.testing.contract")
    module = importlib.import_module(f"vecenv.testing.{_MODULES.get(name, 'faulty')}")
    return module if name == "faulty" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "faulty"})
