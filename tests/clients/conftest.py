"""Tests with client libraries. They need torch, so they run only if the command line names this folder or a file in it.

pip install -e ".[clients]" && pytest tests/clients

Torch starts threads that make every later fork of the process unsafe, and tests of other folders fork.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class SkippedModule(pytest.Module):
    """A test module that is not imported."""

    def __init__(self, *, reason: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reason = reason

    def collect(self) -> Any:
        pytest.skip(self._reason, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    invocation = parent.config.invocation_params
    selected = [Path(invocation.dir, argument.partition("::")[0]).resolve() for argument in parent.config.args]
    if importlib.util.find_spec("torch") is None:
        return SkippedModule.from_parent(parent, path=module_path, reason="needs torch: pip install 'vecenv[clients]'")
    if not any(path.is_relative_to(HERE) for path in selected):
        return SkippedModule.from_parent(parent, path=module_path, reason="imports torch: run pytest tests/clients")
    return None


@pytest.fixture(autouse=True, scope="session")
def limit_torch_to_one_thread() -> None:
    """Limit torch to one thread: tiny networks are fastest with one, and sums always have the same order."""
    import torch

    torch.set_num_threads(1)
