"""What users need to test their own vector environments, and their own training loops, against the same
rules as ours.

:class:`VectorEnvContract` is a mixin for pytest: inherit, override one factory, and every promise of
Gymnasium's vector interface is checked. The other names are environments that fail on purpose. Each loads
when it is first touched, so that a training loop can be tested against the faulty environments where pytest
is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vecenv.state.proof import prove as assert_restorable
    from vecenv.testing.contract import VectorEnvContract, assert_identical, assert_same_trajectory
    from vecenv.testing.double import DoubleVectorEnv
    from vecenv.testing.isolated import assert_isolated

__all__ = [
    "DoubleVectorEnv", "VectorEnvContract", "assert_identical", "assert_isolated", "assert_restorable",
    "assert_same_trajectory",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562); what the contract does not define, ``faulty`` may."""
    if name == "DoubleVectorEnv":
        return importlib.import_module("vecenv.testing.double").DoubleVectorEnv
    if name == "assert_isolated":
        return importlib.import_module("vecenv.testing.isolated").assert_isolated
    if name == "assert_restorable":
        return importlib.import_module("vecenv.state.proof").prove
    if name in __all__:
        import pytest

        # Its assertions explain themselves, as those of a test module do.
        pytest.register_assert_rewrite("vecenv.trajectories", "vecenv.testing.contract")
        return getattr(importlib.import_module("vecenv.testing.contract"), name)
    if not name.startswith("__"):
        try:
            faulty = importlib.import_module("vecenv.testing.faulty")
            return faulty if name == "faulty" else getattr(faulty, name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise AttributeError(f"module 'vecenv.testing' has no attribute {name!r}") from error
    raise AttributeError(f"module 'vecenv.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "faulty"})
